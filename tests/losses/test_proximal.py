"""FedProx's term: the specification's numbers (BASELINES-A.md, section 3) and edges."""

import pytest
import torch

from fl_lightning.core.message import Message
from fl_lightning.core.term import counts
from fl_lightning.errors import ConfigError
from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.losses.proximal import Proximal, proximal_loss
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.local import Local


def test_proximal_loss_matches_hand_computed_value():
    """Differences (.1, .2), μ = 2: 2 · ½ · 0.05."""
    assert 2 * proximal_loss([torch.tensor([0.1, 0.2])], [torch.zeros(2)]).item() == pytest.approx(0.05)


def test_proximal_loss_is_a_sum_over_all_tensors():
    parameters, anchors = [torch.ones(2, 3), torch.tensor([2.0])], [torch.zeros(2, 3), torch.zeros(1)]
    assert proximal_loss(parameters, anchors).item() == pytest.approx((6 + 4) / 2)


def test_gradient_is_the_difference_and_reaches_no_anchor():
    weight, anchor = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    proximal_loss([weight], [anchor]).backward()
    torch.testing.assert_close(weight.grad, (weight - anchor).detach())
    assert anchor.grad is None


def test_proximal_loss_is_computed_in_float32():
    narrow = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    loss = proximal_loss([narrow], [torch.zeros(1000, dtype=torch.bfloat16)])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.05, rel=1e-2)
    assert proximal_loss([], []).item() == 0


@pytest.fixture
def received(make_client, data):
    """A client with such a method that has received its own initial weights."""

    def receive(method):
        client = make_client(method)
        client.receive(client.initial_message().clone(), data.clients[0])
        return client

    return receive


def moved_by(client, amount):
    with torch.no_grad():
        for parameter in client.method.model.parameters():
            parameter.add_(amount)
    return client


@pytest.mark.parametrize(("method", "part"), [(FedAvg, ""), (FedRep, "body.")])
def test_term_holds_what_is_shared_of_the_model(mlp, received, method, part):
    term = Proximal(1.0)
    client = moved_by(received(method(mlp(), extra_terms=[term])), 0.5)
    held = sum(p.numel() for name, p in client.method.model.named_parameters() if name.startswith(part))
    assert term(client.method, None).item() == pytest.approx(0.5 * held * 0.25, rel=1e-6)


@pytest.mark.parametrize("method", [Local, DRDFL])
def test_term_is_refused_where_the_model_is_private(mlp, make_client, method):
    with pytest.raises(
        ConfigError, match=rf"^method\.extra_terms: Proximal holds .*; {method.__name__} shares nothing of it"
    ):
        make_client(method(mlp(), extra_terms=[Proximal(1.0)]))
    make_client(method(mlp(), extra_terms=[Proximal(0.0)]))


def test_term_reaches_what_it_holds_and_counts_in_no_other_phase(mlp, make_client, sgd):
    term = Proximal(1.0)
    client = make_client(FedRep(mlp(), extra_terms=[term]), sgd())
    assert term.reaches == tuple(f"model.body.{name}" for name, _ in client.method.model.body.named_parameters())
    assert [counts(term, planned.phase, 1.0) for planned in client.plan()] == [False, True]
    assert not counts(term, client.plan()[1].phase, 0.0)


def test_term_holds_batch_norm_scales_and_leaves_its_statistics(conv_net, received):
    term = Proximal(1.0)
    client = received(FedAvg(conv_net(), extra_terms=[term]))
    norm = client.method.model.body.stages[0][1]
    norm.running_mean.fill_(100.0)
    assert term(client.method, None).item() == 0
    norm.weight.data.add_(2.0)
    assert term(client.method, None).item() == pytest.approx(0.5 * 3 * 4)


def test_anchors_are_overwritten_by_every_receive_and_kept_by_nobody(mlp, received, data):
    term = Proximal(1.0)
    client = moved_by(received(FedAvg(mlp(), extra_terms=[term])), 1.0)
    assert term(client.method, None).item() > 0
    assert not any("anchor" in name for name in client.entries)
    assert not any("anchor" in name for name, _ in client.named_parameters())
    client.receive(Message(client.division.weights()), data.clients[0])
    assert term(client.method, None).item() == 0


@pytest.mark.parametrize("order", [1, -1])
def test_term_stands_beside_one_that_takes_the_last_bias_away(mlp, received, order):
    term = Proximal(1.0)
    client = received(FedAvg(mlp(), extra_terms=[term, ClassRelation(1.0)][::order]))
    assert client.method.model.head.bias is None
    held = sum(p.numel() for p in moved_by(client, 1.0).method.model.parameters())
    assert term(client.method, None).item() == pytest.approx(held / 2, rel=1e-6)


def test_term_rejects_a_negative_weight():
    with pytest.raises(ConfigError, match=r"Proximal\.weight: must be >= 0.*got -1"):
        Proximal(-1.0)
