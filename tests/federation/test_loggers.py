"""Lightning's own loggers, side by side."""

import importlib.util
import threading

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.errors import ConfigError
from fl_lightning.federation.loggers import Loggers
from fl_lightning.report.run_logger import RunStart


def test_two_loggers_of_one_kind_write_into_folders_of_their_own(tmp_path):
    Loggers([CSVLogger(tmp_path), TensorBoardLogger(tmp_path), CSVLogger(tmp_path, name="other")])
    with pytest.raises(ConfigError, match=r"^logger\.2: writes into the folder of logger\.0; give one of them another"):
        Loggers([CSVLogger(tmp_path), TensorBoardLogger(tmp_path), CSVLogger(tmp_path)])


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_runs_that_begin_at_once_log_into_folders_of_their_own(tmp_path, kind):
    """Both had looked which version is free before either wrote: cells of a table, say."""
    if kind is TensorBoardLogger:
        pytest.importorskip("tensorboard")
    runs = [Loggers([kind(tmp_path), kind(tmp_path / "apart", version=0)]) for _ in range(3)]
    for run in runs:
        run.reserve()
    assert [run.versions for run in runs] == [{0: 0, 1: 0}, {0: 1, 1: 0}, {0: 2, 1: 0}]
    assert not (tmp_path / "apart").exists()  # it was told a version, and makes the folder when it writes


def test_loggers_of_one_run_may_share_a_folder(tmp_path):
    pytest.importorskip("tensorboard")
    one = Loggers([CSVLogger(tmp_path), TensorBoardLogger(tmp_path)])
    one.reserve()
    assert one.versions == {0: 0, 1: 0}


def test_version_that_can_never_be_taken_ends_the_search(tmp_path):
    """A file in its place, which no listing of folders shows."""
    (tmp_path / "lightning_logs").mkdir()
    (tmp_path / "lightning_logs" / "version_0").touch()
    one = Loggers([CSVLogger(tmp_path)])
    one.reserve()
    assert one.versions == {0: 0}


def test_second_wandb_logger_is_refused(tmp_path):
    """Both logged every round into one run: the folder keeps one id."""
    wandb = pytest.importorskip("fl_lightning.report.wandb")
    with pytest.raises(ConfigError, match=r"^logger\.1: would log into the run of logger\.0; leave one of them out"):
        Loggers([wandb.WandbLogger(project="a"), wandb.WandbLogger(project="b")])


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.parametrize("saved", [0, 2])
def test_rounds_after_the_last_checkpoint_of_a_killed_process_are_not_there_twice(tmp_path, saved, monkeypatch):
    """TensorBoard drew both, of which the first may never have been (a value of another seed of the GPU, say)."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # a test of several processes may have left another
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def go(rows, rounds, value):
        loggers = Loggers([TensorBoardLogger(tmp_path, name="mine", version=0)])
        loggers.log_hyperparams({"a": 1})
        loggers.begin(RunStart(tmp_path, {}, "hash", ["a"], np.ones((1, 1)), 4, rows))
        for round in rounds:
            loggers.log_round({"round": round, "Local-T": value}, lambda with_shared: None)
        return loggers

    go([], (1, 2, 3), 0.5)
    go([{"round": n} for n in range(1, saved + 1)], range(saved + 1, 5), 0.75).close("success")
    events = EventAccumulator(str(tmp_path / "mine" / "version_0"))
    events.Reload()
    said = [(event.step, event.value) for event in events.Scalars("Local-T")]
    assert said == [(n, 0.5 if n <= saved else 0.75) for n in range(1, 5)]


def test_a_logger_that_fails_gives_the_reason(tmp_path, capfd):
    """Of a file that cannot be written it was said that 0.5 cannot be logged."""
    (tmp_path / "logs").write_text("no folder")
    loggers = Loggers([TensorBoardLogger(tmp_path / "logs", "tb", 0)])
    loggers.log_round({"round": 1, "Local-T": 0.5}, lambda shared: None)
    assert capfd.readouterr().err.startswith("logger TensorBoardLogger failed (NotADirectoryError: [Errno 20]")


def test_a_disk_that_is_full_under_tensorboards_thread_is_one_line(tmp_path, capfd, monkeypatch):
    """A traceback of the thread stood above it."""
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own

    def write(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write", write)
    loggers = Loggers([TensorBoardLogger(tmp_path, "tb", 0)])
    for round in (1, 2):
        loggers.log_round({"round": round, "loss": 0.5}, lambda with_shared: None)
    err = capfd.readouterr().err
    assert err.startswith("logger TensorBoardLogger failed (OSError: [Errno 28] No space left on device)")
    assert err.count("\n") == 1
    assert loggers.present == []
