"""How a table's cells are run."""

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess

import pytest

from fl_lightning.errors import is_first_process
from fl_lightning.federation.team import is_main, started_outside
from fl_lightning.resuming import HELD
from fl_lightning.sealed import write_json
from fl_lightning.table import running
from fl_lightning.table.cells import Cell
from fl_lightning.table.definition import Column, Row
from fl_lightning.table.overlays import Overlay

CONFIG = {"method": "their.Method", "data": {"dataset": "their.Data"}, "federation": {"rounds": 1}}


@pytest.fixture
def cell(tmp_path):
    cell = Cell(Row("Method", Overlay()), Column("", Overlay(), {}), 0, CONFIG, (), tmp_path / "cells")
    cell.folder.mkdir(parents=True)
    return cell


def test_a_cell_whose_holder_ended_just_after_it_was_refused_is_tried_again(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "PATIENCE", 0.0)
    tried = cell.folder / "tried"

    def fit(words):
        if not tried.exists():
            tried.touch()
            os.write(2, f"fl-lightning: error: output: {HELD} {cell.folder}\n".encode())
            sys.exit(running.REFUSED)
        write_json(cell.folder / "summary.json", {"finished": True, "rounds": 1})

    states = []
    crew = running.Crew([cell], tmp_path / "logs", 1, fit, lambda crew: states.append(crew.jobs[0].state))
    assert crew.run() == 0
    assert list(dict.fromkeys(states)) == ["running", "elsewhere", "finished"]


def test_a_cell_of_a_table_that_srun_or_torchrun_started_is_a_process_of_its_own(cell, tmp_path, monkeypatch):
    """It took itself for one of the job's processes, and waited for the others."""
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}
    places |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_JOB_NAME": "tables"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)

    def fit(words):
        os.write(2, f"{started_outside()} {is_main()} {is_first_process()}\n".encode())
        sys.exit(1)

    assert started_outside() == (2, 1)
    crew = running.Crew([cell], tmp_path / "logs", 1, fit, lambda crew: None)
    assert crew.run() == 1
    assert crew.jobs[0].said == "(1, 1) True True"
    assert started_outside() == (2, 1)


def test_a_cell_that_is_refused_for_what_it_says_has_failed(cell, tmp_path):
    def fit(words):
        os.write(2, b"fl-lightning: error: model: there is no such model\n")
        sys.exit(running.REFUSED)

    crew = running.Crew([cell], tmp_path / "logs", 1, fit, lambda crew: None)
    assert crew.run() == 1
    assert (crew.jobs[0].state, crew.jobs[0].said) == ("failed", "model: there is no such model")


def test_a_signal_while_a_run_ends_or_begins_stops_the_table(cell, tmp_path, monkeypatch):
    """It met a process that was closed, or none that it could ask, and the table waited for the whole run."""

    def hit(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    with monkeypatch.context() as patched:
        patched.setattr(running, "_last_line", hit)
        assert running.Crew([cell], tmp_path / "logs", 1, lambda words: None, lambda crew: None).run() == 143
    start = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda process: (start(process), hit()))
    begun = time.monotonic()
    assert running.Crew([cell], tmp_path / "logs", 1, lambda words: time.sleep(9), lambda crew: None).run() == 143
    assert time.monotonic() - begun < 5


def test_a_log_that_cannot_be_written_is_said_of_the_cell(cell, tmp_path, capfd):
    """Its process ended in a traceback, and the table said that the disk was full."""
    crew = running.Crew([cell], tmp_path / "logs", 1, lambda words: None, lambda crew: None)
    (tmp_path / "logs" / f"{cell.name}.log").mkdir(parents=True)
    assert crew.run() == 1
    (job,) = crew.jobs
    assert (job.state, job.said) == ("failed", f"cannot write {tmp_path / 'logs' / cell.name}.log: Is a directory")
    assert capfd.readouterr() == ("", "")


def test_a_process_that_the_system_does_not_start_is_said_of_the_cell(cell, tmp_path, monkeypatch):
    """The table ended in a traceback, and took the cells that were running with it."""

    def refuse(process):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(BaseProcess, "start", refuse)
    crew = running.Crew([cell], tmp_path / "logs", 1, lambda words: None, lambda crew: None)
    assert crew.run() == 1
    (job,) = crew.jobs
    assert (job.state, job.said) == ("failed", f"its process cannot be started ({os.strerror(errno.EAGAIN)})")


def test_a_log_with_a_second_name_is_added_to_under_its_own(cell, tmp_path):
    log = tmp_path / "logs" / f"{cell.name}.log"
    log.parent.mkdir()
    (tmp_path / "original.log").write_text("before\n")
    os.link(tmp_path / "original.log", log)
    running.Crew([cell], tmp_path / "logs", 1, lambda words: os.write(2, b"now\n"), lambda crew: None).run()
    assert (tmp_path / "original.log").read_text() == "before\n"
    assert log.read_text().startswith("before\nnow\n")


def test_a_run_that_is_killed_is_not_said_to_fail_as_its_last_start_did(cell, tmp_path):
    log = tmp_path / "logs" / f"{cell.name}.log"
    log.parent.mkdir()
    log.write_text("fl-lightning: error: model: there is no such model\n")

    def fit(words):
        os.kill(os.getpid(), signal.SIGKILL)

    crew = running.Crew([cell], tmp_path / "logs", 1, fit, lambda crew: None)
    assert crew.run() == 1
    assert crew.jobs[0].said == "killed by SIGKILL, as the system does where memory runs out"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "killed by SIGKILL, as the system does where memory runs out; its last line: round 3/9"),
        (-signal.SIGSEGV, "killed by SIGSEGV; its last line: round 3/9"),
        (128 + signal.SIGTERM, "stopped by SIGTERM"),
        (2, "round 3/9"),
    ],
)
def test_a_run_that_a_signal_ended_is_said_to_be_so(code, said):
    """Its last line was of a round that went well, or the command to go on with."""
    assert running._why(code, "round 3/9") == said


def test_a_run_that_could_not_even_write_its_line_is_explained():
    assert running._why(2, "") == "ended with exit code 2 and wrote nothing, as where the disk is full"


def test_a_cell_whose_files_were_edited_after_the_start_is_not_run_under_its_name(cell, tmp_path):
    """What it read of them was another run's, and its figures stood under the first one's name."""
    (tmp_path / "table.json").write_text("[1]")
    config = {**CONFIG, "method": {"class_path": "mine.Mine", "init_args": {"table": str(tmp_path / "table.json")}}}
    cells = [replace(cell, config=config, seed=seed) for seed in (0, 1)]
    assert len({own.name for own in cells}) == 2

    def fit(words):
        (tmp_path / "table.json").write_text("[1, 2]")
        folder = tmp_path / "cells" / words[words.index("--name") + 1]
        write_json(folder / "summary.json", {"finished": True, "rounds": 1})

    crew = running.Crew(cells, tmp_path / "logs", 1, fit, lambda crew: None)
    assert crew.run() == 1
    assert [job.state for job in crew.jobs] == ["finished", "failed"]
    assert crew.jobs[1].said.startswith("method.init_args.table: the file was edited after the start; ")
