"""Calls into somebody else's service, waited for so long and no longer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Outcome = tuple[Any, BaseException | None]
Calls = SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Outcome]] | None]
"""What is to be called, and where its outcome goes; None ends the thread."""


class Patience:
    """Makes calls one after another in a thread of its own; who waits for one goes on when it takes too long.

    The thread ends once nobody has the object any more, and holds nothing of a call that is over: a process may make
    many runs. It is given up with the call that it is stuck in: all later calls fail at once.
    """

    stuck: bool = False
    """Whether a call of this process never came back, so that its end must not wait for what the service still does."""

    def __init__(self) -> None:
        self._calls: Calls = SimpleQueue()
        weakref.finalize(self, self._calls.put, None).atexit = False
        self._thread: threading.Thread | None = None
        self._is_stuck = False

    def call(self, function: Callable[[], Any], limit: float) -> Any:
        """What a function returns.

        Args:
            function: the call.
            limit: seconds.

        Raises:
            TimeoutError: if it takes longer, or an earlier one did.
        """
        if threading.current_thread() is self._thread:  # a call within a call
            return function()
        if self._is_stuck:
            raise TimeoutError("an earlier call never came back")
        if self._thread is None or not self._thread.is_alive():  # none yet, or this process was forked
            self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True, name="patience")
            self._thread.start()
        outcome: SimpleQueue[Outcome] = SimpleQueue()
        self._calls.put((function, outcome))
        try:
            result, error = outcome.get(timeout=limit)
        except Exception as empty:
            self._is_stuck = Patience.stuck = True
            raise TimeoutError(f"no answer within {limit:.0f} s") from empty
        if error is not None:
            raise error
        return result


def _serve(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        function, outcome = call
        try:
            outcome.put((function(), None))
        except BaseException as error:  # whoever waits gets it
            outcome.put((None, error))
        del call, function, outcome  # or the last one, and whose it was, would be kept
