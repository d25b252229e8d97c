import csv
import dataclasses
import io
import json
import math
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.files import WriteError
from fl_lightning.parser import configured
from fl_lightning.table.overlays import spelled_out
from fl_lightning.tune.command import Tuning, _end_of
from fl_lightning.tune.space import read_search
from fl_lightning.tune.trials import Median, Optuna, Trial

SEARCH = """
search: optuna
trials: 12
monitor: Local-T.last
rows:
  Method: {space: {optimizer.init_args.lr: {low: 0.0, high: 1.0}, method.init_args.mode: [a, b]}}
"""


@pytest.fixture
def search(tmp_path):
    (tmp_path / "s.yaml").write_text(SEARCH)
    return read_search(tmp_path / "s.yaml")


def worth(point):
    return -((point["optimizer.init_args.lr"] - 0.3) ** 2) - (point["method.init_args.mode"] == "a")


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optuna_goes_on_where_it_was_killed(search, tmp_path):
    pytest.importorskip("optuna")

    def go_on(stop_after, folder="out", by_signal=False):
        with closing(Optuna(search, search.contenders[0], tmp_path / folder)) as sampler:
            asked = []
            while (answer := sampler.ask()) is not None:
                asked.append(answer[0])
                if len(asked) > stop_after:  # killed in the middle of a trial
                    return asked
                state = "failed" if answer[0]["optimizer.init_args.lr"] > 0.8 else "complete"
                if len(asked) == stop_after and by_signal:
                    sampler.tell(Trial(0, answer[0], state="stopped", handle=answer[1]))
                    return asked
                sampler.tell(Trial(0, answer[0], value=worth(answer[0]), state=state, handle=answer[1]))
            return asked

    straight = go_on(100, "straight")
    assert len(straight) == search.trials
    assert len({json.dumps(point) for point in straight}) == search.trials
    assert any(point["optimizer.init_args.lr"] > 0.8 for point in straight[:5])  # what failed counts
    assert max(map(worth, straight)) > -0.02
    for stop_after in (0, 5, 5, 8):  # the same one twice
        assert go_on(stop_after) == straight[: stop_after + 1]
    assert go_on(100) == straight
    assert go_on(4, "stopped", by_signal=True) == straight[:4]
    assert go_on(100, "stopped") == straight


def searched(search, folder, jobs=1, stops_at=None):
    """The points and states of a search whose runs are worked out at once; one of them may be stopped."""
    tuning = Tuning(search, folder, jobs, None, None)
    tuning.cells_at = lambda contender, point: []
    tuning._first_cells = lambda contender: [run("first", [])]
    tuning._signals = SimpleNamespace(first=None)
    tuning.record.write = lambda found: ""  # of trials without runs

    def run_batch(batch, median):
        for trial in batch:
            rate = trial.point["optimizer.init_args.lr"]
            trial.state, trial.value = ("failed", None) if rate > 0.8 else ("complete", -abs(rate - 0.3))
            if trial.number == stops_at:
                trial.state, trial.value = "stopped", None
        return 130 if any(trial.state == "stopped" for trial in batch) else 0

    tuning._run_batch = run_batch
    with closing(Optuna(search, search.contenders[0], folder)) as sampler:
        tuning._searched(search.contenders[0], sampler, found := {})
    return [(trial.point, trial.state) for trial in found["Method"]]


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_choice_that_fails_whenever_it_is_drawn_counts_whenever_it_was(tmp_path):
    """The first of two such trials was taken for one that was broken off, and another point was drawn for it."""
    pytest.importorskip("optuna")
    (tmp_path / "s.yaml").write_text(
        SEARCH.replace("{low: 0.0, high: 1.0}", "[0.9, 0.1, 0.2]").replace("[a, b]", "[a]")
    )
    search = read_search(tmp_path / "s.yaml")
    first = searched(search, tmp_path / "out")
    assert [state for _, state in first].count("failed") > 1
    made = (tmp_path / "out" / "Method.journal").read_text().count('"op_code":4')  # trials
    assert searched(search, tmp_path / "out") == first
    assert (tmp_path / "out" / "Method.journal").read_text().count('"op_code":4') == made == search.trials
    assert searched(search, tmp_path / "cut", stops_at=7)[:7] == first[:7]
    assert searched(search, tmp_path / "cut") == first


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trial_that_failed_and_then_ended_well_is_learned_from_in_its_place(search, tmp_path):
    """It stayed failed in the journal: the sampler never learned the value of a run that memory had ended once."""
    pytest.importorskip("optuna")

    def go_on(*states):
        with closing(Optuna(search, search.contenders[0], tmp_path)) as sampler:
            points = []
            for state in states:
                point, handle = sampler.ask()
                value = worth(point) if state == "complete" else None
                sampler.tell(Trial(len(points), point, value=value, state=state, handle=handle))
                points.append(point)
            learned = {trial.number: trial.value for trial in sampler._study.get_trials(deepcopy=False) if trial.values}
            return points, learned

    points, learned = go_on("complete", "failed", "failed", "complete")
    assert list(learned) == [0, 3]
    again, learned = go_on("complete", "complete", "failed", "complete")
    assert (again, list(learned), learned[4]) == (points, [0, 3, 4], worth(points[1]))
    again, learned = go_on("complete", "complete", "pruned", "complete", "complete")
    assert (again[:4], list(learned)) == (points, [0, 3, 4, 6])
    learned[7] = worth(points[2])  # which a search without pruning runs to its end
    assert [go_on(*["complete"] * 5) for _ in range(2)] == [(again, learned)] * 2


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stops_at", [0, 1, 4, 10])
def test_what_ended_behind_a_trial_that_was_stopped_is_told_in_its_place(stops_at, search, tmp_path):
    """It came before that one, and all that was drawn later was another search."""
    pytest.importorskip("optuna")
    search = dataclasses.replace(search, trials=20)
    straight = searched(search, tmp_path / "straight", jobs=2)
    assert len(straight) == 20
    searched(search, tmp_path / "cut", jobs=2, stops_at=stops_at)
    assert searched(search, tmp_path / "cut", jobs=2) == straight


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "new", "runs"),
    [
        ("monitor: Local-T.last", "monitor: eval_loss/Local-T.last", ()),  # and less of it is better
        ("high: 1.0", "high: 0.2", ()),
        ("[a, b]", "[a, c]", ()),  # of which Optuna wants to know nothing
        ("trials: 12", "trials: 12", ("a-run-of-another-base",)),
    ],
)
def test_a_search_that_asks_something_else_learns_nothing_from_the_journal(old, new, runs, tmp_path):
    pytest.importorskip("optuna")
    for text, names, is_new in ((SEARCH, (), True), (SEARCH.replace(old, new), runs, True), (SEARCH, (), False)):
        (tmp_path / "s.yaml").write_text(text)
        search = read_search(tmp_path / "s.yaml")
        with closing(Optuna(search, search.contenders[0], tmp_path, names)) as sampler:
            point, handle = sampler.ask()
            assert (handle is not None) == is_new
            assert point["optimizer.init_args.lr"] <= search.contenders[0].space["optimizer.init_args.lr"].high
            sampler.tell(Trial(0, point, value=1.0, state="complete", handle=handle))


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_processes_do_not_search_with_one_journal(search, tmp_path):
    """The second ended the first one's trials, whose values then nobody took."""
    pytest.importorskip("optuna")
    said = r"search: another process is running in .*Method\.journal"
    with closing(Optuna(search, search.contenders[0], tmp_path)), pytest.raises(ConfigError, match=said):
        Optuna(search, search.contenders[0], tmp_path)


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_search_whose_folder_was_copied_by_hard_links_leaves_the_original_alone(search, tmp_path):
    pytest.importorskip("optuna")

    def ask(folder):
        with closing(Optuna(search, search.contenders[0], tmp_path / folder)) as sampler:
            return sampler.ask()[0]

    first, original = ask("a"), (tmp_path / "a" / "Method.journal").read_bytes()
    (tmp_path / "b").mkdir()
    os.link(tmp_path / "a" / "Method.journal", tmp_path / "b" / "Method.journal")
    assert ask("b") == first
    assert (tmp_path / "a" / "Method.journal").read_bytes() == original


@pytest.mark.parametrize("cut", [1, 20])
def test_a_journal_whose_last_line_is_cut_is_gone_on_with(cut, search, tmp_path):
    """What came next stood behind the half line, and the journal was refused from then on."""
    pytest.importorskip("optuna")
    journal = tmp_path / "Method.journal"

    def go_on(count):
        with closing(Optuna(search, search.contenders[0], tmp_path)) as sampler:
            asked = []
            for number in range(count):
                point, handle = sampler.ask()
                sampler.tell(Trial(number, point, value=worth(point), state="complete", handle=handle))
                asked.append(point)
            return asked

    known = go_on(4)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert go_on(6)[:4] == known  # the fourth, whose value is lost, is asked for again
    assert go_on(8)[:4] == known
    for line in journal.read_bytes().splitlines():
        json.loads(line)


def test_a_search_that_was_killed_as_it_wrote_locks_out_nobody(search, tmp_path, monkeypatch):
    """By a relative path, Optuna's lock leads nowhere: every later start waited for it for ever."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    lock = Path("out", "Method.journal.lock")
    lock.parent.mkdir()
    lock.symlink_to("out/Method.journal")
    with closing(Optuna(search, search.contenders[0], Path("out"))) as sampler:
        assert sampler.ask() is not None
    assert not lock.is_symlink()


@pytest.mark.parametrize("moment", ["begin", "ask", "tell"])
def test_a_journal_that_cannot_be_written_is_named_and_gone_on_with(moment, search, tmp_path):
    """A disk that was full by then was a traceback of Optuna's, or one was told to move the journal away."""
    pytest.importorskip("optuna")
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = tmp_path / "Method.journal"

    def until(size):  # the bytes that the disk still takes
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def go_on(fails_at=None):
        until(10 if fails_at == "begin" else soft)
        with closing(Optuna(search, search.contenders[0], tmp_path)) as sampler:
            until(journal.stat().st_size + 10 if fails_at == "ask" else soft)
            point, handle = sampler.ask()
            until(journal.stat().st_size + 10 if fails_at == "tell" else soft)
            sampler.tell(Trial(0, point, value=0.5, state="complete", handle=handle))
            return point

    try:
        with pytest.raises(WriteError, match=r"cannot write .*Method\.journal: File too large"):
            go_on(moment)
    finally:
        until(soft)
    assert go_on() == go_on()


def run(name, values, rounds=10, column="Local-T", seed=0, finished=False):
    rows = [{"round": n + 1, column: value} for n, value in enumerate(values)]
    return SimpleNamespace(
        name=name, rounds=rounds, rows=lambda: rows, config={}, read={}, seed=seed, finished=finished
    )


def test_what_lies_below_the_median_of_the_others_is_ended(search):
    median = Median(search)
    for number, level in enumerate((0.5, 0.6, 0.7)):
        assert not median.worse(run(f"run{number}", [level] * 10))  # nothing to compare with yet, or good
    assert median.worse(run("bad", [0.1, 0.2, 0.3]))
    assert not median.worse(run("good", [0.1, 0.65]))
    assert not median.worse(run("young", [0.1]))  # in the first fifth of the rounds
    assert not median.worse(run("blind", []))


def test_runs_are_held_against_those_of_their_own_seed(tmp_path):
    """A hard split was worse than the median of all, and a point that was better on each was ended for it."""
    (tmp_path / "s.yaml").write_text(SEARCH + "seeds: [0, 1, 2]\n")
    median = Median(read_search(tmp_path / "s.yaml"))
    for trial in range(4):
        for seed, level in enumerate((0.9, 0.88, 0.7)):
            assert not median.worse(run(f"run{trial}-{seed}", [level + 0.01 * trial] * 10, seed=seed))
    assert median.worse(run("bad", [0.69] * 10, seed=2))


class Working:
    """Runs at work, of which some are asked to end."""

    def __init__(self, **states):
        self.jobs = [SimpleNamespace(cell=cell, state=state) for cell, state in states.values()]
        self.pruned = []

    @property
    def running(self):
        return [job for job in self.jobs if job.state == "running"]

    def prune(self, job):
        self.pruned.append(job.cell.name)


def test_a_point_of_which_one_run_is_ended_is_not_gone_on_with(search):
    """Its other runs went on to their ends, for nothing; what had ended just now counted in the next batch alone."""
    median = Median(search)
    ended = [run(f"run{number}", [level] * 10) for number, level in enumerate((0.5, 0.6, 0.7))]
    bad, beside, other = run("bad", [0.1] * 3), run("beside", [0.9] * 3), run("other", [0.9] * 3)
    states = {cell.name: (cell, "finished") for cell in ended}
    states |= {"bad": (bad, "running"), "beside": (beside, "waiting"), "other": (other, "running")}
    crew = Working(**states)
    median.cull(crew, [Trial(0, {}, [bad, beside]), Trial(1, {}, [other]), *(Trial(2, {}, [cell]) for cell in ended)])
    assert crew.pruned == ["bad", "beside"]


@pytest.mark.filterwarnings("ignore:.*is experimental")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["grid", "optuna"])
def test_what_was_pruned_stays_so_when_the_search_is_started_again(kind, tmp_path):
    """It was run to its end, for by then fewer runs were under way that it could be held against."""
    if kind == "optuna":
        pytest.importorskip("optuna")
    text = SEARCH.replace("search: optuna", f"search: {kind}\npruning: true").replace(
        "{low: 0.0, high: 1.0}", "[0.1, 0.2]"
    )
    ran = []

    def start(said, finished=False):
        (tmp_path / "s.yaml").write_text(said)
        tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None)
        tuning.cells_at = lambda contender, point: [run(json.dumps(sorted(point.items())), [], finished=finished)]
        tuning.record._write_overlay = lambda *_: None

        def run_batch(batch, median):
            for trial in batch:
                ran.append(trial.point)
                bad = trial.point["optimizer.init_args.lr"] == 0.1
                trial.state, trial.value = ("pruned", None) if bad else ("complete", 0.5)
            return 0

        tuning._run_batch = run_batch
        _, found = tuning.run()
        tuning.record.write(found)
        return (tuning.folder / "trials.csv").read_bytes()

    first, asked = start(text), len(ran)
    assert start(text) == first
    again = ran[asked:]
    assert all(point["optimizer.init_args.lr"] != 0.1 for point in again)
    start(text.replace("pruning: true", "pruning: false"))  # another search, which prunes nothing
    assert any(point["optimizer.init_args.lr"] == 0.1 for point in ran[asked + len(again) :])
    known = len(ran)
    start(text, finished=True)  # the first one again: what the other has finished counts
    assert any(point["optimizer.init_args.lr"] == 0.1 for point in ran[known:])


@pytest.mark.parametrize("option", ["--optimizer.lr=0.5", "--optimizer.init_args.lr=0.5", "--data.evaluate_on=test"])
def test_an_option_that_no_run_would_heed_is_refused(option, search, tmp_path):
    """`tune.md` and the overlay said that every run was started with it."""
    key = option.partition("=")[0].replace(".init_args", "")
    with pytest.raises(ConfigError, match=rf"^{key}: is (what the search varies|validation in every search)"):
        Tuning(search, tmp_path, 1, None, None, [option])


def test_what_a_trial_chose_names_each_key_so_that_they_differ(search, tmp_path):
    """The clients' rate and the server's were both "lr"."""
    point = {"optimizer.lr": 0.1, "federation.server_optimizer.init_args.lr": 1.0, "method.mu": 0.5}
    tuning = Tuning(search, tmp_path, 1, None, None)
    tuning.record.write({"Method": [Trial(0, point, state="failed")]})
    with (tuning.folder / "trials.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["choice"] == "optimizer.lr 0.1, server_optimizer.lr 1.0, mu 0.5"


def test_a_value_of_several_lines_stands_in_one_row(search, tmp_path):
    """Its row was two, which a later start of the search could not read."""
    tuning = Tuning(search, tmp_path, 1, None, None)
    tuning.record.write({"Method": [Trial(0, {"method.note": "two\nlines"}, state="failed")]})
    assert len((tuning.folder / "trials.csv").read_text().splitlines()) == 2


@pytest.fixture
def chosen_before(search, tmp_path):
    """A search, and what an earlier one of its name has chosen."""
    tuning = Tuning(search, tmp_path, 1, None, None)
    overlay = tuning.folder / search.contenders[0].file
    overlay.parent.mkdir(parents=True)
    overlay.write_text("method: {class_path: FedAvg}\n")
    return tuning, overlay


def test_where_every_trial_failed_no_earlier_choice_stands_as_this_ones(chosen_before):
    tuning, overlay = chosen_before
    trials = [Trial(0, {"method.mu": 0.5}, state="failed"), Trial(1, {"method.mu": 1.0}, state="pruned")]
    tuning.record.write({"Method": trials})
    assert overlay.exists()
    assert "| Method | 1 | – | every trial failed |" in tuning.record.write({"Method": trials[:1]})
    assert not overlay.exists()


def test_a_search_that_was_stopped_is_not_said_to_have_failed(chosen_before):
    """Ctrl-C in its first trial deleted what an earlier search had chosen."""
    tuning, overlay = chosen_before
    trials = [Trial(0, {"method.mu": 0.5}, state="failed"), Trial(1, {"method.mu": 1.0}, state="stopped")]
    assert (
        "| Method | 1 of 12, stopped | – | no trial is complete; method.yaml is of an earlier search |"
        in tuning.record.write({"Method": trials})
    )
    assert overlay.exists()
    ends = [("stopped", "waiting"), ("finished", "waiting"), ("stopped", "failed"), ("pruned",), ("finished",)]
    assert list(map(_end_of, ends)) == ["stopped", "stopped", "failed", "pruned", "failed"]


def test_a_figure_that_ran_away_ends_a_trial_and_not_the_search(search, tmp_path):
    """ "No run has it", it was said of the only one in which it was no number."""
    tuning = Tuning(search, tmp_path, 1, None, None)

    def lacks(*values):
        return tuning._lacks_monitor(SimpleNamespace(**vars(run("a", values)), summary=dict))

    assert [lacks(0.5, math.nan), lacks(math.inf), lacks(0.5), lacks(None)] == [False, False, False, True]


@pytest.mark.parametrize(("participants", "lacks"), [([0, 0], False), ([0, 4], True), ([], True)])
def test_a_run_that_trained_nobody_ends_a_trial_and_not_the_search(search, tmp_path, participants, lacks):
    tuning = Tuning(search, tmp_path, 1, None, None)
    rows = [{"round": n + 1, "Local-T": None, "participants": own} for n, own in enumerate(participants)]
    own = SimpleNamespace(name="a", rounds=2, rows=lambda: rows, summary=dict, config={})
    assert tuning._lacks_monitor(own) == lacks
    trial = Trial(0, {}, [own])
    tuning._judge(trial, ["finished"])
    assert trial.state == "failed"
    for row in rows:
        row["Local-T"] = 0.1  # of untrained models
    tuning._judge(trial, ["finished"])
    assert trial.state == ("complete" if sum(participants) else "failed")


def test_a_run_that_ran_away_keeps_no_other_from_being_ended(search):
    """With a value that is no number, the median was none, and nothing lay below it."""
    median = Median(search)
    for number, level in enumerate((0.5, math.nan, 0.6, 0.7)):
        assert not median.worse(run(f"run{number}", [level] * 10))
    assert median.worse(run("bad", [0.1, 0.2, 0.3]))


def test_what_is_said_of_other_methods_is_kept_whatever_the_locale(tmp_path, monkeypatch):
    """Files are written as UTF-8, and were read as the locale has it."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    (tmp_path / "s.yaml").write_text(SEARCH.replace("Method:", "Fed-Ä:"), "utf-8")
    tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None)
    tuning.record.write({"Fed-Ä": [Trial(0, {"method.mu": 0.5}, state="failed")]})
    before = (tuning.folder / "trials.csv").read_bytes()
    tuning.record.write({})
    assert (tuning.folder / "trials.csv").read_bytes() == before


def test_values_of_another_figure_do_not_stand_below_this_ones_name(search, tmp_path):
    trial = Trial(0, {"method.mu": 0.5}, value=0.9, state="complete")
    tuning = Tuning(search, tmp_path, 1, None, None)
    tuning.record._write_overlay = lambda *_: None
    tuning.record.write({"Method": [trial]})
    assert "0.9" in (tuning.folder / "trials.csv").read_text()
    (tmp_path / "s.yaml").write_text(SEARCH.replace("Local-T.last", "eval_loss/Local-T.last"))
    Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None).record.write({})
    assert "0.9" not in (tuning.folder / "trials.csv").read_text()
    assert "90.00" not in (tuning.folder / "tune.md").read_text()


@pytest.mark.parametrize(("listed", "fraction"), [(True, 0.0), (False, 0.2)])
def test_validation_parts_that_the_partitions_file_lists_are_taken_as_they_are(tmp_path, listed, fraction):
    """Under `split: global` a fraction was laid over them, which every run refused."""
    own = {"train": [0, 1], "validation": [2]} if listed else {"train": [0, 1]}
    (tmp_path / "who.json").write_text(json.dumps([own]))
    data = f"{{split: global, num_clients: 1, partition: FromFile, partition.path: {tmp_path}/who.json}}"
    rest = "monitor: Server-T.last\nrows: {A: {space: {optimizer.lr: [0.1]}}}\n"
    (tmp_path / "s.yaml").write_text(f"base: {{files: [quickstart], set: {{method: FedAvg, data: {data}}}}}\n{rest}")
    tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None)
    (cell,) = tuning.cells_at(tuning.contenders[0], {"optimizer.lr": 0.1})
    assert cell.config["data"]["evaluate_on"] == "validation"
    assert cell.config["data"]["validation_fraction"] == fraction


# --- what was chosen --------------------------------------------------------------------------------------------------

CHOICES = {
    "a class after its argument": ("", {"method.mu": 0.25, "method": "FedProx"}),
    "an argument of a class that gave way": ("set: {optimizer: SGD}, ", {"optimizer.lr": 0.02, "optimizer": "Adam"}),
    "one that the row has set": (
        "set: {optimizer: {class_path: SGD, init_args: {lr: 0.1}}}, ",
        {"optimizer": "Adam"},
    ),
    "an entry of a list": (
        "set: {federation: {wire: [{class_path: Quantize, init_args: {bits: 8}}]}}, ",
        {"federation.wire.0.init_args.bits": 16},
    ),
    "whole lists": ("", {"model.hidden": [8, 8], "federation.local_epochs": 2}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_overlay_gives_the_trial_that_was_chosen(name, tmp_path):
    row, point = CHOICES[name]
    space = json.dumps({key: [value] for key, value in point.items()})
    (tmp_path / "s.yaml").write_text(
        "base: {files: [quickstart], set: {method: FedAvg, optimizer: {class_path: Adam, init_args: {lr: 0.003}}}}\n"
        f"rows: {{A: {{{row}space: {space}}}}}\n"
    )
    tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None)
    (contender,) = tuning.search.contenders
    trial = Trial(0, point, tuning.cells_at(contender, point), value=0.5, state="complete")
    tuning.record.write({"A": [trial]})
    base = list(tuning.search.base.words())
    _, found = configured("fit", "", [*base, "--config", str(tuning.folder / "a.yaml")])
    chosen = trial.cells[0].config
    for section in ("method", "model", "optimizer", "federation", "trainer"):
        assert found[section] == chosen[section]
    for key, value in point.items():
        node = chosen
        for part in spelled_out(key, chosen).split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        assert value in (node, node.get("class_path", "").rpartition(".")[2] if isinstance(node, dict) else None)


# --- a second start ---------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Start a grid of four points whose best is 0.3; it may be stopped, or killed, before one of them."""

    def begin(
        *options,
        stops_at=None,
        dies_at=None,
        fails=False,
        only=(),
        values="[0.1, 0.2, 0.3, 0.4]",
        monitor="Local-T.last",
        meanwhile=lambda: None,
    ):
        text = SEARCH.replace("search: optuna", "search: grid").replace("Local-T.last", monitor)
        text = text.replace("{low: 0.0, high: 1.0}", values).replace(", method.init_args.mode: [a, b]", "")
        (tmp_path / "s.yaml").write_text(f"name: s{text}  Other: {{space: {{optimizer.init_args.lr: [0.1]}}}}\n")
        tuning = Tuning(read_search(tmp_path / "s.yaml"), tmp_path, 1, None, None, options, only)
        tuning.cells_at = lambda contender, point: [run(f"{contender.name}-{point['optimizer.init_args.lr']}", [])]
        written = []
        tuning.record._write_overlay = lambda contender, best, ended: written.append((contender.name, best.point))

        def run_batch(batch, median):
            (trial,) = batch
            meanwhile()
            if trial.number == dies_at:
                raise KeyboardInterrupt
            rate = trial.point["optimizer.init_args.lr"]
            trial.state, trial.value = ("pruned", None) if rate == 0.4 else ("complete", 1 - abs(rate - 0.3))
            if fails:
                trial.state, trial.value = "failed", None
            if trial.number == stops_at:
                trial.state, trial.value = "stopped", None
            return 130 if trial.state == "stopped" else 0

        tuning._run_batch = run_batch
        _, found = tuning.run()
        tuning.record.write(found)
        return written

    return begin


def of_method(folder, name="Method"):
    """Its rows of `trials.csv`, and its line of `tune.md`."""
    with (folder / "tunes" / "s" / "trials.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == name]
    lines = (folder / "tunes" / "s" / "tune.md").read_text().splitlines()
    return rows, next((line for line in lines if line.startswith(f"| {name} |")), "")


@pytest.mark.parametrize("stops_at", range(4))
def test_a_second_start_that_is_stopped_loses_nothing_of_the_first(stops_at, start, tmp_path):
    """It wrote the trials up to there alone: four complete ones were gone, and what was pruned was judged anew."""
    start()
    whole = of_method(tmp_path)
    assert sorted(row["state"] for row in whole[0]) == ["complete"] * 3 + ["pruned"]
    start(stops_at=stops_at)
    assert of_method(tmp_path) == whole
    assert of_method(tmp_path, "Other")[1].startswith("| Other | 1 | 80.00 |")


def test_a_second_start_whose_runs_fail_loses_nothing_of_the_first(start, tmp_path):
    """It deleted the overlay, and what had been found: its folders had been cleared away, and memory ran out."""
    start()
    overlay, whole = tmp_path / "tunes" / "s" / "method.yaml", of_method(tmp_path)
    overlay.write_text("method: FedAvg\n")
    start(fails=True)
    assert overlay.exists()
    assert of_method(tmp_path) == whole
    start(fails=True, values="[0.5, 0.6]")  # another search
    assert not overlay.exists()


def test_a_search_that_is_killed_has_told_what_it_knew(start, tmp_path):
    """A grid's pruned points stood in a file that was written at the end alone."""
    with pytest.raises(KeyboardInterrupt):
        start(dies_at=3)
    rows, line = of_method(tmp_path)
    assert len(rows) == 3
    assert line.startswith("| Method | 3 of 4, stopped | ")
    start(stops_at=0)  # and is stopped at once when it is started again
    assert of_method(tmp_path) == (rows, line)
    start()
    assert of_method(tmp_path)[0][:3] == rows
    assert of_method(tmp_path)[1].startswith("| Method | 4 | 100.00 | lr 0.3 |")


def test_two_starts_at_once_leave_each_other_what_they_found(start, tmp_path):
    """The one that ended last wrote what it had found when it began: the other's trials were gone."""
    start(only=["Method"], meanwhile=lambda: start(only=["Other"]))
    assert len(of_method(tmp_path)[0]) == 4
    rows, line = of_method(tmp_path, "Other")
    assert ([row["state"] for row in rows], line) == (["complete"], "| Other | 1 | 80.00 | lr 0.1 |")


def test_a_start_that_is_stopped_leaves_what_another_found_meanwhile_of_the_same_method(start, tmp_path):
    """It wrote what it had found when it began."""
    others = [lambda: start(only=["Method"])]
    start(only=["Method"], stops_at=1, meanwhile=lambda: others and others.pop()())
    rows, line = of_method(tmp_path)
    assert sorted(row["state"] for row in rows) == ["complete"] * 3 + ["pruned"]
    assert line.startswith("| Method | 4 | 100.00 | lr 0.3 |")


def test_a_choice_of_other_settings_is_told_from_todays(start, tmp_path):
    """It stood there, with a value that the present search does not have, beside "no trial is complete"."""
    assert ("Method", {"optimizer.init_args.lr": 0.3}) in start()
    (tmp_path / "tunes" / "s" / "method.yaml").write_text("method: FedAvg\n")
    start(stops_at=0, values="[0.5, 0.6]")
    rows, line = of_method(tmp_path)
    assert [row["state"] for row in rows] == ["stopped"]
    assert line == "| Method | 0 of 2, stopped | – | no trial is complete; method.yaml is of an earlier search |"


def test_a_method_that_was_searched_by_another_figure_is_named(start, tmp_path):
    """It was gone from both files, while its choice stayed."""
    start()
    start(only=["Method"], monitor="eval_loss/Local-T.last")
    rows, line = of_method(tmp_path, "Other")
    assert (rows, line) == ([], "| Other | – | – | searched with other settings before |")


@pytest.mark.parametrize(("old", "new"), [(",0,complete,", ",x,complete,"), (",complete,1.0,", ",complete,much,")])
def test_rows_that_somebody_has_edited_are_passed_over(old, new, start, tmp_path):
    start()
    file = tmp_path / "tunes" / "s" / "trials.csv"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    start(stops_at=0)
    assert [row["state"] for row in of_method(tmp_path)[0]].count("complete") == 2  # of three
    file.write_text("\n" + text)  # no head
    start(stops_at=0)
    assert [row["state"] for row in of_method(tmp_path)[0]] == ["stopped"]


@pytest.mark.parametrize(("values", "twice"), [("[0.1, 0.2, 0.1]", "0.1"), ("[a, b, [1], [1]]", r"\[1\]")])
def test_values_of_a_space_differ(values, twice, tmp_path):
    """Three points were searched as four trials."""
    (tmp_path / "s.yaml").write_text(SEARCH.replace("{low: 0.0, high: 1.0}", values))
    with pytest.raises(ConfigError, match=rf"lr\.values: must differ from each other; {twice} stands there twice"):
        read_search(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text(SEARCH.replace("{low: 0.0, high: 1.0}", "[false, 0, 1, true, '1']"))
    read_search(tmp_path / "s.yaml")
