"""When a table's cell counts as finished, and which cells there are."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import Federation
from fl_lightning.report.journal import RunTables
from fl_lightning.report.record import watched_by
from fl_lightning.sealed import write_json
from fl_lightning.table.cells import (
    Cell,
    Choice,
    _clients_of,
    cells_of,
    of_edited_folders,
    of_extended_runs,
    of_other_folders,
    of_two_data_sets,
)
from fl_lightning.table.definition import Column, Row, read_definition
from fl_lightning.table.overlays import Overlay

CONFIG = {"method": "their.Method", "data": {"dataset": "their.Data"}, "federation": {"rounds": 2}}


@pytest.fixture
def cell(tmp_path):
    """One whose run has ended."""
    cell = Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, CONFIG, (), tmp_path)
    cell.folder.mkdir()
    tables = RunTables(cell.folder, {"metrics.csv": ["round", "Local-T"]}, cell.folder / "journal.txt")
    tables.start(0)
    for round in (1, 2):
        tables.append(round, {"metrics.csv": [{"round": round, "Local-T": 0.5}]})
    write_json(cell.folder / "summary.json", {"finished": True, "rounds": 2, "tables": tables.sums})
    return cell


def test_run_that_has_ended_is_finished(cell):
    assert cell.finished
    assert [row["round"] for row in cell.rows()] == [1, 2]


@pytest.mark.parametrize(
    ("file", "was", "now"),
    [
        ("metrics.csv", "2,0.5", "2,0.7"),
        ("metrics.csv", "2,0.5\n", ""),
        ("metrics.csv", "2,0.5\n", "2,0.5\n2,0.5\n"),
        ("metrics.csv", "round", "sound"),
        ("summary.json", "2", "3"),
        ("summary.json", "finished", "finish"),
        ("summary.json", "{", "["),
    ],
)
def test_damaged_run_is_not_finished_so_that_it_is_gone_on_with_and_mended(cell, file, was, now):
    path = cell.folder / file
    path.write_text(path.read_text().replace(was, now))
    assert not cell.finished


@pytest.mark.parametrize(("patience", "has"), [(2, 4), (3, 5), (None, 6)])
def test_run_that_went_on_after_its_patience_was_at_an_end_has_the_rounds_before(patience, has, tmp_path):
    """Of a cell that early stopping had ended, and somebody extended, the extension's figures were printed."""
    stopping = None if patience is None else {"monitor": "Local-V", "patience": patience}
    config = {"method": "their.Method", "data": {"dataset": "their.Data", "evaluate_on": "test"}}
    config["federation"] = {"rounds": 6, "early_stopping": stopping}
    cell = Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path)
    cell.folder.mkdir()
    lines = [f"{round},{value}" for round, value in enumerate((0.5, 0.6, 0.6, 0.6, 0.6, 0.9), 1)]
    (cell.folder / "metrics.csv").write_text("\n".join(["round,Local-V", *lines, ""]))
    write_json(cell.folder / "summary.json", {"finished": True, "rounds": 6})
    assert [row["round"] for row in cell.rows()] == list(range(1, has + 1))
    assert cell.extended_to == (6 if has < 6 else 0)
    assert bool(cell.summary()) is (has == 6)
    notes = of_extended_runs([cell])
    assert all(f"was extended to 6 rounds; its figures are of the first {has}," in line for line in notes)
    assert len(notes) == (has < 6)


@pytest.mark.parametrize(
    ("rounds", "said"), [(3, "3, of which round 3 was not tested, so that round 2 stands for it, and"), (2, "2, and")]
)
def test_last_round_that_a_run_has_not_tested_because_it_was_extended_is_named(rounds, said, tmp_path):
    """Extended before its end, with `evaluate_every: 2`, a run of three rounds had its second one's figures as last."""
    config = {"method": "their.Method", "data": {"dataset": "their.Data"}, "federation": {"rounds": rounds}}
    cell = Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path)
    cell.folder.mkdir()
    (cell.folder / "metrics.csv").write_text("round,Local-T\n1,\n2,0.5\n3,\n4,0.6\n")
    write_json(cell.folder / "summary.json", {"finished": True, "rounds": 4})
    (note,) = of_extended_runs([cell])
    assert f"its figures are of the first {said} what" in note


def test_a_figure_that_no_round_has_is_not_what_a_run_waited_for(tmp_path):
    """`Server-T` of a method without a global model: the table took the first rounds for all."""
    config = {"method": "their.Method", "data": {"dataset": "their.Data", "evaluate_on": "validation"}}
    config["federation"] = {"rounds": 4, "early_stopping": {"patience": 1}}
    cell = Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path)
    cell.folder.mkdir()
    (cell.folder / "metrics.csv").write_text("round,Global-T,Server-T\n1,0.1,\n2,0.2,\n3,0.3,\n4,0.4,\n")
    assert (cell.end, len(cell.rows())) == (4, 4)
    assert watched_by(config, cell.rows()) == ("", None)


def test_who_holds_which_samples_is_read_of_a_run_that_was_extended_too(cell):
    assert cell.clients == ""
    write_json(cell.folder / "partition.json", {"hash": "of indices", "samples": "of pixels", "clients": []})
    write_json(cell.folder / "summary.json", {"finished": True, "rounds": 9})
    assert cell.summary() == {}
    assert cell.clients == "of indices of pixels"


def test_clients_are_the_same_in_whatever_parts_a_seed_cuts_their_samples(tmp_path):
    """As of sites, users or a public code's own seed: they are no new clients under another seed of the run."""

    def holders(changed, **client):
        record = {"hash": f"of seed {changed}", "samples": "of pixels", "clients": [client] if client else []}
        write_json(tmp_path / "partition.json", record)
        return _clients_of(tmp_path / "partition.json", changed)[1]

    first = holders(0, train=[1, 4], validation=[], test=[7])
    assert first == holders(1, train=[4], validation=[1], test=[7]) == holders(2, train=[7, 1], test=[4])
    assert first != holders(3, train=[1, 4], test=[8])
    assert holders(4) == ""  # a `Population` lists nobody


def test_run_of_an_older_version_that_says_nothing_of_its_tables_is_finished(cell):
    write_json(cell.folder / "summary.json", {"finished": True, "rounds": 2})
    assert cell.finished


def test_a_file_of_weights_that_holds_something_else_makes_another_run(tmp_path):
    start = tmp_path / "start.pt"
    model = {"class_path": "WrappedModel", "init_args": {"module": "their.Net", "weights": str(start)}}

    def name():
        config = {**CONFIG, "model": model}
        return Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path).name

    missing = name()
    start.write_bytes(b"one")
    one = name()
    start.write_bytes(b"two")
    assert len({missing, one, name()}) == 3
    start.write_bytes(b"one")
    assert name() == one


def test_a_file_that_a_method_reads_and_that_holds_something_else_makes_another_run(tmp_path):
    def name():
        config = {**CONFIG, "method": {"class_path": "mine.Mine", "init_args": {"table": str(tmp_path / "table.json")}}}
        return Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path).name

    (tmp_path / "table.json").write_text("[1]")
    one = name()
    (tmp_path / "table.json").write_text("[1, 2]")
    assert name() != one


def test_a_reference_that_was_run_again_makes_another_run(tmp_path):
    def name():
        config = {**CONFIG, "federation": {"rounds": 2, "evaluate": {"reference": str(tmp_path / "local")}}}
        return Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path).name

    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "clients.csv").write_text("round,client,Local-T\n1,0,0.5\n")
    one = name()
    (tmp_path / "local" / "clients.csv").write_text("round,client,Local-T\n1,0,0.25\n")
    assert name() != one


def test_runs_that_care_otherwise_for_clients_that_fail_are_two_cells(tmp_path):
    def name(**settings):
        config = {**CONFIG, "federation": {"rounds": 2, **settings}}
        return Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, config, (), tmp_path).name

    usual = Federation(rounds=2)
    assert name() == name(on_client_error=usual.on_client_error, max_growth=usual.max_growth)
    assert len({name(), name(on_client_error="skip"), name(max_growth=100.0)}) == 3


@pytest.mark.parametrize(
    ("figure", "settings", "said"),
    [
        ("Local-V.last", "{}", "set data.validation_fraction above 0"),
        ("Local-T.best@eval_loss/Local-V", "{}", "set data.validation_fraction above 0"),
        ("Local-V.last", "{data.validation_fraction: 0.2, data.evaluate_on: validation}", "the test parts' names"),
        ("F1Score/Local-T.last", "{}", "do not measure F1Score"),
        ("F1Score/Local-T.last", "{metrics: [torchmetrics.F1Score]}", ""),
        ("eval_loss/Local-T.last", "{federation.evaluate.loss: false}", "do not measure eval_loss"),
        ("Local-T_newcomers.last", "{}", "set federation.newcomers.clients"),
        ("epsilon.last", "{}", "put ClipAndNoise into federation.wire"),
        ("epsilon.last", "{federation.wire: [Quantize]}", "put ClipAndNoise into federation.wire"),
        ("epsilon.last", "{federation.wire: [Quantize, ClipAndNoise]}", ""),
        ("summary.record_privacy.epsilon", "{}", "set federation.record_privacy"),
        ("Server-T.last", "{federation.evaluate.server: false}", "evaluate.server switches it off"),
        ("eval_loss/Global-T.last", "{federation.evaluate.globally: false}", "evaluate.globally switches it off"),
        ("Local-T_worst10.last", "{federation.evaluate.trained: false}", "evaluate.trained switches it off"),
        ("Local-T_received.last", "{federation.evaluate.trained: false}", ""),
        ("Local-T_received_std.last", "{federation.evaluate.received: false}", "evaluate.received switches it off"),
        (
            "Local-V.last",
            "{data.validation_fraction: 0.2, federation.evaluate.validation: false}",
            "evaluate.validation switches it off",
        ),
        ("receive_drop.mean", "{federation.evaluate.trained: false}", "evaluate.trained switches it off"),
        ("summary.best.Local-T.value", "{federation.evaluate.trained: false}", "evaluate.trained switches it off"),
        ("Local-T/fine_tuned_worst10.last", "{}", "set federation.evaluate.fine_tune"),
        ("Local-T/fine_tuned.last", "{federation.evaluate.fine_tune: {epochs: 1}}", ""),
        ("Local-T.last", "{data.split: global}", "take Global-T or Server-T"),
        ("Global-T.last", "{data.split: global}", ""),
        ("Local-V.last", "{data.validation_fraction: 0.2}", ""),
        ("Local-T.last", "{data.validation_fraction: 0.2, data.evaluate_on: validation}", ""),
    ],
)
def test_figure_that_no_run_can_have_is_refused(tmp_path, figure, settings, said):
    rest = f"columns: {{Digits: {{}}}}\nrows:\n  FedAvg: {{set: {settings}}}\n"
    (tmp_path / "own.yaml").write_text(f"base: {{files: [quickstart]}}\nfigure: {figure}\n{rest}")
    definition, choice = read_definition(tmp_path / "own.yaml"), Choice(tmp_path)
    if not said:
        assert len(cells_of(definition, choice)) == len(definition.seeds)
        return
    with pytest.raises(ConfigError) as caught:
        cells_of(definition, choice)
    assert caught.value.key == f"rows.FedAvg, columns.{definition.columns[0].name}"
    assert f"there is no {figure}: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("listed", [True, False])
def test_figure_on_validation_parts_that_the_partitions_file_lists_is_there_under_split_global(tmp_path, listed):
    """It was refused, with the advice to set a fraction, which the run refuses."""
    own = {"train": [0, 1], "validation": [2]} if listed else {"train": [0, 1]}
    (tmp_path / "who.json").write_text(json.dumps([own, {"train": [3, 4]}]))
    data = f"{{split: global, num_clients: 2, partition: FromFile, partition.path: {tmp_path}/who.json}}"
    rest = f"columns: {{A: {{}}}}\nrows: {{FedAvg: {{set: {{data: {data}}}}}}}\n"
    (tmp_path / "own.yaml").write_text(f"base: {{files: [quickstart]}}\nfigure: Server-V.last\n{rest}")
    with nullcontext() if listed else pytest.raises(ConfigError, match=r"set data\.validation_fraction above 0"):
        assert len(cells_of(read_definition(tmp_path / "own.yaml"), Choice(tmp_path))) == 1


@pytest.mark.parametrize(
    ("logger", "key"),
    [
        ("{class_path: wandb, init_args: {id: mine}}", "id"),
        ("{class_path: wandb, init_args: {version: mine}}", "version"),
        ("{class_path: CSVLogger, init_args: {save_dir: logs, version: 3}}", "version"),
        ("{class_path: CSVLogger, init_args: {version: 3}}", ""),
        ("{class_path: CSVLogger, init_args: {save_dir: logs}}", ""),
    ],
)
def test_name_under_which_all_runs_would_log_is_refused(tmp_path, logger, key):
    rest = f"columns: {{Digits: {{set: {{logger: [{logger}]}}}}}}\nrows: {{FedAvg: {{}}}}\n"
    (tmp_path / "own.yaml").write_text(f"base: {{files: [quickstart]}}\nfigure: Local-T.last\n{rest}")
    definition = read_definition(tmp_path / "own.yaml")
    if not key:
        cells_of(definition, Choice(tmp_path))
        return
    with pytest.raises(ConfigError, match=rf"logger\.0\.{key}: must be left out: all runs of a table or a search"):
        cells_of(definition, Choice(tmp_path))


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        ("fl_lightning.data.image_folder.ImageFolder", False),
        ("fl_lightning.data.own_files.LEAF", False),
        ("fl_lightning.data.own_files.PFLlibFolder", False),
        ("somebody.elses.Data", False),
        ("fl_lightning.data.idx.MNIST", True),
        ("fl_lightning.data.colour.CIFAR10", True),
    ],
)
def test_two_folders_of_somebodys_own_are_not_one_run(tmp_path, kind, published):
    def of(kind, root):
        images = {"class_path": kind, "init_args": {"root": root}}
        data = {"dataset": {"class_path": "Sample", "init_args": {"dataset": images}}}
        return Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, {**CONFIG, "data": data}, (), tmp_path)

    a, b = of(kind, "a"), of(kind, "b")
    assert a.name == b.name  # a folder may be moved
    assert of_two_data_sets([a, b]) == (None if published else (a, b))
    assert of_two_data_sets([a, a]) is None


def test_finished_run_of_another_folder_of_images_is_found(cell, tmp_path):
    def config(root):
        return {**CONFIG, "data": {"dataset": {"class_path": "ImageFolder", "init_args": {"root": str(root)}}}}

    (tmp_path / "link").symlink_to(tmp_path / "then")
    same, other = replace(cell, config=config(tmp_path / "link")), replace(cell, config=config(tmp_path / "now"))
    assert same.folder == other.folder  # a folder may be moved
    cell.folder.rename(other.folder)
    (other.folder / "config.yaml").write_text(json.dumps(config(tmp_path / "then")))
    assert of_other_folders([same]) == {}
    assert of_other_folders([other]) == {(str(tmp_path / "then"), str(tmp_path / "now")): [other]}
    (other.folder / "summary.json").unlink()
    assert of_other_folders([other]) == {}


def test_a_cell_is_of_its_data_as_they_are(cell, tmp_path):
    file, split = tmp_path / "own.csv", tmp_path / "split.json"
    dataset = {"class_path": "CSVTable", "init_args": {"path": str(file)}}
    partition = {"class_path": "FromFile", "init_args": {"path": str(split)}}

    def name():
        return replace(cell, config={**CONFIG, "data": {"dataset": dataset, "partition": partition}}).name

    without = name()
    file.write_text("x,y\n1,0\n")
    first = name()
    split.write_text("{}")
    second = name()
    file.write_text("x,y\n2,1\n")
    third = name()
    assert len({without, first, second, third}) == 4
    file.write_text("x,y\n1,0\n")
    assert name() == second


@pytest.mark.parametrize(
    ("kind", "argument"), [("ImageFolder", "root"), ("HuggingFace", "path"), ("own.Mine", "where")]
)
def test_finished_run_whose_data_were_changed_since_is_found(cell, tmp_path, kind, argument):
    images = tmp_path / "images" / "cat"
    images.mkdir(parents=True)
    (images / "1.png").write_bytes(b"a picture")
    data = {"dataset": {"class_path": kind, "init_args": {argument: str(images.parent), "word": "no folder"}}}
    own = replace(cell, config={**CONFIG, "data": data})
    cell.folder.rename(own.folder)
    past = (own.folder / "summary.json").stat().st_mtime - 100
    for path in (images.parent, images, images / "1.png"):
        os.utime(path, (past, past))
    assert of_edited_folders([own]) == {}
    (images / "2.png").write_bytes(b"another")
    os.utime(images / "2.png", (past, past))
    os.utime(images, (past + 200, past + 200))
    assert of_edited_folders([own]) == {str(images.parent): [own]}
    arguments = {**data["dataset"]["init_args"], "around": str(tmp_path)}  # in which the run itself lies
    around = replace(cell, config={**CONFIG, "data": {"dataset": {"class_path": kind, "init_args": arguments}}})
    own.folder.rename(around.folder)
    assert of_edited_folders([around]) == {str(images.parent): [around]}
    around.folder.rename(own.folder)
    (own.folder / "summary.json").unlink()
    assert of_edited_folders([own]) == {}
