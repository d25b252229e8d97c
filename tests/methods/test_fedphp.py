"""FedPHP: the personal model inherits local ones, less and less, and teaches the next."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.settings import Newcomers
from fl_lightning.losses.discrepancy import mean_discrepancy
from fl_lightning.methods import fedphp
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedphp import FedPHP
from fl_lightning.models.mixture import move_towards


def risk(transfer, model, personal):
    def loss(x, y):
        z = model.embed(x)
        logits = model.head(z)
        with torch.no_grad():
            teacher = F.softmax(personal(x) / 4, 1)
        inherited = -(teacher * logits.log_softmax(1)).sum(1).mean()
        if transfer == "MMD":
            inherited = mean_discrepancy(z, personal.embed(x).detach())
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * inherited

    return loss


@pytest.mark.parametrize(("transfer", "precision"), [("KD", "32-true"), ("MMD", "32-true"), ("KD", "64-true")])
def test_three_rounds_are_those_of_the_paper(transfer, precision, mlp, data, set_up_federation, sgd, train_by_hand):
    """In double precision the share that is kept was of single."""
    trainer, kind = {"precision": precision}, torch.float64 if precision == "64-true" else torch.float32
    near = {"rtol": 1e-12, "atol": 1e-14} if kind == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    loop = set_up_federation(lambda: FedPHP(mlp(), 0.3, transfer), data=data, rounds=3, trainer=trainer)
    personal = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    model = mlp().to(kind)
    for round in (1, 2, 3):
        received = loop.diary.received[round, 0].weights
        model.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})
        loss = risk(transfer, model, personal)
        train_by_hand(model, data.clients[0], sgd(), round, loss=lambda x, y, loss=loss: loss(x.to(kind), y))
        keep = 0.9 * (round - 1) / 3
        with torch.no_grad():
            for p, w in zip(personal.parameters(), model.parameters(), strict=True):
                p.copy_(keep * p + (1 - keep) * w)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(loop.diary.sent[round, 0].weights[f"model.{name}"], tensor, **near)
    kept = loop.runner.pool.get(0)
    assert kept["num_fits"] == 3
    for name, tensor in personal.state_dict().items():
        torch.testing.assert_close(kept[f"personal.{name}"], tensor, **near)


def test_without_transfer_it_is_fedavg(conv_net, run_federation, assert_identical):
    one, other = run_federation(lambda: FedPHP(conv_net(), 0.0), 2), run_federation(lambda: FedAvg(conv_net()), 2)
    assert_identical(one.exchange.global_message().weights, other.exchange.global_message().weights)
    assert one.diary.rows[1]["Local-T"] == one.diary.rows[1]["Local-T/personal"]


def test_what_cannot_be_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"method\.weight: must be in \[0, 1\]"):
        FedPHP(mlp(), weight=2.0)
    with pytest.raises(ConfigError, match=r"method\.transfer: must be"):
        FedPHP(mlp(), transfer="other")


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_fits_of_a_client_are_reckoned_with_whoever_comes_to_a_round(sampling, mlp, set_up_federation):
    """N = 6 rounds of half of the clients; who is out, or joins later, changes nothing of it."""
    failures, newcomers = Failures(0.4), Newcomers(clients=1, after=2)
    options = {"participation": 0.5, "sampling": sampling, "failures": failures, "newcomers": newcomers}
    loop = set_up_federation(lambda: FedPHP(mlp()), rounds=6, **options)
    kept, found = [], []

    def spied(personal, model, keep):
        kept.append(float(keep))
        move_towards(personal, model, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedphp, "move_towards", spied)
        patch.setattr(FedPHP, "on_fit_start", lambda self: found.append(int(self.num_fits)))
        loop.run()
    assert len({row["participants"] for row in loop.diary.rows}) > 1
    assert kept == pytest.approx([min(0.9 * before / 3, 0.9) for before in found])
    assert max(found) > 0
