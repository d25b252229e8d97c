"""A run's folder that somebody else has filled with links."""

import fcntl
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.federation.checkpoint import CheckpointPolicy, Chosen
from fl_lightning.federation.clients import ClientPool
from fl_lightning.files import WriteError, append_text, remove
from fl_lightning.report.journal import RunTables
from fl_lightning.report.record import MetricsFile
from fl_lightning.resuming import LOCK, MARK, advice_on, is_held, with_resumed_folder
from fl_lightning.run_folder import RunFolder
from fl_lightning.sealed import save_tensors, write_json


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("method: FedAvg\n")
    (path / LOCK).write_text(MARK)
    return RunFolder(path)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/clients", "models", "wandb"])
@pytest.mark.parametrize("options", [("auto", False), (None, True)], ids=["resume", "overwrite"])
def test_folder_that_is_a_link_out_of_the_run_is_refused(folder, name, options, tmp_path):
    (tmp_path / "others").mkdir()
    link = folder.path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "others")
    with pytest.raises(ConfigError, match=rf"output: .*{name} is a link that leads out of the run's folder"):
        folder.claim(*options, {})


@pytest.mark.parametrize("name", ["log", "log/version_0", "log/version_0/hparams.yaml"])
def test_loggers_do_not_write_through_a_link_out_of_the_run(folder, name, tmp_path):
    """Lightning's CSV logger writes hparams.yaml anew on resume, whatever stands there."""
    (tmp_path / "mine").write_text("precious")
    link = folder.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "mine" if name.endswith("yaml") else tmp_path)
    with pytest.raises(ConfigError, match=rf"output: .*{name} is a link that leads out of the run's folder"):
        folder.claim("auto", False, {})


def test_links_inside_the_run_and_to_it_are_none_of_them(folder, tmp_path):
    (folder.path / "wandb-1").mkdir()
    (folder.path / "wandb").symlink_to("wandb-1")
    (tmp_path / "link").symlink_to(folder.path)
    RunFolder(tmp_path / "link").claim(None, True, {})


def test_lock_that_is_a_link_leaves_the_file_alone(folder, tmp_path):
    (tmp_path / "precious").write_text("mine\n")
    (folder.path / LOCK).unlink()
    (folder.path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(WriteError, match=r"cannot write .*\.lock"), folder.held():
        pass
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_lock_that_the_disk_has_no_room_for_is_named(folder):
    """What was written was buffered, and written once more as the file was closed: that error named no file."""
    (folder.path / LOCK).write_text("")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(WriteError, match=r"cannot write .*\.lock"), folder.held():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with folder.held():
        assert (folder.path / LOCK).read_text() == MARK


@pytest.mark.parametrize("name", [".", "models"])
def test_run_of_which_a_folder_is_protected_is_not_overwritten_by_halves(folder, name, monkeypatch):
    """After `chmod a-w runs/quickstart` its checkpoints and models were deleted, and then its tables were not."""
    own = [folder.path / file for file in ("checkpoints/round-0001.ckpt", "models/00000.pt", "metrics.csv")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    protected, access = folder.path / name, os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != protected and access(path, mode))
    with pytest.raises(WriteError, match=rf"cannot write {protected}: it is protected, so nothing of the run is del"):
        folder.clean(overwrite=True)
    assert all(path.read_text() == "mine" for path in own)


def test_table_that_is_a_link_becomes_a_file(folder, tmp_path):
    (tmp_path / "precious").write_text("round\n")
    path = folder.path / "metrics.csv"
    path.symlink_to(tmp_path / "precious")
    table = MetricsFile(path, ["round"])
    table.start()
    table.append("1\n")
    assert not path.is_symlink()
    assert (path.read_text(), (tmp_path / "precious").read_text()) == ("round\n1\n", "round\n")


def test_file_with_a_second_name_becomes_one_of_its_own(folder, tmp_path):
    """A folder that was copied by hard links: what is appended in place stood in the original, too."""
    names = ("metrics.csv", "log/version_0/hparams.yaml")
    for name in names:
        for place in (tmp_path, folder.path):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("round\n")
        os.link(tmp_path / name, folder.path / name)
    table = MetricsFile(folder.path / names[0], ["round"])
    table.start()
    folder.clean(False)
    for name in names:
        append_text(folder.path / name, "1\n")
        assert ((folder.path / name).read_text(), (tmp_path / name).read_text()) == ("round\n1\n", "round\n")


def saved_run(folder, rounds_of_models, last_row, rounds=6):
    """A run of which round 1 alone is saved: its models, and its rows, in which client 0 takes part every time."""
    folder.config.write_text(f"method: FedAvg\nfederation: {{rounds: {rounds}}}\n")
    (folder.path / "models").mkdir()
    for client, round in enumerate(rounds_of_models):
        save_tensors(folder.path / "models" / f"{client:05d}.pt", {"w": torch.zeros(1)}, round=round)
    checkpoint = folder.checkpoints.save(1, {}, {}, keep=2)
    columns = {"clients.csv": ["round", "client", "participated"]}
    tables = RunTables(folder.path, columns, folder.checkpoints.journal)
    tables.start(0)
    for round in range(1, last_row + 1):
        rows = [{"round": round, "client": c, "participated": int(c in (0, round))} for c in range(6)]
        tables.append(round, {"clients.csv": rows})
    return Chosen(checkpoint)


def models_left(folder):
    return [int(path.stem) for path in sorted((folder.path / "models").iterdir())]


def test_model_of_a_round_without_a_row_is_withdrawn(folder):
    """A run was killed in the middle of its third round, of which no row stood yet."""
    chosen = saved_run(folder, [1, 3, 2, 1], last_row=2)
    (folder.path / "clients.csv").unlink()
    folder.leave_only(chosen, CheckpointPolicy(), lambda round: ())
    assert models_left(folder) == [0, 3]
    folder.leave_only(None, CheckpointPolicy(), lambda round: ())  # it begins anew
    assert models_left(folder) == []


@pytest.mark.parametrize("lost", [False, True])
def test_models_of_older_versions_are_withdrawn_by_rows_and_calendar(folder, lost):
    """They do not say of which round they are; round 3 was broken off, in which client 5 was to take part."""
    chosen = saved_run(folder, [None] * 6, last_row=2)
    if lost:
        (folder.path / "clients.csv").unlink()
    folder.leave_only(chosen, CheckpointPolicy(), {3: (5,)}.__getitem__)
    assert models_left(folder) == [1, 3, 4]


@pytest.mark.parametrize("ended", ["stopped", "finished"])
def test_models_of_older_versions_stay_where_no_round_was_broken_off(folder, ended):
    chosen = saved_run(folder, [None] * 6, last_row=2, rounds=6 if ended == "stopped" else 2)
    (folder.path / "clients.csv").unlink()
    if ended == "stopped":
        write_json(folder.path / "summary.json", {"rounds": 2})
    folder.leave_only(chosen, CheckpointPolicy(), {3: (5,)}.__getitem__)
    assert models_left(folder) == [1, 3, 4, 5]


@pytest.mark.parametrize(("rounds", "stays"), [(1, True), (3, False)])
def test_summary_of_a_later_end_goes_where_a_run_goes_on_from_before(folder, rounds, stays):
    """Killed then, the run was said to be over, and its tables not to be what it wrote."""
    chosen = saved_run(folder, [], last_row=rounds)
    write_json(folder.path / "summary.json", {"rounds": rounds, "finished": True})
    folder.leave_only(chosen, CheckpointPolicy(), lambda round: ())
    assert (folder.path / "summary.json").exists() == stays


def test_summary_of_a_later_end_goes_aside_with_its_checkpoints(folder, capsys):
    chosen = saved_run(folder, [], last_row=3)
    folder.checkpoints.save(3, {}, {}, keep=2)
    write_json(folder.path / "summary.json", {"rounds": 3, "finished": True})
    folder.leave_only(chosen, CheckpointPolicy(), lambda round: ())
    (aside,) = folder.path.rglob("summary.json")
    assert str(aside.parent) in capsys.readouterr().err


def test_states_that_no_checkpoint_names_go_at_a_start_that_saves_nothing(folder):
    """A killed run with its clients' states on disk has left them."""
    saved_run(folder, [], last_row=1)
    pool = ClientPool(folder.checkpoints.clients)
    pool.put(0, {"w": torch.zeros(1)}, 2)
    folder.checkpoints.save(2, {}, pool.flush(2), keep=1)
    pool.put(1, {"w": torch.zeros(1)}, 3)
    pool.flush(3)
    policy = CheckpointPolicy(every=0)
    folder.leave_only(Chosen(folder.checkpoints.all()[0]), policy, lambda round: ())
    assert [path.name for path in folder.checkpoints.clients.iterdir()] == ["r0002-w0.states"]
    remove(folder.checkpoints.all()[0])
    folder.leave_only(None, policy, lambda round: ())
    assert list(folder.checkpoints.clients.iterdir()) == []


def test_pipe_on_which_a_logger_would_wait_is_refused(folder):
    (folder.path / "log" / "version_0").mkdir(parents=True)
    (folder.path / "log" / "version_0" / "hparams.yaml").symlink_to("nowhere")  # is none
    folder.claim(None, True, {})
    os.mkfifo(folder.path / "log" / "version_0" / "metrics.csv")
    with pytest.raises(ConfigError, match=r"output: .*version_0/metrics\.csv is a pipe or a device"):
        folder.claim("auto", False, {})


@pytest.mark.parametrize("words", [["--resume", "nosuch/run"], ["--seed", "1", "--resume", "nosuch/run/checkpoints"]])
def test_a_folder_to_go_on_from_that_is_not_there_is_named(words, tmp_path, monkeypatch):
    """That a method must be named was said, and led away from it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--resume: there is no run in that folder, got 'nosuch/run"):
        with_resumed_folder(words)
    assert with_resumed_folder([*words, "--config", "exp.yaml"]) == [*words, "--config", "exp.yaml"]


@pytest.mark.parametrize("other", [["--name", "other"], ["--output", "elsewhere"], ["--output", "runs", "--name", "b"]])
@pytest.mark.parametrize("given", [[], ["--config", "exp.yaml"]])
def test_a_folder_to_go_on_from_and_another_one_are_refused(other, given, tmp_path, monkeypatch):
    """That a method must be named was said, or that there is no run in the other one."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "round-0001.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    (tmp_path / "runs" / "a" / "config.yaml").touch()
    for named in ("runs/a", "runs/a/checkpoints/round-0001.ckpt"):
        said = rf"^--resume: goes on with the run in runs/a, and --output and --name say \w+/({other[-1]}|a): leave"
        with pytest.raises(ConfigError, match=said):
            with_resumed_folder([*given, "--resume", named, *other])
        same = with_resumed_folder([*given, "--resume", named, "--output", "runs", "--name", "a"])
        assert same[-6:-2] == ["--output", "runs", "--name", "a"]
    assert with_resumed_folder(["--resume", "auto", *other]) == ["--resume", "auto", *other]


@pytest.mark.parametrize(
    ("said", "goes_on"),
    [("federation: {rounds: 9}", True), ("name: b", False), ("output: elsewhere", False), ("", True)],
)
def test_a_file_behind_a_runs_own_changes_it_and_not_where_it_lies(said, goes_on, tmp_path, monkeypatch):
    """A run that was moved began anew, or went on with another one, in the folder that its configuration names."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "moved" / "a" / "checkpoints" / "round-0001.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    (tmp_path / "moved" / "a" / "config.yaml").write_text("output: runs\nname: a")
    (tmp_path / "longer.yaml").write_text(said)
    words = ["--config", "moved/a/config.yaml", "--config=longer.yaml", "--resume", "auto"]
    place = ["--output", "moved", "--name", "a"] if goes_on else []
    assert with_resumed_folder(words) == [*words, *place]


def test_run_that_has_lost_its_configuration_says_so(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "round-0001.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for named in (tmp_path / "run", checkpoint):
        with pytest.raises(ConfigError, match=r"^--resume: .*run has lost its config\.yaml; say --config FILE, too$"):
            with_resumed_folder(["--resume", str(named)])
        assert "exp.yaml" in with_resumed_folder(["--config", "exp.yaml", "--resume", str(named)])


def test_a_folder_is_held_as_long_as_somebody_runs_in_it(folder, tmp_path):
    assert not is_held(folder.path)
    with folder.held():
        assert is_held(folder.path)
        with pytest.raises(ConfigError, match="output: another process is running in"), RunFolder(folder.path).held():
            pass
    assert not is_held(folder.path)
    assert not is_held(tmp_path / "nowhere")


def test_who_looks_whether_a_folder_is_held_keeps_nobody_out(folder):
    with (folder.path / LOCK).open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        timer = threading.Timer(0.03, fcntl.flock, (glance, fcntl.LOCK_UN))
        timer.start()
        with folder.held():
            assert is_held(folder.path)
        timer.join()


def test_what_is_said_of_a_broken_run_is_what_its_folder_holds(folder):
    """A run that saves by time alone, or could not write, was said to have saved the rounds before."""
    path = folder.path
    command = f"fl-lightning fit --config {path / 'config.yaml'} --resume auto"
    assert advice_on(path, saves=False) == "nothing was saved (federation.checkpoint.every is 0)"
    assert advice_on(path) == f"no round was saved; begin anew with\n  {command}"
    (path / "checkpoints").mkdir()
    for round in (9, 12):
        (path / "checkpoints" / f"round-{round:04d}.ckpt").touch()
    assert advice_on(path) == f"the rounds up to 12 are saved; continue with\n  {command}"
    (path / "config.yaml").unlink()
    assert advice_on(path) == f"there is no run in {path} any more"
