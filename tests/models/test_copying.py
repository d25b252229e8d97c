"""Copies of a user's networks, with their hooks."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.core.freezing import frozen_copy
from fl_lightning.errors import ConfigError
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedphp import FedPHP
from fl_lightning.methods.fedrod import FedRoD
from fl_lightning.methods.fml import FML
from fl_lightning.methods.moon import MOON
from fl_lightning.models.copying import copied
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel

SHAPE = (1, 8, 8)


class Masked(nn.Module):
    """Trains the last four rows of its first layer and of its head alone, by hooks of one of several kinds."""

    def __init__(self, kind="function"):
        super().__init__()
        self.first, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)
        mask = torch.ones(8, 1)
        mask[:4] = 0
        self.register_buffer("mask", mask)
        for layer in (self.first, self.fc):
            weight, own = layer.weight, mask[: len(layer.weight)]
            if kind == "function":
                weight.register_hook(lambda gradient, own=own: gradient * own)
            elif kind == "method":
                weight.register_hook(self.masked)
            elif kind == "after":
                weight.register_post_accumulate_grad_hook(self.cut)
            elif kind == "own buffer":
                weight.register_hook(lambda gradient: gradient * self.mask[: len(gradient)])

    def masked(self, gradient):
        return gradient * self.mask[: len(gradient)]

    def cut(self, parameter):
        parameter.grad.mul_(self.mask[: len(parameter)])

    def forward(self, x):
        return self.fc(self.first(x.flatten(1)).relu())


class Scaled(nn.Module):
    """A learned scale of its first layer's output, by a hook."""

    def __init__(self, hook="method"):
        super().__init__()
        self.first, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))
        by_default = {"parts": [self.first, {"scale": self.scale}]}
        hooks = {
            "method": self.scaled,
            "closure": lambda module, inputs, out: out * self.scale,
            "default": lambda module, inputs, out, held=by_default: out * held["parts"][1]["scale"],
        }
        self.first.register_forward_hook(hooks[hook])

    def scaled(self, module, inputs, out):
        return out * self.scale

    def forward(self, x):
        return self.fc(self.first(x.flatten(1)).relu())


@pytest.mark.parametrize("kind", ["function", "method", "after"])
@pytest.mark.parametrize("method", [FedAvg, Ditto, APFL, FML, FedRoD])
def test_hooks_of_gradients_hold_in_every_model_that_is_trained(method, kind, run_federation, set_up_federation):
    """A copy has none of `copy.deepcopy`: masked rows were trained, in silence."""

    def make():
        return method(WrappedModel(SHAPE, 4, Masked(kind), "fc"))

    entries = {name: own.clone() for name, own in set_up_federation(make, 1).runner.modules[0].entries.items()}
    module = run_federation(make, 1).runner.modules[0]
    layers = [name for name in entries if name.endswith(("first.weight", "head.weight"))]
    assert len(layers) >= 2
    for name in layers:
        moved = (module.entries[name] - entries[name]).abs()
        assert moved[:4].max() == 0, name
    assert (module.entries[layers[0]] - entries[layers[0]]).abs()[4:].max() > 0


def test_a_hook_that_is_a_method_is_that_of_the_copy(run_federation):
    loop = run_federation(lambda: FedAvg(WrappedModel(SHAPE, 4, Scaled(), "fc")), 1)
    (scale,) = (own for name, own in loop.exchange.global_message().weights.items() if name.endswith("scale"))
    assert not torch.equal(scale, torch.ones(8))


@pytest.mark.parametrize("module", [Scaled("closure"), Scaled("default"), Masked("own buffer")])
def test_a_hook_that_would_stay_with_the_original_is_refused(module):
    with pytest.raises(ConfigError, match=r"^model\.module: the hook .* holds on to parts of \w+, which is copied"):
        WrappedModel(SHAPE, 4, module, "fc")


class Chooses(nn.Module):
    """Calls its first layer by what stands in an attribute."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)
        block = lambda x: self.first(x).relu()  # noqa: E731
        self.ways = {
            "closure": block,
            "in a container": partial(lambda ways, x: ways[0](x), [block]),
            "wrapped": torch.enable_grad()(self.passed),
            "method": self.passed,
            "given": partial(self.passed, slope=0.5),
            "of itself": F.relu,
        }[kind]

    def passed(self, x, slope=1.0):
        return self.first(x).relu() * slope

    def forward(self, x):
        return self.fc(self.ways(x.flatten(1)[:, : self.fc.in_features] if self.ways is F.relu else x.flatten(1)))


@pytest.mark.parametrize("kind", ["closure", "in a container", "wrapped"])
def test_a_function_that_would_stay_with_the_original_is_refused(kind):
    """The copy's forward went through the original's layers, which nobody trains, in silence."""
    said = r"^model\.module: the function .* in Chooses\.ways holds on to parts of Chooses, which is copied"
    with pytest.raises(ConfigError, match=said):
        WrappedModel(SHAPE, 4, Chooses(kind), "fc")


class OwnBody(nn.Module):
    """A body that goes through its layer by a function in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 8)
        self.block = lambda x: self.layer(x.flatten(1)).relu()

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize("method", [FedNTD, FedPHP, FedCP, MOON, Ditto])
def test_a_model_of_which_a_teacher_would_go_through_its_own_layers_is_refused(method, make_client):
    """The teacher was the student, and FedPHP's personal model the global one, in silence."""
    model = SplitModel(Body([], OwnBody()), nn.Linear(8, 4), 8, 4, SHAPE)
    with pytest.raises(ConfigError, match=r"^model: the function .*OwnBody.* holds on to parts of"):
        make_client(method(model))
    make_client(FedAvg(SplitModel(Body([], OwnBody()), nn.Linear(8, 4), 8, 4, SHAPE)))


def test_a_teacher_needs_no_hooks_of_gradients():
    assert not any(own.requires_grad for own in frozen_copy(Masked("own buffer")).parameters())
    with pytest.raises(ConfigError, match=r"the hook .* holds on to parts of Scaled"):
        frozen_copy(Scaled("closure"))


@pytest.mark.parametrize("kind", ["method", "given", "of itself"])
def test_a_function_that_goes_along_is_taken(kind):
    module = Chooses(kind)
    made = copied(module)
    made(torch.ones(2, *SHAPE)).sum().backward()
    assert made.fc.weight.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_copy_shares_nothing_and_its_hooks_are_called_once():
    calls = []
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: calls.append("gradient"))
    layer.register_forward_hook(lambda module, inputs, out: calls.append("forward"))
    copied(copied(layer))(torch.ones(1, 2)).sum().backward()
    assert calls == ["forward", "gradient"]
    assert layer.weight.grad is None


def test_what_cannot_be_copied_says_what_to_take_instead():
    """Torch's own words named neither the layer nor a remedy; TorchScript was a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are deprecated
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
        scripted = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    old(torch.zeros(1, 2))
    with pytest.raises(ConfigError, match=r"^model: Sequential has an attribute .* take torch\.nn\.utils\.parametriz"):
        copied(old)
    with pytest.raises(ConfigError, match=r"^model: Sequential has a part in TorchScript, of which no copy can be tr"):
        copied(scripted)


def test_functions_that_a_part_makes_anew_are_no_matter():
    """Metrics of torchmetrics' wrap their own methods, and a compiled module its forward."""
    parts = nn.ModuleDict({"metric": MulticlassAccuracy(num_classes=4), "layer": nn.Linear(2, 2)})
    parts["layer"].compile()
    assert copied(parts)["metric"].update is not parts["metric"].update
