"""Random schedules of all that may befall a federation; many more: `benchmarks/schedules.py`."""

import pytest
from federation.schedule import AGGREGATORS, ATTACKS, CHECKPOINTS, DAMAGES, ENDS, FILTERS, METHODS, OPTIMIZERS
from federation.simulator import Schedule, play
from federation.team import Killed, Team

from fl_lightning.federation import graphs

COUNT, PARTS = 240, 4  # parts for several processes of pytest
SICK = {"raises", "nan", "huge", "loss"}


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules_hold_what_they_must(part):
    wrong = {seed: said for seed in range(part, COUNT, PARTS) if (said := play(Schedule(seed)))}
    assert wrong == {}


FOUND = [10167]  # states of a killed first checkpoint were believed to be named by a later one
"""Seeds that once failed, of `benchmarks/schedules.py`."""


@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_failed_hold_now(seed):
    assert play(Schedule(seed)) == []


def test_schedules_are_of_every_kind():
    drawn = [Schedule(seed) for seed in range(COUNT)]

    def values(name):
        return {getattr(schedule, name) for schedule in drawn}

    assert values("method") == set(METHODS)
    assert values("exchange") == set(graphs.EXCHANGES)  # all that there are
    ways = {(s.exchange, *(f"{key}: {value}" for key, value in s.exchange_options.items())) for s in drawn}
    for exchange, option in (
        ("Ring", "schedule: sequential"),
        ("Ring", "directions: both"),
        ("DirectedGraph", "mixing: uniform"),
        ("DirectedGraph", "redraw: False"),
        ("RandomPeers", "redraw: False"),
        ("RandomPeers", "degree: 3"),
    ):
        assert any(way[0] == exchange and option in way for way in ways), (exchange, option)
    assert any("edges" in schedule.exchange_options for schedule in drawn)
    assert values("wire") == {"", *FILTERS}
    assert values("optimizer") == {"", *OPTIMIZERS}
    assert values("aggregator") == {"", *AGGREGATORS}
    assert {schedule.attack.get("kind") for schedule in drawn} == {None, *ATTACKS}
    assert {key for schedule in drawn for key in schedule.failures} == {"probability", "schedule", "clients"}
    assert {kind for schedule in drawn for kind in schedule.sick.values()} == SICK
    assert {s.checkpoint for s in drawn} == {(*own, keep) for own in CHECKPOINTS for keep in (1, 2)}
    for key, allowed in (("sampling", {"fixed", "poisson"}), ("pool", {"memory", "disk"}), ("init", {"common", "own"})):
        assert {schedule.options[key] for schedule in drawn} == allowed
    assert any(s.newcomers for s in drawn)
    assert any(s.options["sampling"] == "poisson" and s.participation < 1 for s in drawn)


def test_runs_are_disturbed_in_every_way():
    parts = [part for seed in range(COUNT) for part in Schedule(seed).parts]
    assert {part.how for part in parts} == {*ENDS, "end"}
    assert {part.workers for part in parts} == {1, 2, 3}
    assert {part.damage for part in parts} == set(DAMAGES)
    assert {part.older for part in parts} == {True, False}


def test_workers_that_all_wait_are_found():
    with pytest.raises(RuntimeError, match="wait for each other"):
        Team(2).run(lambda rank: Team.present.team.take(1 - rank, rank))


def test_a_killed_worker_ends_the_team():
    def work(rank):
        if rank == 1:
            raise Killed
        Team.present.team.take(1, 0)

    with pytest.raises(Killed):
        Team(2).run(work)
