"""Grad-CAM by hand-computed numbers, and which networks of a method are asked."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("captum")

from fl_lightning.attention import _agreement, _as_colours, _images_of, gradcam, views
from fl_lightning.classifier import labels_of
from fl_lightning.core.client import ClientModule
from fl_lightning.core.predictor import Seen
from fl_lightning.data.shifts import ConceptShift
from fl_lightning.losses.distillation import Distillation
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.models.cbam import CBAM
from fl_lightning.models.cnn import CNN
from fl_lightning.models.mlp import MLP
from fl_lightning.rebuilding import own_way


def test_map_is_what_the_definition_gives():
    """A_1 = x, A_2 = -2x; the score Σ(3 A_1 + A_2) has a_1 = 3, a_2 = 1 at every place: relu(3x − 2x) = relu(x)."""
    layer = nn.Conv2d(1, 2, 1, bias=False)
    layer.weight.data = torch.tensor([1.0, -2.0]).view(2, 1, 1, 1)
    x = torch.tensor([[[[0.0, 1.0], [-1.0, 4.0]]], [[[-1.0, -2.0], [-3.0, -4.0]]]])
    found = gradcam(lambda x: (layer(x) * torch.tensor([3.0, 1.0]).view(1, 2, 1, 1)).sum((1, 2, 3)), layer, x)
    torch.testing.assert_close(found, torch.tensor([[[0.0, 0.25], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]))


def test_every_network_over_images_is_asked_for_what_it_says():
    x = torch.randn(2, 1, 16, 16)
    method = DRDFL(CNN((1, 16, 16), 10)).eval()
    found = {name: (score, layer) for name, score, layer in views(method, x, 7)}
    assert set(found) == {"model", "personanet", "learngene"}
    with torch.no_grad():
        torch.testing.assert_close(found["model"][0](x), method.model(x)[:, 7])
        torch.testing.assert_close(found["personanet"][0](x), method.personanet(x).square().sum(1) / 2)
        torch.testing.assert_close(found["learngene"][0](x), method.learngene(x)[0].square().sum(1) / 2)
    # 16x16 images are halved to 8, 4 and 2: the last map that still says where has 4x4 places
    assert found["personanet"][1] is method.personanet.layers[3]
    for score, layer in found.values():
        assert gradcam(score, layer, x).shape == (2, 16, 16)
        assert all(p.grad is None for p in method.parameters())


def test_a_class_is_the_images_and_not_what_a_client_calls_another_one():
    """Under a concept shift images of other classes were drawn as those of the one that was asked for."""
    shift, classes = ConceptShift(concepts=2), torch.tensor([0, 1, 2] * 2)
    parts = [np.arange(3), np.arange(3, 6)]
    y = torch.cat(
        [shift.apply(classes[p], classes[p], k, 2, 3, np.random.default_rng(0))[1] for k, p in enumerate(parts)]
    )
    assert not torch.equal(y, classes)
    clients = [SimpleNamespace(test=part) for part in parts]
    data = SimpleNamespace(
        arrays=SimpleNamespace(y=y), clients=clients, shift=shift, spec=SimpleNamespace(num_classes=3)
    )
    loop = SimpleNamespace(data=data, num_clients=2)
    assert _images_of(loop, 1) == {0: 1, 1: 4}
    assert [labels_of(loop, client)[1] for client in range(2)] == [1, int(y[4])]


def test_a_gate_of_one_channel_is_no_map_of_features():
    """CBAM's spatial gate was taken for the last convolution, and clients looked nowhere."""
    x = torch.randn(2, 1, 16, 16)
    method = FedCPD(CNN((1, 16, 16), 10), distillation=Distillation(attention="inline"))
    ClientModule(method)
    ((name, _, layer),) = views(method.eval(), x, 7)
    assert name == "model"
    assert layer.out_channels > 1
    assert any(isinstance(part, CBAM) for part in method.model.modules())


def test_a_personal_model_is_a_classifier_too():
    """Its map followed the norm of its scores, not the class's, as is said of classifiers."""
    x = torch.randn(2, 1, 16, 16)
    method = Ditto(CNN((1, 16, 16), 10))
    method.setup()
    found = {name: score for name, score, _ in views(method.eval(), x, 7)}
    assert set(found) == {"model", "personal"}
    with torch.no_grad():
        torch.testing.assert_close(found["personal"](x), method.personal(x)[:, 7])


def test_weights_that_several_models_make_are_asked_as_the_client_predicts():
    """APFL's client predicts by a mixture, and only what is mixed was drawn."""
    x = torch.randn(2, 1, 16, 16)
    method = APFL(CNN((1, 16, 16), 10), mixed="weights")
    method.setup()
    with torch.no_grad():
        for parameter in method.personal.parameters():
            parameter.add_(torch.randn_like(parameter))
    found = {name: (score, layer) for name, score, layer in views(method.eval(), x, 7)}
    assert set(found) == {"model", "personal", "mixed"}
    way = own_way(method)
    assert way is not None
    said = way.scores(Seen(x))[:, 7].detach()
    torch.testing.assert_close(found["mixed"][0](x), said)
    assert not torch.allclose(found["model"][0](x), said)
    assert not torch.allclose(found["personal"][0](x), said)
    assert gradcam(*found["mixed"], x).amax((1, 2)).equal(torch.ones(2))


def test_a_network_without_convolutions_is_not_asked():
    assert not list(views(FedAvg(MLP((1, 8, 8), 10, (16,))).eval(), torch.randn(2, 1, 8, 8), 0))


def test_agreement_is_one_for_equal_maps_and_left_out_without_heat():
    one = np.random.default_rng(0).random((3, 4, 4))
    assert _agreement([one, one]) == "agreement 1.00"
    assert _agreement([one, 1 - one]) == "agreement -1.00"
    assert _agreement(np.zeros((2, 2, 4, 4))) == "no two maps to compare"
    assert _agreement([one]) == "no two maps to compare"


@pytest.mark.parametrize(("channels", "drawn"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 1, 2]), (4, [0, 1, 2])])
def test_images_of_any_number_of_channels_are_drawn(channels, drawn):
    """Two and four channels ended in a traceback."""
    x = torch.rand(2, channels, 3, 3)
    torch.testing.assert_close(_as_colours(x), x[:, drawn])
