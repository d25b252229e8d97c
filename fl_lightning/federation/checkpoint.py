"""Atomic save and exact resume of a whole federation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.model_files import ModelFolder
from fl_lightning.federation.segments import Record, round_of_states, verify_states
from fl_lightning.federation.state_index import packed_index, unpacked_index
from fl_lightning.files import make_folder, remove, sync_folder, writing
from fl_lightning.report.journal import JOURNAL
from fl_lightning.resuming import CHECKPOINT, checkpoints_in, round_of
from fl_lightning.sealed import load_tensors, save_tensors

FORMAT = 3
READABLE = (2, FORMAT)  # version 2 had a file for every client's state
KEEP_MODELS_BELOW = 2**30  # bytes of all clients' models together, for `models: auto`
_PARTS = ("round", "clients")


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a federation is saved.

    Args:
        every: rounds between checkpoints, >= 0; the last round is always saved. 0 leaves it to `seconds`, and without
            that saves nothing at all.
        seconds: > 0; the first round to end so many seconds after a checkpoint is saved, too. null leaves that out.
        keep: newest checkpoints that are kept, >= 1.
        models: whether each client's own trained model is kept at the end of `rounds` (`models/`), so that
            `evaluate` can compute Local-T again: ``auto`` keeps them if they take less than 1 GiB together.
    """

    every: int = 1
    seconds: float | None = None
    keep: int = 2
    models: bool | str = "auto"

    def __post_init__(self) -> None:
        require(self.every >= 0, "federation.checkpoint.every", "must be >= 0", self.every)
        waits = self.seconds is None or self.seconds > 0
        require(waits, "federation.checkpoint.seconds", "must be > 0 or null", self.seconds)
        require(self.keep >= 1, "federation.checkpoint.keep", "must be >= 1", self.keep)
        allowed = self.models in (True, False, "auto")
        require(allowed, "federation.checkpoint.models", "must be true, false or auto", self.models)
        rule = "must be false or auto where nothing is saved (every: 0, seconds: null)"
        kept = self.models is not True or self.every > 0 or self.seconds is not None
        require(kept, "federation.checkpoint.models", rule, self.models)

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return self.every > 0 or self.seconds is not None

    def due(self, round: int, last: bool, waited: float = 0.0) -> bool:
        """Whether `round` is saved.

        Args:
            round: 1-based.
            last: whether the run ends with it.
            waited: seconds since something was saved.
        """
        by_time = self.seconds is not None and waited >= self.seconds
        return self.saves and (last or by_time or (self.every > 0 and round % self.every == 0))


class Chosen(NamedTuple):
    """The checkpoint that a run goes on from.

    Args:
        path: the file.
        damaged: what is wrong with newer ones, one entry each.
    """

    path: Path
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run: `round-0005.ckpt` and, in `clients/`, the private states that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.require_ours: Callable[[], None] = lambda: None
        """Raises `WriteError` where the folder is the run's no more; called before anything of a checkpoint."""
        self._named: dict[Path, set[str]] = {}  # checkpoint -> the files of states that it names, where that is known

    @property
    def clients(self) -> Path:
        """Where the pool writes private states."""
        return self.folder / "clients"

    @property
    def journal(self) -> Path:
        """Where the rows of the run's tables are kept."""
        return self.folder / JOURNAL

    def all(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        return checkpoints_in(self.folder)

    def save(self, round: int, state: dict[str, Any], clients: Mapping[int, Record], keep: int) -> Path:
        """Write one checkpoint; only then delete what is older than the `keep` newest.

        Args:
            round: the last round that is done.
            state: the loop's state.
            clients: client -> where its private state lies, on disk already (`ClientPool.flush`).
            keep: how many checkpoints stay.
        """
        path = self.folder / f"round-{round:04d}.ckpt"
        save_tensors(path, {"format": FORMAT, "round": round, "clients": packed_index(clients), **state})
        self._named[path] = {record.segment for record in clients.values()}
        self.prune(keep, up_to=round)
        return path

    def prune(self, keep: int | None, up_to: int | None = None) -> None:
        """Delete all but the `keep` newest checkpoints, and the files of states that none of those names.

        Args:
            keep: how many checkpoints stay; None keeps all.
            up_to: spare states of later rounds, which other workers may be writing; None spares none.
        """
        for path in self.all()[:-keep] if keep is not None else ():
            remove(path)
            self._named.pop(path, None)
        named = self._names(self.all())
        for path in self.clients.glob("*"):
            round = round_of_states(path.name)
            later = up_to is not None and round is not None and round > up_to
            if round is not None and path.name not in named and not later:
                remove(path)

    def _names(self, checkpoints: Iterable[Path]) -> set[str]:
        """The files of states that some checkpoints name: of one that cannot be read, all that are no younger."""
        named: set[str] = set()
        for path in checkpoints:
            if path not in self._named:
                try:
                    self.load(path)
                except ConfigError:
                    rounds = {file.name: round_of_states(file.name) for file in self.clients.glob("*")}
                    named.update(
                        name for name, round in rounds.items() if round is not None and round <= round_of(path)
                    )
                    continue
            named |= self._named[path]
        return named

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint; under ``clients`` is where each client's state lies.

        Raises:
            ConfigError: if it is missing, damaged, of another version or no checkpoint of a federation.
        """
        state = load_tensors(path, "--resume")
        version = state.get("format") if isinstance(state, dict) else None
        known = type(version) is int and version in READABLE
        require(known, "--resume", f"{path} is no checkpoint of this version of fl-lightning")
        missing = [part for part in _PARTS if part not in state]
        require(not missing, "--resume", f"{path} is no whole checkpoint: it has no {', '.join(missing)}")
        named = CHECKPOINT.fullmatch(path.name) is None or round_of(path) == state["round"]
        require(named, "--resume", f"{path} was renamed: it is of round {state['round']}")
        clients = unpacked_index(state["clients"])
        require(clients is not None, "--resume", f"{path} is no whole checkpoint: it names no files of clients' states")
        assert clients is not None
        self._named[path] = {record.segment for record in clients.values()}
        return {**state, "clients": clients}

    def check(self, path: Path, more: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        """Read a checkpoint and verify all files that it names.

        Args:
            path: the checkpoint.
            more: verifies what else it counts on.

        Raises:
            ConfigError: naming the file that is missing or damaged.
        """
        state = self.load(path)
        verify_states(self.clients, state["clients"])
        if more is not None:
            more(state)

    def choose(self, resume: str, more: Callable[[Mapping[str, Any]], None] | None = None) -> Chosen | None:
        """The checkpoint to go on from: for ``auto``, the newest that is whole.

        Args:
            resume: ``auto``, a folder or a file, as `find` takes them.
            more: as `check` takes it.

        Returns:
            None if there is none for ``auto``.

        Raises:
            ConfigError: if the one that was named is damaged, or all are.
        """
        if resume != "auto":
            path = self.find(resume)
            assert path is not None
            self.check(path, more)
            return Chosen(path)
        damaged: list[str] = []
        for path in reversed(self.all()):
            try:
                self.check(path, more)
            except ConfigError as error:
                damaged.append(str(error).removeprefix("--resume: "))
            else:
                return Chosen(path, tuple(damaged))
        if damaged:
            others = f" (and {len(damaged) - 1} more)" if damaged[1:] else ""
            none = "no checkpoint is whole, so there is nothing to go on from; --overwrite starts anew"
            raise ConfigError("--resume", f"{damaged[0]}{others}; {none}")
        return None

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `--resume` means: the newest for ``auto`` (None if there is none), else the one named."""
        if resume == "auto":
            found = self.all()
            return found[-1] if found else None
        path = Path(resume)
        if path.is_dir():
            inner = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path).all()
            require(bool(inner), "--resume", f"there is no checkpoint in {path}")
            return inner[-1]
        require(path.is_file(), "--resume", f"there is no file {path}; give a checkpoint, a run's folder or auto")
        return path

    def put_aside(self, after: int) -> Path | None:
        """Move the checkpoints of later rounds into a folder of their own, with all that they need.

        At a kill in between, those that are left are the older ones, and whole. Of what a damaged one needs, what is
        missing stays missing.

        Args:
            after: the round that the run goes on from.

        Returns:
            The folder; None if there are no later ones.

        Raises:
            WriteError: if the system refuses; no folder without a checkpoint is left.
        """
        later = [path for path in self.all() if round_of(path) > after]
        if not later:
            return None
        numbers = (path.name.removeprefix("aside-") for path in self.folder.glob("aside-*"))
        last = max((int(number) for number in numbers if number.isdigit()), default=0)
        aside = Checkpoints(self.folder / f"aside-{last + 1:04d}")
        try:
            self._fill(aside, later)
        except BaseException:
            if not aside.all():
                shutil.rmtree(aside.folder, ignore_errors=True)
            raise
        return aside.folder

    def _fill(self, aside: Checkpoints, later: Sequence[Path]) -> None:
        """Move checkpoints into a folder of their own, the newest first, after a link to all that they need."""
        make_folder(aside.clients)
        for name in sorted(self._names(later)):
            if (self.clients / name).is_file():
                _link(self.clients / name, aside.clients / name)
        if self.journal.is_file():
            with writing(aside.journal):
                shutil.copyfile(self.journal, aside.journal)
        for path in reversed(later):
            with writing(aside.folder):
                os.replace(path, aside.folder / path.name)
        for folder in (aside.clients, aside.folder, self.folder):
            sync_folder(folder)


def _link(there: Path, here: Path) -> None:
    """Let a file have a second place, without a copy where the file system can do that; files are never written to."""
    with writing(here):
        try:
            os.link(there, here)
        except FileExistsError:
            return
        except OSError:
            shutil.copyfile(there, here)


class RunStorage:
    """Where a federation keeps what, in its run's folder.

    Args:
        folder: the run's; None keeps everything in memory.
        policy: when it is saved.
        on_disk: whether clients' states are kept on disk, not in memory.

    Raises:
        ConfigError: if states are to be on disk without a folder.
    """

    def __init__(self, folder: Path | None, policy: CheckpointPolicy, on_disk: bool) -> None:
        require(not on_disk or folder is not None, "federation.pool", "disk needs a run's folder")
        self._folder = folder
        self._policy = policy
        self.on_disk = on_disk
        saves = folder is not None and policy.saves
        self.checkpoints = Checkpoints(folder / "checkpoints") if folder is not None and saves else None
        """The checkpoints; None where nothing is saved."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.checkpoints is not None and bool(self.checkpoints.all())

    @property
    def states(self) -> Path | None:
        """Folder of clients' private states, also where none are saved: a run may go on from saved ones; or None."""
        return None if self._folder is None else Checkpoints(self._folder / "checkpoints").clients

    def models(self, num_bytes: int, writes: bool) -> ModelFolder:
        """Where clients' trained models go, so many bytes together, where this process writes; and whether it keeps."""
        keep = num_bytes < KEEP_MODELS_BELOW if self._policy.models == "auto" else bool(self._policy.models)
        place = None if self._folder is None or not writes else self._folder / "models"
        return ModelFolder(place, keep and self.checkpoints is not None)
