"""What a search says of its runs, and what it makes of their ends."""

import csv
import io
import math
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.report.plain import PlainConsole
from fl_lightning.table.progress import forecast
from fl_lightning.table.running import Job
from fl_lightning.tune import command, record
from fl_lightning.tune.command import Tuning
from fl_lightning.tune.space import read_search

SEARCH = """
name: s
monitor: Local-T.last
rows:
  Method: {space: {model.hidden: [8, 16, 32]}}
  Other: {space: {optimizer.lr: [0.1]}}
"""
FIT = [{"round": n + 1, "Local-T": 0.5, "seconds": 2.0} for n in range(10)]


def run(name, point, seed=0, rows=()):
    """A run of ten rounds, of two seconds each."""
    own = SimpleNamespace(name=f"{name}-{point}-{seed}", rounds=10, seed=seed, config={}, read={}, finished=False)
    own.row, own.column, own.title = SimpleNamespace(name=name), SimpleNamespace(name="validation"), name
    own.found = list(rows)
    own.rows, own.summary, own.keep_results = lambda: own.found, dict, lambda: None
    return own


class Crew:
    """Runs that have ended at once: as `ends` says of each point, with a line of why, or with rows."""

    ends: ClassVar = {}

    def __init__(self, cells, logs, jobs, fit, told):
        self.jobs, self.at_once, self._told = [Job(cell) for cell in cells], jobs, told

    def having(self, *states):
        return [job for job in self.jobs if job.state in states]

    waiting = property(lambda self: self.having("waiting"))
    running = property(lambda self: self.having("running"))
    elsewhere = property(lambda self: [])

    def run(self):
        self._told(self)
        for job in self.jobs:
            end = self.ends.get(next(iter(job.cell.point.values())), FIT)
            if isinstance(end, str):
                job.state, job.said, job.code = "failed", end, 2
            else:
                job.state, job.cell.finished, job.cell.found = "finished", True, end
        self._told(self)
        return int(any(job.state == "failed" for job in self.jobs))


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Search; returns the search, an exit code, the states of each method's trials, and the lines."""
    monkeypatch.setattr(command, "Crew", Crew)
    monkeypatch.setattr(command, "trained_nobody", lambda cell: False)

    def search(text=SEARCH, jobs=1, only=(), **ends):
        (tmp_path / "s.yaml").write_text(text)
        console = PlainConsole(file=io.StringIO(), width=300)
        tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, jobs, None, console, (), only)

        def cells_at(contender, point):
            cells = [run(contender.name, point, seed) for seed in tuning.search.seeds]
            for cell in cells:
                cell.point = point
            return cells

        tuning.cells_at = cells_at
        tuning.record._write_overlay = lambda *_: None
        monkeypatch.setattr(Crew, "ends", {int(key[1:]): end for key, end in ends.items()})
        code, found = tuning.run()
        states = {name: [trial.state for trial in trials] for name, trials in found.items()}
        return tuning, code, states, console.file.getvalue().splitlines()

    return search


BOTH = "method: FedX: takes wide models alone"
DAMAGED = "--resume: checkpoints/round-3.ckpt is damaged: its checksum does not fit its content"


def test_what_a_class_refuses_inside_a_run_is_a_trial_that_failed(searched):
    """It ended the whole search, though it was of one point, and on a terminal nothing said why."""
    tuning, code, states, _ = searched(_8=BOTH, _16=DAMAGED, _32=BOTH)
    assert (tuning.refusal, code, states["Method"]) == ("", 1, ["failed"] * 3)
    assert "| Method | 3 | – | every trial failed |" in (tuning.folder / "tune.md").read_text()
    tuning, code, states, lines = searched(_8=BOTH, _16=BOTH)
    assert (tuning.refusal, code) == ("", 1)
    assert (sorted(states["Method"]), states["Other"]) == (["complete", "failed", "failed"], ["complete"])
    assert sum(f"✗ Method, hidden 8, seed 0: failed ({BOTH})" in line for line in lines) == 1


def test_a_value_that_no_trial_varies_ends_a_search_unless_another_point_came_through(searched):
    missing = "data.dataset: there is no such folder"
    tuning, _, states, _ = searched(_8=missing, _16=missing, _32=missing)
    assert (tuning.refusal, states) == (missing, {"Method": ["failed"]})
    _, *later = searched()[0]._begun["Method"]
    late = {f"_{later[0].point['model.hidden']}": "data.partition: leaves a client without samples"}
    tuning, code, states, _ = searched(**late)
    assert (tuning.refusal, code, sorted(states["Method"])) == ("", 1, ["complete", "complete", "failed"])
    full = {f"_{later[0].point['model.hidden']}": "output: cannot write metrics.csv: No space left on device"}
    assert searched(**full)[0].refusal == next(iter(full.values()))


@pytest.mark.parametrize("line", ["data: cannot be read", "trainer: has no such plugin", "federation: is too small"])
def test_what_no_class_refuses_for_anothers_choice_ends_a_search_at_once(line, searched):
    """It went on through all of its trials, each of which ended like the first."""
    tuning, _, states, _ = searched(_8=line, _16=line, _32=line)
    assert (tuning.refusal, states) == (line, {"Method": ["failed"]})


def test_a_method_without_the_figure_is_named(searched):
    """ "No run has it", it was said where those of the method before it had."""
    rows = [{"round": 1, "seconds": 2.0}]
    tuning, _, states, _ = searched(SEARCH.replace("[0.1]", "[64]"), _64=rows)
    assert states == {"Method": ["complete"] * 3, "Other": ["failed"]}
    assert tuning.refusal.startswith("monitor: no run of Other has it, or its validation parts are empty")
    _, *later = searched()[0]._begun["Method"]
    assert searched(**{f"_{later[0].point['model.hidden']}": rows})[0].refusal == ""


@pytest.mark.parametrize("monitor", ["Local-T.best@eval_loss/Local-T", "summary.last.eval_loss/Local-T"])
def test_a_run_whose_loss_ran_away_ends_a_trial_and_not_the_search(monitor, searched):
    rows = [{"round": 1, "Local-T": 0.1, "eval_loss/Local-T": math.nan, "seconds": 2.0}]
    text = SEARCH.replace("Local-T.last", monitor).partition("  Other")[0]
    tuning, code, states, lines = searched(text, _8=rows, _16=rows, _32=rows)
    assert (tuning.refusal, states["Method"]) == ("", ["failed"] * 3)
    assert code == 1  # of a search that has found nothing
    assert f"Method, hidden 8: failed: {monitor}: no number" in lines


def left(lines):
    """How much each line says is left."""
    end = " left of the search"
    return [line.removesuffix(end).rpartition(", ")[2] for line in lines if line.endswith(end)]


def test_the_time_that_is_left_is_that_of_the_whole_search(searched):
    """After each trial it said that 0 s were left."""
    first = ["an unknown time"]
    assert left(searched(only=["Other"])[-1]) == [*first, "0 s"]
    text = SEARCH.replace("name: s", "name: t")
    assert left(searched(text)[-1]) == [*first, "1 min", "1 min", "40 s", "40 s", "20 s", "20 s", "0 s"]
    assert left(searched(text)[-1])[:2] == [*first, "0 s"]  # the others have ended at an earlier start
    assert left(searched(f"{text}pruning: true\n")[-1])[:2] == [*first, "at most 1 min"]
    assert "2 min" in left(searched(f"{text}seeds: [0, 1, 2]\n", jobs=2)[-1])  # nine runs more, 1.5 at a time


@pytest.mark.parametrize(
    ("jobs", "together", "pruned", "said"),
    [
        (1, 0, False, "1 min left"),
        (8, 0, False, "20 s left with 3 at once"),  # which was an eighth of all
        (2, 3, True, "at most 40 s left with 2 at once"),
        (2, 1, False, "1 min left"),
    ],
)
def test_a_forecast_goes_by_how_many_runs_there_are_at_once(jobs, together, pruned, said):
    console = PlainConsole(file=io.StringIO(), width=300)
    known = run("A", {}, rows=FIT)
    known.finished = True
    named = [("a", known), *((name, run("A", {"model.hidden": name}, seed=1)) for name in "bcd")]
    forecast(console, named, jobs, together, pruned)
    assert console.file.getvalue().splitlines()[-1] == f"4 runs: 3 to do, {said}"


def test_an_argument_that_takes_neither_of_its_ends_is_searched(searched):
    tuning = searched()[0]
    contender, plain = tuning.contenders[0], tuning.cells_at

    def cells_at(contender, point):
        if point["model.hidden"] != 16:
            raise ConfigError("model.hidden", "must be 16")
        return plain(contender, point)

    tuning.cells_at = cells_at
    assert [cell.point for cell in tuning._first_cells(contender)] == [{"model.hidden": 16}]


def test_two_searches_that_write_in_one_instant_keep_each_others_trials(searched, monkeypatch):
    """The second read, the first wrote, and then the second wrote over it."""
    first, second = (searched(only=[name])[0] for name in ("Method", "Other"))
    for name in ("trials.csv", "tune.md"):
        (first.folder / name).unlink()
    known, others = record.written_before, []

    def read(folder):
        found = known(folder)
        if not others:
            others.append(threading.Thread(target=second.record.write, args=(second._begun,)))
            others[0].start()
            others[0].join(0.2)
        return found

    monkeypatch.setattr(record, "written_before", read)
    first.record.write(first._begun)
    others[0].join()
    with (first.folder / "trials.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["Method"] * 3 + ["Other"]
