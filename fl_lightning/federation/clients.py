"""The pool of client states that are swapped in and out of the resident module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.moving import moved
from fl_lightning.errors import require
from fl_lightning.federation.segments import KEY, Record, SegmentLog, State, load_state
from fl_lightning.federation.state_index import sparse_segments

_CPU = torch.device("cpu")


class ClientPool:
    """Private states of N clients, in memory or on disk.

    What is written is appended to a segment, which the next checkpoint closes: it names the records that belong to
    it, so that it writes only what changed since the one before, and a run killed in mid-round finds the old ones
    untouched.

    Args:
        folder: where segments are written; None keeps everything in memory (no checkpoints, no disk).
        on_disk: keep states on disk only, so that memory does not grow with the number of clients.
        rank: the worker's, so that each writes files of its own.
    """

    def __init__(self, folder: Path | None, on_disk: bool = False, rank: int = 0) -> None:
        if on_disk and folder is None:
            raise ValueError("ClientPool: states on disk need a folder")
        self.folder = folder
        self.on_disk = on_disk
        self._states: dict[int, State] = {}
        self._records: dict[int, Record] = {}  # of states that have not changed since they were written
        self._log = None if folder is None else SegmentLog(folder, rank)
        self._sparse: frozenset[str] = frozenset()  # segments that the next flush leaves

    def get(self, client: int) -> State | None:
        """The client's last private state; None if it never took part."""
        if client in self._states:
            return self._states[client]
        if client in self._records:
            return self._read(client, self._records[client])
        return None

    def put(self, client: int, state: Mapping[str, Tensor], round: int) -> None:
        """Keep a copy of the client's private state after `round`; of an empty one nothing, nor of the one before."""
        if not state:
            self._forget(client)
            return
        if self._log is not None:
            self._log.round = round
        here = moved(state, _CPU)
        if self.on_disk:
            self._write(client, {name: tensor.detach() for name, tensor in here.items()})
            return
        self._records.pop(client, None)
        own = self._states.get(client)
        if own is None or _kinds(own) != _kinds(here):
            kept = {name: tensor.detach().clone() if tensor is state[name] else tensor for name, tensor in here.items()}
            self._states[client] = kept
            return
        for name, tensor in here.items():
            own[name].copy_(tensor.detach())

    def _forget(self, client: int) -> None:
        self._states.pop(client, None)
        record = self._records.pop(client, None)
        if record is not None and self._log is not None:
            self._log.give_up(record)

    def flush(self, round: int) -> dict[int, Record]:
        """Bring every state to disk, for the checkpoint of `round`, and return where each client's lies."""
        if self._log is None:
            return {}
        self._log.round = round
        sparse = {client: record for client, record in self._records.items() if record.segment in self._sparse}
        changed = {c: state for c, state in sorted(self._states.items()) if c not in self._records or c in sparse}
        resting = {client: record for client, record in sorted(sparse.items()) if client not in changed}
        self._records |= {**self._log.append(changed), **self._log.copy(resting)}
        self._log.sync(round)
        return dict(self._records)

    def settle(self, records: Mapping[int, Record]) -> None:
        """Take note of where all workers' clients lie, so that segments with little in them are left next time."""
        if self.folder is not None:
            self._sparse = sparse_segments(self.folder, records)

    def restore(self, records: Mapping[int, Record], fits: Callable[[int, State], bool] | None = None) -> None:
        """Take up the states that a checkpoint names.

        Args:
            records: client -> where its state lies.
            fits: whether a state is one of that client's model; None believes it.

        Raises:
            ConfigError: if one of them is missing or damaged, or of another model.
        """
        self._states.clear()
        self._records = dict(records)
        for client, record in records.items():
            state = self._read(client, record)
            fit = fits is None or fits(client, state)
            rule = f"the state of client {client} in {record.segment} does not fit the model of the run's configuration"
            require(fit, KEY, rule)
            if not self.on_disk:
                self._states[client] = state
        self._sparse = frozenset(record.segment for record in records.values() if record.is_single)

    def release(self, client: int) -> dict[str, Any]:
        """Hand a client's state over to another worker's pool: what `adopt` takes."""
        record = self._records.pop(client, None)
        if record is not None and self._log is not None and self._log.is_fresh(record):  # this pool's to move about
            self._log.give_up(record)
            return {"state": self._read(client, record), "record": None}
        return {"state": self._states.pop(client, None), "record": record}

    def adopt(self, client: int, released: Mapping[str, Any]) -> None:
        """Take a client's state over; what a checkpoint names stays where it is."""
        state, record = released["state"], released["record"]
        if record is not None:
            self._records[client] = record
        if state is not None and self.on_disk:
            self._write(client, state)
        elif state is not None:
            self._states[client] = state

    def _write(self, client: int, state: State) -> None:
        """Write a state; only `flush` makes it safe, with all others, so that files are synced but once."""
        assert self._log is not None
        old = self._records.get(client)
        self._records |= self._log.append({client: state})
        if old is not None:
            self._log.give_up(old)
        if self._log.is_wasteful:
            self._records |= self._log.compact(self._records)

    def _read(self, client: int, record: Record) -> State:
        assert self.folder is not None
        return load_state(self.folder, client, record)


def _kinds(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What must be the same for a state to be copied into another's tensors."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
