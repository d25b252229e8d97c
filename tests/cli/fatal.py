"""Kills a process before its n-th file operation in a folder: opens to write, writes, renames, syncs, deletions."""

import builtins
import errno
import io
import os
import pathlib
import shutil
import signal
from pathlib import Path

NAMED = ("unlink", "remove", "mkdir", "rmdir", "truncate")  # with one path
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class FatalOperations:
    """Counts the operations of each of a run's processes, under its rank (``starter`` for the one that starts them).

    It replaces functions of `os` and `io` in this process for good; what is forked from it takes them over. What C++
    writes by itself is not seen.

    Args:
        folder: what happens elsewhere is not counted.
        die: who dies, and before which of its operations (1-based); with a third item that is true, a write in the
            middle of itself; with ``full`` nobody dies, but the disk is full from there on. None lets everybody live.
        log: a file that gets a line for every operation: who, what, on which file.
    """

    def __init__(self, folder, die=None, log=None) -> None:
        self.folder = os.path.abspath(folder)
        self.die = tuple(die or ())
        self.log = log
        self.is_full = False
        self.counts = {}
        self.originals = {name: getattr(os, name) for name in ("open", "write", "kill", "readlink")}
        self._replace_functions()

    # --- what happens at an operation -------------------------------------------------------------------------------

    def _at(self, what: str, path: str, half=None) -> None:
        if not path.startswith(self.folder):
            return
        who = os.environ.get("LOCAL_RANK", "starter")
        self.counts[who] = self.counts.get(who, 0) + 1
        if self.log is not None:
            log = self.originals["open"](self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self.originals["write"](log, f"{who} {what} {path[len(self.folder) + 1 :]}\n".encode())
            os.close(log)
        if self.die == (who, self.counts[who], "full"):
            self.is_full = True
        elif self.die[:2] == (who, self.counts[who]):
            if half is not None and self.die[2:] == (True,):
                half()
            self.originals["kill"](os.getpid(), signal.SIGKILL)
        if self.is_full and what.startswith(("open", "write", "fsync")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _path(self, path, folder=None) -> str:
        """The full path of a name, a name in an open folder, or an open file."""
        if isinstance(path, int):
            try:
                return self.originals["readlink"](f"/proc/self/fd/{path}")
            except OSError:
                return ""
        base = self._path(folder) if isinstance(folder, int) else os.getcwd()
        return os.path.join(base, os.fsdecode(path))

    # --- the operations ---------------------------------------------------------------------------------------------

    def _replace_functions(self) -> None:
        for name in NAMED:
            setattr(os, name, self._named(name, getattr(os, name)))
        for name in ("replace", "rename", "link", "symlink"):
            setattr(os, name, self._moving(name, getattr(os, name)))
        for name in ("fsync", "fdatasync", "ftruncate", "write"):
            setattr(os, name, self._on_open_file(name, getattr(os, name)))
        os.open = self._open(os.open)
        builtins.open = io.open = self._open_stream(io.open)
        shutil._use_fd_functions = False  # its own set of functions that take open folders does not know these
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10's paths have taken the functions before
        for name in ("mkdir", "unlink", "rmdir", "rename", "replace", "open") if accessor else ():
            setattr(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))

    def _named(self, name, original):
        def call(path, *arguments, dir_fd=None, **options):
            self._at(name, self._path(path, dir_fd))
            folder = {} if dir_fd is None else {"dir_fd": dir_fd}
            return original(path, *arguments, **folder, **options)

        return call

    def _moving(self, name, original):
        def call(source, target, *arguments, **options):
            self._at(name, self._path(target))
            return original(source, target, *arguments, **options)

        return call

    def _on_open_file(self, name, original):
        def call(file, *arguments):
            number = file if isinstance(file, int) else file.fileno()
            self._at(name, self._path(number))
            return original(file, *arguments)

        return call

    def _open(self, original):
        def call(path, flags, *arguments, dir_fd=None, **options):
            if flags & WRITES:
                self._at("open", self._path(path, dir_fd))
            folder = {} if dir_fd is None else {"dir_fd": dir_fd}
            return original(path, flags, *arguments, **folder, **options)

        return call

    def _open_stream(self, original):
        shim = self

        class Raw(io.FileIO):
            """A file each of whose writes is an operation; a buffer around it calls them."""

            def write(self, data):
                half = memoryview(data).cast("B")
                shim._at("write", shim._path(self.fileno()), lambda: io.FileIO.write(self, half[: len(half) // 2]))
                return super().write(data)

            def truncate(self, size=None):
                shim._at("truncate", shim._path(self.fileno()))
                return super().truncate(size)

        def call(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
            if not set(mode) & set("wax+") or isinstance(file, int) or opener is not None or buffering == 0:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not self._path(file).startswith(self.folder):
                return original(file, mode, buffering, encoding, errors, newline)
            self._at(f"open-{mode}", self._path(file))
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return call


def operations(log: Path) -> dict[str, list[str]]:
    """Who -> its operations in order, as a log tells them."""
    found: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        who, _, what = line.partition(" ")
        found.setdefault(who, []).append(what)
    return found
