"""Reading W&B's own record of a run back: the ``run-<id>.wandb`` files that it writes as a run goes on."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """The records of a file as W&B's own protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in raw_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def read_history(path: Path) -> list[dict[str, Any]]:
    """What was logged, step by step, with W&B's ``_step``; a nested value's key is joined with dots."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in read_records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def run_files(folder: Path, run_id: str) -> list[Path]:
    """The files of a run, oldest first: one for each process that worked on it.

    Args:
        folder: the folder in which W&B made its folder ``wandb``.
        run_id: W&B's id of the run.
    """
    found = (folder / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))


def is_unsent(path: Path) -> bool:
    """Whether a file was recorded offline and ``wandb sync`` has not sent it yet."""
    return path.parent.name.startswith("offline-") and not path.with_name(path.name + ".synced").exists()
