"""`fl-lightning table`: cells are ordinary runs, are found again, and stand beside what was published."""

import csv
import fcntl
import json
import os
import re
import shlex
import signal

import pytest

TABLE = """\
title: "A small table"
source: "nowhere, Table 1"
seeds: [0, 1]
spread: seeds
rank: [received]
base: {files: [../exp.yaml]}
columns:
  Digits:
    figures:
      received: Local-T_received.last
      all: Global-T.best
      spread: Global-T_std.best
      sent: {of: summary.communication.uplink_params_Mi_per_round, scale: 1}
rows:
  FedAvg: {set: {method: FedAvg}}
  FedRep: {set: {federation.lr_decay: 0.9}}
published:
  FedAvg: {Digits: {received: 50.5 ± 1}}
"""


@pytest.fixture
def place(workplace):
    workplace.draws = False
    workplace.change(federation={"rounds": 2})
    workplace.write("tables/small.yaml", TABLE)
    return workplace


def cells(place):
    with (place.path / f"runs/tables/{place.path.name}-small/table.csv").open() as file:
        return {(row["row"], row["figure"]): row for row in csv.DictReader(file)}


def folders(place):
    return sorted(path for path in (place.path / "runs/cells").iterdir() if path.is_dir())


def test_a_table_from_one_command(place):
    code, out, err = place.call("table", "tables/small.yaml", "--jobs", "2")
    assert code == 0, err + out
    assert "4 of 4 runs finished" in out
    runs = folders(place)
    assert len(runs) == 4
    found = cells(place)
    assert len(found) == 8
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    mine = [100 * s["last"]["Local-T_received"] for s in summaries if s["method"] == "FedAvg"]
    received = found["FedAvg", "received"]
    assert float(received["mean"]) == pytest.approx(sum(mine) / 2)
    assert float(received["difference"]) == pytest.approx(sum(mine) / 2 - 50.5)
    best = [100 * s["best"]["Global-T"]["value"] for s in summaries if s["method"] == "FedRep"]
    assert float(found["FedRep", "all"]["mean"]) == pytest.approx(sum(best) / 2)
    assert float(found["FedRep", "all"]["over_clients"]) > 0
    sent = [s["communication"]["uplink_params_Mi_per_round"] for s in summaries if s["method"] == "FedAvg"]
    assert float(found["FedAvg", "sent"]["mean"]) == pytest.approx(sum(sent) / 2)
    spreads = []
    for run in (run for run, s in zip(runs, summaries, strict=True) if s["method"] == "FedRep"):
        with (run / "metrics.csv").open() as file:
            rounds = list(csv.DictReader(file))
        spreads.append(float(max(rounds, key=lambda row: float(row["Global-T"]))["Global-T_std"]))
    assert float(found["FedRep", "spread"]["mean"]) == pytest.approx(100 * sum(spreads) / 2)
    assert found["FedRep", "spread"]["over_clients"] == ""
    text = (place.path / f"runs/tables/{place.path.name}-small/table.md").read_text()
    assert "[50.5 ± 1; " in text
    assert "## Ranking by Digits received" in text
    assert (place.path / f"runs/tables/{place.path.name}-small/ranking.csv").read_text().count("\n") == 3
    assert '"key":"ranking"' in (place.path / f"runs/tables/{place.path.name}-small/report.html").read_text()
    assert "published (nowhere, Table 1), ± over seeds, and ours" in text
    assert "Every run was started" not in text
    tex = (place.path / f"runs/tables/{place.path.name}-small/table.tex").read_text()
    assert tex.count(r"\\") == 4  # the head, two methods, one line of what was published
    assert tex.count("&") == 16

    stamps = {run: (run / "summary.json").stat().st_mtime_ns for run in runs}
    place.write("tables/other.yaml", TABLE.replace("small", "other").replace("[0, 1]", "[1]"))
    code, out, err = place.call("table", "tables/other.yaml")  # another table with the same cells
    assert code == 0, err + out
    assert {run: (run / "summary.json").stat().st_mtime_ns for run in folders(place)} == stamps

    code, out, _ = place.call("table", "tables/small.yaml", "--print-commands", "--only", "FedRep", "--shard", "2/2")
    words = shlex.split(out)
    assert (code, words[:2], words[-2:]) == (0, ["fl-lightning", "fit"], ["--resume", "auto"])
    assert (place.path / "runs/cells" / words[words.index("--name") + 1]) in runs
    code, out, _ = place.call("table", "tables/small.yaml", "--dry-run", "--rounds", "4")
    assert code == 0
    assert "0 of 4 rounds" in out
    assert "4 runs: 4 to do" in out
    assert "0 s left" not in out


def test_a_killed_table_goes_on_to_the_same_figures(place):
    code, out, err = place.call("table", "tables/small.yaml", "--only", "FedAvg", "--seeds", "0", "--output", "whole")
    assert code == 0, err + out
    (whole,) = [path for path in (place.path / "whole/cells").iterdir() if path.is_dir()]
    running = place.start("table", "tables/small.yaml", "--only", "FedAvg", "--seeds", "0", "--rounds", "2")
    cell = place.path / "runs/cells" / whole.name
    running.wait_until(lambda: (cell / "metrics.csv").is_file() and len((cell / "metrics.csv").read_text()) > 400)
    os.kill(running.process.pid, signal.SIGTERM)
    code, out, err = running.result()
    assert code in (0, 128 + signal.SIGTERM), err + out
    code, out, err = place.call("table", "tables/small.yaml", "--only", "FedAvg", "--seeds", "0")
    assert code == 0, err + out
    code, out, err = place.call("compare", f"whole/cells/{whole.name}", f"runs/cells/{whole.name}")
    assert code == 0, err + out


def test_a_cell_that_another_process_runs_is_waited_for_and_taken_over_when_that_one_ends(place):
    code, out, err = place.call("table", "tables/small.yaml", "--print-commands")
    assert code == 0, err
    words = shlex.split(out.splitlines()[0])
    cell = place.path / "runs/cells" / words[words.index("--name") + 1]
    cell.mkdir(parents=True)
    with (cell / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        running = place.start("table", "tables/small.yaml", "--jobs", "2")
        waits = "3 of 4 runs finished, 0 running, 1 elsewhere"
        running.wait_until(lambda: running.out.exists() and waits in running.out.read_text())
        assert not (cell / "config.yaml").exists()
    code, out, err = running.result()
    assert code == 0, err + out
    assert "4 of 4 runs finished, 0 running, 0 s left" in out
    assert len(cells(place)) == 8


def test_two_tables_share_the_cells_out(place):
    both = [place.start("table", "tables/small.yaml", out=f"out{number}") for number in (1, 2)]
    for running in both:
        code, out, err = running.result()
        assert code == 0, err + out
        assert "4 of 4 runs finished" in out
    logs = sorted((place.path / f"runs/tables/{place.path.name}-small/logs").iterdir())
    assert len(logs) == 4
    first_rounds = [len(re.findall(r"^round +1/", log.read_text(), re.MULTILINE)) for log in logs]
    assert first_rounds == [1] * 4  # none is trained twice; one that ended meanwhile may be taken up, and ends at once


def test_a_cell_that_fails_and_a_data_set_that_is_missing_are_said(place):
    text = TABLE.replace("  FedRep: {set:", "  FedBN: {set: {data.num_clients: 4000, method: FedBN}}\n  FedRep: {set:")
    text = text.replace(
        "rows:\n",
        "  MNIST:\n    set:\n      data.dataset: {class_path: MNIST, init_args: {root: none, download: false}}\n"
        "rows:\n",
    )
    place.write("tables/small.yaml", text)
    code, out, err = place.call("table", "tables/small.yaml", "--seeds", "0", "--jobs", "2", "--rounds", "1")
    assert code == 1, err + out
    assert "Every run was started with --federation.rounds=1 over what the file says." in out
    assert "Variables of the environment" not in out
    assert "column MNIST: " in out
    assert "train-images-idx3-ubyte" in out
    assert "FedBN, Digits, seed 0: " in out
    assert "FedBN, Digits, seed 0: data." in out
    assert len(folders(place)) == 2
    assert {row for row, _ in cells(place)} >= {"FedAvg", "FedRep"}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--only", "FedAgv"], "did you mean FedAvg"),
        (["--columns", "MNIST"], "Digits"),
        (["--shard", "3/2"], "2/8"),
        (["--seeds", "one"], "whole numbers"),
        (["--seed", "1"], "--seeds"),
        (["--jobs", "0"], "must be >= 1"),
        (["--rounds", "0"], "must be >= 1"),
        (["--dry-rum"], "dry-rum: there is no such key; did you mean dry-run?"),
        (["--federation.round", "3"], "rounds"),
        (["--federation.rounds=-1", "--dry-run"], "rows.FedAvg, columns.Digits: federation.rounds: must be >= 1"),
    ],
)
def test_mistakes_are_one_line(place, argv, word):
    code, out, err = place.call("table", "tables/small.yaml", *argv)
    assert code == 2, out + err
    assert word in err
    assert len(err.strip().splitlines()) == 1
    assert not (place.path / "runs").exists()


def test_a_row_and_a_column_without_a_cell_in_common_are_no_table(place):
    """ "0 of 0 runs finished", and an empty table, for a script that took that for done."""
    half = TABLE.replace("{method: FedAvg}}", "{method: FedAvg}, columns: {Digits: null}}")
    place.write("tables/half.yaml", half.partition("published:")[0])
    code, out, err = place.call("table", "tables/half.yaml", "--only", "FedAvg", "--columns", "Digits")
    assert (code, out) == (2, "")
    said = "--only: have no cell together with the columns that were asked for, got 'FedAvg'"
    assert err == f"fl-lightning: error: {said}\n"
    assert not (place.path / "runs").exists()
    empty = "rows: {FedAvg: {set: {method: FedAvg}, columns: {Digits: null}}}\n"
    place.write("tables/empty.yaml", TABLE.partition("rows:")[0] + empty)
    code, _, err = place.call("table", "tables/empty.yaml")
    assert (code, err) == (2, "fl-lightning: error: rows: have no cell, got 'FedAvg'\n")


def test_rows_that_the_command_line_makes_the_same_are_refused(place):
    """The row named FedRep was a run of FedAvg, and said so nowhere."""
    two = TABLE.replace("federation.lr_decay: 0.9", "federation.local_epochs: 2")
    place.write("tables/rows.yaml", two)
    code, out, err = place.call("table", "tables/rows.yaml", "--method", "FedAvg", "--federation.local_epochs", "1")
    assert (code, out) == (2, "")
    assert "turn the rows FedAvg and FedRep into the same run; say which with --only" in err
    assert place.call("table", "tables/rows.yaml", "--dry-run", "--federation.local_epochs", "1")[0] == 0


def test_seed_by_seed_a_table_becomes_whole(place):
    """Each call's table had its own seeds alone."""
    for seed, said in (("0", True), ("1", False)):
        code, out, err = place.call("table", "tables/small.yaml", "--rounds", "1", "--seeds", seed)
        assert code == 0, err + out
        assert ("every figure is the mean of seed 0, without 1" in out) is said
    table = (place.path / f"runs/tables/{place.path.name}-small/table.csv").read_text()
    assert all({"0:", "1:"} <= set(re.findall(r"\b[01]:", line)) for line in table.splitlines()[1:])


def test_a_run_that_was_extended_since_has_the_figures_of_its_own_rounds(place):
    words = ("table", "tables/small.yaml", "--seeds", "0", "--only", "FedAvg")
    assert place.call(*words)[0] == 0
    before = cells(place)
    (run,) = folders(place)
    assert place.call("fit", "--resume", str(run), "--federation.rounds", "3", "--quiet")[0] == 0
    code, out, err = place.call(*words)
    assert code == 0, err + out
    assert "its run was extended to 3 rounds; its figures are of the first 2" in out
    after = cells(place)
    for name in ("received", "all", "spread"):
        assert after["FedAvg", name]["mean"] == before["FedAvg", name]["mean"]
    assert ("FedAvg", "sent") not in after or not after["FedAvg", "sent"]["mean"]  # the run's own word, of three rounds


def test_options_that_fit_the_chosen_columns_alone_are_laid_over_them(place):
    """The other columns' cells are looked at when the table is printed, and not before: it was lost there."""
    split = "{data.partition: {class_path: Pathological, init_args: {classes: 2}}}"
    place.write("tables/two.yaml", TABLE.replace("rows:", f"  Pathological:\n    set: {split}\nrows:"))
    words = ("table", "tables/two.yaml", "--seeds", "0", "--only", "FedAvg", "--rounds", "1")
    assert place.call(*words, "--columns", "Digits")[0] == 0
    option = ("--columns", "Pathological", "--data.partition.classes", "5")
    code, out, err = place.call(*words, *option)
    assert code == 0, err + out
    assert "1 of 1 runs finished" in out
    assert "written to" in out
    code, out, err = place.call(*words, *option[2:])
    assert code == 2
    assert "columns.Digits: data.partition.classes: there is no such key" in err


def test_columns_that_the_command_line_makes_the_same_are_refused_and_never_shown_for_one_another(place):
    both = TABLE.replace(
        "rows:", "  Longer:\n    figures: {late: Global-T.last}\n    set: {federation.rounds: 3}\nrows:"
    )
    place.write("tables/both.yaml", both)
    for option in ("--federation.rounds", "--rounds"):
        code, out, err = place.call("table", "tables/both.yaml", "--seeds", "0", option, "1")
        assert code == 2
        assert not out
        assert "turn the columns Digits and Longer into the same run; say which with --columns" in err
    chosen = ("--seeds", "0", "--only", "FedAvg", "--columns", "Longer", "--federation.rounds", "1")
    code, out, err = place.call("table", "tables/both.yaml", *chosen)
    assert code == 0, err + out
    assert "Longer" in out
    assert "Digits" not in out
