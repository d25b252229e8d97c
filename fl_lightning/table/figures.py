"""What a table prints of its cells: means over seeds, both spreads, and whether two rows can be told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.files import content_of, plain_json
from fl_lightning.report.record import Row as Record
from fl_lightning.report.recorded_run import rows_of
from fl_lightning.table.cells import Cell
from fl_lightning.table.definition import Definition, Published
from fl_lightning.table.quantity import Figure, best_round, is_number, moments

BESIDE = ("last", "mean_last_10", "best")
"""Moments that are given beside the one that the published figure means."""
LEVEL = 0.05
LEAST_SEEDS = 3  # of a paired test over seeds
LEAST_CLIENTS = 3  # of one over clients


@dataclass
class Value:
    """A printed cell.

    Args:
        seeds: seed -> the figure, in the table's unit.
        clients: client -> its figure, the mean over seeds; empty where the figure is none of clients'.
        weights: client -> what it counts for in the mean: its samples where that is weighted, else the same for all.
        spreads: the standard deviation over clients (over N) in each run.
        beside: moment -> the mean over seeds of the same column of `metrics.csv`.
        published: what was printed, None where nothing was.
        mark: ``best`` or ``second`` where a test tells the row from the next one.
        less_is_better: whether the best is the least.
    """

    seeds: dict[int, float] = field(default_factory=dict)
    clients: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)
    beside: dict[str, float] = field(default_factory=dict)
    published: Published | None = None
    mark: str = ""
    less_is_better: bool = False

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None before the first run has ended."""
        return math.fsum(self.seeds.values()) / len(self.seeds) if self.seeds else None

    @property
    def over_seeds(self) -> float | None:
        """The sample standard deviation over seeds; None of fewer than two."""
        return float(np.std(list(self.seeds.values()), ddof=1)) if len(self.seeds) > 1 else None

    @property
    def over_clients(self) -> float | None:
        """The standard deviation over clients, as the papers print it (over N); the mean over seeds."""
        return float(np.mean(self.spreads)) if self.spreads else None

    @property
    def difference(self) -> float | None:
        """To the published figure."""
        return None if self.mean is None or self.published is None else self.mean - self.published.value


@dataclass(frozen=True)
class Head:
    """A printed column: the setting and the figure's name, empty where it has one."""

    column: str
    figure: str

    def __str__(self) -> str:
        return f"{self.column} {self.figure}".strip()


Values = dict[tuple[str, Head], Value]
"""(row, column) -> what is printed."""


def values_of(table: Definition, cells: Iterable[Cell]) -> Values:
    """Read the figures of the finished cells, and mark what can be told apart."""
    found: Values = {}
    by_place: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.row.name, cell.column.name), []).append(cell)
    for (row, column), runs in by_place.items():
        for name in runs[0].column.figures:
            figure = table.figure(runs[0].row, runs[0].column, name)
            if figure is None:
                continue
            scale = table.scale if figure.scale is None else figure.scale
            value = _value([run for run in runs if run.finished], figure, scale)
            value.published = table.published.get(row, {}).get(column, {}).get(name)
            found[row, Head(column, name)] = value
    for head in {head for _, head in found}:
        _mark({row: value for (row, own), value in found.items() if own == head and value.seeds})
    return found


def _value(runs: Sequence[Cell], figure: Figure, scale: float) -> Value:
    value = Value(less_is_better=figure.less_is_better)
    clients: dict[int, list[float]] = {}
    weights: dict[int, list[float]] = {}
    beside: dict[str, list[float]] = {}
    for run in runs:
        rows = run.rows()
        known = moments(figure, rows, run.summary())
        if figure.report not in known:
            continue
        value.seeds[run.seed] = scale * known[figure.report]
        for moment in BESIDE:
            if moment in known:
                beside.setdefault(moment, []).append(scale * known[moment])
        of_clients = _of_clients(run, figure, rows)
        for client, (own, weight) in of_clients.items():
            clients.setdefault(client, []).append(scale * own)
            weights.setdefault(client, []).append(weight)
        value.spreads += [scale * float(np.std([own for own, _ in of_clients.values()]))] if of_clients else []
    value.clients = {client: float(np.mean(own)) for client, own in sorted(clients.items())}
    value.weights = {client: float(np.mean(own)) for client, own in sorted(weights.items())}
    value.beside = {moment: float(np.mean(own)) for moment, own in beside.items()}
    return value


def figure_of(run: Cell, figure: Figure) -> float | None:
    """What one run has; None where it has no such figure (yet)."""
    return moments(figure, run.rows(), run.summary()).get(figure.report)


def _of_clients(run: Cell, figure: Figure, rows: Sequence[Record]) -> dict[int, tuple[float, float]]:
    """Each client's figure at the same moment, and what it counts for; empty where it has none."""
    rounds = [row["round"] for row in rows if is_number(row.get(figure.column))]
    if figure.report == "final_received" or not figure.of_clients or not rounds:
        return {}  # the final receive is a mean alone
    best = best_round(figure, rows, run.summary()) if figure.report == "best" else None
    if best is not None:
        chosen = {best["round"]}
    else:
        chosen = set({"last": rounds[-1:], "mean_last_10": rounds[-10:]}.get(figure.report, rounds))
    found: dict[int, list[float]] = {}
    weights: dict[int, float] = {}
    weighted = figure.column.endswith("_weighted")
    sizes = _validation_sizes(run) if weighted and "-V" in figure.column else {}
    for row in rows_of(run.folder / "clients.csv"):
        if row["round"] in chosen and is_number(row.get(figure.of_clients)) and not row.get("attacker"):
            found.setdefault(int(row["client"]), []).append(row[figure.of_clients])
            size = sizes.get(int(row["client"]), row.get("num_test") or 0)
            weights[int(row["client"])] = float(size) if weighted else 1.0
    return {client: (float(np.mean(own)), weights[client]) for client, own in found.items()}


def _validation_sizes(run: Cell) -> dict[int, int]:
    """How many validation samples each client has; empty where nothing says it."""
    try:
        clients = plain_json(content_of(run.folder / "partition.json"))["clients"]
        return {client: len(own["validation"]) for client, own in enumerate(clients)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# --- which rows can be told apart -------------------------------------------------------------------------------------


def _mark(values: Mapping[str, Value]) -> None:
    """Mark the best and the second best of a column, each only where a test tells it from the next one.

    Where rows print figures of which more and of which less is better, none is the best.
    """
    if len({value.less_is_better for value in values.values()}) > 1:
        return
    ranked = sorted(values.values(), key=lambda value: (value.mean or 0.0) * (1 if value.less_is_better else -1))
    for place, mark in enumerate(("best", "second")):
        if len(ranked) > place + 1 and differ(ranked[place], ranked[place + 1]):
            ranked[place].mark = mark


def differ(first: Value, second: Value) -> bool:
    """Whether two cells can be told apart at the 5 % level, runs with the same seed and clients being pairs.

    With three seeds or more, a paired t-test over seeds; else, of runs with the same seeds and three clients or more, a
    paired t-test over clients, which says nothing of other seeds. Neither is corrected for how many rows there are.
    Cells whose pairs say the opposite of their means, because seeds are missing, are not told apart.
    """
    apart = (first.mean or 0.0) - (second.mean or 0.0)
    gaps = pairs(first.seeds, second.seeds)
    if len(gaps) >= LEAST_SEEDS:
        if gaps.mean() * apart <= 0:
            return False
        if np.ptp(gaps) == 0:
            return True
        from scipy import stats

        return bool(stats.ttest_1samp(gaps, 0.0).pvalue < LEVEL)
    low, high = over_clients(first, second)
    return (low > 0 and apart > 0) or (high < 0 and apart < 0)


def over_clients(first: Value, second: Value) -> tuple[float, float]:
    """The 95 % interval of a difference over clients; NaN where runs or clients are no pairs, or fewer than three.

    A client of another seed is another client: who holds what is drawn anew.
    """
    gaps = pairs(first.clients, second.clients)
    if len(gaps) < LEAST_CLIENTS or first.seeds.keys() != second.seeds.keys():
        return math.nan, math.nan
    weights = np.array([first.weights.get(key, 1.0) for key in sorted(first.clients.keys() & second.clients.keys())])
    return students(gaps, weights)


def pairs(first: Mapping[int, float], second: Mapping[int, float]) -> np.ndarray:
    """Differences [P] of what both have, in the order of their keys."""
    return np.array([first[key] - second[key] for key in sorted(first.keys() & second.keys())])


def students(gaps: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the weighted mean of differences [P]: Student's t, of the equal-weights case the usual one.

    With shares h_i = w_i / Σ w and the mean m = Σ h_i g_i the standard error is the jackknife's,
    s² = (n − 1)/n Σ (h_i/(1 − h_i) (g_i − m))², and the degrees of freedom are 1/Σ h_i² − 1: those of as many clients
    as count. (A bootstrap's percentiles are far too narrow for few clients: one null comparison in five is told apart
    with four of them.) NaN where fewer than three count at all.
    """
    from scipy import stats

    gaps, shares = gaps[weights > 0], weights[weights > 0] / weights.sum() if weights.any() else weights[:0]
    if len(gaps) < LEAST_CLIENTS:
        return math.nan, math.nan
    mean = float(shares @ gaps)
    without = shares / (1 - shares) * (gaps - mean)
    error = math.sqrt((1 - 1 / len(gaps)) * float(without @ without))
    half = float(stats.t.ppf(1 - LEVEL / 2, 1 / float(shares @ shares) - 1)) * error
    return mean - half, mean + half
