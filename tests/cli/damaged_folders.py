"""Damaged runs' folders and files: is what every command says of them right, or one line?

One file or folder of a finished or interrupted run, of a table's or a search's, is damaged (`damage.py`); then a
command reads it. It must end in time with the right result, or with one line of at most 300 characters that names the
file or its key, and lose nothing else on disk; what a resumed run, a table or a search writes is what the undisturbed
one wrote.
"""

from __future__ import annotations

import csv
import ctypes
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from damage import damaged

LONGEST = 300  # characters of a line
SLOWEST = 20.0  # seconds of one core
PATIENCE = 300.0  # seconds of the clock, on a busy machine
EVERY = ("cut", "emptied", "deleted", "flipped", "no text")
CONFIG = {
    "seed": 0,
    "name": "run",
    "output": "runs",
    "method": "FedRep",
    "model": {"class_path": "MLP", "init_args": {"hidden": [16, 8]}},
    "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.2}},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "Dirichlet", "init_args": {"beta": 0.5, "min_samples": 20}},
        "num_clients": 4,
        "batch_size": 128,
    },
    "federation": {"rounds": 3},
    "trainer": {"accelerator": "cpu"},
    "logger": {"class_path": "CSVLogger", "init_args": {"name": "log"}},
}
CELL = {**CONFIG, "logger": None}
TABLE = {
    "title": "A small table",
    "name": "small",
    "seeds": [0, 1],
    "figures": {"L": "Local-T.last", "G": "Global-T_received.mean_last_10"},
    "base": {"files": ["base.yaml"]},
    "columns": {"A": {}},
    "rows": {"FedRep": {}, "Local": {"set": {"method": "Local"}}},
    "published": {"Local": {"A": {"L": "66.24 ± 0.6"}}},
}
TUNE = {
    "title": "A small search",
    "name": "small",
    "trials": 2,
    "monitor": "Local-T_received.last",
    "validation": 0.2,
    "base": {"files": ["base.yaml"]},
    "rows": {"FedRep": {"space": {"optimizer.init_args.lr": [0.1, 0.2]}}},
}
SEARCH = {**TUNE, "name": "guided", "search": "optuna", "pruning": False}
AUDIT = ["--images", "1", "--steps", "2", "--output", "out/audit"]


@dataclass(frozen=True)
class Command:
    """A command that reads folders.

    Args:
        name: for people.
        argv: the command line.
        reads: folders and files below which something is damaged.
        right: what is wrong with what it has done, if anything; of the case and the answer.
        writes: what it may change or make, by the beginnings of paths.
        codes: with which it may end, beside 2.
        share: how often it is tried, beside the others.
    """

    name: str
    argv: tuple[str, ...]
    reads: tuple[str, ...]
    right: Callable[[Case, Answer], str] = lambda case, answer: ""
    writes: tuple[str, ...] = ("out/",)
    codes: tuple[int, ...] = (0,)
    share: int = 4


@dataclass
class Case:
    """A command on a folder in which one thing was damaged.

    Args:
        place: the working directory.
        command: the command.
        path: what was damaged, seen from the place.
        what: was done to it.
        before: every file that was there then, with its content.
    """

    place: Path
    command: Command
    path: str
    what: str
    before: dict[str, bytes | None] = field(default_factory=dict, repr=False)


@dataclass
class Answer:
    """What a command has said: its exit code (-9 for a hang), both outputs, and how long it took."""

    code: int
    out: str
    err: str
    seconds: float


# --- the place ------------------------------------------------------------------------------------------------------


def build(place: Path, run: Callable[[list[str], Path], Answer], tables: bool = True) -> None:
    """Make a working directory with runs, a table and searches in it.

    Args:
        place: an empty folder.
        run: runs a command line in a folder.
        tables: whether there are a table and searches, too.
    """
    files = {"exp": CONFIG, "base": CELL, "small": TABLE, "tune": TUNE, "guided": SEARCH}
    for name, content in files.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    _must(run, place, "fit", "--config", "exp.yaml", "--quiet")
    _must(run, place, "fit", "--config", "exp.yaml", "--name", "begun", "--federation.rounds", "2", "--quiet")
    begun = place / "runs" / "begun"
    (begun / "config.yaml").write_text((begun / "config.yaml").read_text().replace("rounds: 2", "rounds: 3"))
    for name in ("summary.json", "curves.png", "partition.png"):
        (begun / name).unlink(missing_ok=True)
    shutil.rmtree(begun / "models", ignore_errors=True)
    for command in (["table", "small.yaml"], ["tune", "tune.yaml"], ["tune", "guided.yaml"]) if tables else ():
        _must(run, place, *command, "--quiet")
    shutil.copytree(place / "runs" / "run", place / "runs" / "twin")
    (place / "runs" / "run" / "mine.txt").write_text("mine\n")
    (place / "runs" / "begun" / "mine.txt").write_text("mine\n")


def _must(run: Callable[[list[str], Path], Answer], place: Path, *argv: str) -> None:
    answer = run(list(argv), place)
    if answer.code != 0:
        raise RuntimeError(f"{argv}: {answer.code}\n{answer.out}\n{answer.err}")


def files_in(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder, with its content; None of a folder, and what cannot be read is a word."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = b"link " + os.readlink(path).encode()
        elif path.is_dir():
            found[name] = None
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = b"special"
    return found


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table, without seconds; none of what is no file, as a pipe, on which one would wait."""
    if not path.is_file():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
    except (OSError, ValueError, csv.Error):
        return []
    return [{name: cell for name, cell in row.items() if not f"{name}".startswith("seconds")} for row in rows]


# --- what is right --------------------------------------------------------------------------------------------------


def _resumed(run: str) -> Callable[[Case, Answer], str]:
    """What a run that goes on leaves behind is what the undisturbed one left."""

    def right(case: Case, answer: Answer) -> str:
        if answer.code:
            return ""
        here, there = case.place / "runs" / run, case.place / "runs" / "twin"
        for name in ("metrics.csv", "clients.csv"):
            now, then = rows_of(here / name), rows_of(there / name)
            if now != then and now[: len(then)] != then:  # more rounds, where the configuration says so now
                return f"other {name}"
        try:
            summary = json.loads((here / "summary.json").read_text())
        except (OSError, ValueError):
            return "no summary"
        return "" if summary["finished"] else "not finished"

    return right


def _compared(case: Case, answer: Answer) -> str:
    """Equal where the figures are, in whatever order, which nobody reads out of another file."""
    if answer.code not in (0, 1):
        return ""
    same = all(
        _whole_rows(case.place / "runs" / "run" / name) == _whole_rows(case.place / "runs" / "twin" / name)
        for name in ("metrics.csv", "clients.csv")
    )
    return "" if same is (answer.code == 0) else f"says {'equal' if answer.code == 0 else 'different'}"


def _whole_rows(path: Path) -> set[str]:
    """The rows that say something: one that stands there twice says it once, a head or another length nothing."""
    rows = [row for row in rows_of(path) if row.get("round") != "round"]
    return {str(row) for row in rows if None not in row and None not in row.values()}


def _evaluated(case: Case, answer: Answer) -> str:
    """The figures are the run's; where it is said that they are not, what was written down was changed."""
    changed = case.path.endswith(("metrics.csv", "summary.json")) or not case.path.startswith("runs/run")
    return "says that figures differ" if answer.code == 1 and not changed else ""


def _written(path: str) -> Callable[[Case, Answer], str]:
    """A table or a search that ends well has the figures of the undisturbed one."""

    def right(case: Case, answer: Answer) -> str:
        if answer.code or not case.path.startswith("runs/"):
            return ""
        return "" if (case.place / path).read_bytes() == case.before[f"undisturbed {path}"] else f"other {path}"

    return right


def _page(path: str) -> Callable[[Case, Answer], str]:
    return lambda case, answer: "" if answer.code or (case.place / path).stat().st_size > 1000 else f"no {path}"


RUN, BEGUN = ("runs/run",), ("runs/begun",)
COMMANDS = [
    Command("evaluate", ("evaluate", "runs/run"), RUN, _evaluated, codes=(0, 1)),
    Command("evaluate begun", ("evaluate", "runs/begun"), BEGUN, codes=(0, 1)),
    Command("compare", ("compare", "runs/run", "runs/twin"), RUN, _compared, codes=(0, 1)),
    Command("report", ("report", "runs/run", "--output", "out/a.html"), RUN, _page("out/a.html"), share=1),
    Command("report runs", ("report", "runs", "--output", "out/a.html"), (*RUN, *BEGUN), _page("out/a.html"), share=1),
    Command(
        "report table",
        ("report", "runs/tables/small", "--output", "out/a.html"),
        ("runs/tables", "runs/cells"),
        _page("out/a.html"),
        share=1,
    ),
    Command(
        "report definition",
        ("report", "small.yaml", "--output", "out/a.html"),
        ("small.yaml", "base.yaml", "runs/cells"),
        _page("out/a.html"),
        share=1,
    ),
    Command(
        "dashboard",
        ("dashboard", "--picture", "out/a.png", "runs/run", "runs/twin"),
        RUN,
        _page("out/a.png"),
        share=2,
    ),
    Command("audit", ("audit", "runs/run", *AUDIT), RUN, _page("out/audit/index.html")),
    Command(
        "fit auto",
        ("fit", "--config", "runs/run/config.yaml", "--resume", "auto", "--quiet"),
        RUN,
        _resumed("run"),
        ("runs/run/",),
        (0, 1),
    ),
    Command(
        "fit own config",
        ("fit", "--config", "exp.yaml", "--name", "begun", "--resume", "auto", "--quiet"),
        BEGUN,
        _resumed("begun"),
        ("runs/begun/",),
        (0, 1),
    ),
    Command(
        "fit folder",
        ("fit", "--resume", "runs/begun", "--quiet"),
        BEGUN,
        _resumed("begun"),
        ("runs/begun/",),
        (0, 1),
    ),
    Command(
        "table",
        ("table", "small.yaml", "--quiet"),
        ("runs/cells", "runs/tables/small"),
        _written("runs/tables/small/table.csv"),
        ("runs/tables/", "runs/cells/"),
        (0, 1),
    ),
    Command(
        "table file",
        ("table", "small.yaml", "--rounds", "3", "--quiet"),
        ("small.yaml", "base.yaml"),
        writes=("runs/tables/", "runs/cells/"),
        codes=(0, 1),
    ),
    Command(
        "tune",
        ("tune", "tune.yaml", "--quiet"),
        ("runs/cells", "runs/tunes/small"),
        _written("runs/tunes/small/trials.csv"),
        ("runs/tunes/", "runs/cells/"),
        (0, 1),
    ),
    Command(
        "tune guided",
        ("tune", "guided.yaml", "--quiet"),
        ("runs/cells", "runs/tunes/guided"),
        writes=("runs/tunes/", "runs/cells/"),
        codes=(0, 1),
    ),
    Command(
        "tune file",
        ("tune", "tune.yaml", "--print-commands"),
        ("tune.yaml", "base.yaml"),
        writes=(),
        codes=(0,),
    ),
]


# --- a case ---------------------------------------------------------------------------------------------------------


def make_case(base: Path, place: Path, seed: int, command: str = "") -> Case:
    """Copy the working directory and damage one thing in it.

    Args:
        base: what `build` made.
        place: where the copy is made.
        seed: chooses the command, the file and the damage.
        command: its name; empty leaves that to the seed.
    """
    draw = random.Random(seed)
    known = [own for own in COMMANDS if command in ("", own.name)]
    chosen = draw.choices(known, [own.share for own in known])[0]
    shutil.copytree(base, place, symlinks=True)
    (place / "out").mkdir()
    found = sorted(each for root in chosen.reads for each in _targets(place / root))
    path = draw.choice(found)
    results = [name for name in _RESULTS if (place / name).is_file()]
    undisturbed = {f"undisturbed {name}": (place / name).read_bytes() for name in results}
    case = Case(place, chosen, str(path.relative_to(place)), "")
    while True:
        case.what = damaged(path, draw)
        if not _is_longer(base / case.path, path):
            break
        _restore(base / case.path, path)
    case.before = {**files_in(place), **undisturbed}
    return case


_RESULTS = ("runs/tables/small/table.csv", "runs/tunes/small/trials.csv")


def _targets(root: Path) -> list[Path]:
    """What can be damaged: every file, and folders below; files of a run that nothing depends on are left out."""
    if root.is_file():
        return [root]
    left_out = (".png", ".html", ".txt.svg")
    inside = [path for path in root.rglob("*") if path.suffix not in left_out and path.name != "mine.txt"]
    return [path for path in inside if path.name not in ("log", "version_0")] or [root]


def _restore(base: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    shutil.copytree(base, path) if base.is_dir() else shutil.copy2(base, path)


def _is_longer(base: Path, path: Path) -> bool:
    """Whether a configuration asks for much more work now, which is no mistake."""
    if path.suffix != ".yaml" or not path.is_file():
        return False
    try:
        content = yaml.safe_load(path.read_text())
        rounds = content["federation"]["rounds"]
    except Exception:
        return False
    return isinstance(rounds, (int, float)) and rounds > 20


def answer_of(case: Case, run: Callable[[list[str], Path], Answer]) -> tuple[Answer, list[str]]:
    """Run a case's command; returns what it said, and what is wrong with that."""
    answer = run(list(case.command.argv), case.place)
    wrong = _judged(case, answer)
    if not wrong and "sealed again" not in case.what:  # who forges a file gets another result
        wrong += [said] if (said := case.command.right(case, answer)) else []
    wrong += _lost(case, answer)
    return answer, wrong


def _judged(case: Case, answer: Answer) -> list[str]:
    wrong = []
    if "Traceback" in answer.err or "Traceback" in answer.out:
        wrong.append("traceback")
    elif answer.code == -9:
        wrong.append("hang")
    elif answer.code not in (2, *case.command.codes):
        wrong.append(f"exit code {answer.code}")
    if answer.seconds > SLOWEST:
        wrong.append("slow")
    lines = answer.err.splitlines()
    if any(len(line) > LONGEST for line in lines):
        wrong.append("long line")
    if answer.code == 2 and not wrong:
        errors = [line for line in lines if line.startswith("fl-lightning: error: ")]
        if len(lines) != 1 or len(errors) != 1:
            wrong.append("not one line")
        elif not _names(case, errors[0]):
            wrong.append("does not say which file")
    return wrong


def _names(case: Case, line: str) -> bool:
    """Whether a message names the file, a folder that it lies in, or one of the keys of a configuration."""
    path = Path(case.path)
    if path.name in line or any(parent.name and parent.name in line for parent in path.parents[:2]):
        return True
    if path.suffix == ".ckpt" and f"checkpoint of round {int(path.stem.partition('-')[2])} " in line:
        return True
    if path.suffix not in (".yaml", ".yml"):
        return False
    key = line.removeprefix("fl-lightning: error: ").partition(":")[0]
    return bool(key) and " " not in key.replace(", ", ",")


def _lost(case: Case, answer: Answer) -> list[str]:
    """Files that were changed or deleted and should not be."""
    after = files_in(case.place)
    writes = case.command.writes if answer.code in (0, 1) else ("out/",)
    if case.command.name.startswith(("table", "tune")):
        writes = case.command.writes  # its results are written whatever becomes of a cell
    lost = []
    for name, content in case.before.items():
        if name.startswith("undisturbed ") or name.endswith(".lock") or name == case.path:
            continue
        allowed = name.startswith(writes) if writes else False
        if name.endswith("mine.txt") or not allowed:
            aside = any("/aside-" in other and other.endswith(f"/{Path(name).name}") for other in after)
            if name not in after and aside:
                continue
            if name not in after:
                lost.append(f"lost {name}")
            elif after[name] != content:
                lost.append(f"changed {name}")
    return lost[:3]


# --- running --------------------------------------------------------------------------------------------------------


def in_fork(argv: list[str], folder: Path) -> Answer:
    """Run a command in a forked process; one that takes too long is killed."""
    files = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setpgid(0, 0)
            os.chdir(folder)
            for number, path in zip((1, 2), files, strict=True):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="backslashreplace") for number in (1, 2))
            _without_privileges()
            code = command(argv)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    status: int | None = None
    while status is None:
        done, found = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
        elif time.monotonic() - start > PATIENCE:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = -9
        else:
            time.sleep(0.003)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    out, err = (path.read_text(errors="replace") if path.exists() else "" for path in files)
    return Answer(status, out, err, seconds)


def _without_privileges() -> None:
    """Let root be refused what others are: the capabilities to pass over permissions are laid down."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this thread
    libc = ctypes.CDLL(None)
    if libc.capget(header, data) == 0:
        data[0] &= ~0b110  # of the effective ones CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        libc.capset(header, data)


def in_process(argv: list[str], folder: Path) -> Answer:
    """Run a command in this process."""
    out, err, before, start = io.StringIO(), io.StringIO(), os.getcwd(), time.monotonic()
    with redirect_stdout(out), redirect_stderr(err):
        os.chdir(folder)
        try:
            code = command(argv)
        finally:
            os.chdir(before)
    return Answer(code, out.getvalue(), err.getvalue(), time.monotonic() - start)


def command(argv: list[str]) -> int:
    """The command line, without the pictures that `fit` draws at its end."""
    import traceback

    from fl_lightning import cli, config_commands

    config_commands.draw_run = lambda *arguments: None  # type: ignore[assignment]
    try:
        cli.main(argv)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def warm_up() -> None:
    """Import all that a command could need, so that a fork has it."""
    import optuna  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import vl_convert  # noqa: F401

    import fl_lightning.audit.command
    import fl_lightning.report.dashboard
    import fl_lightning.table.command
    import fl_lightning.tune.command  # noqa: F401

    torch.set_num_threads(1)
    from cli import warm  # noqa: F401 - one parser and one Trainer


def clear(folder: Path) -> None:
    """Delete a case's folder, whatever may be in it, and what its command said."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)
    for name in ("out", "err"):
        folder.with_name(f"{folder.name}.{name}").unlink(missing_ok=True)
