"""Going straight into autograd's engine is what torch does, bit for bit, and refuses what torch refuses."""

import pytest
import torch
from torch import nn

from fl_lightning.core import engine


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16])
def loss_of(request, network):
    network.to(request.param)
    x = torch.randn(7, 5, dtype=request.param)
    return lambda: nn.functional.cross_entropy(network(x), torch.arange(7) % 3)


@pytest.fixture
def goes_straight(monkeypatch):
    """How often the engine was called without torch's way into it."""
    calls, run = [], engine._run
    monkeypatch.setattr(engine, "_run", lambda *arguments, **options: calls.append(1) or run(*arguments, **options))
    return calls


def of_torch(loss, parameters):
    return [gradient.clone() for gradient in torch.autograd.grad(loss, parameters)]


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_are_added_as_torch_adds_them(network, loss_of, goes_straight):
    parameters = list(network.parameters())
    expected = of_torch(loss_of(), parameters)
    engine.backward(loss_of())
    assert same([parameter.grad for parameter in parameters], expected)
    engine.backward(loss_of())
    assert same([parameter.grad for parameter in parameters], [2 * gradient for gradient in expected])
    assert len(goes_straight) == 2


def test_gradients_are_given_as_torch_gives_them(network, loss_of, goes_straight):
    apart = nn.Parameter(torch.ones(2))
    parameters = [*network.parameters(), apart]
    *found, none = engine.gradients(loss_of(), parameters)
    assert same(found, of_torch(loss_of(), parameters[:-1]))
    assert none is None
    assert all(parameter.grad is None for parameter in parameters)
    assert len(goes_straight) == 1


def test_a_hook_that_changes_its_gradient_changes_no_other(network, loss_of):
    parameters = list(network.parameters())
    expected = of_torch(loss_of(), parameters)
    changed = loss_of()
    changed.register_hook(lambda gradient: gradient.mul_(3))
    engine.backward(changed)
    assert same(engine.gradients(loss_of(), parameters), expected)


def test_options_are_torchs(network, goes_straight):
    loss, weight = network(torch.randn(2, 5)).sum(), network[0].weight
    engine.backward(loss, inputs=[weight], retain_graph=True)
    assert weight.grad is not None
    assert network[2].weight.grad is None
    engine.backward(loss)
    assert network[2].weight.grad is not None
    assert len(goes_straight) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda out: out, "only for scalar outputs"),
        (lambda out: out.sum().to(torch.complex64), "only for real scalar outputs"),
        (lambda out: out.detach().sum(), "does not require grad"),
        (lambda out: torch.ones((), dtype=torch.int64), "does not require grad|for real scalar outputs"),
    ],
    ids=["no scalar", "complex", "no graph", "whole numbers"],
)
def test_what_torch_refuses_is_refused(network, make, says):
    for go in (engine.backward, lambda loss: engine.gradients(loss, list(network.parameters()))):
        with pytest.raises(RuntimeError, match=says):
            go(make(network(torch.randn(2, 5))))


def test_a_pass_is_gone_back_once(network):
    loss = network(torch.randn(2, 5)).sum()
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)


def test_inside_a_transform_torch_refuses(network):
    def inside(x):
        loss = network(x).sum()
        engine.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(inside)(torch.randn(2, 5))
