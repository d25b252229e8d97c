import copy

import torch

from fl_lightning.models.projection import add_projection


def test_projected_model_keeps_its_feature_maps_and_embeds_on_the_unit_sphere(conv_net):
    plain = conv_net().eval()
    model = add_projection(copy.deepcopy(plain), 7).eval()
    x = torch.randn(5, 1, 8, 8)
    maps, z = model.forward_features(x)
    assert all(torch.equal(own, other) for own, other in zip(maps, plain.features(x), strict=True))
    assert z.shape == (5, 7)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(5))
    assert torch.equal(model.embed(x), z)
    assert torch.equal(model(x), model.head(z))
    assert (model.embedding_size, model.head.in_features, model.head.out_features) == (7, 7, 4)
    assert model.feature_shapes() == plain.feature_shapes()


def test_projection_of_zero_is_zero_with_a_finite_gradient(mlp):
    model = add_projection(mlp(), 3)
    for parameter in model.body.neck[3].parameters():
        torch.nn.init.zeros_(parameter)
    z = model.embed(torch.randn(2, 1, 8, 8))
    z.sum().backward()
    assert not z.any()
    assert all(p.grad.isfinite().all() for p in model.body.parameters())
