"""What the tests of several methods share: a model of one number, a loss of it, and a count of passes."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fl_lightning.core.term import CrossEntropy
from fl_lightning.models.split import Body, SplitModel


class OneNumber(nn.Module):
    """A head whose only parameter is w, and whose logits do not depend on anything."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(start)))

    def forward(self, z):
        return z.new_zeros(len(z), 4)


class Parabola(CrossEntropy):
    """f(w) = ½ (w − optimum)² in place of the cross-entropy."""

    name = "cross_entropy"

    def __init__(self, optimum):
        super().__init__()
        self.optimum = optimum

    def forward(self, host, out):
        return 0.5 * (host.model.head.w - self.optimum) ** 2


@pytest.fixture(scope="session")
def on_a_parabola():
    """A factory of methods that minimise ½ (w − optimum)²: `on_a_parabola(FedProx, start=0, optimum=1, mu=1)`."""

    def make(kind, start, optimum, **options):
        def method():
            model = SplitModel(Body([], nn.Flatten()), OneNumber(start), 64, 4, (1, 8, 8))
            made = kind(model, **options)
            made.terms[0] = Parabola(optimum)
            return made

        return method

    return make


@pytest.fixture(scope="session")
def number():
    """The w that a loop's server holds."""
    return lambda loop: loop.exchange.global_message().weights["model.head.w"].item()


@pytest.fixture(scope="session")
def assert_trains_only():
    """A term's gradient reaches every parameter of one part of its client, and none of another."""

    def check(client, term, x, y, trained, other):
        client.zero_grad()
        term(client.method, client.step(x, y).forward()).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.parameters())
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in other.parameters())

    return check


class Passes:
    """Samples that went forward through a layer, and gradients that came back to its output."""

    def __init__(self, layer):
        self.forward = self.backward = 0
        layer.register_forward_hook(self._forward)

    def _forward(self, layer, args, output):
        self.forward += len(output)
        if output.requires_grad:
            output.register_hook(self._backward)

    def _backward(self, gradient):
        self.backward += len(gradient)


@pytest.fixture(scope="session")
def count_passes():
    """Count the passes through a layer: `passes = count_passes(layer)`."""
    return Passes


@contextmanager
def _unchanged(module):
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    streams = torch.get_rng_state()
    yield
    assert torch.equal(streams, torch.get_rng_state())
    assert [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])] == []


@pytest.fixture(scope="session")
def unchanged():
    """A block that must leave a module's state and the random streams as they were."""
    return _unchanged
