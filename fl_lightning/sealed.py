"""Files that say by themselves whether they still are what was written.

A file of tensors ends with a seal of 24 bytes behind torch's own archive (which `torch.load` passes over): a mark, the
format's version, the CRC-32 of the content and its length. Before it may stand the round that the file is of, and
before that whose it is, which the CRC-32 covers, too. A JSON file has its checksum as its last member. Either is
verified before anything is made of the content. That finds accidents (every single flipped bit, every burst of up to 32
bits, a cut, and any other damage but one in 2^32); who alters a file on purpose can seal it again, so it is no
signature.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.archives import check_stored, check_unfolded
from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, plain_json, write_atomically, write_text

FORMAT = 1
"""Version of the seal."""
JSON_FORMAT = 1
"""Version of JSON files."""
MARK = b"\nFLseal\n"
SEAL = struct.Struct("<8sIIQ")  # mark, version, CRC-32 and length of what stands before it
ROUND = struct.Struct("<8sQ")  # mark, round
ROUND_MARK = b"FLround\n"
OWNER = struct.Struct("<8sQ")  # mark, length of the JSON object before it
OWNER_MARK = b"FLowner\n"
CHUNK = 1 << 22  # bytes read at once where a file is only verified
_ZIP_END = b"PK\x05\x06"  # of an archive's last 22 bytes


# --- tensors --------------------------------------------------------------------------------------------------------


class Summed:
    """A binary file that keeps the CRC-32 and the number of the bytes that are written to it."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.crc = 0
        self.size = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes."""
        try:
            self.file.write(content)
        except OSError as error:
            self.error = error
            raise
        self.crc = zlib.crc32(content, self.crc)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()

    @property
    def seal(self) -> bytes:
        """What closes a file of this content."""
        return SEAL.pack(MARK, FORMAT, self.crc, self.size)


def save_tensors(
    path: Path, state: Any, sync: bool = True, round: int | None = None, owner: Mapping[str, Any] | None = None
) -> None:
    """Save plain containers of tensors, sealed, atomically.

    Args:
        path: the file.
        state: what is saved.
        sync: whether it must survive a power cut right away.
        round: what `round_in` says of the file.
        owner: what `owner_in` says of it; only beside a round.
    """
    import torch

    def write(file: Any) -> None:
        summed = Summed(file)
        try:
            torch.save(state, summed)  # type: ignore[arg-type]
        except RuntimeError:
            if summed.error is not None:  # torch's words hide the system's
                raise summed.error from None
            raise
        if owner is not None:
            said = json.dumps(dict(owner)).encode()
            summed.write(said + OWNER.pack(OWNER_MARK, len(said)))
        if round is not None:
            summed.write(ROUND.pack(ROUND_MARK, round))
        file.write(summed.seal)

    write_atomically(path, write, sync)


def round_in(path: Path) -> int | None:
    """The round that `save_tensors` was given for a file, which is not verified; None where there is none."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            file.seek(-SEAL.size - ROUND.size, os.SEEK_END)
            mark, round = ROUND.unpack(file.read(ROUND.size))
    except OSError:  # it is shorter than that, too
        return None
    return int(round) if mark == ROUND_MARK else None


def owner_in(path: Path) -> dict[str, Any]:
    """Whose `save_tensors` was told that a file is, which must have been verified; empty where there is nothing."""
    if round_in(path) is None:
        return {}
    end = SEAL.size + ROUND.size + OWNER.size
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - end))
        mark, length = OWNER.unpack(file.read(OWNER.size))
        if mark != OWNER_MARK:
            return {}
        file.seek(-end - length, os.SEEK_END)
        return dict(json.loads(file.read(length)))


def load_tensors(path: Path, key: str) -> Any:
    """Load what `save_tensors` wrote: verified first, then read with ``weights_only=True``.

    Raises:
        ConfigError: with `key`, if the file is missing, damaged, of an older version or something else, or would take
            more memory than it has bytes.
    """
    content = _read(path, key)
    _require_seal(path, key, content[-SEAL.size :], len(content), lambda size: zlib.crc32(memoryview(content)[:size]))
    return plain_tensors(content, path, key)


def plain_tensors(content: Any, path: Path, key: str) -> Any:
    """What the bytes of torch's own archive hold, read with ``weights_only=True``.

    Args:
        content: the bytes.
        path: the file that they are of, for errors.
        key: for errors.

    Raises:
        ConfigError: with `key`, if they hold something else, or would take more memory than they are bytes.
    """
    import torch  # here: tables of figures are read without it

    check_stored(content, path, key)
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(key, f"{path} holds no plain tensors ({first[:120]})") from error
    check_unfolded(found, len(content), path, key)
    return found


def tensors_as_bytes(state: Any) -> memoryview:
    """Plain containers of tensors as torch's own archive."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return memoryview(buffer.getvalue())  # no copy; a view of the buffer itself may outlive it, as Python 3.13 says


def require_readable(state: Any) -> None:
    """Write plain containers of tensors down and read them again, in memory.

    Raises:
        TypeError: naming the first entry that is nothing plain, where that is what cannot be read again.
        Exception: what pickle or torch raise else (half a dozen types), where it cannot be done.
    """
    import torch

    try:
        torch.load(io.BytesIO(tensors_as_bytes(state)), map_location="cpu", weights_only=True)
    except Exception as error:
        odd = _odd_entry(state)
        if not odd:
            raise
        raise TypeError(odd) from error


def _odd_entry(state: Any, name: str = "it") -> str:
    """Which entry of a state is no plain container, number, text or tensor, and what it is; empty for none."""
    import torch

    if isinstance(state, Mapping):
        inner = [(str(key) if name == "it" else f"{name}.{key}", own) for key, own in state.items()]
    elif type(state) in (list, tuple, set):
        inner = [(f"{name}.{place}", own) for place, own in enumerate(state)]
    elif isinstance(state, torch.Tensor) or type(state) in (type(None), bool, int, float, complex, str, bytes):
        return ""
    else:
        kind = type(state)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}'s "
        return f"{name} is {where}{kind.__name__}"
    return next(filter(None, (_odd_entry(own, key) for key, own in inner)), "")


def verify(path: Path, key: str) -> None:
    """Verify a sealed file without loading it.

    Raises:
        ConfigError: as `load_tensors`.
    """
    try:
        require(path.is_file() or not path.exists(), key, f"{path} is no file")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SEAL.size))
            seal = file.read()
            file.seek(0)
            _require_seal(path, key, seal, size, lambda length: _sum(file, length))
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror or error}") from error


def _read(path: Path, key: str) -> bytes:
    try:
        return content_of(path)
    except FileNotFoundError:
        raise ConfigError(key, f"there is no file {path}") from None
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror or error}") from error


def _sum(file: Any, length: int) -> int:
    crc = 0
    while length > 0 and (part := file.read(min(CHUNK, length))):
        crc, length = zlib.crc32(part, crc), length - len(part)
    return crc


def _require_seal(path: Path, key: str, end: bytes, size: int, crc_of: Callable[[int], int]) -> None:
    """Refuse a file whose seal is missing or does not fit.

    Args:
        path: the file.
        key: for the error.
        end: its last bytes.
        size: its size in bytes.
        crc_of: gives the CRC-32 of so many of its first bytes.
    """
    if end[-22:].startswith(_ZIP_END):
        raise ConfigError(
            key, f"{path} has no checksum: it is of an older version of fl-lightning, or another program's"
        )
    if len(end) < SEAL.size or not end.startswith(MARK):
        raise ConfigError(key, f"{path} is damaged: cut short, altered, or not a checkpoint")
    _, version, crc, length = SEAL.unpack(end)
    if length != size - SEAL.size or crc != crc_of(length):
        raise ConfigError(key, f"{path} is damaged: its checksum does not fit its content")
    if version != FORMAT:
        raise ConfigError(key, f"{path} is of another version of fl-lightning, or damaged (format {version})")


# --- JSON -----------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object atomically, with the format's version and, as the last member, its checksum."""
    plain = json.loads(json.dumps({**content, "format": JSON_FORMAT}))  # as it is read back: keys are texts
    write_text(path, json.dumps({**plain, "checksum": _checksum(plain)}, indent=indent) + "\n")


def read_json(path: Path, key: str) -> dict[str, Any]:
    """Read what `write_json` wrote, without checksum and version.

    Raises:
        ConfigError: with `key`, if the file is missing, damaged or of another version.
    """
    try:
        content = plain_json(_read(path, key))
    except ValueError as error:
        raise ConfigError(key, f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict) or "checksum" not in content:
        raise ConfigError(key, f"{path} has no checksum: it is of an older version of fl-lightning, or damaged")
    if not fits_checksum(content):
        raise ConfigError(key, f"{path} is damaged: its checksum does not fit its content")
    version = content.get("format", JSON_FORMAT)  # the first had none
    require(version == JSON_FORMAT, key, f"{path} is of another version of fl-lightning (format {version})")
    return {name: value for name, value in content.items() if name not in ("format", "checksum")}


def fits_checksum(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is what `write_json` wrote; of one without a checksum, somebody's own, nothing is known."""
    plain = {name: value for name, value in content.items() if name != "checksum"}
    return "checksum" not in content or content["checksum"] == _checksum(plain)


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"crc32:{zlib.crc32(text.encode()):08x}"
