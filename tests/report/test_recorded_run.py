"""Runs' folders as they are read back, whatever has happened to them."""

import json

import pytest
from report.run_folders import make_run

from fl_lightning.files import write_json
from fl_lightning.report.journal import RunTables
from fl_lightning.report.recorded_run import read_run


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
