"""Exact resume: a run that was killed at any moment ends as one that was not, bit for bit."""

import copy
import itertools
import json
import os
import random
import shutil
import time

import numpy as np
import pytest
import torch

from cli.run_files import read_run, without_seconds

ROUNDS = 4
VARIANTS = {
    "FedRep": {"method": {"class_path": "FedRep"}, "federation": {"rounds": ROUNDS, "participation": 0.5}},
    "FedProto": {"method": {"class_path": "FedProto"}, "federation": {"rounds": ROUNDS}},
    "FedRep-disk": {
        "method": {"class_path": "FedRep"},
        "federation": {"rounds": ROUNDS, "participation": 0.5, "pool": "disk"},
    },
    "FedProto-disk": {"method": {"class_path": "FedProto"}, "federation": {"rounds": ROUNDS, "pool": "disk"}},
}


@pytest.fixture(autouse=True)
def _no_pictures(workplace):
    workplace.draws = False


@pytest.fixture(scope="module")
def straight(make_workplace):
    """variant -> a workplace whose run was never stopped, and how many seconds it took; made when first asked for."""
    made = {}

    def get(variant):
        if variant not in made:
            place = make_workplace(variant.lower())
            place.draws = False
            place.change(**VARIANTS[variant])
            start = time.monotonic()
            place.fit("--quiet")
            place.took = time.monotonic() - start
            made[variant] = place
        return made[variant]

    return get


def check_folder(folder, keep=2):
    """The `keep` newest checkpoints, the client states that they name, and nothing temporary."""
    checkpoints = sorted((folder / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in checkpoints] == [f"round-{r:04d}.ckpt" for r in range(ROUNDS - keep + 1, ROUNDS + 1)]
    indices = [torch.load(path, weights_only=True)["clients"] for path in checkpoints]
    named = set(itertools.chain(*(index["segments"] for index in indices)))
    assert {path.name for path in (folder / "checkpoints" / "clients").iterdir()} == named
    assert [path for path in folder.rglob("*") if path.name.endswith(".tmp")] == []


def resume_after_kills(place, moments):
    """Start, kill after so many seconds, start again …; at last let it finish. Returns whether a kill hit."""
    hit = 0
    for moment in moments:
        running = place.start("fit", "--config", "exp.yaml", "--resume", "auto", "--quiet")
        time.sleep(moment)
        running.kill()
        code, _, err = running.result()
        assert code in (0, -9), err
        hit += code == -9
    place.fit("--resume", "auto", "--quiet")
    return hit


@pytest.mark.parametrize("seed", range(4))
def test_run_killed_at_a_random_moment_resumes_exactly(straight, workplace, assert_same_run, seed):
    """One kill or, for every fourth seed, three; moments over the whole duration of a run."""
    variant = list(VARIANTS)[seed % len(VARIANTS)]
    reference = straight(variant)
    workplace.change(**VARIANTS[variant])
    rng = random.Random(seed)
    resume_after_kills(workplace, [rng.uniform(0.05, reference.took) for _ in range(3 if seed % 4 == 0 else 1)])
    assert_same_run(reference.run, workplace.run)
    check_folder(workplace.run)


# Syncs and renames of a run in order: config.yaml 3, partition.json 3, metrics.csv 2, clients.csv 2, then a round:
# 2 appends, the clients' states, the checkpoint.
@pytest.mark.parametrize("seed", range(3))
def test_run_killed_while_it_writes_resumes_exactly(straight, workplace, assert_same_run, seed):
    """The process kills itself before one of its syncs and renames: before, in and after every kind of file."""
    variant = list(VARIANTS)[seed % len(VARIANTS)]
    reference = straight(variant)
    workplace.change(**VARIANTS[variant])
    number = random.Random(seed).randint(11, 60)
    for _ in range(1 + seed % 2):
        code, _, err = workplace.call("fit", "--config", "exp.yaml", "--resume", "auto", "--quiet", die_at=number)
        assert code in (0, -9), err
    workplace.fit("--resume", "auto", "--quiet")
    assert_same_run(reference.run, workplace.run)
    check_folder(workplace.run)


@pytest.mark.parametrize("number", [1, 4, 10])
def test_run_killed_before_its_first_round_resumes(straight, workplace, assert_same_run, number):
    """While config.yaml (1-3), partition.json (4-6), metrics.csv (7, 8) and clients.csv (9, 10) are first written."""
    workplace.change(**VARIANTS["FedRep"])
    code, _, _ = workplace.call("fit", "--config", "exp.yaml", "--quiet", die_at=number)
    assert code == -9
    workplace.fit("--resume", "auto", "--quiet")
    assert_same_run(straight("FedRep").run, workplace.run)
    check_folder(workplace.run)


def test_run_killed_after_its_last_checkpoint_is_completed(straight, workplace, assert_same_run):
    """Killed between the last checkpoint and summary.json: what is left to do is done, checkpoints are tidied."""
    workplace.change(**VARIANTS["FedRep"])
    workplace.draws = True
    code, _, _ = workplace.call("fit", "--config", "exp.yaml", "--quiet", die_at=f"round-{ROUNDS:04d}.ckpt")
    assert code == -9
    workplace.fit("--resume", "auto", "--quiet")
    assert_same_run(straight("FedRep").run, workplace.run)
    assert (workplace.run / "curves.png").exists()
    assert (workplace.run / "summary.json").exists()
    check_folder(workplace.run)


ENOUGH = """
from fl_lightning.federation.callbacks import FederationCallback


class Enough(FederationCallback):
    def on_round_end(self, loop, row):
        if row["round"] == 2:
            loop.stop()
"""


def test_run_that_a_callback_has_ended_is_completed_after_a_kill_and_goes_on_only_then(workplace):
    """Killed between its last checkpoint and summary.json, it made all the rounds that were left."""
    workplace.write("mine.py", ENOUGH)
    workplace.change(data={"num_clients": 2}, federation={"rounds": 3, "callbacks": ["mine.Enough"]})
    code, _, _ = workplace.call("fit", "--config", "exp.yaml", "--quiet", die_at="round-0002.ckpt")
    assert code == -9
    for rounds in (2, 3):
        workplace.fit("--resume", "auto", "--quiet")
        said = json.loads((workplace.run / "summary.json").read_text())
        assert (said["rounds"], said["finished"], "stopped" in said) == (rounds, True, rounds == 2)


def test_finished_run_resumes_to_itself(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet")
    workplace.fit("--quiet", "--resume", "auto")
    assert_same_run(straight("FedRep").run, workplace.run)


def test_interrupted_run_saves_the_round_and_says_how_to_go_on(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedProto"])
    running = workplace.start("fit", "--config", "exp.yaml")
    running.wait_until((workplace.run / "checkpoints" / "round-0001.ckpt").exists)
    running.interrupt()
    code, out, err = running.result()
    assert code == 130
    assert err.count("\n") == 1
    assert "stopping once round" in err
    done = len(without_seconds(workplace.run / "metrics.csv")) - 1
    assert 1 <= done < ROUNDS
    assert f"stopped after round {done}" in out
    assert (workplace.run / "checkpoints" / f"round-{done:04d}.ckpt").exists()
    command = next(line.strip() for line in out.splitlines() if "--resume auto" in line)
    code, _, err = workplace.call(*command.split()[1:])
    assert code == 0, err
    assert_same_run(straight("FedProto").run, workplace.run)
    check_folder(workplace.run)


def test_second_interrupt_ends_the_run_at_once(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedProto"])
    running = workplace.start("fit", "--config", "exp.yaml")
    running.wait_until((workplace.run / "checkpoints" / "round-0001.ckpt").exists)
    running.interrupt()
    running.wait_until(lambda: "stopping once" in running.err.read_text())
    running.interrupt()
    code, _, err = running.result()
    assert code == 130, err
    assert "Traceback" not in err
    workplace.fit("--quiet", "--resume", "auto")
    assert_same_run(straight("FedProto").run, workplace.run)


def test_second_process_in_the_same_folder_is_refused(workplace):
    running = workplace.start("fit", "--config", "exp.yaml", "--quiet", "--federation.rounds", "500")
    running.wait_until((workplace.run / "checkpoints" / "round-0001.ckpt").exists)
    code, _, err = workplace_beside(workplace).call("fit", "--config", "exp.yaml", "--resume", "auto", "--quiet")
    running.kill()
    assert running.result()[0] == -9
    assert code == 2
    assert err.count("\n") == 1
    assert "another process" in err
    assert "runs/run" in err


def workplace_beside(place):
    """The same working directory, with files of its own for what a second process prints."""
    other = copy.copy(place)
    other.name = "second"
    return other


def test_run_that_is_made_longer_goes_on_exactly(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    workplace.fit("--quiet", "--resume", "auto", "--federation.rounds", str(ROUNDS))
    assert_same_run(straight("FedRep").run, workplace.run)


def test_run_goes_on_from_an_older_checkpoint(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet")
    workplace.fit("--quiet", "--resume", f"runs/run/checkpoints/round-{ROUNDS - 1:04d}.ckpt")
    assert_same_run(straight("FedRep").run, workplace.run)
    check_folder(workplace.run)


def test_pool_may_change_on_resume(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedProto"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    workplace.fit("--quiet", "--resume", "auto", "--federation.rounds", str(ROUNDS), "--federation.pool", "disk")
    assert_same_run(straight("FedProto").run, workplace.run)


def test_memory_and_disk_give_the_same_run(straight):
    memory, disk = (read_run(straight(variant).run) for variant in ("FedRep", "FedRep-disk"))
    assert memory == disk


@pytest.mark.parametrize("keep", [1, 3])
def test_checkpoints_that_are_kept_are_the_newest(workplace, keep):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet", "--federation.rounds", "2", "--federation.checkpoint.keep", str(keep))
    more = ["--resume", "auto", "--federation.rounds", str(ROUNDS), "--federation.checkpoint.keep", str(keep)]
    workplace.fit("--quiet", *more)
    check_folder(workplace.run, keep)


def test_checkpoint_every_third_round_and_at_the_end(straight, workplace):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet", "--federation.checkpoint.every", "3")
    names = sorted(path.name for path in (workplace.run / "checkpoints").glob("*.ckpt"))
    assert names == ["round-0003.ckpt", f"round-{ROUNDS:04d}.ckpt"]


def test_run_without_checkpoints_leaves_none(workplace):
    workplace.fit("--quiet", "--federation.rounds", "1", "--federation.checkpoint.every", "0")
    assert not (workplace.run / "checkpoints").exists()
    assert (workplace.run / "metrics.csv").exists()
    code, _, err = workplace.call("fit", "--resume", "runs/run", "--quiet", "--federation.rounds", "1")
    assert (code, err) == (0, "runs/run holds rounds, but no checkpoint; the run begins anew\n")


# --- damaged files --------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_run_falls_back_to_the_newest_whole_checkpoint(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet")
    cut(workplace.run / "checkpoints" / f"round-{ROUNDS:04d}.ckpt")
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--quiet", "--resume", "auto")
    assert (code, err.count("\n")) == (0, 1), err
    assert f"round-{ROUNDS:04d}.ckpt is damaged" in err
    assert f"going on from round {ROUNDS - 1}" in err
    assert_same_run(straight("FedRep").run, workplace.run)
    check_folder(workplace.run)


def test_run_that_goes_on_without_saving_keeps_its_rows(straight, workplace):
    """Its tables hold the rounds before, though nothing is saved from now on."""
    reference = straight("FedRep-disk")
    workplace.change(**VARIANTS["FedRep-disk"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    workplace.fit("--quiet", "--resume", "auto", "--federation.checkpoint.every=0", "--federation.pool=memory")
    for name in ("metrics.csv", "clients.csv"):
        assert without_seconds(workplace.run / name) == without_seconds(reference.run / name)


def test_older_checkpoint_puts_newer_ones_aside_and_is_gone_on_from_after_a_kill(straight, workplace, assert_same_run):
    """With `keep: 1` and states on disk, and a kill right after that."""
    workplace.change(**VARIANTS["FedRep-disk"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    older = workplace.run / "checkpoints" / "round-0002.ckpt"
    workplace.fit("--quiet", "--resume", "auto", "--federation.checkpoint.keep", "3")
    less = ("--federation.checkpoint.keep", "1")
    code, _, err = workplace.call(
        "fit", "--config", "exp.yaml", "--quiet", "--resume", str(older), *less, die_at="config.yaml"
    )
    assert code == -9
    assert "aside-0001; going on from round 2" in err
    assert [path.name for path in (workplace.run / "checkpoints").glob("*.ckpt")] == ["round-0002.ckpt"]
    workplace.fit("--quiet", "--resume", "auto", *less)
    assert_same_run(straight("FedRep-disk").run, workplace.run)
    check_folder(workplace.run, keep=1)


def test_older_checkpoint_leaves_no_model_of_later_rounds(workplace):
    """A shorter run goes on from it: clients that trained in discarded rounds alone do so no more."""
    workplace.change(federation={"participation": 0.5})
    workplace.fit("--quiet", "--federation.rounds", "4", "--federation.checkpoint.keep", "4")
    older = workplace.run / "checkpoints" / "round-0001.ckpt"
    workplace.fit("--quiet", "--federation.rounds", "2", "--resume", str(older))
    code, out, err = workplace.call("evaluate", str(workplace.run))
    assert code == 0, err + out
    assert "different" not in out
    assert list((workplace.run / "checkpoints" / "aside-0001" / "models").glob("*.pt"))


def test_shorter_run_leaves_no_model_of_a_round_that_was_killed(straight, workplace):
    """Of that round no row stood yet, by which its models would be known."""
    rows = [row for row in without_seconds(straight("FedRep").run / "clients.csv") if row[0] == str(ROUNDS)]
    first, *_, last = [int(row[1]) for row in rows if row[2] == "1"]
    workplace.change(**VARIANTS["FedRep"])
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--quiet", die_at=f"{last:05d}.pt")
    assert code == -9, err
    model = workplace.run / "models" / f"{first:05d}.pt"
    assert model.is_file()
    workplace.fit("--quiet", "--federation.rounds", str(ROUNDS - 1), "--resume", "auto")
    assert not model.exists()
    code, out, err = workplace.call("evaluate", str(workplace.run))
    assert (code, "different" in out) == (0, False), err + out


def test_run_whose_newest_states_are_lost_goes_on_from_the_round_before(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep-disk"])
    workplace.fit("--quiet")
    for path in (workplace.run / "checkpoints" / "clients").glob(f"r{ROUNDS:04d}*"):
        path.unlink()
    code, _, err = workplace.call("fit", "--resume", str(workplace.run), "--quiet")
    assert code == 0, err
    assert f"aside-0001; going on from round {ROUNDS - 1}" in err
    assert_same_run(straight("FedRep-disk").run, workplace.run)


def test_tables_are_put_right_on_resume(straight, workplace, assert_same_run):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    (workplace.run / "metrics.csv").write_bytes(b"\xff\xfe\x00 no text")
    (workplace.run / "clients.csv").unlink()
    workplace.fit("--quiet", "--resume", "auto")
    assert_same_run(straight("FedRep").run, workplace.run)


# --- where a run lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["--config", "elsewhere/it/config.yaml", "--resume", "auto"], ["--resume", "elsewhere/it"]]
)
def test_moved_run_goes_on_where_it_lies_now(straight, workplace, assert_same_run, argv):
    workplace.change(**VARIANTS["FedRep"])
    workplace.fit("--quiet", "--federation.rounds", "2")
    moved = workplace.path / "elsewhere" / "it"
    moved.parent.mkdir()
    workplace.run.rename(moved)
    code, _, err = workplace.call("fit", *argv, "--quiet", "--federation.rounds", str(ROUNDS))
    assert code == 0, err
    assert not workplace.run.exists()
    assert_same_run(straight("FedRep").run, moved)


def test_run_goes_on_whose_file_of_data_was_moved(workplace):
    file = {"class_path": "ArrayFile", "init_args": {"path": "own.npz"}}
    workplace.change(data={"dataset": file, "partition": {"class_path": "IID"}})
    x, y = np.random.default_rng(0).random((100, 4)), np.arange(100) % 2
    np.savez(workplace.path / "own.npz", x=x, y=y)
    workplace.fit("--quiet", "--federation.rounds", "1")
    (workplace.path / "own.npz").rename(workplace.path / "moved.npz")
    argv = ("fit", "--resume", str(workplace.run), "--quiet", "--data.dataset.init_args.path", "moved.npz")
    code, _, err = workplace.call(*argv, "--federation.rounds", "2")
    assert (code, len(without_seconds(workplace.run / "metrics.csv"))) == (0, 3), err
    assert "path: moved.npz" in (workplace.run / "config.yaml").read_text()
    np.savez(workplace.path / "moved.npz", x=x[::-1], y=y)
    code, _, err = workplace.call(*argv, "--federation.rounds", "3")
    assert (code, "the data are not those that the run began with" in err) == (2, True), err


def test_copy_by_hard_links_goes_on_without_the_original(workplace):
    """As of `cp -al`: rows of the copy's later rounds, and loggers' files, were written into the original's, too."""
    logger = {"class_path": "CSVLogger", "init_args": {"name": "log"}}
    workplace.change(**VARIANTS["FedRep-disk"], logger=logger)
    workplace.fit("--quiet", "--federation.rounds", "2")
    original = {path: path.read_bytes() for path in workplace.run.rglob("*") if path.is_file()}
    copy = workplace.path / "runs" / "copy"
    shutil.copytree(workplace.run, copy, copy_function=os.link)
    code, _, err = workplace.call("fit", "--resume", str(copy), "--quiet", "--federation.rounds", str(ROUNDS))
    assert code == 0, err
    assert {path: path.read_bytes() for path in workplace.run.rglob("*") if path.is_file()} == original


def test_file_that_cannot_be_written_ends_the_run_in_one_line(workplace):
    """As on a full disk; the line says how to go on."""
    workplace.change(**VARIANTS["FedRep"])
    workplace.write("runs/run/checkpoints", "a file where a folder must be")
    workplace.write("runs/run/.lock", "a run of fl-lightning lies here\n")
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--quiet")
    assert (code, err.count("\n")) == (2, 1), err
    assert "cannot write runs/run/checkpoints" in err


def test_folder_that_is_resumed_imports_nothing_by_itself(workplace):
    workplace.write("mine.py", BROKEN.replace("Broken", "Mine") + "\nprint('imported')\n")
    workplace.change(logger={"class_path": "mine.Mine"})
    workplace.fit("--quiet", "--federation.rounds", "1")
    code, out, err = workplace.call("fit", "--resume", "runs/run", "--quiet", "--federation.rounds", "2")
    assert (code, err.count("\n")) == (2, 1), err
    assert "--trust mine" in err
    assert "imported" not in out
    code, _, err = workplace.call(
        "fit", "--resume", "runs/run", "--trust", "mine", "--quiet", "--federation.rounds", "2"
    )
    assert code == 0, err


def test_weights_to_start_from_that_hold_something_else_are_refused(workplace):
    layers = "nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)"
    workplace.write(
        "mine.py",
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        f"    def __init__(self):\n        super().__init__({layers})\n",
    )

    def start_from(value):
        shapes = {"1.weight": (8, 64), "1.bias": (8,), "2.weight": (10, 8), "2.bias": (10,)}
        torch.save({name: torch.full(shape, value) for name, shape in shapes.items()}, workplace.path / "net.pt")

    start_from(0.1)
    wrapped = {"class_path": "WrappedModel", "init_args": {"module": "mine.Net", "head": "2", "weights": "net.pt"}}
    workplace.change(model=wrapped)
    workplace.fit("--quiet", "--federation.rounds", "1")
    start_from(0.2)
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--resume", "auto", "--quiet")
    assert (code, "model.init_args.weights (contents) is" in err) == (2, True), err
    start_from(0.1)
    workplace.fit("--quiet", "--resume", "auto")


@pytest.mark.parametrize(("settings", "refused"), [({}, True), ({"method.anneal_rounds": 2}, False)])
def test_a_run_of_a_method_that_plans_its_rounds_ahead_is_not_made_longer(workplace, settings, refused):
    options = ["--method", "DisPFL", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    workplace.fit("--quiet", *options, "--federation.rounds", "2")
    code, _, err = workplace.call(
        "fit", "--config", "exp.yaml", *options, "--resume", "auto", "--quiet", "--federation.rounds", "3"
    )
    said = "federation.rounds: DisPFL plans its rounds ahead, and this run began with 2; leave it at that, got 3"
    assert (code, said in err) == ((2, True) if refused else (0, False)), err


def test_a_command_without_arguments_is_answered(workplace):
    code, _, err = workplace.call("fit")
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False), err


# --- loggers --------------------------------------------------------------------------------------------------------


def test_loggers_version_goes_on_and_one_that_fails_is_left_out(straight, workplace, assert_same_run):
    workplace.write("broken.py", BROKEN)
    workplace.change(**VARIANTS["FedRep"], logger=[{"class_path": "CSVLogger"}, {"class_path": "broken.Broken"}])
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--quiet", "--federation.rounds", "2")
    assert code == 0, err
    assert "logger Broken failed (RuntimeError: no more)" in err
    workplace.fit("--quiet", "--resume", "auto")
    logs = workplace.run / "lightning_logs"
    assert [path.name for path in logs.iterdir()] == ["version_0"]
    assert len((logs / "version_0" / "metrics.csv").read_text().splitlines()) == 1 + ROUNDS + 1
    assert_same_run(straight("FedRep").run, workplace.run)


BROKEN = """
from lightning.pytorch.loggers import CSVLogger

class Broken(CSVLogger):
    def __init__(self, save_dir: str = "."):
        super().__init__(save_dir, name="broken")

    def log_metrics(self, metrics, step=None):
        raise RuntimeError("no more")
"""
