"""Files that are either whole or not there, and that say by themselves whether they still are what was written.

A file of tensors ends with a seal of 24 bytes behind torch's own archive (which `torch.load` passes over): a mark, the
format's version, the CRC-32 of the content and its length. A JSON file has its checksum as its last member. Either is
verified before anything is made of the content. That finds accidents (every single flipped bit, every burst of up to 32
bits, a cut, and any other damage but one in 2^32); who alters a file on purpose can seal it again, so it is no
signature.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_lightning.archives import check_stored, check_unfolded
from fl_lightning.errors import ConfigError, require

FORMAT = 1
"""Version of the seal."""
JSON_FORMAT = 1
"""Version of JSON files."""
MARK = b"\nFLseal\n"
SEAL = struct.Struct("<8sIIQ")  # mark, version, CRC-32 and length of what stands before it
CHUNK = 1 << 22  # bytes read at once where a file is only verified
RECENT = 10.0  # seconds in which a file may still be written to
_TEMPORARY = re.compile(r"\..+\.(\d+)(-[0-9a-f]+)?\.tmp")
_ZIP_END = b"PK\x05\x06"  # of an archive's last 22 bytes


class WriteError(OSError):
    """A file of a run's could not be written: a full disk, a read-only folder, a missing permission.

    Args:
        path: the file or folder.
        error: what the system said.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot write {path}: {error.strerror or error}")


def default_cache_dir() -> Path:
    """Where what is made once is kept: ``$FL_LIGHTNING_CACHE``, else ``~/.cache/fl-lightning/arrays``."""
    return Path(os.environ.get("FL_LIGHTNING_CACHE") or "~/.cache/fl-lightning/arrays").expanduser()


def content_of(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as the system says; and for a pipe or a device, on which one might wait for ever.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, no file", str(path))
    return path.read_bytes()


def plain_json(content: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: if it is none, one that is nested too deep, or one that says a key twice.
    """
    try:
        return json.loads(content, object_pairs_hook=_said_once)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it says {json.dumps(twice)} twice")
    return found


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in every error of the system's."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from error


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


def write_atomically(path: Path, write: Callable[[Any], object], sync: bool = True) -> None:
    """Write to a temporary file beside `path`, sync it, rename it, sync the folder.

    Args:
        path: the file.
        write: is given the temporary file, open for bytes.
        sync: whether it must survive a power cut right away.

    Raises:
        WriteError: if the system refuses; the file is as it was.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(3)}"  # on several machines that share a folder, too
    temporary = path.with_name(f".{path.name}.{unique}.tmp")
    with writing(path):
        make_folder(path.parent)
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_folder(path.parent)


def remove_left_overs(folder: Path) -> None:
    """Delete what kills in the middle of writes have left in a folder and those below it."""
    for path in folder.rglob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def remove_abandoned(folder: Path) -> None:
    """Delete what killed processes have left in a folder that several may write into at once.

    What a living process of this machine is writing stays, and so does what was written to just now, perhaps by another
    machine.
    """
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        with suppress(OSError):
            age = abs(time.time() - path.stat().st_mtime)  # from the future where the clock was set back
            if match and age > RECENT and not _lives(int(match[1])):
                path.unlink()


def _lives(process: int) -> bool:
    """Whether this machine has a process of that number."""
    if os.name != "posix":  # where signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        WriteError: if the system refuses.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file; one that is gone already is no error.

    Raises:
        WriteError: if the system refuses.
    """
    with writing(path):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; what is no letter, as a byte of a path that is no text, is spelled out."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def holds(path: Path, text: str) -> bool:
    """Whether a text file, no link to one, can be read and holds just that."""
    try:
        return not path.is_symlink() and content_of(path) == text.encode()
    except OSError:
        return False


def append_text(path: Path, text: str, sync: bool = True) -> None:
    """Write at the end of a text file; what is appended may be cut short by a kill.

    Raises:
        WriteError: if the system refuses.
    """
    with writing(path), path.open("ab", buffering=0) as file:
        left = memoryview(text.encode())
        while left:
            left = left[file.write(left) :]
        if sync:
            os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make what was written to a file survive a power cut."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    sync_file(folder)


# --- sealed files of tensors ----------------------------------------------------------------------------------------


def save_tensors(path: Path, state: Any, sync: bool = True) -> None:
    """Save plain containers of tensors, sealed, atomically."""
    import torch

    def write(file: Any) -> None:
        summed = Summed(file)
        try:
            torch.save(state, summed)  # type: ignore[arg-type]
        except RuntimeError:
            if summed.error is not None:  # torch's words hide the system's
                raise summed.error from None
            raise
        file.write(summed.seal)

    write_atomically(path, write, sync)


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
    return buffer.getbuffer()


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


# --- sealed JSON ----------------------------------------------------------------------------------------------------


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
