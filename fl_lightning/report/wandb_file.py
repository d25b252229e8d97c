"""Reading W&B's own record of a run back: the ``run-<id>.wandb`` files that it writes as a run goes on."""

from __future__ import annotations

import glob
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.files import content_of, plain_json

HEADER = 7  # bytes before the first block
BLOCK = 32 * 1024
WHOLE, FIRST, LAST = 1, 2, 4  # kinds of a part; 3 is a middle one


def raw_records(log: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format; a record that a kill cut short is left out.

    Args:
        log: the file's content: a header, then blocks of 32 KiB, whose parts are checksum (4 bytes), length (2), kind
            (1) and data.
    """
    position = HEADER
    parts: list[bytes] = []
    while position + 7 <= len(log):
        left = BLOCK - position % BLOCK
        _, length, kind = struct.unpack("<IHB", log[position : position + 7])
        if left < 7 or kind == 0:  # the rest of the block is padding
            position += left
            continue
        data = log[position + 7 : position + 7 + length]
        if len(data) < length:
            return
        position += 7 + length
        parts = [data] if kind in (WHOLE, FIRST) else [*parts, data]
        if kind in (WHOLE, LAST):
            yield b"".join(parts)


def read_records(path: Path) -> Iterator[Any]:
    """The records of a file as W&B's own protobuf messages; damaged ones are left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in raw_records(content_of(path)):
        record = Record()
        try:
            record.ParseFromString(data)
        except Exception:  # protobuf's, a package without types
            continue
        yield record


def read_history(path: Path) -> list[dict[str, Any]]:
    """What was logged, step by step, with W&B's ``_step``; a nested value's key is joined with dots."""
    found = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            with suppress(ValueError):  # a damaged one
                found.append({name: plain_json(text) for name, text in items.items()})
    return found


def run_files(folder: Path, run_id: str) -> list[Path]:
    """The files of a run, oldest first: one for each process that worked on it.

    Args:
        folder: the folder in which W&B made its folder ``wandb``.
        run_id: W&B's id of the run.
    """
    name = glob.escape(run_id)
    found = (folder / "wandb").glob(f"*run-*-{name}*/run-{name}.wandb")
    return sorted(found, key=lambda path: _begun(path, run_id))


def _begun(path: Path, run_id: str) -> tuple[str, int]:
    """When a file was begun: the second, and of those in one second the number that W&B puts behind the id."""
    stamp, _, number = path.parent.name.removeprefix("offline-").rpartition(run_id)
    number = number.removeprefix("-")
    return stamp, int(number) if number.isdecimal() else 0


def is_unsent(path: Path) -> bool:
    """Whether a file was recorded offline and ``wandb sync`` has not sent it yet."""
    return path.parent.name.startswith("offline-") and not path.with_name(path.name + ".synced").exists()
