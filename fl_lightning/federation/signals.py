"""Signals that ask a run to stop: the first one once the present round is saved, a second one at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from typing_extensions import Self

STOP_SIGNALS = tuple(
    getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "USR1") if hasattr(signal, f"SIG{name}")
)
"""Ctrl-C; the end that schedulers ask for; a terminal that was closed; a scheduler's notice before a time limit."""
HANDED_ON = STOP_SIGNALS + ((signal.SIGTSTP,) if hasattr(signal, "SIGTSTP") else ())
"""These, and Ctrl-Z: what is answered for the processes that one starts, which the terminal does not reach."""
ECHO = (
    1.0  # seconds in which a hangup belongs to the signal before it: a shell that ends sends one, its terminal another
)


class StoppedAtOnce(BaseException):
    """Somebody asked a second time. No `Exception`, so that no one takes it for a failure of their own.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


KILLED = 128 + 9
"""The exit code of who was killed; not every system has the signal."""


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP, 138 for USR1."""
    return 128 + number


class StopSignals(AbstractContextManager["StopSignals"]):
    """Answers the signals for the length of a block; outside the main thread the caller answers them.

    A third signal ends the process, in case that the second could not. A SIGHUP that was ignored before (``nohup``) is
    ignored still.

    Args:
        ask: called with the first signal's number.
        end: called with the second's; it may raise, and what it raises comes out of the block.
        numbers: the signals.
    """

    def __init__(
        self, ask: Callable[[int], Any], end: Callable[[int], Any], numbers: tuple[int, ...] = STOP_SIGNALS
    ) -> None:
        self.ask = ask
        self.end = end
        self.numbers = numbers
        self.count = 0
        self.first = 0
        """The first signal's number; 0 before there was one."""
        self._asked = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                before = signal.getsignal(number)
                if not (number == getattr(signal, "SIGHUP", None) and before == signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that was forked in the block, and is none of the run's yet
            os._exit(exit_code(number))
        now = time.monotonic()
        if self.count and number == getattr(signal, "SIGHUP", None) and now - self._asked < ECHO:
            return
        self.count += 1
        if self.count == 1:
            self.first, self._asked = number, now
            self.ask(number)
        elif self.count == 2:
            self.end(number)
        else:
            os._exit(exit_code(number))


@contextmanager
def held_back() -> Iterator[None]:
    """Let signals wait while processes are started: what a handler raises in the middle of a fork is lost.

    This process's handlers hear of them after the block; a started process, in which none of them runs, by `hear`.
    """
    came: list[int] = []
    answers = {}
    if threading.current_thread() is threading.main_thread():
        # what is blocked here reaches this process by way of its other threads
        answers = {number: answer for number in HANDED_ON if callable(answer := signal.getsignal(number))}
    for number in answers:
        signal.signal(number, lambda number, frame: came.append(number))
    blocks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON) if blocks else set()
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, answer in answers.items():
            signal.signal(number, answer)
        for number in came:
            signal.raise_signal(number)


def hear(numbers: Iterable[int] = HANDED_ON) -> None:
    """Hear signals again in a process that was started while they were held back; its own handlers stand."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def hand_on(number: int, processes: Iterable[BaseProcess]) -> None:
    """Give a signal to processes that were started here, and that the terminal's does not reach (`stand_apart`).

    On Windows it reaches them, and what is given to them by anybody else ends them.
    """
    for process in processes if os.name == "posix" else ():
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)


def stand_apart() -> None:
    """Let the terminal's signals go to who started this process alone, who hands them on."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


@contextmanager
def pausing(processes: Callable[[], Iterable[BaseProcess]]) -> Iterator[None]:
    """Let processes that the terminal does not reach pause at its Ctrl-Z, and go on, with this one.

    Args:
        processes: says which run.
    """

    def pause(number: int, frame: FrameType | None) -> None:
        hand_on(number, processes())
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # comes back once this process goes on
        signal.signal(number, pause)
        hand_on(signal.SIGCONT, processes())

    in_main, known = threading.current_thread() is threading.main_thread(), hasattr(signal, "SIGTSTP")
    answers = in_main and known and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
    if answers:
        signal.signal(signal.SIGTSTP, pause)
    try:
        yield
    finally:
        if answers:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def stop_at_once(number: int) -> None:
    """Raise `StoppedAtOnce`."""
    raise StoppedAtOnce(number)
