"""FedLC: FedAvg of calibrated logits."""

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedlc import FedLC


def test_two_rounds_are_those_of_the_formula(mlp, data, set_up_federation, sgd, train_by_hand):
    loop = set_up_federation(lambda: FedLC(mlp(), tau=0.5), data=data, rounds=2)
    loop.run()
    model, counts = mlp(), data.clients[1].class_counts
    held = counts > 0
    for round in (1, 2):
        received = loop.diary.received[round, 1].weights
        model.load_state_dict({n.removeprefix("model."): t for n, t in received.items()})
        places = held.long().cumsum(0) - 1

        def loss(x, y, places=places):
            return F.cross_entropy(model(x)[:, held] - 0.5 * counts[held].float() ** -0.25, places[y])

        train_by_hand(model, data.clients[1], sgd(), round, loss=loss)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(loop.diary.sent[round, 1].weights[f"model.{name}"], tensor, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_calibrated_one_alone(mlp, run_federation):
    row = run_federation(lambda: FedLC(mlp(), form="paper"), 1).diary.rows[0]
    assert row["loss"] == row["loss/calibrated"]
    assert "loss/cross_entropy" not in row


def test_what_cannot_be_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"method\.tau: must be >= 0"):
        FedLC(mlp(), tau=-1.0)
    with pytest.raises(ConfigError, match=r"method\.form: must be"):
        FedLC(mlp(), form="other")
