"""Networks of torchvision's and timm's by name, and weights from files."""

import copy

import pytest
import torch
import torchvision
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.models.library import LibraryModel
from fl_lightning.models.wrapped import WrappedModel

RGB, GREY = (3, 32, 32), (1, 32, 32)
SMALL = "mobilenet_v3_small"


class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, classes)

    def forward(self, x):
        return self.fc(self.norm(x))


def parts(model, shape):
    model.eval()
    x = torch.rand(2, *shape)
    return model.body.neck(x), model(x)


@pytest.mark.parametrize("shape", [RGB, GREY])
def test_a_network_by_name_has_as_many_outputs_as_there_are_classes(shape):
    model = LibraryModel(shape, 7, SMALL)
    z, logits = parts(model, shape)
    assert (tuple(z.shape), tuple(logits.shape)) == ((2, model.embedding_size), (2, 7))
    assert model.classification_layer is model.head  # "classifier.3", found without being named


def test_layers_that_are_named_come_frozen():
    model = LibraryModel(RGB, 7, SMALL, frozen=["features", "classifier.0"])
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}


def test_published_weights_are_added_up_for_grey_images_and_leave_the_classifier(monkeypatch):
    torch.manual_seed(0)
    published = torchvision.models.get_model(SMALL, num_classes=1000).state_dict()
    weights = torchvision.models.get_model_weights(SMALL)
    monkeypatch.setattr(weights, "get_state_dict", lambda self, **_: dict(published))
    model = LibraryModel(GREY, 7, SMALL, weights="DEFAULT")
    state = model.body.neck.state_dict()
    first = "features.0.0.weight"
    assert torch.equal(state[first], published[first].sum(1, keepdim=True))
    assert torch.equal(state["classifier.0.weight"], published["classifier.0.weight"])
    assert model.head.out_features == 7
    with pytest.raises(ConfigError, match="images of 1 or 3 channels, got 5"):
        LibraryModel((5, 32, 32), 7, SMALL, weights="DEFAULT")


def test_weights_that_cannot_be_had_are_one_line(monkeypatch):
    def fails(self, **_):
        raise OSError("no network")

    monkeypatch.setattr(torchvision.models.get_model_weights(SMALL), "get_state_dict", fails)
    with pytest.raises(ConfigError, match=r"model.weights: mobilenet_v3_small's cannot be had \(no network\)"):
        LibraryModel(RGB, 7, SMALL, weights="DEFAULT")


@pytest.mark.parametrize(
    ("shape", "given", "said"),
    [
        (RGB, {"name": "mobilenet_v3_smal"}, "model.name: .* did you mean mobilenet_v3_small"),
        (RGB, {"name": "googlenet"}, "model.name: must be a network of the library's"),
        (RGB, {"name": SMALL, "weights": "BEST"}, "must be a file or one of IMAGENET1K_V1, DEFAULT, got 'BEST'"),
        (RGB, {"name": SMALL, "weights": "nowhere.pt"}, "model.weights: there is no such file"),
        (RGB, {"name": SMALL, "head": "clasifier"}, "model.head: .*classifier"),
        (RGB, {"name": SMALL, "library": "keras"}, "model.library: must be one of torchvision, timm"),
        ((4,), {"name": SMALL}, "LibraryModel takes images"),
    ],
)
def test_mistakes_are_named(shape, given, said):
    with pytest.raises(ConfigError, match=said) as raised:
        LibraryModel(shape, 7, **given)
    assert len(str(raised.value)) <= 300


@pytest.mark.parametrize(("classes", "kept"), [(3, True), (5, False)])
@pytest.mark.parametrize(
    "wrapped", [lambda state: state, lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}}]
)
def test_a_file_of_weights_is_where_a_network_starts(tmp_path, classes, kept, wrapped):
    net = Net()
    nn.init.constant_(net.norm.running_mean, 2.0)
    torch.save(wrapped(net.state_dict()), tmp_path / "net.pt")
    model = WrappedModel((4,), classes, Net(classes), "fc", weights=str(tmp_path / "net.pt"))
    assert model.body.neck.norm.running_mean.tolist() == [2.0] * 4
    assert (model.head.weight.shape == net.fc.weight.shape and torch.equal(model.head.weight, net.fc.weight)) is kept


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"norm.weight": torch.ones(4)}, "lacks weights of Net, got 'norm.bias'"),
        ({**Net().state_dict(), "conv.weight": torch.ones(1)}, "holds weights that Net has not, got 'conv.weight'"),
        ({**Net().state_dict(), "norm.bias": torch.ones(5)}, r"holds norm.bias of shape \[5\], Net has \[4\]"),
        ({**Net().state_dict(), "norm.bias": torch.full((4,), torch.nan)}, "finite numbers.* got 'norm.bias'"),
        ({**Net().state_dict(), "norm.bias": torch.ones(4, dtype=torch.complex64)}, "finite numbers.* got 'norm.bias'"),
        ([torch.ones(1)], "must hold a dict of tensors"),
        ({"norm": nn.ReLU()}, "holds no plain tensors"),
    ],
)
def test_weights_of_another_network_or_code_are_refused(tmp_path, state, said):
    torch.save(state, tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=said):
        WrappedModel((4,), 3, Net(), "fc", weights=str(tmp_path / "net.pt"))


def test_timm_is_named_where_it_is_missing_and_used_where_it_is_there():
    try:
        import timm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"timm is not installed: pip install 'fl-lightning\[timm\]'"):
            LibraryModel(RGB, 7, "resnet10t", library="timm")
        return
    model = LibraryModel(GREY, 7, "resnet10t", library="timm")
    assert tuple(parts(model, GREY)[1].shape) == (2, 7)
    with pytest.raises(ConfigError, match=r"model\.name: must be a network of the library's"):
        LibraryModel(RGB, 7, "hf-hub:someone/net", library="timm")
    with pytest.raises(ConfigError, match="timm has none of that name for resnet10t"):
        LibraryModel(RGB, 7, "resnet10t", library="timm", weights="none_such")


def test_a_network_with_a_submodule_called_module_takes_its_own_weights(tmp_path):
    """Its name was taken for DataParallel's, and cut off."""
    net = nn.Sequential()
    net.module, net.fc = nn.Linear(4, 2), nn.Linear(2, 3)
    for state in (net.state_dict(), nn.DataParallel(net).state_dict()):
        torch.save(state, tmp_path / "net.pt")
        model = WrappedModel((4,), 3, copy.deepcopy(net), "fc", weights=str(tmp_path / "net.pt"))
        assert torch.equal(model.body.neck.module.weight, net.module.weight)
