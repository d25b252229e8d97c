"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

RECENT = 10.0  # seconds in which a file may still be written to
LOADED = time.time()
"""When this process imported this, in seconds since the epoch: what tells older files from younger ones."""
LONG = 24 * 3600.0  # seconds after which nobody writes to another machine's any more, however far its clock is off
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems say that cannot be asked for a folder, or anything, to be on the disk by now."""
_TEMPORARY = re.compile(r"\..+\.(\d+)(-[0-9a-f]+)?\.tmp")


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
    return expanded(os.environ.get("FL_LIGHTNING_CACHE") or "~/.cache/fl-lightning/arrays")


def expanded(path: str | Path) -> Path:
    """A path with its ``~`` filled in; of a user whom the system does not know it stays.

    Who has no home, as a number without a name in a container, has ``/`` for it, as at a login.
    """
    found = os.path.expanduser(path)
    return Path(f"/{found[2:]}" if found == "~" or found.startswith("~/") else found)


def inside(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder in a folder, itself first, with the names of its files; links are followed, to each folder once."""
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()  # of two links to one folder the same one counts everywhere
        with suppress(OSError):  # it has just gone
            about = os.stat(place)
            if (about.st_dev, about.st_ino) in seen:
                folders.clear()
                continue
            seen.add((about.st_dev, about.st_ino))
        yield place, names


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


def write_atomically(path: Path, write: Callable[[Any], object], sync: bool = True) -> None:
    """Write to a temporary file beside `path`, sync it, rename it, sync the folder.

    Args:
        path: the file.
        write: is given the temporary file, open for bytes.
        sync: whether it must survive a power cut right away.

    Raises:
        WriteError: if the system refuses; the file is as it was.
    """
    temporary = _beside(path)
    with writing(path):
        make_folder(path.parent)
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                if sync:
                    _sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_folder(path.parent)


@contextmanager
def temporary_folder(folder: Path, name: str) -> Iterator[Path]:
    """A folder below a folder that several may write into at once; it is taken away after the block.

    So is, before it, what killed processes have left there.

    Args:
        folder: where; it is there.
        name: what it is for, a part of its name.

    Raises:
        OSError: if the system refuses.
    """
    remove_abandoned(folder)
    path = _beside(folder / name)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def sign_in(folder: Path) -> Iterator[Path]:
    """An empty file of a name that was nowhere before, by which others know a folder; it is taken away after the block.

    Raises:
        WriteError: if the system refuses.
    """
    path = _beside(folder / "sign")
    with writing(folder):  # nobody knows the other name
        path.touch()
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let the processes that come by a file into the block one after another.

    Where the system has no such locks, all go in at once.

    Args:
        path: the file, which is made and stays empty.

    Raises:
        WriteError: if it cannot be made.
    """
    make_folder(path.parent)
    with writing(path):
        own = os.access(path, os.W_OK) or not path.exists()  # another user's is locked all the same
        file = path.open("ab" if own else "rb")
    with file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _beside(path: Path) -> Path:
    """A temporary name beside a path, which nobody else has: on several machines that share a folder, either."""
    return path.with_name(f".{path.name}.{os.getpid()}-{this_machine()}{secrets.token_hex(3)}.tmp")


@lru_cache
def this_machine() -> str:
    """Eight hexadecimal digits that tell this machine, or container, from others, of which one may have its name.

    A process's number means something on that one alone.
    """
    told = [platform.node()]
    with suppress(OSError):  # no Linux
        told += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\n".join(told).encode(errors="surrogateescape")).hexdigest()[:8]


def remove_left_overs(folder: Path) -> None:
    """Delete what kills in the middle of writes have left in a folder and those below it."""
    for path in folder.rglob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def remove_abandoned(folder: Path) -> None:
    """Delete what killed processes have left in a folder that several may write into at once.

    What a living process of this machine is writing stays, and so does what another one's has written to today: whether
    that lives cannot be seen from here, and a slow download writes nothing for a while.
    """
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        with suppress(OSError):
            written = max(own.stat().st_mtime for own in (path, *path.rglob("*")))
            age = abs(time.time() - written)  # from the future where the clock was set back
            if match and (age > LONG if _is_anothers(match[2]) else age > RECENT and not _lives(int(match[1]))):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_anothers(mark: str | None) -> bool:
    """Whether the end of a temporary name is another machine's; earlier versions' says of none."""
    return len(mark or "") > len("-") + 6 and not str(mark).startswith(f"-{this_machine()}")


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            astray = next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
            if astray is None:
                raise
            why = f"{astray} is a link to {os.readlink(astray)}, which is not there"
            raise FileNotFoundError(errno.ENOENT, why) from error


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
    """Whether a text file, no link to one and with no second name, can be read and holds just that."""
    try:
        about = path.lstat()
        return stat.S_ISREG(about.st_mode) and about.st_nlink <= 1 and content_of(path) == text.encode()
    except OSError:
        return False


def separate(path: Path) -> None:
    """Copy a file that has a second name, as in a folder that was copied by hard links, so that only this one changes.

    Raises:
        WriteError: if the system refuses.
    """
    with writing(path), suppress(FileNotFoundError):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
            with path.open("rb") as shared:
                write_atomically(path, lambda file: shutil.copyfileobj(shared, file))


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
            _sync(file.fileno())


def sync_file(path: Path) -> None:
    """Make what was written to a file survive a power cut."""
    with writing(path):
        _sync_at(path, os.O_RDWR)  # Windows syncs nothing that is open for reading alone


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, as far as it can be opened: Windows opens no folder."""
    with writing(folder), suppress(PermissionError):
        _sync_at(folder, os.O_RDONLY)


def _sync_at(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Wait until what was written is on the disk, as far as the file system can say."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
