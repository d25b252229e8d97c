"""FedCPD's cross-layer fusion and feature distillation: the specification's numbers (section 8) and edges."""

import pytest
import torch
from sections import sectioned
from tiny_models import count_parameters

from fl_lightning.building import build
from fl_lightning.core.client import ClientModule
from fl_lightning.errors import ConfigError
from fl_lightning.losses.distillation import (
    CrossLayerFusion,
    Distillation,
    FeatureDistillation,
    feature_distillation_loss,
)
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.cnn import CNN

A1, A2 = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[[[2.0]]]])


def identity_fusion(smooth=1.0, **options):
    """One channel, every convolution the centre-identity (Cv2 times `smooth`)."""
    fusion = CrossLayerFusion([1, 1], mid_channels=1, **options)
    with torch.no_grad():
        for name, parameter in fusion.named_parameters():
            parameter.zero_()
            if name.endswith("weight"):
                centre = parameter.shape[-1] // 2
                parameter[0, 0, centre, centre] = smooth if name.startswith("smooth") else 1.0
    return fusion


@pytest.mark.parametrize(
    ("smooth", "low", "high"), [(1.0, [[4.0, 6.0], [8.0, 10.0]], [[4.0]]), (2.0, [[8.0, 12.0], [16.0, 20.0]], [[8.0]])]
)
def test_fusion_matches_hand_computed_value(smooth, low, high):
    first, second = identity_fusion(smooth)([A1, A2])
    assert first.squeeze().tolist() == low
    assert second.squeeze((0, 1)).tolist() == high


def test_recursive_fusion_takes_the_fused_map_above():
    first, second = identity_fusion(recursive=True)([A1, A2])
    assert second.item() == 4.0
    assert first.squeeze().tolist() == [[6.0, 8.0], [10.0, 12.0]]  # 4 comes down instead of 2


def test_upsampling_is_bilinear_with_corners_not_aligned():
    above = torch.tensor([[[[0.0, 4.0], [8.0, 12.0]]]])
    fused = identity_fusion()([torch.zeros(1, 1, 3, 3), above])[0]
    assert fused.squeeze().tolist() == [[0.0, 2.0, 4.0], [4.0, 6.0, 8.0], [8.0, 10.0, 12.0]]


@pytest.mark.parametrize(("smooth_convs", "more"), [(1, 0), (2, 2 * (64 * 64 * 9 + 64))])
def test_fusion_parameter_count_matches_the_specification(smooth_convs, more):
    assert count_parameters(CrossLayerFusion([32, 64], smooth_convs=smooth_convs)) == 117_088 + more


def test_fusion_keeps_every_level_its_shape():
    maps = [torch.randn(2, 3, 7, 6), torch.randn(2, 5, 3, 3), torch.randn(2, 4, 1, 1)]
    fusion = CrossLayerFusion([3, 5, 4], mid_channels=8)
    assert [tuple(m.shape) for m in fusion(maps)] == [(2, 3, 7, 6), (2, 5, 3, 3), (2, 4, 1, 1)]
    with pytest.raises(ValueError, match="made for 3 levels, got 2 maps"):
        fusion(maps[:2])


def test_fusion_gradients_match_finite_differences():
    fusion = CrossLayerFusion([2, 1], mid_channels=2).double()
    low = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    high = torch.randn(1, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: tuple(fusion([a, b])), (low, high))


@pytest.mark.parametrize(("reduction", "one_path", "both"), [("mean", 25.5, 51.0), ("sum", 90.0, 180.0)])
def test_distillation_loss_matches_hand_computed_value(reduction, one_path, both):
    student = identity_fusion()([A1, A2])
    loss = feature_distillation_loss(student, [A1, A2], reduction)
    assert loss.item() == one_path
    assert (loss + feature_distillation_loss(student, [A1, A2], reduction)).item() == both


def test_distillation_sum_is_a_mean_over_the_batch():
    student, teacher = [torch.full((4, 3, 2, 2), 2.0)], [torch.zeros(4, 3, 2, 2)]
    assert feature_distillation_loss(student, teacher, "sum").item() == 3 * 4 * 4.0
    assert feature_distillation_loss(student, teacher, "mean").item() == 4.0


def test_distillation_loss_gradients_match_finite_differences():
    student = [torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)]
    teacher = [torch.randn(2, 2, 3, 3, dtype=torch.float64)]
    for reduction in ("mean", "sum"):
        assert torch.autograd.gradcheck(lambda s, r=reduction: feature_distillation_loss([s], teacher, r), student)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distillation_loss_is_computed_in_float32(dtype):
    student = torch.full((1, 1, 2, 2), 300.0, dtype=dtype, requires_grad=True)  # 300² is beyond float16
    loss = feature_distillation_loss([student], [torch.zeros(1, 1, 2, 2, dtype=dtype)])
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(90_000, rel=1e-2)
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("student", "teacher", "reduction", "message"),
    [
        ([A1], [A1, A2], "mean", "needs levels of equal shapes"),
        ([A1], [A2], "mean", "needs levels of equal shapes"),
        ([], [], "mean", "needs levels of equal shapes"),
        ([A1], [A1], "median", "`reduction` must be 'mean' or 'sum', got 'median'"),
    ],
)
def test_distillation_loss_refuses_what_does_not_fit(student, teacher, reduction, message):
    with pytest.raises(ValueError, match=message):
        feature_distillation_loss(student, teacher, reduction)


# --- the term -------------------------------------------------------------------------------------------------------


def make_client(model=None, weight=1.0, **options):
    torch.manual_seed(0)
    model = model or CNN((1, 16, 16), 4, channels=(4, 6), hidden=8)
    term = FeatureDistillation(weight, Distillation(mid_channels=5, **options))
    return ClientModule(FedAvg(model, extra_terms=[term]))


def taught(client):
    """The client's term after a fit that moved its body a little."""
    term = client.method.terms[-1]
    term.after_fit(client.method)
    with torch.no_grad():
        for parameter in client.method.model.parameters():
            parameter.add_(0.05)
    term.receive(client.method, None)
    return term


def forward(client, batch=3):
    x = torch.randn(batch, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    return client.step(x, torch.zeros(batch, dtype=torch.long)).forward()


def test_client_that_never_fitted_has_no_teacher_and_no_loss():
    client = make_client()
    term = client.method.terms[-1]
    term.receive(client.method, None)
    assert term(client.method, forward(client)).item() == 0.0


@pytest.mark.parametrize("target", ["fused", "raw"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_term_is_the_loss_of_attention_maps_plus_that_of_feature_maps(target, reduction):
    client = make_client(feature_target=target, reduction=reduction)
    term = taught(client)
    out = forward(client)
    teacher = term.teacher.forward_features(out.x)[0]
    wanted = [cbam(m) for cbam, m in zip(term.teacher_cbam, teacher, strict=True)]
    own = [cbam(m) for cbam, m in zip(term.cbam, out.features, strict=True)]
    maps = term.feature_fusion(out.features) if target == "fused" else out.features
    expected = feature_distillation_loss(term.attention_fusion(own), wanted, reduction)
    expected = expected + feature_distillation_loss(maps, teacher, reduction)
    assert torch.equal(term(client.method, out), expected)


def test_gradient_reaches_the_convolutions_and_the_terms_own_parameters_but_no_more():
    client = make_client()
    term = taught(client)
    term(client.method, forward(client)).backward()
    moved = {name for name, p in client.method.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    own = {"model.body.stages.0.0.weight", "model.body.stages.1.0.weight"}
    assert own <= moved
    assert not any("head" in name or "neck" in name or "teacher" in name for name in moved)
    for part in ("cbam.0.mlp.0.weight", "cbam.1.spatial.weight", "attention_fusion.lateral.1.weight"):
        assert f"terms.1.{part}" in moved
    assert {"terms.1.feature_fusion.smooth.0.weight", "terms.1.feature_fusion.enhance.1.weight"} <= moved


def test_teacher_is_frozen_in_eval_mode_and_holds_no_more_than_the_maps_need():
    client = make_client()
    term = taught(client)
    client.train()
    assert not any(module.training for module in (*term.teacher.modules(), *term.teacher_cbam.modules()))
    assert not any(p.requires_grad for p in (*term.teacher.parameters(), *term.teacher_cbam.parameters()))
    assert not any("neck" in name for name in term.teacher.state_dict())
    before = [m.clone() for m in term.teacher.forward_features(torch.ones(1, 1, 16, 16))[0]]
    optimizer = torch.optim.SGD([p for p in client.parameters() if p.requires_grad], lr=0.1)
    term(client.method, forward(client)).backward()
    optimizer.step()
    assert all(map(torch.equal, before, term.teacher.forward_features(torch.ones(1, 1, 16, 16))[0]))


def test_teacher_is_the_extractor_as_the_last_fit_left_it():
    client = make_client()
    x = torch.randn(2, 1, 16, 16)
    left = [m.clone() for m in client.method.model.features(x)]
    term = taught(client)
    assert all(map(torch.equal, left, term.teacher.forward_features(x)[0]))
    assert not torch.equal(left[0], client.method.model.features(x)[0])


def test_tied_fusion_has_one_set_of_convolutions():
    tied, own = (make_client(tie_fusion=tie).method.terms[-1] for tie in (True, False))
    assert count_parameters(own) - count_parameters(tied) == count_parameters(own.feature_fusion)


@pytest.mark.parametrize(
    "options", [{"feature_target": "raw"}, {"tie_fusion": True}, {"attention": "inline"}, {}], ids=str
)
def test_all_that_is_trained_travels_where_it_is_shared(options):
    client = make_client(parameters="shared", **options)
    own = {name for name, parameter in client.method.named_parameters() if parameter.requires_grad}
    assert own <= set(client.division.shared)


@pytest.mark.parametrize("tap", ["block", "preact"])
@pytest.mark.parametrize("attention", ["side", "inline"])
def test_taps_and_attention_change_only_what_they_say(tap, attention):
    torch.manual_seed(0)
    plain = CNN((1, 16, 16), 4, channels=(4, 6), hidden=8)
    client = make_client(tap=tap, attention=attention)
    term = taught(client)
    out = forward(client)
    assert term(client.method, out).item() > 0
    maps, attended = term._maps(out.features, term.cbam)
    assert [tuple(m.shape[1:]) for m in maps] == [tuple(m.shape[1:]) for m in attended] == [(4, 6, 6), (6, 1, 1)]
    assert (maps[0].min() < 0) == (tap == "preact")
    for entry, other in zip(client.method.model.body.parameters(), plain.body.parameters(), strict=False):
        if attention == "side":
            assert torch.allclose(entry, other + 0.05)
    names = list(client.method.model.body.state_dict())
    assert any("spatial" in name for name in names) == (attention == "inline")
    if attention == "side":  # predictions are the model's own
        for parameter in plain.parameters():
            parameter.data.add_(0.05)
        assert torch.allclose(out.logits, plain(out.x), atol=1e-6)


def test_vectors_count_as_maps_of_one_position(mlp):
    client = make_client(mlp(shape=(1, 16, 16)))
    assert taught(client)(client.method, forward(client)).item() > 0


def test_batch_of_one_and_dead_maps_stay_finite():
    client = make_client()
    term = taught(client)
    with torch.no_grad():
        client.method.model.body.stages[0][0].bias.fill_(-100.0)  # the first ReLU lets nothing through
    loss = term(client.method, forward(client, batch=1))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in client.parameters() if p.grad is not None)


def test_term_of_weight_0_adds_neither_parameters_nor_state():
    client = make_client(weight=0.0)
    assert list(client.method.terms.state_dict()) == []


@pytest.mark.parametrize("options", [{"attention": "inline"}, {"tap": "preact"}], ids=str)
def test_term_of_weight_0_leaves_the_model_as_it_is(options, assert_identical):
    torch.manual_seed(0)
    plain = CNN((1, 16, 16), 4, channels=(4, 6), hidden=8)
    model = make_client(weight=0.0, **options).method.model
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1}, "FeatureDistillation.weight"),
        ({"feature_target": "flat"}, "Distillation.feature_target: must be one of fused, raw, got 'flat'"),
        ({"reduction": "median"}, "Distillation.reduction"),
        ({"attention": "none"}, "Distillation.attention"),
        ({"tap": "pool"}, "Distillation.tap"),
        ({"parameters": "public"}, "Distillation.parameters"),
        ({"mid_channels": 0}, "Distillation.mid_channels"),
        ({"smooth_convs": 3}, "Distillation.smooth_convs: must be 1 or 2, got 3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        FeatureDistillation(**sectioned(FeatureDistillation, **options))


def test_configured_option_is_refused_where_it_is_written():
    node = {"class_path": "fl_lightning.losses.distillation.FeatureDistillation"}
    node["init_args"] = {"distillation": {"mid_channels": 0}}
    with pytest.raises(
        ConfigError, match=r"^method\.extra_terms\.0\.init_args\.distillation\.mid_channels: must be >= 1, got 0$"
    ):
        build([node], "method.extra_terms")


def test_model_without_maps_is_refused(mlp):
    with pytest.raises(ConfigError, match="has no feature map to distil; set the weight"):
        make_client(mlp(hidden=(5,)))


def test_preact_needs_a_relu_to_stand_before(conv_net):
    with pytest.raises(ConfigError, match="preact needs stages that end in a ReLU"):
        make_client(conv_net(), tap="preact")
