"""`fl-lightning tune`: the same budget for every method, on validation parts alone, and overlays that work."""

import csv
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml

from fl_lightning.report.plain import PlainConsole
from fl_lightning.tune.command import Tuning
from fl_lightning.tune.space import read_search

TUNE = """\
title: A small search
name: small
trials: 2
monitor: Local-T_received.last
base: {files: [exp.yaml]}
rows:
  FedRep: {space: {optimizer.init_args.lr: [0.0001, 0.2]}}
"""


@pytest.fixture
def place(workplace):
    workplace.draws = False
    workplace.change(federation={"rounds": 2})
    workplace.write("small.yaml", TUNE)
    return workplace


def test_a_trial_in_which_no_client_came_through_its_fit_has_failed(place):
    """It was complete, at the accuracy of untrained models, which may be the best of a poor lot."""
    place.write("small.yaml", TUNE.replace("[0.0001, 0.2]", "[1.0e+30, 0.2]"))
    place.change(federation={"on_client_error": "skip"})
    code, out, err = place.call("tune", "small.yaml")
    assert code == 0, out + err
    with (place.path / "runs/tunes/small/trials.csv").open() as file:
        rows = {row["choice"]: row for row in csv.DictReader(file)}
    assert [rows[choice]["state"] for choice in ("lr 1e+30", "lr 0.2")] == ["failed", "complete"]
    assert rows["lr 1e+30"]["Local-T_received.last"] == ""


def test_a_search_is_run_on_validation_parts_and_writes_an_overlay(place):
    code, out, err = place.call("tune", "small.yaml", "--jobs", "2")
    assert code == 0, out + err
    folder = place.path / "runs/tunes/small"
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["complete"] * 2
    tried = [f"FedRep, trial {int(row['trial']) + 1} of 2: {row['choice']}" for row in rows]
    assert [line for line in out.splitlines() if ", trial " in line] == tried  # "1 of 1 runs, 0 s left" was all
    figures = {row["choice"]: float(row["Local-T_received.last"]) for row in rows}
    assert figures["lr 0.2"] > figures["lr 0.0001"]
    for row in rows:
        record = json.loads((place.path / "runs/cells" / row["runs"] / "partition.json").read_text())
        assert record["evaluate_on"] == "validation"
        assert all(len(client["validation"]) and len(client["test"]) for client in record["clients"])
    overlay = yaml.safe_load((folder / "fedrep.yaml").read_text())
    assert overlay == {"method": "FedRep", "optimizer": {"init_args": {"lr": 0.2}}}
    code, out, err = place.call("fit", "--config", "exp.yaml", "--config", str(folder / "fedrep.yaml"), "--quiet")
    assert code == 0, err

    kept = {path.name for row in rows for path in (place.path / "runs/cells" / row["runs"]).iterdir()}
    assert {"config.yaml", "metrics.csv", "summary.json"} < kept
    assert kept.isdisjoint({"checkpoints", "models"})  # hundreds of trials would fill a disk

    stamps = {
        row["runs"]: (place.path / "runs/cells" / row["runs"] / "summary.json").stat().st_mtime_ns for row in rows
    }
    code, out, err = place.call("tune", "small.yaml")  # nothing is run again
    assert (code, ", trial " in out) == (0, False), err
    now = {name: (place.path / "runs/cells" / name / "summary.json").stat().st_mtime_ns for name in stamps}
    assert now == stamps

    lines = (folder / "tune.md").read_text().splitlines()
    place.write("small.yaml", TUNE + "  FedAvg: {space: {optimizer.init_args.lr: [0.01]}}\n")
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg")
    assert code == 0, err
    with (folder / "trials.csv").open() as file:
        later = list(csv.DictReader(file))
    assert later[:2] == rows
    assert {row["method"] for row in later[2:]} == {"FedAvg"}
    now = (folder / "tune.md").read_text().splitlines()
    fewer = ", or all points of a grid that has fewer (FedAvg 1)"
    assert [line.replace(fewer, "") for line in now[: len(lines)]] == lines
    assert sum(fewer in line for line in now) == 1
    code, _, err = place.call("tune", "small.yaml", "--only", "FedAvgg")
    assert (code, "--only: the search has none of that name" in err) == (2, True)


def test_an_overlay_says_all_that_its_row_says(place):
    """A rate that was chosen under one optimizer is none for another."""
    place.write("half.yaml", "federation: {local_epochs: 2}\n")
    row = "{files: [half.yaml], set: {optimizer: Adam, data.batch_size: 32}, space: {optimizer.init_args.lr: [0.003]}}"
    place.write("small.yaml", TUNE.partition("rows:")[0] + f"rows:\n  FedRep: {row}\n")
    assert place.call("tune", "small.yaml")[0] == 0
    overlay = place.path / "runs/tunes/small/fedrep.yaml"
    code, _, err = place.call("fit", "--config", "exp.yaml", "--config", str(overlay), "--quiet")
    assert code == 0, err
    (tried,) = (place.path / "runs/cells").iterdir()
    tried, again = (yaml.safe_load((run / "config.yaml").read_text()) for run in (tried, place.run))
    for section in ("method", "model", "optimizer", "trainer"):
        assert again[section] == tried[section]
    assert (again["data"]["batch_size"], again["federation"]["local_epochs"]) == (32, 2)
    assert (again["optimizer"]["class_path"], again["optimizer"]["init_args"]["lr"]) == ("torch.optim.Adam", 0.003)


def test_options_of_a_configuration_are_laid_over_every_run(place):
    more = ["--federation.rounds", "1", "--data.batch_size=8", "--quiet"]
    assert place.call("tune", "small.yaml", *more)[0] == 0
    cells = sorted((place.path / "runs/cells").iterdir())
    configs = [yaml.safe_load((cell / "config.yaml").read_text()) for cell in cells]
    assert [config["federation"]["rounds"] for config in configs] == [1, 1]
    assert [config["data"]["batch_size"] for config in configs] == [8, 8]
    assert {config["optimizer"]["init_args"]["lr"] for config in configs} == {0.0001, 0.2}
    code, _, err = place.call("tune", "small.yaml", "--seed", "3")
    assert (code, err.strip()) == (2, "fl-lightning: error: --seed: each run has its own; a search's file names them")


def test_a_dry_run_says_what_there_is_to_do(place):
    place.write("small.yaml", TUNE)
    code, out, err = place.call("tune", "small.yaml", "--dry-run", "--federation.rounds", "1")
    assert (code, err) == (0, "")
    assert not (place.path / "runs/cells").exists()
    cells = [line for line in out.splitlines() if line.startswith("FedRep, lr ")]
    assert len(cells) == 2
    assert all(line.endswith(", seed 0: 0 of 1 rounds") for line in cells)
    assert "2 runs: 2 to do; how long is known once one of them has done a round" in out
    assert place.call("tune", "small.yaml", "--quiet", "--federation.rounds", "1")[0] == 0
    code, out, _ = place.call("tune", "small.yaml", "--dry-run", "--federation.rounds", "1")
    assert (code, out.count(": finished"), "2 runs: all are finished" in out) == (0, 2, True)
    place.write("small.yaml", TUNE + "search: optuna\n")
    code, _, err = place.call("tune", "small.yaml", "--dry-run")
    assert (code, "--dry-run: needs search: grid" in err) == (2, True)


def test_trials_of_other_settings_do_not_stand_beside_todays(place):
    """Six trials of one round stood above six of four, under one heading."""
    both = TUNE + "  FedAvg: {space: {optimizer.init_args.lr: [0.01]}}\n"
    place.write("small.yaml", both)
    folder = place.path / "runs/tunes/small"
    assert place.call("tune", "small.yaml", "--federation.rounds", "1", "--quiet")[0] == 0
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg", "--federation.rounds", "1")
    assert code == 0, err
    assert "| FedRep | 2 |" in out
    assert "Every run was started with --federation.rounds=1." in out
    assert "# Every run was started with --federation.rounds=1." in (folder / "fedavg.yaml").read_text()
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg")
    assert code == 0, err
    assert "| FedRep | – | – | searched with other settings before |" in out
    assert "started with" not in out + (folder / "fedavg.yaml").read_text()
    with (folder / "trials.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"FedAvg"}
    place.write("small.yaml", both + "goal: min\n")
    code, out, err = place.call("tune", "small.yaml", "--only", "FedRep")
    assert code == 0, err
    assert "| FedAvg | – | – | searched with other settings before |" in out
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg")
    assert code == 0, err
    assert "searched with other settings" not in out


def test_variables_of_the_environment_are_noted(place):
    """They changed every run of a search or a table without a word."""
    variables = {"FL_LIGHTNING_FIT__FEDERATION__PARTICIPATION": "0.5"}
    words = ["tune", "small.yaml", "--federation.rounds", "1"]
    code, out, err = place.call(*words, env=variables)
    assert code == 0, err
    said = "Variables of the environment said --federation.participation=0.5 where no file did."
    assert said in out
    assert said in (place.path / "runs/tunes/small/fedrep.yaml").read_text()
    place.write(
        "table.yaml", "rows: {FedAvg: {}}\ncolumns: {Digits: {files: [exp.yaml]}}\nfigures: {acc: Local-T.last}\n"
    )
    code, out, err = place.call("table", "table.yaml", "--rounds", "1", env=variables)
    assert code == 0, err
    assert said in out


def test_commands_that_are_printed_hold_the_variables_of_the_environment(place):
    """Without them a run of other settings lay in the cell's folder, and its figures stood in the table."""
    place.write("table.yaml", "rows: {FedAvg: {}}\ncolumns: {Digits: {files: [exp.yaml]}}\n")
    section = "FL_LIGHTNING_FIT__FEDERATION__"
    variables = {f"{section}LOCAL_EPOCHS": "{uniform: [1, 2]}", f"{section}PARTICIPATION": "0.5"}
    for words in (["table", "table.yaml"], ["tune", "small.yaml"]):
        code, out, err = place.call(*words, "--print-commands", env=variables)
        assert code == 0, err
        own = shlex.split(out.splitlines()[0])
        assert own[:5] == ["env", *(f"{name}={value}" for name, value in variables.items()), "fl-lightning", "fit"]


def test_a_search_that_a_signal_ends_between_or_in_trials_says_so(place, monkeypatch):
    """It went by the trials begun, all of which had ended."""
    monkeypatch.chdir(place.path)
    ended = []

    def run_batch(self, batch, median):
        for trial in batch:
            trial.state, trial.value = "complete", 0.5
        ended.append(os.kill(os.getpid(), signal.SIGTERM))
        return 0

    monkeypatch.setattr(Tuning, "_run_batch", run_batch)
    tuning = Tuning(read_search(Path("small.yaml")), Path("runs"), 1, print, PlainConsole(quiet=True))
    code, found = tuning.run()
    assert (code, len(ended), len(found["FedRep"])) == (143, 1, 1)
    assert "| FedRep | 1 of 2, stopped | 50.00 |" in tuning.record.write(found)
    assert "# So far: 1 of 2, stopped." in (place.path / "runs/tunes/small/fedrep.yaml").read_text()


def test_mistakes_are_one_line(place):
    place.write("small.yaml", TUNE.replace("init_args.lr", "init_args.rate"))
    code, _, err = place.call("tune", "small.yaml")
    assert code == 2
    assert "rate" in err
    assert len(err.strip().splitlines()) == 1
    code, _, _ = place.call("tune", "small.yaml", "--jobs", "0")
    assert code == 2
    place.write("small.yaml", TUNE.replace("Local-T_received.last", "{of: Local-T_received.last, scale: 1000}"))
    code, _, err = place.call("tune", "small.yaml")
    assert (code, "monitor.scale: a search has its figure as it is" in err) == (2, True)
    place.write("small.yaml", TUNE.replace("Local-T_received.last", "Local-T_newcomers.last"))
    code, _, err = place.call("tune", "small.yaml")
    assert (code, "monitor: is no figure of" in err, err.count("\n")) == (2, True, 1)


def refused(place, *argv):
    """The one line of a search that is refused."""
    code, out, err = place.call("tune", "small.yaml", "--quiet", *argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    return err.removeprefix("fl-lightning: error: ")


def test_value_that_is_wrong_for_every_trial_ends_the_search_with_its_line(place):
    """What constructors say of their arguments before any run; what the data say of them after the first."""
    assert refused(place, "--federation.rounds=-1").startswith("rows.FedRep, columns.validation: federation.rounds: ")
    assert not (place.path / "runs").exists()
    said = refused(place, "--data.dataset=ImageFolder", "--data.dataset.root=nowhere")
    assert said.startswith("data.dataset")
    assert "nowhere" in said
    assert len(list((place.path / "runs/tunes/small/logs").iterdir())) == 1  # the second trial has not begun


def test_value_that_trials_vary_is_refused_trial_by_trial(place):
    place.write(
        "small.yaml", TUNE.replace("optimizer.init_args.lr: [0.0001, 0.2]", "federation.aggregator: [null, Bulyan]")
    )
    code, _, err = place.call("tune", "small.yaml", "--quiet", "--federation.rounds=1")
    assert (code, err) == (1, "")
    with (place.path / "runs/tunes/small/trials.csv").open() as file:
        assert sorted(row["state"] for row in csv.DictReader(file)) == ["complete", "failed"]


@pytest.mark.parametrize("search", ["grid", "optuna"])
def test_value_that_its_class_refuses_is_a_trial_that_failed(place, search):
    """Known before any run; the method behind is searched, and so it is when the search is started again."""
    values = {"grid": "[0.5, 1.5]", "optuna": "{low: 0.5, high: 9.0}"}[search]
    rows = f"""\
  First: {{space: {{federation.participation: {values}}}}}
  Second: {{space: {{optimizer.init_args.lr: [0.01]}}}}
search: {search}
pruning: false
"""
    place.write("small.yaml", TUNE.partition("  FedRep")[0] + rows)
    for _ in range(2):
        code, out, err = place.call("tune", "small.yaml", "--quiet", "--federation.rounds=1")
        assert code == 1, out + err
        assert "fl-lightning: First, participation " in err
        assert "federation.participation: must be in (0, 1]" in err
        with (place.path / "runs/tunes/small/trials.csv").open() as file:
            states = [(row["method"], row["state"], bool(row["Local-T_received.last"])) for row in csv.DictReader(file)]
        assert ("Second", "complete", True) in states
        assert ("First", "failed", False) in states
    if search == "grid":
        assert sorted(states) == [("First", "complete", True), ("First", "failed", False), ("Second", "complete", True)]
        code, out, err = place.call("tune", "small.yaml", "--dry-run", "--federation.rounds=1")
        assert (code, "2 runs: all are finished" in out) == (0, True)


def test_choices_that_a_class_refuses_together_are_a_trial_that_failed(place):
    """Its line names the class alone, which ended the search, also where it had run for days."""
    space = "{optimizer.init_args.nesterov: [false, true], optimizer.init_args.momentum: [0.9, 0.0]}"
    row = f"  FedAvg: {{set: {{optimizer: {{class_path: SGD, init_args: {{lr: 0.1}}}}}}, space: {space}}}\n"
    place.write("small.yaml", TUNE.partition("  FedRep")[0].replace("trials: 2", "trials: 4") + row)
    code, out, err = place.call("tune", "small.yaml", "--dry-run")
    assert (code, "3 runs: 3 to do" in out) == (0, True), out + err
    assert "FedAvg, nesterov True, momentum 0.0: " in err
    assert "optimizer: SGD: Nesterov momentum requires a momentum" in err
    code, out, err = place.call("tune", "small.yaml", "--dry-run", "--optimizer.weight_decay=-1.0")
    assert (code, "weight_decay" in err, out) == (2, True, "")  # of every trial


def test_trials_of_data_that_have_changed_since_do_not_stand_beside_todays(place):
    def data(noise):
        rows = [f"{i % 7 - 3},{(i * noise) % 5},{'ab'[i % 2]}" for i in range(80)]
        place.write("d.csv", "\n".join(["u,v,label", *rows]) + "\n")

    lines = (
        "--data.dataset=CSVTable",
        "--data.dataset.path=d.csv",
        "--data.dataset.label=label",
        "--federation.rounds=1",
    )
    lines += ("--data.partition=IID",)
    both = TUNE + "  FedAvg: {space: {optimizer.init_args.lr: [0.01]}}\n"
    place.write("small.yaml", both)
    data(1)
    code, out, err = place.call("tune", "small.yaml", *lines)
    assert code == 0, out + err
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg", *lines)
    assert "searched with other settings" not in out
    data(3)
    code, out, err = place.call("tune", "small.yaml", "--only", "FedAvg", *lines)
    assert code == 0, out + err
    assert "| FedRep | – | – | searched with other settings before |" in out


def test_whole_ends_of_a_range_of_any_numbers_do_not_make_it_whole(place):
    text = TUNE.partition("  FedRep")[0].replace("trials: 2", "trials: 5")
    place.write(
        "small.yaml", text + "  APFL: {set: {method: APFL}, space: {method.init_args.alpha: {low: 0, high: 1}}}\n"
    )
    code, out, err = place.call("tune", "small.yaml", "--dry-run")
    assert (code, err) == (0, "")
    assert [f"alpha {share}," in out for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [True] * 5
    place.write("small.yaml", text + "  FedRep: {space: {federation.local_epochs: {low: 1, high: 3}}}\n")
    code, out, err = place.call("tune", "small.yaml", "--dry-run")
    assert (code, out.count(", seed 0:")) == (0, 3)


def test_a_monitor_that_no_run_has_and_a_refusal_leave_what_a_search_has_written(place):
    code, out, err = place.call("tune", "small.yaml", "--quiet")
    assert code == 0, out + err
    files = [place.path / "runs/tunes/small" / name for name in ("trials.csv", "tune.md")]
    before = [file.read_text() for file in files]
    place.write("small.yaml", TUNE.replace("Local-T_received.last", "Local-T/nobody.last"))
    code, out, err = place.call("tune", "small.yaml", "--quiet")
    said = "monitor: no run has it, or its validation parts are empty, got 'Local-T/nobody.last'"
    assert (code, err) == (2, f"fl-lightning: error: {said}\n"), out
    assert [file.read_text() for file in files] == before
    place.write("small.yaml", TUNE)
    code, out, err = place.call("tune", "small.yaml", "--quiet", "--data.num_clients", "5000")
    assert (code, err.count("\n")) == (2, 1), out + err
    assert [file.read_text() for file in files] == before


def test_the_least_loss_is_chosen(place):
    assert read_search(place.path / "small.yaml").maximise
    place.write("small.yaml", TUNE.replace("Local-T_received.last", "eval_loss/Local-T.last"))
    assert not read_search(place.path / "small.yaml").maximise
