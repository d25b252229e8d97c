"""No second of a run is in no row, and every one is in the part that it belongs to."""

import pytest

from fl_lightning.federation import stopwatch
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.stopwatch import COLUMNS, Stopwatch
from fl_lightning.methods.fedavg import FedAvg


class Clock:
    """Time stands still but where a test lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    own = Clock()
    monkeypatch.setattr(stopwatch, "time", own)
    return own


def test_time_within_a_part_of_a_part_is_the_inner_ones_alone(clock):
    def fails():
        clock.now += 8
        raise KeyError

    watch = Stopwatch()
    watch.start()
    clock.now += 1
    with watch.part("fit"):
        clock.now += 2
        with watch.part("evaluate"):
            clock.now += 4
        with pytest.raises(KeyError), watch.part(None):
            fails()
        clock.now += 16
    assert watch.lap() == {
        "seconds": 31, "seconds_fit": 18, "seconds_evaluate": 4, "seconds_exchange": 0, "seconds_save": 0
    }  # fmt: skip
    clock.now += 32
    assert watch.lap() == dict.fromkeys(COLUMNS, 0) | {"seconds": 32}


class Slow(FederationCallback):
    """A callback, as a logger is one, that takes its time after every round."""

    def __init__(self, clock) -> None:
        self.clock = clock

    def on_round_end(self, loop, row):
        self.clock.now += 100


def test_row_holds_what_came_after_the_row_before_it(clock, monkeypatch, mlp, run_federation, tmp_path):
    class Lasts(FedAvg):
        def send(self, data):
            clock.now += 1
            return super().send(data)

        def predictors(self):
            if self.facts.round:
                clock.now += 0.125  # is asked for more than once in a test
            return super().predictors()

    def save(*arguments):
        clock.now += 10
        return saved(*arguments)

    saved = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    loop = run_federation(lambda: Lasts(mlp()), rounds=3, folder=tmp_path, callbacks=[Slow(clock)])
    rows = [[row[name] for name in COLUMNS] for row in loop.diary.rows]
    evaluate = [row[2] for row in rows]
    assert min(evaluate) > 0
    assert rows[0] == [4 + evaluate[0], 4, evaluate[0], 0, 0]
    assert rows[1] == [114 + evaluate[1], 4, evaluate[1], 0, 10]
    assert rows[2] == [114 + evaluate[2], 4, evaluate[2], 0, 10]
    assert loop.seconds == sum(row[0] for row in rows) + 110  # with the last checkpoint, which no row follows
