"""Which folder a run has: its name, and what a command line that resumes one means. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.errors import require
from fl_lightning.files import content_of
from fl_lightning.reading import read_yaml
from fl_lightning.shipped import path_of

LOCK = ".lock"
MARK = "a run of fl-lightning lies here\n"
"""What the lock file says: `--overwrite` deletes nothing in a folder without it."""
CHECKPOINT = re.compile(r"round-(\d+)\.ckpt")
BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What the system says of a lock that another process has."""
HELD = "another process is running in"
"""How a run is refused whose folder another process holds."""
LONGEST_NAME = 200  # bytes


def check_name(name: str) -> None:
    """Refuse a run's name that is no name but a path, or that no file system takes.

    Raises:
        ConfigError: with the key ``name``.
    """
    plain = not re.search(r"[/\\\x00-\x1f\x7f]", name) and name.strip() not in ("", ".", "..")
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    require(plain, "name", "must be a name, not a path: without / and \\, line breaks, NUL, and not . or ..", shown)
    fits = len(name.encode(errors="surrogatepass")) <= LONGEST_NAME
    require(fits, "name", f"must have at most {LONGEST_NAME} bytes", shown)


def is_marked(folder: Path) -> bool:
    """Whether this program made the folder for a run."""
    try:
        return content_of(folder / LOCK) == MARK.encode()
    except (OSError, ValueError):
        return False


def is_held(folder: Path) -> bool:
    """Whether a process is running in a folder; False where the system has no such locks."""
    try:
        import fcntl

        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in BUSY
    finally:
        os.close(descriptor)
    return False


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder.

    Raises:
        OSError: if it may not be read: it could hold some.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((folder / name for name in names if CHECKPOINT.fullmatch(name)), key=round_of)


def round_of(path: Path) -> int:
    """The round of a checkpoint, by its name."""
    return int(path.stem.removeprefix("round-"))


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run to go on with."""
    begun = (folder / "config.yaml").is_file() and is_marked(folder)
    return begun or bool(checkpoints_in(folder / "checkpoints"))


def continue_command(folder: Path) -> str:
    """The command that goes on with a run, wherever it lies now."""
    return f"fl-lightning fit --config {shlex.quote(str(folder / 'config.yaml'))} --resume auto"


def advice_on(folder: Path, saves: bool = True) -> str:
    """What to do now that a run was broken off, by what is in its folder.

    Args:
        folder: the run's.
        saves: whether it saves at all.
    """
    if not saves:
        return "nothing was saved (federation.checkpoint.every is 0)"
    if not (folder / "config.yaml").is_file():
        return f"there is no run in {folder} any more"
    kept = checkpoints_in(folder / "checkpoints")
    if not kept:
        return f"no round was saved; begin anew with\n  {continue_command(folder)}"
    return f"the rounds up to {round_of(kept[-1])} are saved; continue with\n  {continue_command(folder)}"


def with_resumed_folder(argv: Sequence[str]) -> list[str]:
    """Let a command line that resumes a run mean the folder where that run lies now.

    ``--resume FOLDER`` (or a checkpoint in it) takes output and name from the folder and, without a ``--config``, the
    configuration, too. ``--resume auto`` does so where a ``--config`` is the ``config.yaml`` in a run's folder. An
    ``--output`` or ``--name`` on the command line, or in a file behind it, wins over the latter: then that folder is
    meant.

    Args:
        argv: the command line after ``fit``.

    Raises:
        ConfigError: if the folder has no configuration any more, and none is given; if it is another one than the
            command line's.
    """
    resume, configs = _values(argv, "--resume"), _values(argv, "--config")
    outputs, names = _values(argv, "--output"), _values(argv, "--name")
    if not resume or (resume[-1] == "auto" and (outputs or names)):
        return list(argv)
    if resume[-1] == "auto":
        folder = run_said_by(configs)
        return list(argv) if folder is None else [*argv, *_place(folder)]
    named = Path(resume[-1])
    folder = next(filter(None, map(_run_of, (named, *named.parents[:2]))), None)
    if folder is None:
        require(bool(configs) or named.exists(), "--resume", "there is no run in that folder", str(named))
        return list(argv)
    said = Path([str(folder.parent), *outputs][-1]) / [folder.name, *names][-1]
    rule = f"goes on with the run in {folder}, and --output and --name say {said}: leave them out, or say --resume auto"
    require(said.resolve() == folder.resolve(), "--resume", rule)
    own = folder / "config.yaml"
    require(bool(configs) or own.is_file(), "--resume", f"{folder} has lost its config.yaml; say --config FILE, too")
    config = [] if configs else ["--config", str(own)]
    return [*config, *argv, *_place(folder), "--resume", "auto" if named.is_dir() else str(named)]


def takes_folders_config(argv: Sequence[str], resumed: Sequence[str]) -> bool:
    """Whether the folder alone says the configuration; what a run left behind is data, and imports nothing by itself.

    Args:
        argv: the command line as given.
        resumed: what `with_resumed_folder` made of it.
    """
    return not _values(argv, "--config") and bool(_values(resumed, "--config"))


def _values(argv: Sequence[str], option: str) -> list[str]:
    pairs = zip(argv, [*argv, ""][1:], strict=True)
    return [
        word.partition("=")[2] if word.startswith(f"{option}=") else value
        for word, value in pairs
        if word == option or word.startswith(f"{option}=")
    ]


def run_said_by(configs: Sequence[str | os.PathLike[str] | Mapping[str, Any]]) -> Path | None:
    """The folder of the run whose own configuration is among some, unless one behind it says another place.

    Args:
        configs: files, or what such a file would hold.
    """
    runs = [None if isinstance(config, Mapping) else _run_with(Path(config)) for config in configs]
    place = max((place for place, folder in enumerate(runs) if folder is not None), default=None)
    if place is None:
        return None
    contents = (
        config if isinstance(config, Mapping) else read_yaml(path_of(Path(config)), "--config")
        for config in configs[place + 1 :]
    )
    elsewhere = any(isinstance(said, Mapping) and {"output", "name"} & {*said} for said in contents)
    return None if elsewhere else runs[place]


def _run_with(config: Path) -> Path | None:
    """The folder of the run whose own configuration a file is; None for another file."""
    return _run_of(config.parent) if config.name == "config.yaml" else None


def _run_of(folder: Path) -> Path | None:
    """The folder, under a name of its own, if a run lies there."""
    try:
        if not holds_run(folder):
            return None
        return folder if folder.name not in ("", "..") else folder.resolve()
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None


def _place(folder: Path) -> list[str]:
    return ["--output", str(folder.parent), "--name", folder.name]
