"""Atomic save and exact resume of a whole federation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.files import load_tensors, save_tensors

FORMAT = 1
KEEP_MODELS_BELOW = 2**30  # bytes of all clients' models together, for `models: auto`
_NAME = re.compile(r"round-(\d+)\.ckpt")


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a federation is saved.

    Args:
        every: rounds between checkpoints, >= 0; the last round is always saved. 0 leaves it to `seconds`, and without
            that saves nothing at all.
        seconds: > 0; the first round to end so many seconds after a checkpoint is saved, too. null leaves that out.
        keep: newest checkpoints that are kept, >= 1.
        models: whether each client's own trained model is kept at the end (`models/`), so that `evaluate` can compute
            Local-T again: ``auto`` keeps them if they take less than 1 GiB together.
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


class Checkpoints:
    """The checkpoints of one run: `round-0005.ckpt` and, in `clients/`, the private states that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._named: dict[str, set[str]] = {}  # checkpoint -> the client files that it names

    @property
    def clients(self) -> Path:
        """Where the pool writes private states."""
        return self.folder / "clients"

    def all(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        found = [path for path in self.folder.glob("round-*.ckpt") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.split("-")[1]))

    def save(self, round: int, state: dict[str, Any], clients: Mapping[int, str], keep: int) -> Path:
        """Write one checkpoint; only then delete what is older than the `keep` newest.

        Args:
            round: the last round that is done.
            state: the loop's state.
            clients: client -> the file of its private state, on disk already (`ClientPool.flush`).
            keep: how many checkpoints stay.
        """
        path = self.folder / f"round-{round:04d}.ckpt"
        save_tensors(path, {"format": FORMAT, "round": round, "clients": dict(clients), **state})
        self._named[path.name] = set(clients.values())
        self.prune(keep, up_to=round)
        return path

    def prune(self, keep: int, up_to: int | None = None) -> None:
        """Delete all but the `keep` newest checkpoints, and the client states that none of those names.

        Args:
            keep: how many checkpoints stay.
            up_to: spare states of later rounds, which other workers may be writing; None spares none.
        """
        for path in self.all()[:-keep]:
            path.unlink(missing_ok=True)
        kept = self.all()
        for path in kept:
            if path.name not in self._named:  # of the run before a resume
                self.load(path)
        named = {name for path in kept for name in self._named[path.name]}
        for path in self.clients.glob("*-r*.pt"):
            later = up_to is not None and int(path.stem.rpartition("-r")[2]) > up_to
            if path.name not in named and not later:
                path.unlink(missing_ok=True)

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ConfigError: if it is missing, cut short or no checkpoint of a federation.
        """
        state = load_tensors(path, "--resume")
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ConfigError("--resume", f"{path} is no checkpoint of this version of fl-lightning")
        self._named[path.name] = set(state["clients"].values())
        return state

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
        """Folder of clients' private states; None for memory alone."""
        if self.checkpoints is not None:
            return self.checkpoints.clients
        return self._folder / "checkpoints" / "clients" if self._folder is not None and self.on_disk else None

    def models(self, num_bytes: int) -> Path | None:
        """Folder of clients' trained models, so many bytes together; None where they are not kept."""
        keep = self._policy.models
        if self._folder is None or keep is False or self.checkpoints is None:
            return None
        return self._folder / "models" if keep is True or num_bytes < KEEP_MODELS_BELOW else None
