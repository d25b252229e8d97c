"""Ditto: a global model as FedAvg's, a personal one near it, and figures that say which is which."""

import copy

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import Newcomers
from fl_lightning.losses.label_distillation import LabelDistillation
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.local import Local


def test_without_personal_epochs_it_is_fedavg(mlp, run_federation, assert_identical):
    ditto = run_federation(lambda: Ditto(mlp(), personal_epochs=0))
    fedavg = run_federation(lambda: FedAvg(mlp()))
    for round in (1, 2, 3):
        for client in range(4):
            assert_identical(ditto.diary.sent[round, client].weights, fedavg.diary.sent[round, client].weights)
    assert [row["Server-T"] for row in ditto.diary.rows] == [row["Server-T"] for row in fedavg.diary.rows]


def test_without_a_pull_the_personal_model_is_locals(mlp, run_federation, assert_identical):
    ditto = run_federation(lambda: Ditto(mlp(), weight=0.0))
    local = run_federation(lambda: Local(mlp()))
    for client in range(4):
        own = ditto.runner.pool.get(client)
        personal = {n.replace("personal.", "model."): t for n, t in own.items() if n.startswith("personal.")}
        assert_identical(personal, dict(local.runner.pool.get(client)))
    assert [row["Local-T"] for row in ditto.diary.rows] == [row["Local-T"] for row in local.diary.rows]


def test_personal_fit_is_held_near_what_came_in(mlp, data, set_up_federation, sgd, train_by_hand):
    """Two rounds of client 0, by a loop of the test's own: F(v) + λ/2 ‖v − w^t‖², w^t the received model."""
    loop = set_up_federation(lambda: Ditto(mlp(), weight=0.7), data=data, rounds=2)
    v = copy.deepcopy(loop.runner.modules[0].method.personal)
    loop.run()
    for round in (1, 2):
        w = copy.deepcopy(v)
        w.load_state_dict({n.removeprefix("model."): t for n, t in loop.diary.received[round, 0].weights.items()})

        def loss(x, y, w=w):
            distance = sum(((p - q.detach()) ** 2).sum() for p, q in zip(v.parameters(), w.parameters(), strict=True))
            return nn.functional.cross_entropy(v(x), y) + 0.35 * distance

        train_by_hand(v, data.clients[0], sgd(), round, loss=loss)
    kept = loop.runner.pool.get(0)
    for name, tensor in v.state_dict().items():
        torch.testing.assert_close(kept[f"personal.{name}"], tensor, rtol=1e-5, atol=1e-6)


def test_figures_say_which_model_they_are_of(mlp, run_federation):
    loop = run_federation(lambda: Ditto(mlp()), rounds=2)
    row, before = loop.diary.rows[1], loop.diary.rows[0]
    assert row["Local-T"] == row["Local-T/personal"]
    assert row["Global-T"] == row["Global-T/personal"]
    assert row["Global-T_received/global"] == pytest.approx(before["Server-T"])
    assert loop.examiner.has_global_model


def test_personal_model_stays_and_the_global_one_travels(mlp, run_federation):
    loop = run_federation(lambda: Ditto(mlp()), rounds=1)
    names = set(loop.diary.sent[1, 0].weights)
    assert names == {name for name in loop.runner.modules[0].entries if name.startswith("model.")}
    assert set(loop.runner.pool.get(0)) == {name for name in loop.runner.modules[0].entries if name not in names}


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: Ditto(mlp()), participation=0.5, newcomers=Newcomers(1, 1))


def test_ranges_are_checked(mlp):
    with pytest.raises(ConfigError, match=r"method\.weight: must be >= 0"):
        Ditto(mlp(), weight=-1.0)
    with pytest.raises(ConfigError, match=r"method\.personal_epochs: must be >= 0 or null"):
        Ditto(mlp(), personal_epochs=-1)


def test_what_is_averaged_while_training_is_the_global_models(mlp, run_federation):
    """The personal model's predictions stay with the client, however long it trains."""

    def sent(method, **options):
        terms = [LabelDistillation(1.0, averages="running")]
        loop = run_federation(lambda: method(mlp(), extra_terms=terms, **options), 1)
        return loop.diary.sent[1, 0].artifacts["label_distillation"]

    plain = sent(FedAvg)
    assert torch.equal(sent(Ditto, personal_epochs=0).mean, plain.mean)
    for epochs in (0, 1, 3):
        assert torch.equal(sent(Ditto, personal_epochs=epochs).count, plain.count)
