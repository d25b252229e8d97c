"""The logger's own parts; whole runs with W&B are in `tests/cli/test_wandb.py`."""

import json
import struct

import numpy as np
import pytest

pytest.importorskip("wandb")

from fl_lightning.report import wandb_access
from fl_lightning.report.run_logger import RoundRecord, RunStart
from fl_lightning.report.wandb import WandbLogger, takes_place_of
from fl_lightning.report.wandb_file import BLOCK, HEADER, is_unsent, raw_records, run_files


def log_file(records):
    """Records as W&B writes them: in parts that end with a block of 32 KiB."""
    log = bytearray(HEADER)
    for record in records:
        first, rest = True, record
        while first or rest:
            left = BLOCK - len(log) % BLOCK
            if left < 7:
                log += bytes(left)
                left = BLOCK
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = 1 if first and not rest else 2 if first else 3 if rest else 4
            log += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    return bytes(log)


def test_records_are_read_back_across_blocks():
    rng = np.random.default_rng(0)
    records = [rng.bytes(size) for size in (0, 5, BLOCK, 3 * BLOCK, 1, BLOCK - 40, 30, 7)]
    assert list(raw_records(log_file(records))) == records


def test_record_that_was_cut_short_is_left_out():
    records = [b"a" * 100, b"b" * 2 * BLOCK]
    log = log_file(records)
    for length in (len(log) - 1, BLOCK + 3, HEADER + 110):
        assert list(raw_records(log[:length])) == records[:1]
    assert list(raw_records(log[: HEADER + 50])) == list(raw_records(b"")) == []


def test_files_of_a_run_are_found_oldest_first(tmp_path):
    names = [
        "offline-run-20260102_000000-ab",
        "run-20260101_000000-ab",
        "offline-run-20260101_120000-abc",
        "latest-run",
    ]
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / f"run-{name.split('-')[-1]}.wandb").touch()
    found = run_files(tmp_path, "ab")
    assert [path.parent.name for path in found] == [names[1], names[0]]
    assert [is_unsent(path) for path in found] == [False, True]
    found[1].with_name("run-ab.wandb.synced").touch()
    assert not is_unsent(found[1])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("wandb", True),
        ("WandbLogger", True),
        ("lightning.pytorch.loggers.WandbLogger", True),
        ("lightning.pytorch.loggers.wandb.WandbLogger", True),
        ("pytorch_lightning.loggers.WandbLogger", True),
        ("my_project.WandbLogger", False),
        ("CSVLogger", False),
    ],
)
def test_logger_takes_the_place_of_lightnings(name, ours):
    assert takes_place_of(name) is ours


def test_key_is_found_without_asking(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    assert not wandb_access.has_key("https://example.org")
    file.write_text("machine example.org login user password secret\n")
    file.chmod(0o600)
    assert wandb_access.has_key("https://example.org")
    assert not wandb_access.has_key("https://example.com")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert wandb_access.has_key("https://example.com")


def make_start(folder, rows=()):
    about = {"name": "run", "method": "Some", "seed": 0, "versions": {}, "git_commit": None}
    return RunStart(folder, about, "hash", ["a", "b"], np.ones((3, 2), dtype=int), 5, rows)


def row(round, **values):
    return {"round": round, "Local-T": round / 10, **values}


class Run:
    """In W&B's place: keeps what it is given, and fails where it is told to."""

    def __init__(self, fails_on=()):
        self.fails_on, self.steps, self.finished = fails_on, {}, []
        self.config, self.summary, self.starting_step = {}, {}, 0

    def log(self, values, step, commit):
        for word in self.fails_on:
            if any(word in name for name in values):
                raise RuntimeError(f"no {word}\nsecond line")
        self.steps[step] = values

    def define_metric(self, *arguments, **options):
        pass

    def finish(self, exit_code):
        self.finished.append(exit_code)


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """A logger that has begun a run on `Run`, which `logger.run` is."""

    def make(fails_on=(), rows=(), starting_step=0):
        run = Run(fails_on)
        run.starting_step = starting_step
        run.config = type("Config", (), {"update": lambda self, values, **options: None})()
        made = WandbLogger(save_dir=str(tmp_path))
        monkeypatch.setattr(made, "_connect", lambda earlier: setattr(made, "_experiment", run))
        made.run = run
        made.begin(make_start(tmp_path, rows))
        return made

    return make


def clients():
    return [
        {"round": 1, "client": c, "participated": 1, "num_train": 2, "num_test": 1, "Local-T": 0.5} for c in range(3)
    ]


def test_failure_of_a_table_leaves_the_numbers(logger, capsys):
    made = logger(fails_on=["clients/table"])
    for round in (1, 2):
        made.log_round(RoundRecord(row(round), clients()))
    assert made.run.steps == {1: row(1), 2: row(2)}
    assert not made.lost
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no clients/table" in err
    assert "second line" not in err


def test_failure_of_the_numbers_is_said_once_and_is_the_end_of_wandb(logger, capsys):
    made = logger(fails_on=["Local-T"])
    for round in (1, 2):
        made.log_round(RoundRecord(row(round)))
    made.end({"rounds": 2})
    made.finalize("success")
    assert made.lost
    assert made.run.finished == [1]
    assert made.experiment is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "goes on without it" in err


def test_failure_at_the_end_is_harmless(logger, capsys, monkeypatch):
    made = logger()

    def never(exit_code):
        raise TimeoutError("took too long")

    monkeypatch.setattr(made.run, "finish", never)
    made.finalize("success")
    assert "took too long" in capsys.readouterr().err


def test_rounds_that_the_server_has_are_not_logged_again(logger):
    """W&B's next step is 3, the checkpoint's round 4: rounds 3 and 4 are caught up with, round 4 is not done twice."""
    made = logger(rows=[row(round) for round in (1, 2, 3, 4)], starting_step=3)
    for round in (4, 5):
        made.log_round(RoundRecord(row(round), evaluated=False))
    assert list(made.run.steps) == [3, 4, 5]
    assert made.run.summary["Local-T"] == 0.4
    assert (made.run.summary["best/Local-T"], made.run.summary["best_round/Local-T"]) == (0.5, 5)


def test_worse_round_does_not_replace_the_best(logger):
    made = logger()
    for round, value in ((1, 0.4), (2, 0.9), (3, 0.9), (4, 0.1)):
        made.log_round(RoundRecord({"round": round, "Local-T": value}))
    assert (made.run.summary["best/Local-T"], made.run.summary["best_round/Local-T"]) == (0.9, 2)


def test_id_is_kept_in_the_runs_folder(logger, tmp_path):
    def begun():
        logger()
        return json.loads((tmp_path / "wandb.json").read_text())["id"]

    first = begun()
    assert begun() == first
    (tmp_path / "wandb.json").write_text("{")
    assert begun() != first


@pytest.mark.parametrize(("every", "drawn"), [(0, []), (2, [1, 2, 4, 5]), (10, [1, 5])])
def test_pictures_are_drawn_now_and_then(logger, every, drawn):
    made = logger()
    made.pictures_every = every
    assert [round for round in range(1, 6) if made.wants_shared(round)] == drawn
