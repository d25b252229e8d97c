"""FedAMP: the nearer two models, the more of each other their clients are drawn to."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.combining import CombiningServer
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.local import Local

ALPHA, SIGMA, WEIGHT = 0.1, 0.5, 0.8


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def mixtures(models):
    """u_i as Algorithm 1 has it."""
    found = []
    for i, own in enumerate(models):
        squares = [float((flat(own) - flat(other)).square().sum()) for other in models]
        xi = [0 if j == i else ALPHA / SIGMA * math.exp(-square / SIGMA) for j, square in enumerate(squares)]
        xi[i] = 1 - sum(xi)
        assert all(value > 0.01 for value in xi)
        found.append(sum(x * flat(model) for x, model in zip(xi, models, strict=True)))
    return found


def test_three_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedAMP(mlp(), WEIGHT, ALPHA, SIGMA), data=data)
    models = [copy.deepcopy(loop.runner.modules[0].method.model) for _ in range(4)]
    loop.run()
    centres = [flat(model) for model in models]
    for round in (1, 2, 3):
        for model, centre, client in zip(models, centres, data.clients, strict=True):

            def loss(x, y, model=model, centre=centre):
                w = torch.cat([p.reshape(-1) for p in model.parameters()])
                return F.cross_entropy(model(x), y) + WEIGHT / 2 * (w - centre).square().sum()

            train_by_hand(model, client, sgd(), round, loss=loss)
        centres = mixtures(models)
    for client, (model, centre) in enumerate(zip(models, centres, strict=True)):
        own = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        torch.testing.assert_close(dict(loop.runner.pool.get(client)), own, rtol=1e-4, atol=1e-5)
        heard = loop.exchange.inbox(client).weights
        here = torch.cat([heard[f"model.{name}"].reshape(-1) for name, _ in model.named_parameters()])
        torch.testing.assert_close(here, centre, rtol=1e-4, atol=1e-5)


def test_without_a_pull_it_is_local(mlp, run_federation):
    one, other = run_federation(lambda: FedAMP(mlp(), 0.0), 2), run_federation(lambda: Local(mlp()), 2)
    for name in ("Local-T", "Local-T_received", "Global-T"):
        assert [row[name] for row in one.diary.rows] == [row[name] for row in other.diary.rows]


def test_shares_never_exceed_one(mlp, run_federation):
    """At a large α the others get all, alike where they are alike, and the own model nothing."""
    loop = run_federation(lambda: FedAMP(mlp(), alpha=1e9, sigma=1e3), 1)
    shares = loop.exchange.server.shares({client: loop.diary.sent[1, client] for client in range(4)})
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert shares.diagonal().tolist() == pytest.approx([0.0] * 4)
    assert (shares >= 0).all()


def test_who_sits_out_keeps_its_combination():
    server = CombiningServer(Message({"w": torch.zeros(1)}), ["w"], lambda messages: torch.eye(len(messages)))
    server.setup(Facts(num_clients=2))
    for sent in ({0: 1.0, 1: 2.0}, {0: 5.0}):
        server.aggregate({client: Message({"w": torch.tensor([own])}, {}, 1) for client, own in sent.items()})
    assert [float(server.message_for(client).weights["w"]) for client in (0, 1)] == [5, 2]


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedAMP(mlp()), participation=0.5)


def test_ranges_are_checked(mlp):
    for options in ({"weight": -1.0}, {"alpha": 0.0}, {"sigma": 0.0}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}: must be >"):
            FedAMP(mlp(), **options)
