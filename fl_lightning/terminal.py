"""Standard streams that a run outlives: its terminal may be closed, the reader of its output may go away."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a file, not a reader, takes no more."""


class OutlivedStream:
    """A stream whose reader may go away: what is written from then on is lost, and nothing else.

    Args:
        stream: a text stream, ``sys.stdout`` or ``sys.stderr``.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.cut: OSError | None = None
        """Why the file behind it is not whole; None where it is, and where a reader went away of his own will."""

    def write(self, text: str) -> int:
        """Write, or lose the text."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write, or lose the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what is left to be written, or lose it."""
        self._try(self._stream.flush)

    def _try(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except OSError as error:  # broken pipe, terminal hung up, disk full
            self.cut = self.cut or (error if error.errno in FULL else None)
            with suppress(OSError, ValueError):  # from here on into the void, what the stream still holds, too
                number = self._stream.fileno()
                void = os.open(os.devnull, os.O_WRONLY)
                os.dup2(void, number)
                os.close(void)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outlived() -> Iterator[None]:
    """Let nothing that is printed in a block end the process, whoever has stopped reading, whatever he can read."""
    _open_all()
    before = sys.stdout, sys.stderr
    there = [open(os.devnull, "w") if stream is None else stream for stream in before]  # noqa: SIM115 - it was closed
    for stream in there:
        with suppress(AttributeError, OSError, ValueError):  # a letter that its encoding lacks is spelled out
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = (OutlivedStream(stream) for stream in there)  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, OutlivedStream):
                stream.flush()  # here, for at the interpreter's end a failure changes the exit code
        sys.stdout, sys.stderr = before


def require_whole_output() -> None:
    """Flush the standard output of a block of `outlived`.

    Raises:
        OSError: if it goes into a file on a full disk, so that some of it is lost.
    """
    if isinstance(sys.stdout, OutlivedStream):
        sys.stdout.flush()
        if sys.stdout.cut is not None:
            raise OSError(sys.stdout.cut.errno, sys.stdout.cut.strerror, "standard output")


def _open_all() -> None:
    """Open standard streams that are closed, or a file of the run would get their number and what is printed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def printable(text: str, keep: str = "") -> str:
    r"""A text whose letters all show themselves; one that a terminal would obey is written as in Python.

    >>> print(printable("\x1b[2Jα"))
    \x1b[2Jα

    Args:
        text: any.
        keep: letters that stay, as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)


def named_clients(clients: Sequence[int], most: int = 10) -> str:
    """``client 2``, ``clients 2, 5`` or the first of them, and how many more there are."""
    more = f" and {len(clients) - most} more" if len(clients) > most else ""
    return f"client{'s' if clients[1:] else ''} {', '.join(map(str, clients[:most]))}{more}"


def say(text: str) -> None:
    """Print a line on the standard error stream, from wherever: a signal may come in the middle of another line.

    It is written at once: the text and its end in two would let a second signal, or another process, come in between.
    """
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # the first where it was closed from the start
        sys.stderr.write(f"{printable(text, chr(10))}\n")
        sys.stderr.flush()
