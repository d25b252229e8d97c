"""FedRoD: a balanced generic predictor that travels, and a personal head on top of it that stays."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.core.method import Seen
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrod import FedRoD


class TwoHeads(nn.Module):
    """A model and a second head, for a loop of the test's own."""

    def __init__(self, model, head):
        super().__init__()
        self.model, self.head = model, head

    def risk(self, counts):
        def loss(x, y):
            z = self.model.body(x)
            g = self.model.head(z)
            exponentials = counts * g.exp()
            balanced = -(exponentials.gather(1, y[:, None])[:, 0] / exponentials.sum(1)).log().mean()
            return balanced + F.cross_entropy(g.detach() + self.head(z.detach()), y)

        return loss


def test_two_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    """Client 0, by a loop of the test's own: both risks of every mini-batch, each on its own part."""
    loop = set_up_federation(lambda: FedRoD(mlp()), data=data, rounds=2)
    method = loop.runner.modules[0].method
    pair = TwoHeads(copy.deepcopy(method.model), copy.deepcopy(method.personal_head))
    loop.run()
    for round in (1, 2):
        received = loop.diary.received[round, 0].weights
        pair.model.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})
        counts = data.clients[0].class_counts.float()
        train_by_hand(pair, data.clients[0], sgd(), round, loss=pair.risk(counts))
        sent = loop.diary.sent[round, 0].weights
        for name, tensor in pair.model.state_dict().items():
            torch.testing.assert_close(sent[f"model.{name}"], tensor, rtol=1e-5, atol=1e-6)
    kept = loop.runner.pool.get(0)
    for name, tensor in pair.head.state_dict().items():
        torch.testing.assert_close(kept[f"personal_head.{name}"], tensor, rtol=1e-5, atol=1e-6)


def test_without_balance_the_generic_predictor_is_fedavgs(mlp, run_federation):
    """Under clipping, too: each predictor's gradients are clipped by themselves."""
    clips = {"gradient_clip_val": 0.5}
    one, other = (run_federation(make, trainer=clips) for make in (lambda: FedRoD(mlp(), 0.0), lambda: FedAvg(mlp())))
    for client in range(4):
        torch.testing.assert_close(one.diary.sent[3, client].weights, other.diary.sent[3, client].weights)
    assert one.diary.rows[-1]["Server-T"] == other.diary.rows[-1]["Server-T"]


def test_figures_say_which_predictor_they_are_of(mlp, run_federation):
    loop = run_federation(lambda: FedRoD(mlp()), rounds=2)
    row = loop.diary.rows[1]
    assert row["Local-T"] == row["Local-T/personal"]
    assert row["Global-T_received/generic"] == pytest.approx(loop.diary.rows[0]["Server-T"])
    client, data = loop.runner.load(0), loop.data.clients[0]
    x, _ = data.store.gather(data.test)
    method = client.method.eval()
    with torch.no_grad():
        both = method.model(x) + method.personal_head(method.model.embed(x))
        torch.testing.assert_close(method.predictors()["personal"].scores(Seen(x)), both)


def test_only_the_model_travels(mlp, run_federation):
    loop = run_federation(lambda: FedRoD(mlp()), rounds=1)
    assert {name.split(".")[0] for name in loop.diary.sent[1, 0].weights} == {"model"}
    assert {name.split(".")[0] for name in loop.runner.pool.get(0)} == {"personal_head"}


def test_range_is_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.gamma: must be >= 0"):
        FedRoD(mlp(), gamma=-1.0)
