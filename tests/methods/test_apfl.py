"""APFL: the mixture is trained where it stands, and α learns how much of it is the client's own."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.method import Seen
from fl_lightning.errors import ConfigError
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.local import Local
from fl_lightning.seeding import derive_seed

LR = 0.1


def grad(model, x, y):
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def fit_by_hand(w, v, alpha, data, round):
    """Algorithm 1 for one client, w and v in place; returns α."""
    bundles = data.bundles(derive_seed(0, "shuffle/0", round, data.client), 4)
    for index, (x, y) in enumerate(step for bundle in bundles for step in bundle.steps()):
        mixture = copy.deepcopy(w)
        with torch.no_grad():
            for p, own, other in zip(mixture.parameters(), v.parameters(), w.parameters(), strict=True):
                p.copy_(alpha * own + (1 - alpha) * other)
        at_mixture, at_w, old = grad(mixture, x, y), grad(w, x, y), alpha
        if index == 0:
            pairs = zip(v.parameters(), w.parameters(), at_mixture, strict=True)
            slope = sum(((own - other).detach() * g).sum().item() for own, other, g in pairs)
            alpha = min(max(alpha - LR * slope, 0.0), 1.0)
        with torch.no_grad():
            for own, other, g_v, g_w in zip(v.parameters(), w.parameters(), at_mixture, at_w, strict=True):
                own -= LR * old * g_v
                other -= LR * g_w
    return alpha


def test_three_rounds_are_those_of_the_paper(mlp, data, set_up_federation, sgd):
    loop = set_up_federation(lambda: APFL(mlp(), alpha=0.4), data=data, optimizer=sgd(LR))
    w = copy.deepcopy(loop.runner.modules[0].method.model)
    own, alphas = [copy.deepcopy(w) for _ in range(4)], [0.4] * 4
    loop.run()
    for round in (1, 2, 3):
        others = [copy.deepcopy(w) for _ in range(4)]
        alphas = [fit_by_hand(others[c], own[c], alphas[c], data.clients[c], round) for c in range(4)]
        with torch.no_grad():
            for index, p in enumerate(w.parameters()):
                p.copy_(sum(list(other.parameters())[index] for other in others) / 4)
    weights = loop.exchange.global_message().weights
    for name, tensor in w.state_dict().items():
        torch.testing.assert_close(weights[f"model.{name}"], tensor, rtol=1e-4, atol=1e-5)
    assert len(set(alphas)) == 4
    for client, v in enumerate(own):
        kept = loop.runner.pool.get(client)
        assert kept["alpha"].item() == pytest.approx(alphas[client], rel=1e-4)
        for name, tensor in v.state_dict().items():
            torch.testing.assert_close(kept[f"personal.{name}"], tensor, rtol=1e-4, atol=1e-5)


def test_at_one_it_is_local_and_at_zero_fedavg(mlp, run_federation):
    local, fedavg = run_federation(lambda: Local(mlp()), 2), run_federation(lambda: FedAvg(mlp()), 1)
    one = run_federation(lambda: APFL(mlp(), alpha=1.0, adaptive=False), 2)
    zero = run_federation(lambda: APFL(mlp(), alpha=0.0, adaptive=False), 1)
    for name in ("Local-T", "Global-T"):
        assert [row[name] for row in one.diary.rows] == [row[name] for row in local.diary.rows]
    first, same = zero.diary.rows[0], fedavg.diary.rows[0]
    assert (first["Local-T"], first["Local-T_received"]) == (same["Local-T"], same["Local-T_received"])


def test_mixture_of_logits_predicts_by_both_models(mlp, run_federation):
    loop = run_federation(lambda: APFL(mlp(), adaptive=False, mixed="logits"), rounds=2)
    row = loop.diary.rows[1]
    assert row["Local-T"] == row["Local-T/personal"]
    assert row["Global-T_received/global"] == pytest.approx(loop.diary.rows[0]["Server-T"])
    method, data = loop.runner.load(1).method.eval(), loop.data.clients[1]
    x, _ = data.store.gather(data.test)
    with torch.no_grad():
        both = (method.model(x) + method.personal(x)) / 2
        torch.testing.assert_close(method.predictors()["personal"].scores(Seen(x)), both)


def test_share_is_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.alpha: must be in \[0, 1\]"):
        APFL(mlp(), alpha=1.5)
