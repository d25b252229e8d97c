"""A run's folder: whose it is, who may write into it, and what in it is a run's own."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from fl_lightning.configuration import identity, read_config
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.checkpoint import CheckpointPolicy, Checkpoints, Chosen
from fl_lightning.federation.saving import check_identity
from fl_lightning.files import WriteError, content_of, make_folder, remove, remove_left_overs, separate, writing
from fl_lightning.report.journal import Journal, in_columns, recover
from fl_lightning.report.record import Row, read_rows, rows_in
from fl_lightning.resuming import BUSY, HELD, LOCK, MARK, holds_run, is_marked, round_of
from fl_lightning.sealed import read_json, round_in
from fl_lightning.terminal import say

GLANCES = 5  # a table that looks whether a folder is held holds it for a moment itself

# A run's own files, by patterns from its folder. The lock stays; config.yaml goes last, so that a folder that is half
# cleared is still refused as another run's.
_OWN = (
    "checkpoints/round-*.ckpt", "checkpoints/journal.txt",
    "checkpoints/clients/r*-w*.states", "checkpoints/clients/*-r*.pt",
    "checkpoints/aside-*/round-*.ckpt", "checkpoints/aside-*/journal.txt",
    "checkpoints/aside-*/clients/r*-w*.states", "checkpoints/aside-*/clients/*-r*.pt",
    "checkpoints/aside-*/models/[0-9]*.pt",
    "models/[0-9]*.pt", "wandb/debug*.log", "wandb/latest-run",
    "metrics.csv", "clients.csv", "topology.csv", "logged.csv", "summary.json", "partition.json", "loggers.json",
    "wandb.json", "curves.png", "partition.png", "config.yaml",
)  # fmt: skip
_OWN_TREES = ("wandb/run-*-*", "wandb/offline-run-*-*")
_OWN_FOLDERS = (
    "checkpoints/aside-*/clients", "checkpoints/aside-*/models", "checkpoints/aside-*", "checkpoints/clients",
    "checkpoints", "models", "wandb",
)  # fmt: skip


class RunFolder:
    """The folder of one run.

    Args:
        path: where it is, or will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config(self) -> Path:
        """The run's configuration."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        return Checkpoints(self.path / "checkpoints")

    def claim(self, resume: str | None, overwrite: bool, own: Mapping[str, Any]) -> None:
        """Decide whether a run may use the folder. Writes nothing.

        Args:
            resume: as on the command line.
            overwrite: as on the command line.
            own: the run's `identity`.

        Raises:
            ConfigError: if the folder holds another run, something else, or no checkpoint where one was named.
        """
        where = f"{self.path}"
        try:
            occupied = self.path.exists() and (not self.path.is_dir() or _holds_files(self.path))
        except (OSError, ValueError) as error:  # a path that no file system takes, a folder that may not be read
            raise ConfigError("output", f"{where[:120]} cannot be used: {_said(error)}") from error
        require(not (overwrite and resume), "--overwrite", "cannot be given together with --resume")
        other = "choose another --output or --name"
        blocked = self._in_the_way()
        odd = "it is a folder" if blocked is not None and blocked.is_dir() else "it is no folder"
        require(blocked is None, "output", f"cannot write {blocked}: {odd}")
        out = self._leading_out()
        rule = "is a link that leads out of the run's folder, where a run changes nothing; link the whole folder"
        require(out is None, "output", f"{out} {rule}")
        pipe = self._pipe()
        require(pipe is None, "output", f"{pipe} is a pipe or a device, on which a logger might wait for ever")
        if not holds_run(self.path):
            foreign = occupied and not is_marked(self.path)
            why = "has no mark of fl-lightning's, so nothing in it is deleted" if overwrite else "is no run's folder"
            require(not foreign, "--overwrite" if overwrite else "output", f"{where} exists and {why}; {other}")
            require(resume in (None, "auto"), "--resume", f"there is no run in {where}")
            return
        if overwrite:
            marked = f"{where} has no mark of fl-lightning's, so nothing in it is deleted; {other}"
            require(is_marked(self.path), "--overwrite", marked)
            return
        if resume is None:
            raise ConfigError("output", f"{where} holds a run; continue it with --resume auto, or say --overwrite")
        self._check_identity(own)
        path = self.checkpoints.find(resume)
        inside = path is None or os.path.realpath(self.checkpoints.folder) == os.path.dirname(os.path.realpath(path))
        require(inside, "--resume", f"{path} belongs to another run than {where}; give its --output and --name")

    def _in_the_way(self) -> Path | None:
        """A folder where the run has a file, or something else where it has a folder; None if there is none."""
        own = [self.path / name for name in _OWN if "*" not in name]
        files = next((path for path in own if path.is_dir() and not path.is_symlink()), None)  # W&B's latest-run is one
        folders = [self.path / name for name in _OWN_FOLDERS if "*" not in name]
        return files or next((path for path in folders if os.path.lexists(path) and not path.is_dir()), None)

    def _leading_out(self) -> Path | None:
        """A link to somewhere else in place of a folder of the run's, or in a logger's, which writes through it."""
        here = os.path.realpath(self.path)
        own = (path for name in _OWN_FOLDERS for path in self.path.glob(name))
        links = (path for path in (*own, *self._of_others()) if path.is_symlink())
        return next((path for path in links if not os.path.realpath(path).startswith(f"{here}{os.sep}")), None)

    def _pipe(self) -> Path | None:
        """What is no plain file in the folders of loggers, where others than we open files; None if there is none."""
        for path in self._of_loggers():
            with suppress(OSError):  # a link to nothing
                mode = os.stat(path).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    return path
        return None

    def _of_loggers(self) -> Iterator[Path]:
        """Folders that are no run's own, and all that is in them."""
        ours = ("checkpoints", "models")
        for folder, inner, files in os.walk(self.path):
            if folder == str(self.path):
                inner[:], files = [name for name in inner if name not in ours], []
            yield from (Path(folder, name) for name in (*inner, *files))

    def _of_others(self) -> Iterator[Path]:
        """As `_of_loggers`, without W&B's, which begins a folder at every start, with a link to its cache."""
        wandbs = self.path / "wandb"
        return (path for path in self._of_loggers() if wandbs not in path.parents)

    def _check_identity(self, own: Mapping[str, Any]) -> None:
        try:
            there = read_config(self.config)
        except ConfigError:
            if not self.checkpoints.all():  # they hold it, too
                raise
        else:
            check_identity(identity(there), own)

    def choose(self, resume: str | None) -> Chosen | None:
        """The checkpoint that a run goes on from, with all that it needs verified; None to begin anew.

        Raises:
            ConfigError: if what was named is damaged, or there is nothing whole.
        """
        if resume is None:
            return None
        chosen = self.checkpoints.choose(resume, self._check_tables)
        if chosen is None and self._has_rows():
            say(f"{self.path} holds rounds, but no checkpoint; the run begins anew")
        return chosen

    def is_over(self, chosen: Chosen) -> bool:
        """Whether a run ended with the round of a checkpoint, and said so: a kill may have come between the two."""
        try:
            said = read_json(self.path / "summary.json", "--resume")
        except ConfigError:
            return False
        return bool(said.get("finished")) and said.get("rounds") == round_of(chosen.path)

    def _has_rows(self) -> bool:
        try:
            return content_of(self.path / "metrics.csv").count(b"\n") > 1
        except OSError:
            return False

    def _check_tables(self, state: Mapping[str, Any]) -> None:
        try:
            saved = state["callbacks"]["Recorder"]["tables"]
            recover(Journal(self.checkpoints.journal), self.path, state["round"], saved)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            why = "does not say how far the tables had come"
            raise ConfigError("--resume", f"the checkpoint of round {state['round']} is not whole: it {why}") from error

    def leave_only(
        self, chosen: Chosen | None, policy: CheckpointPolicy, participants: Callable[[int], Iterable[int]]
    ) -> None:
        """Put checkpoints that are newer than the one that a run goes on from aside, and say so.

        Clients' models of later rounds go with them, or are deleted; and so does what was said of a later end.

        States that no checkpoint names are deleted, also where a run begins anew: a kill in the middle of its first
        checkpoint leaves some, which later ones would be believed to name; so does one that saves nothing and has its
        clients' states on disk.

        Args:
            chosen: the one; None where there is none.
            policy: how many stay.
            participants: who takes part in a round.
        """
        aside = self._put_aside(chosen) if chosen is not None else None
        after = round_of(chosen.path) if chosen is not None else 0
        self._withdraw_models(after, aside, participants)
        self._withdraw_summary(after, aside)
        self.checkpoints.prune(policy.keep if policy.saves else None)

    def leave_saved(self, policy: CheckpointPolicy) -> None:
        """At the end of a run that saves nothing, delete the clients' states that it had on disk."""
        if not policy.saves:
            self.checkpoints.prune(None)

    def _put_aside(self, chosen: Chosen) -> Path | None:
        checkpoints, own = self.checkpoints, round_of(chosen.path)
        later = [path.name for path in checkpoints.all() if round_of(path) > own]
        aside = checkpoints.put_aside(own)
        if aside is not None:
            newer = f"there {'are newer checkpoints' if later[1:] else 'is a newer checkpoint'}: {', '.join(later)}"
            more = f" (and {len(chosen.damaged) - 1} more)" if chosen.damaged[1:] else ""
            why = f"{chosen.damaged[0]}{more}" if chosen.damaged else newer
            say(f"{why}; put aside in {aside}; going on from round {own}")
        return aside

    def _withdraw_models(self, after: int, aside: Path | None, participants: Callable[[int], Iterable[int]]) -> None:
        """Take away the models of later rounds, in which their clients need not train again.

        Args:
            after: the round that the run goes on from, 0 for none.
            aside: where the later checkpoints lie, whose these models are; None deletes them.
            participants: who takes part in a round.
        """
        rounds = {path: round_in(path) for path in sorted((self.path / "models").glob("[0-9]*.pt"))}
        silent = None in rounds.values()  # files of older versions
        trained = {f"{client:05d}.pt" for client in self._trained(after, participants)} if silent else set()
        for path, round in rounds.items():
            if path.is_file() and (path.name in trained if round is None else round > after):
                _take_away(path, None if aside is None else aside / "models")

    def _withdraw_summary(self, after: int, aside: Path | None) -> None:
        """Take away what was said of a later end than the round that the run goes on from: it is not over any more."""
        path = self.path / "summary.json"
        try:
            rounds = read_json(path, "--resume").get("rounds")
        except ConfigError:  # there is none, or it says nothing
            return
        if isinstance(rounds, int) and rounds > after:
            _take_away(path, aside)

    def _trained(self, after: int, participants: Callable[[int], Iterable[int]]) -> set[int]:
        """Clients that may have trained in later rounds: by the tables' rows, and in one that a kill left without."""
        rows = [row for row in self._client_rows() if all(isinstance(row.get(k), int) for k in ("round", "client"))]
        later = [row for row in rows if row["round"] > after]
        trained = {row["client"] for row in later if row.get("participated")}
        last = max((row["round"] for row in later), default=after)
        return trained | set(participants(last + 1)) if self._was_broken_off(last) else trained

    def _client_rows(self) -> list[Row]:
        """The rows of ``clients.csv`` and, should it be lost, of the journal."""
        records = in_columns(Journal(self.checkpoints.journal).read(sys.maxsize))
        texts = (record.get("clients.csv", "") for record in records)
        return [*read_rows(self.path / "clients.csv"), *rows_in("".join(texts))]

    def _was_broken_off(self, last: int) -> bool:
        """Whether a run may have ended in the middle of the round after its last row's.

        Args:
            last: the round of the last row.
        """
        try:
            if read_json(self.path / "summary.json", "--resume").get("rounds") == last:  # it ended, or was stopped
                return False
        except ConfigError:
            pass
        try:
            return bool(read_config(self.config)["federation"]["rounds"] > last)
        except (ConfigError, KeyError, TypeError):
            return True

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Hold the folder, so that no second process writes into it; the system lets go when this one ends.

        Yields:
            What raises `WriteError` once another folder lies at the path, which is not held: what is written there
            would be among another run's files.

        Raises:
            ConfigError: if another process holds it.
            WriteError: if it cannot be made or written to.
        """
        make_folder(self.path)
        with writing(self.path / LOCK):  # a link is not followed: what it leads to would be emptied for the mark
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
            file = os.fdopen(os.open(self.path / LOCK, flags, 0o666), "ab+", buffering=0)
        with file:
            lock(file, self.path)
            if not is_marked(self.path):
                with writing(self.path / LOCK):  # in place: another file would have another lock
                    file.truncate(0)
                    file.write(MARK.encode())
            knows = _is_at(file, self.path / LOCK)  # a file system may number its files anew

            def check() -> None:
                if knows and not _is_at(file, self.path / LOCK):
                    raise WriteError(self.path, OSError(0, "it was moved, and another folder is there now"))

            yield check

    def clean(self, overwrite: bool) -> None:
        """Delete what kills have left in the middle of a write and, if asked to, the run that was here.

        Of what loggers write to in place, each file is the run's alone from now on.

        Args:
            overwrite: whether to delete a run's own files; others stay.

        Raises:
            WriteError: if the system refuses.
        """
        remove_left_overs(self.path)
        if overwrite:
            _delete(self.path)
        for path in self._of_others():
            separate(path)


def _is_at(file: Any, path: Path) -> bool:
    """Whether an open file still lies at a path; it counts so where nothing does, of which writes say something."""
    try:
        there = path.lstat()
    except OSError:
        return True
    return os.path.samestat(os.fstat(file.fileno()), there)


def _delete(run: Path) -> None:
    """Delete a run's own files; none where somebody has taken away the permission of one of its folders."""
    for folder in (run, *(path for pattern in _OWN_FOLDERS for path in run.glob(pattern))):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise WriteError(folder, OSError(0, "it is protected, so nothing of the run is deleted"))
    for pattern in _OWN:
        for path in run.glob(pattern):
            if path.is_symlink() or path.is_file():
                remove(path)
        if pattern == "wandb/latest-run":
            _remove_folders(run)


def _remove_folders(run: Path) -> None:
    for pattern in _OWN_TREES:
        for path in run.glob(pattern):
            with writing(path):
                rmtree(path)
    for pattern in _OWN_FOLDERS:
        for path in run.glob(pattern):
            with suppress(OSError):  # somebody's own files are there, too
                path.rmdir()


def lock(file: Any, place: Path, key: str = "output") -> None:
    """Lock an open file until it is closed, so that no second process works in a place.

    Args:
        file: open for writing.
        place: a folder, or the file, for messages.
        key: for the error.

    Raises:
        ConfigError: if another process has locked it.
    """
    try:
        import fcntl
    except ImportError:
        _say_unlocked(place, "this system has no such locks")
        return
    for attempt in range(GLANCES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in BUSY:
                _say_unlocked(place, f"its file system has no locks ({_said(error)})")
                return
            if attempt == GLANCES - 1:
                raise ConfigError(key, f"{HELD} {place}") from error
        time.sleep(0.02)


def _say_unlocked(folder: Path, why: str) -> None:
    say(f"nothing keeps a second process out of {folder}: {why}")


def _take_away(path: Path, to: Path | None) -> None:
    """Move a file into a folder; None deletes it."""
    if to is None:
        remove(path)
        return
    make_folder(to)
    with writing(path):
        os.replace(path, to / path.name)


def _holds_files(folder: Path) -> bool:
    """Whether somebody's files are there; a lock or a temporary file of a killed run is nobody's."""
    return any(not path.name.startswith(".") for path in folder.iterdir())


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
