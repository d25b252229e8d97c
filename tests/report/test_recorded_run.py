"""Runs' folders as they are read back, whatever has happened to them."""

import json

import pytest
import yaml
from report.run_folders import make_run

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
