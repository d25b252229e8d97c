"""The best value of every figure while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fl_lightning.report.columns import less_is_better
from fl_lightning.report.record import CHOOSERS, best_round, summarise
from fl_lightning.report.run_logger import Row

BEST_IS_LOWEST = ("loss", "receive_drop", "seconds", "uplink_", "downlink_")
"""Beginnings of the columns whose best value is the lowest one; of other columns, accuracies alone have a best."""


class BestSoFar:
    """Keeps the best values: an accuracy's highest, a cost's lowest.

    Where a figure on validation parts chooses the best round, that round is the best one of all accuracies and errors.

    Args:
        monitor: the column that chooses the best round; empty leaves it to the rows.
        less: whether less of it is better; None goes by its name.
    """

    def __init__(self, monitor: str = "", less: bool | None = None) -> None:
        self.monitor, self.less = monitor, less
        self._merits: dict[str, float] = {}
        self._said: set[str] = set()  # scores that have a best one

    def see(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Take in some rounds' rows of ``metrics.csv``.

        Returns:
            ``best/COLUMN`` and ``best_round/COLUMN`` of what has become better, and None of both where the round that
            is the best one now lacks a score that had them.
        """
        table = [dict(row) for row in rows]
        gone: set[str] = set()
        summary = summarise(table, self.monitor, self.less)
        chooser, best = summary.get("best_by", ""), summary["best"]
        if self.monitor in self._merits and chooser != self.monitor:
            best = {}  # these rows lack the figure that chooses
        elif chooser:
            falls = less_is_better(chooser) if chooser != self.monitor or self.less is None else self.less
            chosen = best_round(table, chooser, falls)
            moves = chosen is not None and self._improves(chooser, chosen[chooser], falls)
            gone, best = (self._said - best.keys(), best) if moves else (set(), {})
        elif self.monitor or not self._merits.keys().isdisjoint(CHOOSERS):
            best = {}  # these rounds lack the figure that chooses
        else:
            best = {name: own for name, own in best.items() if self._improves(name, own["value"], less_is_better(name))}
        self._said = (self._said | best.keys()) - gone
        found: dict[str, tuple[Any, Any]] = {name: (None, None) for name in sorted(gone)}
        found |= {name: (own["value"], own["round"]) for name, own in best.items()}
        for name in [name for name in (rows[0] if rows else ()) if name.startswith(BEST_IS_LOWEST)]:
            known = [(row[name], row["round"]) for row in rows if row.get(name) is not None]
            finite = [pair for pair in known if math.isfinite(pair[0])]
            if finite and self._improves(name, min(finite)[0], True):
                found[name] = min(finite)
        said = {f"best/{name}": value for name, (value, _) in found.items()}
        return said | {f"best_round/{name}": round for name, (_, round) in found.items()}

    def _improves(self, name: str, value: float, less: bool) -> bool:
        """Whether a value is better than all before it; it is kept if so."""
        merit = -value if less else value
        improves = merit > self._merits.get(name, -math.inf)
        self._merits[name] = merit if improves else self._merits.get(name, -math.inf)
        return improves
