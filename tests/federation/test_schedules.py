"""Random schedules of joins, failures, stops, kills and numbers of workers; many more: `benchmarks/schedules.py`."""

from federation.simulator import Schedule, check

COUNT = 120


def test_schedules_hold_what_they_must():
    wrong = {seed: said for seed in range(COUNT) if (said := check(seed))}
    assert wrong == {}


def test_schedules_are_of_every_kind():
    drawn = [Schedule(seed) for seed in range(COUNT)]
    for kind in ("method", "exchange", "wire", "optimizer"):
        assert len({getattr(schedule, kind) for schedule in drawn}) >= 3
    assert {how for schedule in drawn for _, _, how, _ in schedule.parts} == {"stop", "kill", "end"}
    assert {workers for schedule in drawn for workers, *_ in schedule.parts} == {1, 2, 3}
