"""Clients that are out for rounds."""

import csv
import math

import pytest
import torch
from tiny_optimizers import adam

from fl_lightning.errors import ConfigError
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.recorder import Recorder
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg

pytestmark = pytest.mark.usefixtures("plain_convolutions")


@pytest.fixture
def set_up_federation(set_up_federation):
    """The usual one with Adam, under which DRDFL does not diverge."""
    return lambda method, **options: set_up_federation(method, optimizer=adam, **options)


@pytest.fixture
def run_federation(set_up_federation):
    """Set a federation up, run it, return the loop."""

    def run(method, **options):
        loop = set_up_federation(method, **options)
        loop.final = loop.run()
        return loop

    return run


def out(failures, rounds, clients=range(20), seed=0):
    return [failures.among(clients, seed, round) for round in rounds]


def test_failures_have_their_probability():
    count = sum(map(len, out(Failures(0.3), range(1, 501))))
    assert count / (500 * 20) == pytest.approx(0.3, abs=0.015)
    assert out(Failures(), range(1, 50)) == [set()] * 49


def test_same_seed_gives_the_same_failures_whoever_is_asked():
    failures = Failures(0.3)
    assert out(failures, range(1, 30)) == out(Failures(0.3), range(1, 30))
    assert out(failures, range(1, 30)) != out(failures, range(1, 30), seed=1)
    few = out(failures, range(1, 30), clients=[3, 7])
    assert few == [every & {3, 7} for every in out(failures, range(1, 30))]


def test_schedule_and_clients_add_up():
    failures = Failures(schedule={"3": [0, 4], "5-7": [2]}, clients=[9])
    assert out(failures, range(2, 9)) == [{9}, {0, 4, 9}, {9}, {2, 9}, {2, 9}, {2, 9}, {9}]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"probability": 1.0}, r"failures\.probability: must be in \[0, 1\), got 1\.0"),
        ({"probability": -0.1}, r"failures\.probability: must be in \[0, 1\), got -0\.1"),
        ({"schedule": {"0": [1]}}, r"failures\.schedule: keys must be a round .*, got '0'"),
        ({"schedule": {"5-3": [1]}}, r"failures\.schedule: keys must be a round .*, got '5-3'"),
        ({"schedule": {"soon": [1]}}, r"failures\.schedule: keys must be a round .*, got 'soon'"),
    ],
)
def test_bad_failures_are_refused(options, rule):
    with pytest.raises(ConfigError, match=rule):
        Failures(**options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"schedule": {"2": [4]}}, r"federation\.failures\.schedule\.2: must be clients from 0 to 3, got 4"),
        ({"clients": [-1]}, r"federation\.failures\.clients: must be clients from 0 to 3, got -1"),
        (
            {"clients": [3, 1, 0, 2, 2]},
            r"federation\.failures\.clients: must leave at least one of the 4 clients, got \[3, 1, 0, 2, 2\]",
        ),
        ({"schedule": {"4": [1]}}, r"failures\.schedule: keys must begin within federation\.rounds \(3\), got '4'"),
        ({"schedule": {"2": [1], "5-8": [1]}}, r"failures\.schedule: keys must begin within .* \(3\), got '5-8'"),
    ],
)
def test_clients_and_rounds_that_do_not_exist_are_refused(options, rule, mlp, set_up_federation):
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: FedAvg(mlp()), rounds=3, failures=Failures(**options))


def test_stretch_may_reach_beyond_the_last_round(mlp, run_federation):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=3, failures=Failures(schedule={"3-99": [1]}, clients=[0, 2]))
    assert [row["missing"] for row in loop.diary.rows] == [2, 2, 3]


def test_run_that_is_continued_may_end_before_its_schedule_begins(mlp, set_up_federation, tmp_path):
    """The schedule belongs to the run: its checkpoints would refuse another one."""
    options = {"failures": Failures(schedule={"5": [1]}), "folder": tmp_path}
    set_up_federation(lambda: FedAvg(mlp()), rounds=5, **options).advance()
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=2, **options)
    loop.load_state_dict(loop.checkpoints.load(loop.checkpoints.find("auto")))
    assert loop.run() is not None


def test_missing_clients_keep_their_state_and_their_scores(mlp, run_federation, assert_identical):
    failures = Failures(schedule={"2-3": [1]})
    loop = run_federation(lambda: DRDFL(mlp()), rounds=3, failures=failures)
    short = run_federation(lambda: DRDFL(mlp()), rounds=1)
    assert [row["participants"] for row in loop.diary.rows] == [4, 3, 3]
    assert [row["missing"] for row in loop.diary.rows] == [0, 1, 1]
    assert {client for round, client in loop.diary.sent if round > 1} == {0, 2, 3}
    assert_identical(loop.runner.pool.get(1), short.runner.pool.get(1))
    assert loop.scores["Local-T"][1] == short.scores["Local-T"][1]


def test_failures_come_on_top_of_partial_participation(mlp, run_federation):
    failures = Failures(0.5)
    loop = run_federation(lambda: FedAvg(mlp()), rounds=8, participation=0.5, failures=failures)
    plain = run_federation(lambda: FedAvg(mlp()), rounds=8, participation=0.5)
    for ours, theirs in zip(loop.diary.rows, plain.diary.rows, strict=True):
        assert ours["participants"] + ours["missing"] == theirs["participants"]
        assert theirs["missing"] == 0
    there = {key for key in plain.diary.sent if key[1] not in failures.among([key[1]], 0, key[0])}
    assert set(loop.diary.sent) == there
    assert len(there) < len(plain.diary.sent)


@pytest.mark.parametrize("exchange", [None, Ring(), Ring("sequential"), DirectedGraph(2), RandomPeers(2)])
def test_round_without_anybody_changes_nothing(exchange, mlp, run_federation, assert_identical):
    failures = Failures(schedule={"2": [0, 1, 2, 3]})
    loop = run_federation(lambda: FedAvg(mlp()), rounds=2, failures=failures, exchange=exchange)
    row = loop.diary.rows[1]
    assert (row["participants"], row["missing"], row["uplink_params"]) == (0, 4, 0)
    assert row["Local-T"] == loop.diary.rows[0]["Local-T"]
    assert all(tensor.isfinite().all() for c in range(4) for tensor in loop.exchange.inbox(c).weights.values())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (DRDFL, Ring),
        (FedAvg, lambda: Ring("sequential")),
        (FedAvg, lambda: DirectedGraph(3)),
        (FedAvg, lambda: RandomPeers(3)),
    ],
)
def test_twenty_clients_of_whom_three_in_ten_fail_complete(
    kind, make, mlp, make_data, set_up_federation, outcome, assert_identical, tmp_path
):
    """Nothing is lost: every message arrives where the log says, and a killed run resumes to the same end."""
    counts = tuple((4, 4, 0, 0) if client % 2 else (0, 0, 4, 4) for client in range(20))
    options = {"rounds": 4, "failures": Failures(0.3), "folder": tmp_path}

    def federation():
        return set_up_federation(lambda: kind(mlp()), exchange=make(), data=make_data(counts), **options)

    loop = federation()
    loop.final = loop.run()
    assert 0.1 < sum(row["missing"] for row in loop.diary.rows) / (4 * 20) < 0.5
    for round, hops in loop.diary.hops.items():
        there = {client for r, client in loop.diary.sent if r == round}
        before = {client for r, client in loop.diary.sent if r < round}
        for hop in hops:
            assert hop.receiver in there
            assert hop.sender in there | before
            assert math.isfinite(hop.share)
    for client in range(20):
        assert all(tensor.isfinite().all() for tensor in (loop.runner.pool.get(client) or {}).values())
    again = federation()
    again.load_state_dict(again.checkpoints.load(tmp_path / "checkpoints" / "round-0003.ckpt"))
    again.final = again.run()
    again.diary.rows = loop.diary.rows[:3] + again.diary.rows
    assert_identical(outcome(again), outcome(loop))


def test_files_say_who_was_missing_and_who_sent_to_whom(mlp, set_up_federation, tmp_path):
    recorder = Recorder(tmp_path, {})
    failures = Failures(schedule={"2": [2]})
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=2, failures=failures, exchange=Ring(), callbacks=[recorder])
    with recorder:
        loop.run()
    read = lambda name: list(csv.DictReader((tmp_path / name).read_text().splitlines()))  # noqa: E731
    assert [row["missing"] for row in read("metrics.csv")] == ["0", "1"]
    failed = {(row["round"], row["client"]) for row in read("clients.csv") if row["failed"] == "1"}
    assert failed == {("2", "2")}
    hops = [(row["round"], row["sender"], row["receiver"], row["share"]) for row in read("topology.csv")]
    assert hops == [
        *(("1", str((client - 1) % 4), str(client), "0.5") for client in range(4)),
        ("2", "3", "0", "0.5"),
        ("2", "0", "1", "0.5"),
        ("2", "1", "3", "0.5"),
    ]
    size = sum(tensor.numel() for tensor in loop.runner.modules[0].division.weights().values())
    assert {row["num_params"] for row in read("topology.csv")} == {str(size)}
    assert torch.tensor([int(row["uplink_params"]) for row in read("metrics.csv")]).tolist() == [4 * size, 3 * size]
