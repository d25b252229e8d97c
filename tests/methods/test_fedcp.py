"""FedCP: a policy that takes features apart for two heads."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.models.conditional import ConditionalPolicy


def discrepancy(z, other):
    """Pair by pair."""
    total = 0.0
    for one, near in ((z, 1), (other, 1)):
        total = total + near * sum((-(a - b).square().sum() / 2 / s).exp() for a in one for b in one for s in WIDTHS)
    return (total - 2 * sum((-(a - b).square().sum() / 2 / s).exp() for a in z for b in other for s in WIDTHS)) / len(
        z
    ) ** 2


WIDTHS = (10, 15, 20, 50)


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedCP(mlp(), 2.0, noisy=False), data=data, rounds=2)
    method = loop.runner.modules[0].method
    parts = nn.ModuleDict({"model": copy.deepcopy(method.model), "policy": copy.deepcopy(method.policy)})
    loop.run()
    model, linear, norm = parts["model"], *parts["policy"].layers[:2]
    for round in (1, 2):
        received = loop.diary.received[round, 0].weights
        own = {name: tensor for name, tensor in received.items() if not name.startswith("generic.")}
        for name, tensor in own.items():
            parts.state_dict()[name].copy_(tensor)
        before = copy.deepcopy(model.body)
        weight, bias = (received[f"generic.head.{name}"] for name in ("weight", "bias"))
        v = model.head.weight.detach().sum(0)

        def loss(x, y, before=before, weight=weight, bias=bias, v=v):
            z = model.embed(x)
            a = F.relu(norm(linear(z * v / v.norm())))
            r = (a[:, : z.shape[1]].exp()) / (a[:, : z.shape[1]].exp() + a[:, z.shape[1] :].exp())
            logits = model.head(r * z) + ((1 - r) * z) @ weight.T + bias
            return F.cross_entropy(logits, y) + 2 * discrepancy(z, before(x).detach())

        train_by_hand(parts, data.clients[0], sgd(), round, loss=loss)
        sent = loop.diary.sent[round, 0].weights
        assert sent.keys() == received.keys()
        for name in own:
            torch.testing.assert_close(sent[name], parts.state_dict()[name], rtol=1e-4, atol=1e-5)
        for name, shared in (("weight", weight), ("bias", bias)):
            half = (model.head.state_dict()[name] + shared) / 2
            torch.testing.assert_close(sent[f"generic.head.{name}"], half, rtol=1e-4, atol=1e-5)


def test_policy_by_hand_and_its_noise():
    """Scores ReLU of the layer norm of (2, 0, 0, 2), which is (1, −1, −1, 1): softmaxes of (1, 0) and (0, 1)."""
    policy = ConditionalPolicy(2)
    with torch.no_grad():
        policy.layers[0].weight.copy_(torch.tensor([[1.0, 0], [0, 0], [0, 0], [1, 0]]))
        policy.layers[0].bias.zero_()
    z, context = torch.tensor([[2.0, 7.0]]), torch.tensor([3.0, 0.0])
    r, s = policy.eval()(z, context)
    high = math.e / (1 + math.e)
    torch.testing.assert_close(r, torch.tensor([[high, 1 - high]]), rtol=0, atol=1e-5)
    torch.testing.assert_close(r + s, torch.ones(1, 2))
    torch.manual_seed(0)
    drawn, _ = policy.train()(z.expand(4000, 2), context)
    assert (drawn[:, 0] > 0.5).float().mean() == pytest.approx(high, abs=0.03)  # as Gumbel noise has it
    policy.noisy = False
    torch.testing.assert_close(policy(z, context)[0], r)


def test_context_is_the_sum_of_the_classes_vectors(mlp):
    model = mlp()
    model.head = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))
    method = FedCP(model)
    method.setup()
    torch.testing.assert_close(method.context, (model.head[2].weight @ model.head[0].weight).sum(0).detach())


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.weight: must be >= 0"):
        FedCP(mlp(), weight=-1.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_policy_can_be_traced_for_any_number_of_samples():
    """A run's model could not be exported: the number of samples that it was traced with was a constant."""
    policy = ConditionalPolicy(3).eval()
    traced = torch.jit.trace(policy, (torch.randn(2, 3), torch.ones(3)))
    z, context = torch.randn(5, 3), torch.randn(3)
    for own, other in zip(traced(z, context), policy(z, context), strict=True):
        assert torch.equal(own, other)
