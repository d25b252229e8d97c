"""What a server makes of the mean, against numbers computed by hand."""

import sys

import pytest
import torch

from fl_lightning.core.message import Message
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import (
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerOptimizer,
    ServerYogi,
)
from fl_lightning.errors import ConfigError
from fl_lightning.federation.launch import launch
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.federation.team import Team
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.fesem import FeSEM


class Own(ServerOptimizer):
    """A direction as a function of Δ."""

    def __init__(self, way):
        super().__init__(lr=1.0)
        self.way = way

    def direction(self, name, delta):
        return self.way(delta)


KINDS = [ServerMomentum, ServerAdagrad, ServerAdam, ServerYogi]


def two_rounds(optimizer, first=1.0, second=2.0, start=0.0):
    """The weight after two rounds whose means are `first` and `second`."""
    weight, seen = {"w": torch.tensor([start])}, []
    for mean in (first, second):
        weight = optimizer.step(weight, {"w": torch.tensor([mean])})
        seen.append(float(weight["w"]))
    return seen


def test_momentum_matches_hand_computed_values():
    """v = 1, x = 0.5; Δ = 1.5, v = 0.9 + 1.5 = 2.4, x = 0.5 + 1.2."""
    assert two_rounds(ServerMomentum(lr=0.5, momentum=0.9)) == pytest.approx([0.5, 1.7])


def test_nesterov_momentum_matches_hand_computed_values():
    """v = 1, 0.9 + 1 = 1.9, x = 0.95; Δ = 1.05, v = 1.95, 1.755 + 1.05 = 2.805, x = 0.95 + 1.4025."""
    assert two_rounds(ServerMomentum(lr=0.5, momentum=0.9, nesterov=True)) == pytest.approx([0.95, 2.3525])


def test_a_direction_may_be_made_in_place():
    """Δ was read again after it, so that a step of nothing was one of all of Δ."""
    assert two_rounds(Own(lambda delta: delta.mul_(0)), start=0.5) == [0.5, 0.5]
    assert two_rounds(Own(lambda delta: delta.mul_(2))) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (lambda delta: None, "NoneType"),
        (lambda delta: 0.5, "float"),
        (lambda delta: delta.mean(), r"\[\]"),
        (lambda delta: delta.expand(2, 1), r"\[2, 1\]"),
    ],
)
def test_a_direction_of_another_shape_is_refused(way, said):
    with pytest.raises(
        TypeError, match=rf"^Own\.direction\(\) must give a tensor \[1\] for w, as .*, and gives {said}$"
    ):
        two_rounds(Own(way))


def test_adagrad_matches_hand_computed_values():
    """τ = 1: v = 1 + 1 = 2, x = 1/(√2 + 1) = 0.414214; Δ = 1.585786, v = 2 + 2.514719, x + 1.585786/(√4.514719 + 1)."""
    assert two_rounds(ServerAdagrad(lr=1.0, tau=1.0)) == pytest.approx(
        [0.414214, 0.414214 + 1.585786 / 3.124787], rel=1e-5
    )


def test_adam_matches_hand_computed_values():
    """β₁ = 0.5, β₂ = 0.75, τ = 1: m = 0.5, v = 0.75 + 0.25 = 1, x = 0.5/2 = 0.25.

    Δ = 1.75: m = 0.25 + 0.875 = 1.125, v = 0.75 + 0.25 · 3.0625 = 1.515625, x = 0.25 + 1.125/(1.231107 + 1).
    """
    adam = ServerAdam(lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
    assert two_rounds(adam) == pytest.approx([0.25, 0.25 + 1.125 / 2.231107], rel=1e-6)


def test_yogi_matches_hand_computed_values():
    """β₁ = 0.5, β₂ = 0.75, τ = 0.5: v starts at 0.25, Δ² = 1 is more: v = 0.25 + 0.25 = 0.5, m = 0.5.

    x = 0.5/(0.707107 + 0.5) = 0.414214. Δ = 0.085786, Δ² = 0.007359 is less: v = 0.5 − 0.25 · 0.007359 = 0.498160,
    m = 0.25 + 0.042893, x = 0.414214 + 0.292893/(0.705805 + 0.5).
    """
    yogi = ServerYogi(lr=1.0, beta1=0.5, beta2=0.75, tau=0.5)
    assert two_rounds(yogi, second=0.5) == pytest.approx([0.414214, 0.414214 + 0.292893 / 1.205805], rel=1e-5)


def test_learning_rate_is_the_length_of_the_step():
    assert two_rounds(ServerAdam(lr=0.5, beta1=0.5, beta2=0.75, tau=1.0))[0] == pytest.approx(0.125)


@pytest.mark.parametrize("optimizer", [ServerMomentum(lr=0.05, momentum=0.0), ServerAdam(lr=0.001)])
def test_small_steps_add_up_in_half_precision(optimizer):
    """Every one was rounded away: the weight stood still for ever, though every round's mean is above it."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer.start(["w"])
        weight = torch.tensor([0.5], dtype=dtype)
        for _ in range(100):
            weight = optimizer.step({"w": weight}, {"w": weight + 0.015625})["w"]
        assert weight.dtype == dtype
        ends.append(weight.item())
    assert ends[0] > 0.55
    assert ends[1] == pytest.approx(ends[0], abs=2**-8)  # half of what bfloat16 can hold apart there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_step_of_the_whole_difference_is_the_mean_bit_for_bit(dtype):
    old, mean = torch.tensor([1e10, 0.1, -3.0, 0.0], dtype=dtype), torch.tensor([1e-10, 0.3, 7.1, -2.0], dtype=dtype)
    stepped = ServerMomentum(momentum=0.0).step({"w": old}, {"w": mean})["w"]
    assert stepped.dtype == dtype
    assert torch.equal(stepped, mean)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_parameter_becomes_the_mean(kind):
    optimizer = kind(lr=0.1)
    optimizer.start(["w"])
    old = {"w": torch.zeros(2), "running_mean": torch.zeros(2), "steps": torch.tensor(3)}
    mean = {"w": torch.ones(2), "running_mean": torch.ones(2), "steps": torch.tensor(5)}
    new = optimizer.step(old, mean)
    assert new["running_mean"].tolist() == [1.0, 1.0]
    assert new["steps"] == 5
    assert new["w"].tolist() != [1.0, 1.0]
    assert list(new) == list(mean)


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back(kind, assert_identical):
    straight, first, second = kind(), kind(), kind()
    old, means = {"w": torch.zeros(5)}, [{"w": torch.randn(5)} for _ in range(3)]
    for optimizer in (straight, first):
        optimizer.step(old, means[0])
    second.load_state_dict(first.state_dict())
    for mean in means[1:]:
        assert_identical(second.step(old, mean), straight.step(old, mean))


def test_federation_begins_without_the_state_of_the_one_before(run_federation, outcome, assert_identical, mlp):
    optimizer = ServerAdam()
    runs = [outcome(run_federation(lambda: FedAvg(mlp()), server_optimizer=optimizer)) for _ in range(2)]
    assert_identical(*runs)


# --- in a federation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg, FedRep, FedProx])
def test_momentum_of_zero_at_a_learning_rate_of_one_changes_no_bit(
    run_federation, outcome, assert_identical, conv_net, method
):
    plain = outcome(run_federation(lambda: method(conv_net())))
    same = outcome(run_federation(lambda: method(conv_net()), server_optimizer=ServerMomentum(momentum=0.0)))
    assert same["exchange"].pop("server_optimizer")
    assert_identical(same, plain)


@pytest.mark.parametrize("method", [FedAvg, FedRep, FedProx])
def test_server_steps_from_its_weights_and_averages_statistics(run_federation, conv_net, assert_identical, method):
    """The second round of a run, done again from the messages that were sent."""
    loop = run_federation(lambda: method(conv_net()), rounds=2, server_optimizer=ServerAdam(lr=0.01))
    again = ServerAdam(lr=0.01)
    again.start(name for name, _ in loop.runner.modules[0].method.named_parameters())
    weights = loop.diary.received[1, 0].weights
    for round in (1, 2):
        mean = Server(Message()).aggregate({c: loop.diary.sent[round, c] for c in range(4)}).weights
        weights = again.step(weights, mean)
    there = loop.exchange.global_message().weights
    assert_identical(there, weights)
    statistics = [name for name in there if "running" in name]
    assert statistics
    assert all(torch.equal(there[name], mean[name]) for name in statistics)
    before_batch_norm = "model.body.stages.0.0.bias"  # has no gradient but rounding errors
    plain = [name for name in there if name in again.trained and torch.equal(there[name], mean[name])]
    assert set(plain) <= {before_batch_norm}


@pytest.mark.parametrize("kind", KINDS)
def test_run_resumes_bit_for_bit(assert_resumes, conv_net, kind):
    loop = assert_resumes(lambda: FedRep(conv_net()), server_optimizer=kind(), participation=0.5)
    assert loop.exchange.state_dict()["server_optimizer"]


@pytest.mark.skipif(sys.platform != "linux", reason="functions are handed to forked processes")
def test_result_does_not_depend_on_the_number_of_workers(run_federation, assert_identical, conv_net, tmp_path):
    def run(file):
        for kind in KINDS:
            loop = run_federation(lambda: FedAvg(conv_net()), server_optimizer=kind())
            if loop.workers.is_main:
                rows = [{**row, **dict.fromkeys(COLUMNS)} for row in loop.diary.rows]
                torch.save(
                    {"rows": dict(enumerate(rows)), "state": loop.state_dict()["exchange"]}, f"{file}{kind.__name__}"
                )
        return 0

    run(tmp_path / "one")
    assert launch(run, Team(2, threads=1), tmp_path / "two") == 0
    for kind in KINDS:
        assert_identical(*(torch.load(tmp_path / f"{size}{kind.__name__}") for size in ("one", "two")))


@pytest.mark.parametrize("method", [FedNova, FeSEM, FedProto])
def test_server_that_does_more_than_average_is_refused(set_up_federation, conv_net, method):
    rule = (
        f"federation.server_optimizer: needs a server that only averages weights, which {method.__name__}'s is not: "
        "must be null, got 'ServerAdam'"
    )
    with pytest.raises(ConfigError) as refused:
        set_up_federation(lambda: method(conv_net()), server_optimizer=ServerAdam())
    assert str(refused.value) == rule


def test_exchange_without_a_server_is_refused(set_up_federation, conv_net):
    rule = (
        "federation.server_optimizer: needs a server, which a federation on a Ring has not: must be null, "
        "got 'ServerYogi'"
    )
    with pytest.raises(ConfigError) as refused:
        set_up_federation(lambda: FedAvg(conv_net()), exchange=Ring(), server_optimizer=ServerYogi())
    assert str(refused.value) == rule


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: ServerAdam(lr=0.0), "lr: must be > 0"),
        (lambda: ServerMomentum(momentum=1.0), "momentum: must be in"),
        (lambda: ServerAdam(beta1=-0.1), "beta1: must be in"),
        (lambda: ServerYogi(beta2=1.0), "beta2: must be in"),
        (lambda: ServerAdagrad(tau=0.0), "tau: must be > 0"),
    ],
)
def test_bad_argument_is_refused(make, rule):
    with pytest.raises(ConfigError, match=f"^federation.server_optimizer.{rule}"):
        make()
