"""The tests that the specification of FedUV promises (BASELINES-A.md, section 12)."""

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.errors import ConfigError
from fl_lightning.losses.uniformity import prediction_variance_loss, uniformity_loss
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feduv import FedUV


def test_feduv_without_terms_is_fedavg_bit_for_bit(conv_net, run_federation, outcome, assert_identical):
    plain = run_federation(lambda: FedAvg(conv_net()), participation=0.5)
    client = lambda: FedUV(conv_net(), variance_weight=0, uniformity_weight=0)  # noqa: E731
    assert_identical(outcome(run_federation(client, participation=0.5)), outcome(plain))


def test_feduv_is_training_on_the_sum_of_its_terms(mlp, sgd, make_data, set_up_federation, train_by_hand):
    data = make_data(counts=((12, 8, 5, 4),))
    client = lambda: FedUV(mlp(), variance_weight=1.5, uniformity_weight=0.7)  # noqa: E731
    loop = set_up_federation(client, rounds=2, data=data)
    model = mlp()
    model.load_state_dict(loop.runner.modules[0].method.model.state_dict())
    loop.run()

    def loss(x, y):
        z = model.embed(x)
        logits = model.head(z)
        return F.cross_entropy(logits, y) + 1.5 * prediction_variance_loss(logits) + 0.7 * uniformity_loss(z)

    for round in (1, 2):
        train_by_hand(model, data.clients[0], sgd(), round, loss=loss)
    for name, tensor in loop.exchange.global_message().weights.items():
        torch.testing.assert_close(tensor, model.state_dict()[name.removeprefix("model.")], rtol=1e-4, atol=1e-6)


def test_feduv_variance_counts_all_classes_of_the_federation(mlp, make_data, run_federation):
    """A client of one class has γ = 1/√4 to be short of, not 1."""
    data = make_data(counts=((12, 0, 0, 0),), batch_size=100)
    loop = run_federation(lambda: FedUV(mlp()), rounds=1, data=data, local_epochs=30)
    assert 0.3 < loop.diary.rows[0]["loss/prediction_variance"] <= 0.5


def test_feduv_sends_the_model_and_nothing_else(conv_net, run_federation):
    loop = run_federation(lambda: FedUV(conv_net()), rounds=2)
    size = sum(tensor.numel() for tensor in conv_net().state_dict().values())
    for row in loop.diary.rows:
        assert row["uplink_params"] == row["downlink_params"] == 4 * size
    assert [loop.runner.pool.get(client) for client in range(4)] == [None] * 4


def test_feduv_survives_batches_of_one(mlp, make_data, run_federation):
    """Both statistics are undefined there: the terms are 0, and the client trains on."""
    loop = run_federation(lambda: FedUV(mlp()), rounds=2, data=make_data(batch_size=1))
    assert all(tensor.isfinite().all() for tensor in loop.exchange.global_message().weights.values())
    assert loop.diary.rows[0]["loss/uniformity"] == loop.diary.rows[0]["loss/prediction_variance"] == 0


def test_feduv_trains_in_mixed_precision(conv_net, run_federation):
    loop = run_federation(lambda: FedUV(conv_net()), trainer={"precision": "bf16-mixed"}, local_epochs=2)
    assert loop.diary.rows[-1]["loss"] < loop.diary.rows[0]["loss"]


def test_feduv_hands_the_bandwidth_switch_on(mlp):
    assert [FedUV(mlp(), detach_bandwidth=on).terms[2].detach_bandwidth for on in (False, True)] == [False, True]


@pytest.mark.parametrize("option", ["variance_weight", "uniformity_weight"])
def test_feduv_rejects_negative_weights(mlp, option):
    with pytest.raises(ConfigError, match=rf"method\.{option}: must be >= 0, got -1"):
        FedUV(mlp(), **{option: -1.0})
