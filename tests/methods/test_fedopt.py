"""FedAvgM, FedAdam, FedYogi and FedAdagrad: steps of numbers by hand, and what they are beside FedAvg."""

import math

import pytest
import torch

from fl_lightning.core.server_optimizer import ServerAdagrad, ServerAdam, ServerMomentum, ServerYogi
from fl_lightning.errors import ConfigError
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.methods.fedadagrad import FedAdagrad
from fl_lightning.methods.fedadam import FedAdam
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedavgm import FedAvgM
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedyogi import FedYogi

ADAPTIVE = {"lr": 0.5, "beta1": 0.8, "tau": 0.1}
CASES = {
    FedAvgM: (ServerMomentum, {"lr": 0.7, "momentum": 0.6}),
    FedAdam: (ServerAdam, {**ADAPTIVE, "beta2": 0.9}),
    FedYogi: (ServerYogi, {**ADAPTIVE, "beta2": 0.9}),
    FedAdagrad: (ServerAdagrad, ADAPTIVE),
}


def second_moment(kind, v, square):
    """v of Algorithm 2, by the method."""
    if kind is FedAdagrad:
        return v + square
    return 0.9 * v + 0.1 * square if kind is FedAdam else v - 0.1 * square * math.copysign(1, v - square)


@pytest.mark.parametrize("kind", CASES)
def test_two_rounds_of_one_number_are_those_of_the_paper(kind, on_a_parabola, run_federation, number):
    """Clients go towards 1 by a share s of the way that FedAvg's first round tells: Δ = s (1 − w)."""
    share = number(run_federation(on_a_parabola(FedAvg, start=0, optimum=1), rounds=1))
    w, m, v = 0.0, 0.0, 0.1**2
    for _ in (1, 2):
        delta = share * (1 - w)
        if kind is FedAvgM:
            m = 0.6 * m + delta
            w += 0.7 * m
        else:
            m, v = 0.8 * m + 0.2 * delta, second_moment(kind, v, delta**2)
            w += 0.5 * m / (math.sqrt(v) + 0.1)
    loop = run_federation(on_a_parabola(kind, start=0, optimum=1, **CASES[kind][1]), rounds=2)
    assert number(loop) == pytest.approx(w, rel=1e-5)


def test_it_is_fedavg_under_that_server_optimizer(mlp, run_federation, assert_identical):
    optimizer, options = CASES[FedYogi]
    one = run_federation(lambda: FedYogi(mlp(), **options), 2)
    other = run_federation(lambda: FedAvg(mlp()), 2, server_optimizer=optimizer(**options))
    assert_identical(one.exchange.global_message().weights, other.exchange.global_message().weights)


@pytest.mark.parametrize("kind", [FedAvgM, FedAdam, FedDyn, FedNova, FedKD])
def test_what_is_lost_on_the_way_down_is_no_clients_update(kind, mlp, run_federation, sgd):
    """Rounding was in every Δ: FedAdam, whose clients learnt nothing, went 0.04 away in three rounds."""
    wire = [Quantize(8, ways="down")]
    loop = run_federation(lambda: kind(mlp()), rounds=3, wire=wire, optimizer=sgd(0.0))
    sent, server = loop.diary.sent[1, 0].weights, loop.exchange.global_message().weights
    for name, tensor in sent.items():
        torch.testing.assert_close(server[name], tensor, rtol=0, atol=1e-6)
    before = loop.diary.received[1, 0].weights  # of the server, as nothing is lost yet
    assert not torch.allclose(before["model.head.weight"], sent["model.head.weight"], rtol=0, atol=1e-4)


def test_a_private_mean_is_added_to_what_was_sent(mlp, run_federation, sgd, assert_identical):
    pytest.importorskip("opacus")
    wire = [ClipAndNoise(1.0, 0.0), Quantize(8, ways="down")]
    loop = run_federation(lambda: FedAdam(mlp()), rounds=2, wire=wire, optimizer=sgd(0.0))
    assert_identical(loop.exchange.global_message().weights, loop.diary.received[1, 0].weights)


def test_it_resumes(mlp, assert_resumes):
    assert_resumes(lambda: FedAdam(mlp()), participation=0.5)


def test_what_cannot_be_is_refused(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"^method\.beta2: must be in \[0, 1\)"):
        FedAdam(mlp(), beta2=1.0)
    with pytest.raises(ConfigError, match=r"^method\.momentum: must be in \[0, 1\)"):
        FedAvgM(mlp(), momentum=1.0)
    with pytest.raises(
        ConfigError, match=r"federation\.server_optimizer: needs a server that only averages weights, wh"
    ):
        set_up_federation(lambda: FedAvgM(mlp()), server_optimizer=ServerMomentum())
    with pytest.raises(ConfigError, match="FedAvgM cannot do without its server"):
        set_up_federation(lambda: FedAvgM(mlp()), exchange=Ring())
