"""FedDW's mixing rule (FedDW.md, Table IV): L = L_other + μ L_reg, no last bias, soft labels exchanged beside."""

import pytest
import torch

from fl_lightning.losses.class_relation import ClassRelation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.feduv import FedUV
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.perfedavg import PerFedAvg

HOSTS = [FedProx, MOON, FedUV]


@pytest.mark.parametrize("method", [*HOSTS, FedNova, PerFedAvg])
def test_mix_exchanges_soft_labels_and_trains_on_both_losses(method, mlp, run_federation):
    loop = run_federation(lambda: method(mlp(), extra_terms=[ClassRelation(10.0)]), rounds=3)
    alone = set(run_federation(lambda: method(mlp()), rounds=1).diary.rows[0])
    assert set(loop.diary.rows[-1]) - alone == {"loss/class_relation"}
    assert 0 < loop.diary.rows[-1]["loss/class_relation"] <= 2 / 4
    assert "model.head.bias" not in loop.exchange.global_message().weights
    soft_labels = loop.exchange.global_message().artifacts["soft_labels"]
    torch.testing.assert_close(soft_labels.mean.sum(1), torch.ones(4))


@pytest.mark.parametrize("method", HOSTS)
def test_mix_of_weight_0_is_the_host(method, mlp, run_federation, outcome, assert_identical):
    alone = run_federation(lambda: method(mlp()), rounds=2)
    mixed = run_federation(lambda: method(mlp(), extra_terms=[ClassRelation(0.0)]), rounds=2)
    assert_identical(outcome(mixed), outcome(alone))


@pytest.mark.parametrize("method", HOSTS)
def test_mix_of_weight_0_may_be_the_host_without_its_last_bias(
    method, mlp, run_federation, outcome, assert_identical
):
    def without_bias():
        model = mlp()
        model.head.bias = None
        return model

    alone = run_federation(lambda: method(without_bias()), rounds=2)
    mixed = run_federation(lambda: method(mlp(), extra_terms=[ClassRelation(0.0, bias="always")]), rounds=2)
    assert_identical(outcome(mixed), outcome(alone))


@pytest.mark.parametrize("method", HOSTS)
def test_terms_of_the_hosts_can_be_added_to_others(method, mlp, run_federation, outcome, assert_identical):
    """The host is FedAvg with its terms, so FedAvg with the host's terms is the host, bit for bit."""
    own = run_federation(lambda: method(mlp()), rounds=3, participation=0.5)
    added = run_federation(
        lambda: FedAvg(mlp(), extra_terms=list(method(mlp()).terms)[1:]), rounds=3, participation=0.5
    )
    assert_identical(outcome(added), outcome(own))
