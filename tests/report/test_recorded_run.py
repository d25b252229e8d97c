"""Runs' folders as they are read back, whatever has happened to them."""

import pytest
from report.run_folders import make_run

from fl_lightning.report.recorded_run import read_run


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 2_000, "- " * 2_000 + "1", "a: [1, 2", "\0", "5"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "partition.json"])
def test_damaged_description_is_noted(text, name, tmp_path):
    """libyaml's constructor ends the whole process over thousands of brackets."""
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(text)
    assert read_run(folder, "report").notes == (f"{name} is damaged",)
