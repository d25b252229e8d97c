"""FedDBE: a vector on the embeddings that stays, and one mean that all are held to."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.core.predictor import Seen
from fl_lightning.errors import ConfigError
from fl_lightning.federation.peers import Ring
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddbe import FedDBE

WEIGHT, MOMENTUM = 3.0, 0.4


class Biased(nn.Module):
    """A model and m_i, for a loop of the test's own; r is followed as the mini-batches go."""

    def __init__(self, model):
        super().__init__()
        self.model, self.bias = model, nn.Parameter(torch.zeros(5))

    def risk(self, consensus):
        self.mean = torch.zeros(5)

        def loss(x, y):
            z = self.model.embed(x)
            mean = (1 - MOMENTUM) * self.mean + MOMENTUM * z.mean(0)
            self.mean = mean.detach()
            if consensus is None:
                return F.cross_entropy(self.model.head(z), y)
            return F.cross_entropy(self.model.head(z + self.bias), y) + WEIGHT * (0.5 * (mean - consensus) ** 2).mean()

        return loss


def test_three_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedDBE(mlp(), WEIGHT, MOMENTUM), data=data)
    start = copy.deepcopy(loop.runner.modules[0].method.model)
    loop.run()
    own, sizes = [Biased(copy.deepcopy(start)) for _ in range(4)], [client.num_train for client in data.clients]
    consensus = None
    for round in (1, 2, 3):
        for client, biased in enumerate(own):
            received = loop.diary.received[round, client].weights
            biased.model.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})
            train_by_hand(biased, data.clients[client], sgd(), round, loss=biased.risk(consensus))
            sent = loop.diary.sent[round, client]
            assert ("mean" in sent.artifacts) == (round == 1)
            for name, tensor in biased.model.state_dict().items():
                torch.testing.assert_close(sent.weights[f"model.{name}"], tensor, rtol=1e-4, atol=1e-5)
        if consensus is None:
            consensus = sum(size * biased.mean for size, biased in zip(sizes, own, strict=True)) / sum(sizes)
        torch.testing.assert_close(loop.exchange.global_message().artifacts["mean"], consensus, rtol=1e-4, atol=1e-5)
    for client, biased in enumerate(own):
        torch.testing.assert_close(loop.runner.pool.get(client)["bias"], biased.bias.detach(), rtol=1e-4, atol=1e-5)


def test_first_round_is_fedavgs(mlp, run_federation, assert_identical):
    one, other = run_federation(lambda: FedDBE(mlp()), 1), run_federation(lambda: FedAvg(mlp()), 1)
    assert_identical(one.exchange.global_message().weights, other.exchange.global_message().weights)
    assert one.diary.rows[0]["Local-T"] == other.diary.rows[0]["Local-T"]


def test_mean_is_heard_once_and_stays_without_a_server(mlp, run_federation):
    loop = run_federation(lambda: FedDBE(mlp()), rounds=5, exchange=Ring())
    assert [("loss/mean" in row and row["loss/mean"] is not None) for row in loop.diary.rows] == [False, *[True] * 4]
    assert [bool(loop.diary.sent[r, 0].artifacts) for r in range(1, 6)] == [True, *[False] * 4]


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedDBE(mlp()), participation=0.5)


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.weight: must be >= 0"):
        FedDBE(mlp(), weight=-1.0)
    with pytest.raises(ConfigError, match=r"method\.momentum: must be in \(0, 1\]"):
        FedDBE(mlp(), momentum=0.0)


def test_a_model_that_has_received_nothing_is_fine_tuned_as_it_was_after_its_fit(mlp):
    """m_i joins once r̄ is known, which the model itself says: one from a file is not told by a message."""
    method = FedDBE(mlp())
    x = torch.rand(3, 1, 8, 8)
    for knows in (False, True):
        method.get_buffer("knows").fill_(knows)
        scores = method.predictors()["personal"].scores(Seen(x))
        (slope,) = torch.autograd.grad(scores.square().sum(), method.bias, allow_unused=True)
        assert (slope is not None and bool(slope.any())) == knows
