"""The pool of client states that are swapped in and out of the resident module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.errors import ConfigError, require
from fl_lightning.files import load_tensors, remove, save_tensors, sync_file, sync_folder

State = dict[str, Tensor]


class ClientPool:
    """Private states of N clients, in memory or on disk.

    Files are versioned by round (``00012-r0005.pt``): a checkpoint names the versions that belong to it, so that it
    writes only what changed since the one before, and a run killed in mid-round finds the old versions untouched.

    Args:
        folder: where versions are written; None keeps everything in memory (no checkpoints, no disk).
        on_disk: keep states on disk only, so that memory does not grow with the number of clients.
    """

    def __init__(self, folder: Path | None, on_disk: bool = False) -> None:
        if on_disk and folder is None:
            raise ValueError("ClientPool: states on disk need a folder")
        self.folder = folder
        self.on_disk = on_disk
        self._states: dict[int, State] = {}
        self._files: dict[int, str] = {}
        self._unsynced: set[str] = set()
        self._protected: set[str] = set()  # versions that the newest checkpoint may name

    def get(self, client: int) -> State | None:
        """The client's last private state; None if it never took part."""
        if client in self._states:
            return self._states[client]
        if client in self._files:
            return self._read(client)
        return None

    def put(self, client: int, state: Mapping[str, Tensor], round: int) -> None:
        """Keep a copy of the client's private state after `round`."""
        if not state:
            return
        if self.on_disk:
            self._write(client, {name: tensor.detach().cpu() for name, tensor in state.items()}, round)
            return
        self._files.pop(client, None)
        own = self._states.get(client)
        if own is None or own.keys() != state.keys():
            self._states[client] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
            return
        for name, tensor in state.items():
            own[name].copy_(tensor.detach())

    def flush(self, round: int) -> dict[int, str]:
        """Bring every state to disk, for a checkpoint, and return the file that holds each client's."""
        for client, state in self._states.items():
            if client not in self._files:
                self._write(client, state, round)
        for name in self._unsynced:
            sync_file(self._path(name))
        if self._unsynced and self.folder is not None:
            sync_folder(self.folder)
        self._unsynced.clear()
        self._protected = set(self._files.values())
        return dict(self._files)

    def restore(self, files: Mapping[int, str], fits: Callable[[int, State], bool] | None = None) -> None:
        """Take up the versions that a checkpoint names.

        Args:
            files: client -> the file of its state.
            fits: whether a state is one of that client's model; None believes it.

        Raises:
            ConfigError: if one of them is missing or damaged, or of another model.
        """
        self._states.clear()
        self._unsynced.clear()
        self._files = dict(files)
        self._protected = set(files.values())
        for client in files:
            state = self._read(client)
            fit = fits is None or fits(client, state)
            require(fit, "--resume", f"{self._path(files[client])} does not fit the model of the run's configuration")
            if not self.on_disk:
                self._states[client] = state

    def release(self, client: int) -> dict[str, Any]:
        """Hand a client's state over to another worker's pool: what `adopt` takes."""
        return {"state": self._states.pop(client, None), "file": self._files.pop(client, None)}

    def adopt(self, client: int, released: Mapping[str, Any]) -> None:
        """Take a client's state over; on disk it stays where it is."""
        if released["state"] is not None:
            self._states[client] = released["state"]
        if released["file"] is not None:
            self._files[client] = released["file"]
            self._protected.add(released["file"])  # the newest checkpoint may name it

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name

    def _write(self, client: int, state: State, round: int) -> None:
        """Write a version; only `flush` makes it safe, with all others, so that the folder is synced but once."""
        name = f"{client:05d}-r{round:04d}.pt"
        save_tensors(self._path(name), state, sync=False)
        self._unsynced.add(name)
        old = self._files.get(client)
        if old is not None and old != name and old not in self._protected:
            remove(self._path(old))
            self._unsynced.discard(old)
        self._files[client] = name

    def _read(self, client: int) -> State:
        state = load_tensors(self._path(self._files[client]), "--resume")
        if not isinstance(state, dict):
            raise ConfigError("--resume", f"{self._files[client]} holds no client state")
        return state
