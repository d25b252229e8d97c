"""What a table prints of a run: a column of `metrics.csv` at a moment, or an entry of `summary.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fl_lightning.errors import require, suggest
from fl_lightning.report.columns import (
    FIGURES,
    OTHERS,
    accuracy_of,
    is_score,
    is_share,
    is_spread,
    less_is_better,
    may_exist,
)
from fl_lightning.report.record import Row as Record
from fl_lightning.report.record import best_round as best_by
from fl_lightning.report.record import chosen_by

REPORTS = ("last", "best", "mean_last_10", "mean", "final_received")
"""The moment of a run that a figure is of: its last evaluated round, its best one (chosen on validation parts where the
run has figures on them, else on the very split that it is reported on), the mean of the last ten or of all evaluated
rounds, or one more receive after the last round."""
SUMMARY = "summary"
STD = "_std"
ENTRIES = (
    *(
        f"communication.{direction}_{unit}"
        for direction in ("uplink", "downlink")
        for unit in ("params", "bytes", "params_per_client", "params_Mi_per_round")
    ),
    "parameters.personal",
    "parameters.shared",
    "seconds",
    "rounds",
    "evaluated_rounds",
    "clients",
    "participants_per_round",
    *(f"privacy.{name}" for name in ("epsilon", "delta", "noise_multiplier", "sensitivity", "sampling_rate", "times")),
    *(
        f"record_privacy.{name}"
        for name in ("epsilon", "delta", "noise_multiplier", "max_grad_norm", "client", "sampling_rate", "steps")
    ),
)
"""The numbers of `summary.json` that are no column's."""
_MOMENTS = ("last.", "best.", "mean_last_10.", "final_received.")
_LESS = (
    "receive_drop", "seconds", "loss", "uplink_", "downlink_", "missing", "skipped", "epsilon", "record_epsilon",
    "communication.", "parameters.", "privacy.", "record_privacy.",
)  # fmt: skip
"""How the names of columns and entries begin of which less is better."""


@dataclass(frozen=True)
class Figure:
    """What a table prints of a run.

    Args:
        column: of `metrics.csv`, e.g. ``Local-T_received_weighted``; or an entry of `summary.json`, e.g.
            ``communication.uplink_params``.
        report: the moment, one of `REPORTS`, or ``summary`` for an entry of `summary.json`.
        by: with ``best``, the column whose best round it is; the spread of a column goes with the column.
        scale: factor of the figure; None takes the table's, and without one 100 of what is read in percent, else 1.
    """

    column: str
    report: str
    by: str = ""
    scale: float | None = None

    def __str__(self) -> str:
        if self.report == SUMMARY:
            text = f"{SUMMARY}.{self.column}"
        else:
            other = f"@{self.by}" if self.by not in ("", self.column) else ""
            text = f"{self.column}.{self.report}{other}"
        return text if self.scale is None else f"{text} × {self.scale:g}"

    @property
    def less_is_better(self) -> bool:
        """Spreads, losses, errors, times and what is sent."""
        return self._score.startswith(_LESS) or (is_score(self._score) and less_is_better(self._score))

    @property
    def is_share(self) -> bool:
        """Whether it is read in percent."""
        return is_share(self._score) and not (self.report == SUMMARY and self.column.endswith(".round"))

    @property
    def usual_scale(self) -> float:
        """Its factor where neither it nor its table says one."""
        return 100.0 if self.is_share else 1.0

    @property
    def _score(self) -> str:
        """The column that it is of: that of an entry's moment, too, `Local-T_std` of ``summary.last.Local-T_std``."""
        moment, _, column = self.column.partition(".") if self.report == SUMMARY else ("", "", "")
        if f"{moment}." not in _MOMENTS:
            return self.column
        return column.removesuffix(".value") if moment == "best" else column

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it is read from, or the entry; with what its best round is chosen by."""
        return tuple(filter(None, (self._score, self.by)))

    @property
    def of_clients(self) -> str:
        """The column of `clients.csv` that it is the mean of; empty where it is none."""
        mean = self.column.removesuffix("_weighted")
        return mean if self.report != SUMMARY and is_score(mean) and not is_spread(mean) else ""

    @property
    def pairs_clients(self) -> bool:
        """Whether clients are pairs of a test: each on its own samples. On the union of all, they are one test."""
        return bool(self.of_clients) and not accuracy_of(self.of_clients).startswith("Global-")


def decimals(figure: float | None) -> str:
    """The form in which a figure and what stands beside it are printed: a loss or a time may be far below 1.

    What is below 1e-8 is mostly what rounding leaves of 0, as of the spread of clients that all score 0.1.

    >>> [format(figure, decimals(figure)) for figure in (66.213, 0.5817, -0.03421, 0.99999, 0.0, 1.4e-15)]
    ['66.21', '0.582', '-0.0342', '1.00', '0.00', '0.00']
    """
    if figure is None or not 1e-8 <= abs(figure) < 1:
        return ".2f"
    return f".{2 - int(f'{figure:.2e}'.partition('e')[2])}f"


def is_scale(value: Any) -> bool:
    """Whether a value can be a factor of figures."""
    return type(value) in (int, float) and 0 < value < 1e300


def read_figure(node: Any, key: str) -> Figure:
    """``Local-T_received.best`` -> a figure; so is ``{of: Local-T_received.best, scale: 1}``.

    Without `scale` that has the usual one, too.

    Raises:
        ConfigError: naming the key, and what is allowed.
    """
    if isinstance(node, Mapping):
        for name in node:
            require(
                name in ("of", "scale"), f"{key}.{name}", f"there is no such key; {suggest(str(name), ('of', 'scale'))}"
            )
        figure = read_figure(node.get("of"), f"{key}.of")
        if "scale" not in node:
            return figure
        require(is_scale(node["scale"]), f"{key}.scale", "must be a finite number above 0", node["scale"])
        return replace(figure, scale=float(node["scale"]))
    rule = f"must be a column of metrics.csv and one of {', '.join(REPORTS)}, as in Local-T.last, or summary.ENTRY"
    text, at, by = node.partition("@") if isinstance(node, str) else ("", "", "")
    if text.startswith(f"{SUMMARY}."):
        require(not at and len(text) > len(SUMMARY) + 1, key, rule, node)
        entry = text.removeprefix(f"{SUMMARY}.")
        if not entry.startswith(_MOMENTS):
            require(entry in ENTRIES, key, f"summary.json has no number {entry}; {suggest(entry, ENTRIES)}", node)
            return Figure(entry, SUMMARY)
        return _of_moment(entry, key, node)
    column, _, report = text.rpartition(".")
    require(bool(column) and report in REPORTS, key, rule, node)
    require(
        not at or (report == "best" and bool(by)),
        key,
        "@ names the column whose best round it is: Local-T.best@Local-V",
        node,
    )
    for name in (column, by) if by else (column,):
        usual = (*FIGURES, *(f"{whose}_received" for whose in FIGURES if "Server" not in whose), *OTHERS)
        require(may_exist(name), key, f"metrics.csv has no column {name}; {suggest(name, usual)}", node)
    received = report != "final_received" or (is_score(column) and "_received" in column)
    require(received, key, "final_received is of what models score right after the receive: Local-T_received", node)
    return Figure(column, report, by)


def _of_moment(entry: str, key: str, node: Any) -> Figure:
    """An entry of a moment in `summary.json`, whose columns are scores; of the best round value and round."""
    figure, (moment, _, rest) = Figure(entry, SUMMARY), entry.partition(".")
    best = moment == "best"
    whole = not best or rest.endswith((".value", ".round"))
    require(whole, key, f"must say which of the two, {entry}.value or {entry}.round", node)
    column = rest.rpartition(".")[0] if best else rest
    there = is_score(column) and may_exist(column) and not (best and column.endswith(STD))
    usual = [name for name in FIGURES if not name.endswith("-V")]
    require(there, key, f"summary.json has no {column} under {moment}; {suggest(column, usual)}", node)
    received = moment != "final_received" or "_received" in column
    require(received, key, "final_received is of what models score right after the receive: Local-T_received", node)
    return figure


Watched = tuple[str, bool | None]


def moments(
    figure: Figure, rows: Sequence[Record], summary: Mapping[str, Any], watched: Watched = ("", None)
) -> dict[str, float]:
    """A figure at each of the moments that it has; none of which a round is that ran away, to infinity or no number.

    Args:
        figure: what is asked for.
        rows: of `metrics.csv`.
        summary: what `summary.json` says.
        watched: what the configuration says of the best round (`watched_by`).
    """
    if figure.report == SUMMARY:
        entry = _entry(summary, figure.column)
        return {} if entry is None else {SUMMARY: entry}
    known = [row[figure.column] for row in evaluated(figure, rows)]
    last = [] if _untested(figure, rows) else known[-1:]
    stretches = {"last": last, "mean_last_10": known[-10:], "mean": known}
    found = {moment: math.fsum(own) / len(own) for moment, own in stretches.items() if own and all(map(is_number, own))}
    best = best_round(figure, rows, summary, watched)
    if best is not None and is_number(best.get(figure.column)):
        found["best"] = best[figure.column]
    final = _entry(summary.get("final_received") or {}, figure.column)
    return found if final is None else {**found, "final_received": final}


def evaluated(figure: Figure, rows: Sequence[Record]) -> list[Record]:
    """The rows of the rounds in which a figure was measured, whatever came of it."""
    return [row for row in rows if isinstance(row.get(figure.column), (int, float))]


def _untested(figure: Figure, rows: Sequence[Record]) -> bool:
    """Whether the last round that was tested has no value of a figure: an older one stands for another round."""
    measured = [place for place, row in enumerate(rows) if isinstance(row.get(figure.column), (int, float))]
    later, plain = rows[measured[-1] + 1 :] if measured else (), accuracy_of(figure.column)
    return any(row.get(plain) is not None for row in later)


def ran_away(figure: Figure, rows: Sequence[Record], watched: Watched = ("", None)) -> bool:
    """Whether a figure, or what its best round is chosen by, became infinite, or no number, in some round."""
    columns = {figure.column, figure.by, figure._score, watched[0]}
    numbers = (row[name] for row in rows for name in columns if isinstance(row.get(name), (int, float)))
    return not all(map(math.isfinite, numbers))


def best_round(
    figure: Figure, rows: Sequence[Record], summary: Mapping[str, Any], watched: Watched = ("", None)
) -> Record | None:
    """The row of the round that ``best`` means, the earliest of equals; None before there is one.

    A figure that names no column to choose by is best where the run says so, or by what early stopping watches.
    """
    said = _entry(summary.get("best") or {}, f"{figure.column.removesuffix(STD)}.round")
    if said is not None and not figure.by:
        return next((row for row in rows if row["round"] == said), None)
    monitor, less = watched
    if not figure.by and any(row.get(monitor) is not None for row in rows):
        return best_by(rows, monitor, less)
    by = figure.by or chosen_by(rows) or figure.column.removesuffix(STD)
    return best_by(rows, by, Figure(by, "best").less_is_better)


def is_number(value: Any) -> bool:
    """Whether a cell holds one."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _entry(node: Any, key: str) -> float | None:
    """An entry by its dotted name; the names of columns may themselves hold dots."""
    if not isinstance(node, Mapping):
        return None
    if is_number(node.get(key)):
        return float(node[key])
    words = key.split(".")
    splits = ((".".join(words[:cut]), ".".join(words[cut:])) for cut in range(1, len(words)))
    entries = (_entry(node[head], rest) for head, rest in splits if head in node)
    return next((entry for entry in entries if entry is not None), None)
