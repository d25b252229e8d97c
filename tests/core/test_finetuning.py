"""Fine-tuning before an evaluation: what it trains, and that nothing else notices."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.core.finetuning import FineTune
from fl_lightning.core.private_steps import RecordPrivacy
from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedphp import FedPHP
from fl_lightning.methods.fedproto import FedProto

LR, EPOCHS = 0.3, 4


def tuned(epochs=EPOCHS, **options):
    return EvaluationPolicy(fine_tune=FineTune(epochs, **options))


def by_hand(model, data, lr=LR):
    """The loss on a client's test part after epochs of one mini-batch each."""
    model = copy.deepcopy(model)
    ((x, y),) = data.batches("train")
    for _ in range(EPOCHS):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= lr * g
    x, y = data.store.gather(data.test)
    return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("lr", [None, 0.05])
def test_fedavgs_global_model_is_trained_on_each_clients_samples(lr, mlp, make_data, run_federation, sgd):
    data = make_data(batch_size=64)
    loop = run_federation(lambda: FedAvg(mlp()), 2, data=data, optimizer=sgd(LR), lr_decay=0.5, evaluate=tuned(lr=lr))
    model = mlp()
    for client in range(4):
        weights = loop.diary.received[2, client].weights
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
        scores = loop.diary.reports[2, client].scores
        expected = by_hand(model, data.clients[client], LR if lr is None else lr)
        assert scores["eval_loss/Local-T_received/fine_tuned"] == pytest.approx(expected, rel=1e-5)
    assert "Local-T/" not in loop.diary.rows[-1]
    assert loop.final["Local-T_received/fine_tuned"] >= 0


def test_nothing_else_changes(mlp, run_federation, assert_identical):
    with_it, without = (
        run_federation(lambda: Ditto(mlp()), 2, participation=0.5, evaluate=policy)
        for policy in (tuned(), EvaluationPolicy())
    )
    assert_identical(with_it.exchange.state_dict(), without.exchange.state_dict())
    for row, plain in zip(with_it.diary.rows, without.diary.rows, strict=True):
        names = [name for name in plain if not name.startswith("seconds")]
        assert {name: row[name] for name in names} == pytest.approx({n: plain[n] for n in names}, nan_ok=True)
        assert row["Local-T/fine_tuned"] != row["Local-T/global"]


def test_it_is_fedbabus_own_where_that_does_not_tune(mlp, run_federation):
    outer = run_federation(lambda: FedBABU(mlp(), finetune_epochs=0), 2, evaluate=tuned(2))
    inner = run_federation(lambda: FedBABU(mlp(), finetune_epochs=2), 2)
    for row, own in zip(outer.diary.rows, inner.diary.rows, strict=True):
        assert row["eval_loss/Local-T/fine_tuned"] == own["eval_loss/Local-T"]


def test_classes_that_cannot_be_predicted_are_left_out(mlp, run_federation):
    """FedProto knows the prototypes of those alone who took part."""
    loop = run_federation(lambda: FedProto(mlp()), 2, participation=0.25, evaluate=tuned())
    assert all(0 <= row["Local-T_received/fine_tuned"] <= 1 for row in loop.diary.rows)


def test_it_resumes(conv_net, assert_resumes):
    assert_resumes(lambda: FedAvg(conv_net()), evaluate=tuned(1), participation=0.5)


def test_what_cannot_be_is_refused(mlp, set_up_federation):
    for options, rule in (({"epochs": 0}, r"epochs: must be >= 1"), ({"lr": 0.0}, r"lr: must be > 0 or null")):
        with pytest.raises(ConfigError, match=rf"^federation\.evaluate\.fine_tune\.{rule}"):
            FineTune(**options)
    with pytest.raises(ConfigError, match=r"^federation\.evaluate\.fine_tune: must be null under"):
        set_up_federation(lambda: FedAvg(mlp()), evaluate=tuned(), record_privacy=RecordPrivacy())


def test_who_predicts_by_what_never_learns_is_told_before_the_first_round(mlp, set_up_federation):
    policy = EvaluationPolicy(fine_tune=FineTune())
    with pytest.raises(ConfigError, match=r"^federation\.evaluate\.fine_tune: FedPHP's predictions have no gradient"):
        set_up_federation(lambda: FedPHP(mlp()), evaluate=policy)
