"""Clients' private states in few files: records that are only ever appended, and where each of them lies.

A segment is a row of records, each a header (mark, version, client, round, length, CRC-32 of all that) and the state as
torch's own archive. A worker appends to a segment of its own until the next checkpoint; then it is synced and never
written to again, so that a checkpoint costs what changed, and one sync a worker. Where a record lies is in the
checkpoint, so that what a kill leaves at a segment's end is nobody's.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from torch import Tensor

from fl_lightning.errors import ConfigError, require
from fl_lightning.files import make_folder, remove, sync_file, sync_folder, writing
from fl_lightning.sealed import load_tensors, plain_tensors, tensors_as_bytes, verify

State = dict[str, Tensor]
FORMAT = 1
"""Version of the records."""
MARK = b"FLstate\n"
HEADER = struct.Struct("<8sIQQQI")  # mark, version, client, round, length of the state, CRC-32
LEAST_DEAD = 2**20  # bytes that may be dead before a segment that no checkpoint names yet is written anew
KEY = "--resume"
_NAME = re.compile(r"r(\d+)-w\d+(?:-\d+)?\.states")
_SINGLE = re.compile(r"\d+-r(\d+)\.pt")  # a client's state in a file of its own, as older versions wrote it


@dataclass(frozen=True, order=True)
class Record:
    """Where a client's state lies.

    Args:
        segment: name of the file.
        offset: of the record, in bytes.
        length: of the state alone, in bytes.
        crc: as the record's header has it.
    """

    segment: str
    offset: int = 0
    length: int = 0
    crc: int = 0

    @property
    def size(self) -> int:
        """Bytes of the record."""
        return HEADER.size + self.length

    @property
    def is_single(self) -> bool:
        """Whether it is a file of its own, of an older version, which is sealed as a whole."""
        return _SINGLE.fullmatch(self.segment) is not None


def round_of_states(name: str) -> int | None:
    """The first round whose checkpoint may name a file of states, by its name; None if it is none."""
    match = _NAME.fullmatch(name) or _SINGLE.fullmatch(name)
    return int(match[1]) if match else None


def load_state(folder: Path, client: int, record: Record) -> State:
    """Read a client's state.

    Raises:
        ConfigError: if the file is missing, or the record is damaged or no client's state.
    """
    path = folder / record.segment
    state = load_tensors(path, KEY) if record.is_single else plain_tensors(_read(folder, client, record)[1], path, KEY)
    require(isinstance(state, dict), KEY, f"{path} holds no state of client {client}")
    return dict(state)


def _read(folder: Path, client: int, record: Record) -> tuple[int, memoryview]:
    """The round of a record, and the bytes of its state, verified."""
    path = folder / record.segment
    if record.is_single:
        return round_of_states(record.segment) or 0, tensors_as_bytes(load_state(folder, client, record))
    with _reading(path) as file:
        return _verified(file, path, client, record)


def verify_states(folder: Path, records: Mapping[int, Record]) -> None:
    """Verify records without loading them.

    Raises:
        ConfigError: naming the first file that is missing or damaged.
    """
    segments: dict[str, list[tuple[Record, int]]] = {}
    for client, record in records.items():
        segments.setdefault(record.segment, []).append((record, client))
    for name, own in segments.items():
        path = folder / name
        if own[0][0].is_single:
            verify(path, KEY)
            continue
        with _reading(path) as file:
            for record, client in sorted(own):
                _verified(file, path, client, record)


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of states, and say in one line where that fails."""
    try:
        require(path.is_file() or not path.exists(), KEY, f"{path} is no file")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(KEY, f"there is no file {path}") from None
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror or error}") from error


def _verified(file: IO[bytes], path: Path, client: int, record: Record) -> tuple[int, memoryview]:
    whole = record.offset + record.size <= os.fstat(file.fileno()).st_size
    require(whole, KEY, f"{path} is damaged: cut short before the end of client {client}'s state")
    file.seek(record.offset)
    content = memoryview(file.read(record.size))
    mark, version, own, round, length, crc = HEADER.unpack(content[: HEADER.size])
    state = content[HEADER.size :]
    same = (mark, version, own, length, crc) == (MARK, FORMAT, client, record.length, record.crc)
    fits = same and crc == _crc(client, round, state)
    require(fits, KEY, f"{path} is damaged: the checksum of client {client}'s state does not fit its content")
    return round, state


def _crc(client: int, round: int, state: memoryview) -> int:
    return zlib.crc32(state, zlib.crc32(HEADER.pack(MARK, FORMAT, client, round, len(state), 0)))


class SegmentLog:
    """What one worker writes: one segment from checkpoint to checkpoint.

    Args:
        folder: of the segments; made with the first.
        rank: the worker's.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.round = 1
        """The first round whose checkpoint may name what is written next."""
        self._begin()

    def _begin(self) -> None:
        """Let the next state go into another segment."""
        self._segment: str | None = None
        self._end = 0  # of the segment, in bytes
        self._dead = 0  # bytes of it that nobody needs any more

    def is_fresh(self, record: Record) -> bool:
        """Whether no checkpoint can name a record yet."""
        return record.segment == self._segment

    def give_up(self, record: Record) -> None:
        """Nobody needs a record any more."""
        if self.is_fresh(record):
            self._dead += record.size

    @property
    def is_wasteful(self) -> bool:
        """Whether more than half of what no checkpoint names yet is dead."""
        return self._dead > max(self._end - self._dead, LEAST_DEAD)

    def append(self, states: Mapping[int, State]) -> dict[int, Record]:
        """Write states of the present round, by client; only `sync` makes them safe.

        Returns:
            Client -> where its state lies.

        Raises:
            WriteError: if the system refuses; what was written is taken back.
        """
        return self._write(states, lambda client: (self.round, tensors_as_bytes(states[client])))

    def copy(self, records: Mapping[int, Record]) -> dict[int, Record]:
        """Write states once more, from where they lie; as `append`.

        Raises:
            ConfigError: if one is damaged.
        """
        return self._write(records, lambda client: _read(self.folder, client, records[client]))

    def compact(self, records: Mapping[int, Record]) -> dict[int, Record]:
        """Write those of some records that are fresh into a new segment, and delete the one where they lay.

        Returns:
            Client -> where its state lies now.
        """
        fresh, old = {client: own for client, own in records.items() if self.is_fresh(own)}, self._segment
        self._begin()
        moved = self.copy(fresh)
        if old is not None:
            remove(self.folder / old)
        return moved

    def sync(self, round: int) -> None:
        """Make all that was written survive a power cut, for the checkpoint of `round`, and close the segment."""
        if self._segment is not None:
            sync_file(self.folder / self._segment)
            sync_folder(self.folder)
        self._begin()
        self.round = round + 1

    def _write(
        self, clients: Collection[int], content_of: Callable[[int], tuple[int, memoryview]]
    ) -> dict[int, Record]:
        """Append a record for each of some clients, of what `content_of` gives: its round and the state's bytes."""
        written: dict[int, Record] = {}
        if not clients:
            return written
        with self._open() as (name, file):
            end = self._end
            for client in clients:
                round, content = content_of(client)
                crc = _crc(client, round, content)
                file.write(HEADER.pack(MARK, FORMAT, client, round, len(content), crc))
                file.write(content)
                written[client] = Record(name, end, len(content), crc)
                end += written[client].size
        self._end = end
        return written

    @contextmanager
    def _open(self) -> Iterator[tuple[str, IO[bytes]]]:
        """The segment, open at its end; if anything fails, it is as it was."""
        with writing(self.folder):
            name = self._segment or self._new_name()
        path, is_new = self.folder / name, self._segment is None
        with writing(path):
            make_folder(self.folder)
            try:
                with path.open("xb" if is_new else "r+b") as file:
                    self._segment = name
                    file.seek(self._end)
                    yield name, file
            except BaseException:
                with suppress(OSError):
                    os.truncate(path, self._end)
                raise

    def _new_name(self) -> str:
        """A name that no file has: a killed run may have left some."""
        stem = f"r{self.round:04d}-w{self.rank}"
        names = (f"{stem}{'' if number == 0 else f'-{number}'}.states" for number in count())
        return next(name for name in names if not (self.folder / name).exists())
