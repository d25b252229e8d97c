"""Where the seconds of a round go, by the wall's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from fl_lightning.report.columns import SECONDS

Part = Literal["fit", "evaluate", "exchange", "save"]
COLUMNS = (SECONDS, *(f"{SECONDS}_{part}" for part in get_args(Part)))
"""The columns of a lap."""


class Stopwatch:
    """Shares the time of this process out among the parts of a round, a lap a round.

    A lap ends where the next one begins, so that no second is lost between two rounds. What no part claims (callbacks,
    tables, loggers) is in the whole alone. Work of a GPU counts where the process waits for it.
    """

    def __init__(self) -> None:
        self._part: Part | None = None
        self._since: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._spent: dict[Part | None, float] = dict.fromkeys((None, *get_args(Part)), 0.0)

    def start(self) -> None:
        """Begin the first lap; nothing where one is under way."""
        if self._since is None:
            self._since = time.perf_counter()

    def _switch(self, part: Part | None) -> Part | None:
        """Count what follows to another part; returns the one before."""
        before, now = self._part, time.perf_counter()
        self._spent[before] += 0.0 if self._since is None else now - self._since
        self._part, self._since = part, now
        return before

    @contextmanager
    def part(self, part: Part | None) -> Iterator[None]:
        """A stretch that belongs to a part, or to none; what is another part's within it is that one's alone."""
        before = self._switch(part)
        try:
            yield
        finally:
            self._switch(before)

    def lap(self) -> dict[str, float]:
        """End a lap and begin the next: its seconds and those of its parts, by column."""
        self._switch(self._part)
        spent = self._spent
        self._begin()
        return dict(zip(COLUMNS, [sum(spent.values()), *(spent[part] for part in get_args(Part))], strict=True))
