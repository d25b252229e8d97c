"""`fl-lightning table` where there is nothing to run."""

from contextlib import nullcontext

import pytest

from fl_lightning.data.digits import Digits
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import IID
from fl_lightning.errors import ConfigError
from fl_lightning.files import WriteError
from fl_lightning.sealed import write_json
from fl_lightning.table.command import table
from fl_lightning.table.running import Crew

TABLE = """\
title: Nothing
name: nothing
columns: {A: {}}
rows: {Row: {}}
base:
  set:
    method: Local
    model: MLP
    optimizer: SGD
    data:
      dataset: {class_path: MNIST, init_args: {root: none, download: false}}
      num_clients: 2
      partition: IID
"""


def test_a_table_none_of_whose_data_are_there_has_failed_and_is_printed_though_it_cannot_be_written(
    tmp_path, monkeypatch, capsys
):
    """It ended with 0; and where the disk was full, nothing was printed of what days had found."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(TABLE)
    assert table(["t.yaml"], lambda words: None) == 1
    assert "- column A: data.dataset: " in capsys.readouterr().out
    (tmp_path / "runs/tables/nothing/table.csv").unlink()
    (tmp_path / "runs/tables/nothing/table.csv").mkdir()  # as good as a full disk
    with pytest.raises(WriteError, match=r"cannot write .*table\.csv"):
        table(["t.yaml"], lambda words: None)
    assert "- column A: data.dataset: " in capsys.readouterr().out


def test_a_table_of_runs_on_validation_parts_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = TABLE.replace("{class_path: MNIST, init_args: {root: none, download: false}}", "Digits")
    (tmp_path / "t.yaml").write_text(text + "      validation_fraction: 0.2\n      evaluate_on: validation\n")
    monkeypatch.setattr(Crew, "run", lambda crew: 1)  # nothing is started
    table(["t.yaml"], lambda words: None)
    said = "All figures are on validation parts; the test parts were laid aside."
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "runs/tables/nothing/table.md").read_text()


def test_rows_that_differ_in_how_they_are_computed_alone_are_said_to_be_one_run(tmp_path, monkeypatch, capsys):
    """A row in cohorts had the seconds of the row one by one, to the last digit."""
    monkeypatch.chdir(tmp_path)
    text = TABLE.replace("{class_path: MNIST, init_args: {root: none, download: false}}", "Digits")
    rows = "rows: {Row: {}, Same: {}, Stacked: {set: {federation.cohort: 2, federation.graph: true}}}"
    (tmp_path / "t.yaml").write_text(text.replace("rows: {Row: {}}", rows))
    monkeypatch.setattr(Crew, "run", lambda crew: 1)  # nothing is started
    table(["t.yaml"], lambda words: None)
    out = capsys.readouterr().out
    assert "Stacked, A is the run of Row, A, its seconds, too: they differ in federation.cohort, " in out
    assert "Same, A is the run" not in out


def test_a_reference_of_another_seed_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    """A dry run ended with 0, and every run of the other seed was refused."""
    monkeypatch.chdir(tmp_path)
    data = FederatedData(Digits(), IID(), 2)
    data.setup(0)
    write_json(tmp_path / "partition.json", data.partition_record())
    (tmp_path / "clients.csv").write_text("round,client,Local-T\n1,0,0.5\n")
    text = TABLE.replace("{class_path: MNIST, init_args: {root: none, download: false}}", "Digits")
    text += "    federation: {evaluate: {reference: .}}\n"
    for seeds, refused in (([0], False), ([0, 1], True)):
        (tmp_path / "t.yaml").write_text(f"{text}seeds: {seeds}\n")
        with pytest.raises(ConfigError, match=r"^rows\.Row, columns\.A, seed 1: ") if refused else nullcontext():
            assert table(["t.yaml", "--dry-run"], lambda words: None) == 0
