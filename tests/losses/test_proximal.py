"""FedProx's term: the specification's numbers (BASELINES-A.md, section 3) and edges."""

import pytest
import torch

from fl_lightning.core.message import Message
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


def received(client):
    client.receive(client.initial_message().clone(), None)
    return client


def moved_by(client, amount):
    with torch.no_grad():
        for parameter in client.model.parameters():
            parameter.add_(amount)
    return client


@pytest.mark.parametrize(("method", "part"), [(FedAvg, ""), (FedRep, "body.")])
def test_term_holds_what_is_shared_of_the_model(mlp, method, part):
    term = Proximal(1.0)
    client = moved_by(received(method(mlp(), extra_terms=[term])), 0.5)
    held = sum(p.numel() for name, p in client.model.named_parameters() if name.startswith(part))
    assert term(client, None).item() == pytest.approx(0.5 * held * 0.25, rel=1e-6)


@pytest.mark.parametrize("method", [Local, DRDFL])
def test_term_counts_nowhere_where_the_model_is_private(mlp, method):
    assert Proximal(1.0).reaches == ("",)
    term = Proximal(1.0)
    method(mlp(), extra_terms=[term])
    assert term.reaches == ()


def test_term_holds_batch_norm_scales_and_leaves_its_statistics(conv_net):
    term = Proximal(1.0)
    client = received(FedAvg(conv_net(), extra_terms=[term]))
    client.model.body.stages[0][1].running_mean.fill_(100.0)
    assert term(client, None).item() == 0
    client.model.body.stages[0][1].weight.data.add_(2.0)
    assert term(client, None).item() == pytest.approx(0.5 * 3 * 4)


def test_anchors_are_overwritten_by_every_receive_and_kept_by_nobody(mlp):
    term = Proximal(1.0)
    client = moved_by(received(FedAvg(mlp(), extra_terms=[term])), 1.0)
    assert not any("anchor" in name for name in client.state_dict())
    assert not any("anchor" in name for name, _ in client.named_parameters())
    client.receive(Message(client.shared_weights()), None)
    assert term(client, None).item() == 0


@pytest.mark.parametrize("order", [1, -1])
def test_term_stands_beside_one_that_takes_the_last_bias_away(mlp, order):
    term = Proximal(1.0)
    client = received(FedAvg(mlp(), extra_terms=[term, ClassRelation(1.0)][::order]))
    held = sum(p.numel() for p in moved_by(client, 1.0).model.parameters())
    assert term(client, None).item() == pytest.approx(held / 2, rel=1e-6)


def test_term_rejects_a_negative_weight():
    with pytest.raises(ConfigError, match=r"Proximal\.weight: must be >= 0.*got -1"):
        Proximal(-1.0)
