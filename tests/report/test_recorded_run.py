"""Runs' folders as they are read back, whatever has happened to them."""

import json
import tracemalloc
from contextlib import contextmanager

import pytest
import yaml
from report.run_folders import make_run

from fl_lightning.report.compare import compare
from fl_lightning.report.journal import RunTables
from fl_lightning.report.recorded_run import read_run
from fl_lightning.run import Run
from fl_lightning.sealed import write_json


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 2_000, "- " * 2_000 + "1", "a: [1, 2", "\0", "5"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "partition.json"])
def test_damaged_description_is_noted(text, name, tmp_path):
    """libyaml's constructor ends the whole process over thousands of brackets."""
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(text)
    assert read_run(folder, "report").notes == (f"{name} is damaged",)


def test_altered_figures_are_noted(tmp_path):
    """They are well formed, and wrong."""
    folder = make_run(tmp_path / "run")
    tables = RunTables(folder, {"metrics.csv": ["round", "Local-T"]}, None)
    tables.start(0)
    tables.append(1, {"metrics.csv": [{"round": 1, "Local-T": 0.5}]})
    write_json(folder / "summary.json", {"rounds": 1, "seed": 0, "tables": tables.sums})
    write_json(folder / "partition.json", json.loads((folder / "partition.json").read_text()))
    assert read_run(folder, "report").notes == ()
    for name in ("metrics.csv", "partition.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("0.5", "0.9").replace('"seed": 0', '"seed": 1'))
    assert read_run(folder, "report").notes == ("partition.json is damaged", "metrics.csv is not what the run wrote")
    tables.append(2, {"metrics.csv": [{"round": 2, "Local-T": 0.5}]})  # it goes on
    assert read_run(folder, "report").notes == ("partition.json is damaged",)


def test_figures_that_were_cut_off_are_noted(tmp_path):
    """An earlier round stood for the last one, without a word."""
    folder = make_run(tmp_path / "run")
    tables = RunTables(folder, {"metrics.csv": ["round", "Local-T"]}, None)
    tables.start(0)
    for round in (1, 2):
        tables.append(round, {"metrics.csv": [{"round": round, "Local-T": 0.5}]})
    write_json(folder / "summary.json", {"rounds": 2, "seed": 0, "tables": tables.sums})
    write_json(folder / "partition.json", json.loads((folder / "partition.json").read_text()))
    whole = (folder / "metrics.csv").read_text()
    assert read_run(folder, "report").notes == ()
    for cut in (whole[:-1], whole[:-5], whole[: whole.rindex("2,")]):
        (folder / "metrics.csv").write_text(cut)
        assert read_run(folder, "report").notes == ("metrics.csv is not what the run wrote",)


@pytest.mark.parametrize("stopped", ["", "early stopping"])
def test_a_run_that_was_extended_and_broken_off_is_not_finished(stopped, tmp_path):
    """Its summary is still that of its first end."""
    folder = make_run(tmp_path / "run", rounds=3)
    about = {"finished": True, "rounds": 3, **({"stopped": stopped} if stopped else {})}
    write_json(folder / "summary.json", about)
    assert Run(folder).finished
    text = (folder / "config.yaml").read_text()
    config = yaml.safe_load(text)
    config["federation"] = {"rounds": 6}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert Run(folder).finished == bool(stopped)
    table = folder / "metrics.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[-1].replace("3,", "4,", 1) + "\n")
    assert not Run(folder).finished
    assert "it is not finished: 4 of its 6 rounds are done" in read_run(folder, "report").notes


def test_a_run_that_was_extended_is_shown_as_it_was(tmp_path):
    folder = make_run(tmp_path / "run", rounds=5)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 7, "federation": {"rounds": 9, "cohort": 2}}))
    run = read_run(folder, "report")
    assert run.unfinished
    first = run.first(3)
    assert [row["round"] for row in first.rows] == [1, 2, 3]
    assert {row["round"] for row in first.client_rows} == {1, 2, 3}
    assert first.config == {"seed": 7, "federation": {"rounds": 3, "cohort": 2}}
    assert (first.summary, first.unfinished, first.seed) == ({}, "", 7)
    assert [note for note in run.notes if note not in first.notes] == [run.unfinished]
    assert first.figures["last"]["Local-T"] == run.rows[2]["Local-T"]
    assert run.first(5) is run
    assert {row["round"] for row in run.client_rows} == {1, 2, 3, 4, 5}


def test_a_round_counts_once_though_it_stands_there_twice(tmp_path):
    """It was two of the last ten, and its bytes were sent twice."""
    run = read_run(make_run(tmp_path / "a"), "report")
    metrics = tmp_path / "a" / "metrics.csv"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines(keepends=True)[-1])
    again = read_run(tmp_path / "a", "report")
    assert again.rows == run.rows


@contextmanager
def bytes_at_most(number, peak):
    """Asserts how much is kept, and how much it took at its peak."""
    tracemalloc.start()
    try:
        yield
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (kept < number, most < peak) == (True, True), (kept, most)


def test_rows_of_clients_take_little_memory(tmp_path):
    """A number takes 8 bytes, or a little more; as dicts they took 42, and 120 while they were read."""
    run = read_run(make_run(tmp_path / "a", rounds=40, clients=50), "report")
    numbers = 40 * 50 * 9
    with bytes_at_most(16 * numbers, 110 * numbers):
        assert len(run.client_rows) == 40 * 50


def test_comparison_takes_little_memory(tmp_path):
    """It looks at one round at a time; all figures at once took 420 bytes each."""
    folder = make_run(tmp_path / "a", rounds=40, clients=50)
    figures = 40 * 50 * 7
    compare(folder, folder)
    with bytes_at_most(100 * figures, 200 * figures):
        assert compare(folder, folder)


def test_rows_of_clients_say_what_is_written(tmp_path):
    """Whole numbers stay whole, however large, and what is empty stays none, in columns of one kind and of several."""
    folder = make_run(tmp_path / "a", rounds=1)
    lines = ["round,client,num_test,Local-T,loss", "1,0,7,0.1,", f"1,1,{2**70},nan,3", "1,2,8,1e-3,0.5", "x,3,1,0.1,1"]
    (folder / "clients.csv").write_text("\n".join(lines) + "\n")
    found = read_run(folder, "report").client_rows
    assert [list(row.values()) for row in found] == [
        [1, 0, 7, 0.1, None],
        [1, 1, 2**70, pytest.approx(float("nan"), nan_ok=True), 3],
        [1, 2, 8, 0.001, 0.5],
    ]
    assert [type(value) for value in found[0].values()] == [int, int, int, float, type(None)]
    assert [row["client"] for row in found[1:]] == [1, 2]
    assert list(found.column("attacker")) == [None] * 3
