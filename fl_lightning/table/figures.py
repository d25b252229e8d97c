"""What a table prints of its cells: means over seeds, both spreads, and whether two rows can be told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.files import content_of, plain_json
from fl_lightning.report.columns import is_validated
from fl_lightning.report.record import Row as Record
from fl_lightning.report.record import watched_by
from fl_lightning.report.recorded_run import counting_rows
from fl_lightning.table.cells import Cell
from fl_lightning.table.definition import Definition, Published
from fl_lightning.table.quantity import Figure, best_round, evaluated, is_number, moments

BESIDE = ("last", "mean_last_10", "best")
"""Moments that are given beside the one that the published figure means."""
LEVEL = 0.05
LEAST_SEEDS = 3  # of a paired test over seeds
LEAST_CLIENTS = 3  # of one over clients
ROUNDING = 1e-9  # relative: what two ways to add up the same figures may differ by


@dataclass
class Value:
    """A printed cell.

    Args:
        seeds: seed -> the figure, in the table's unit.
        clients: (seed, client) -> its figure, the mean over rounds; empty where the figure is none of clients', or all
            are tested on the same samples, so that they are no pairs of a test. Of seeds whose clients hold the
            same samples the least stands for all: a client is one pair, with the mean over them.
        weights: the same -> its share of the mean: by its samples where that is weighted, and by how often it was
            tested.
        partitions: seed -> who holds which samples there (`Cell.clients`).
        spreads: the standard deviation over clients (over N) in each run.
        beside: moment -> the mean over seeds of the same column of `metrics.csv`.
        published: what was printed, None where nothing was.
        mark: ``best`` or ``second`` where a test tells the row from the next one.
        rests_on: the pairs of that test: ``5 seeds``, ``20 clients``.
        less_is_better: whether the best is the least.
    """

    seeds: dict[int, float] = field(default_factory=dict)
    clients: dict[tuple[int, int], float] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)
    partitions: dict[int, str] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)
    beside: dict[str, float] = field(default_factory=dict)
    published: Published | None = None
    mark: str = ""
    rests_on: str = ""
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
            value = _value([run for run in runs if run.finished], figure, table.scale_of(figure))
            value.published = table.published.get(row, {}).get(column, {}).get(name)
            found[row, Head(column, name)] = value
    for head in {head for _, head in found}:
        _mark({row: value for (row, own), value in found.items() if own == head and value.seeds})
    return found


def _value(runs: Sequence[Cell], figure: Figure, scale: float) -> Value:
    value = Value(less_is_better=figure.less_is_better)
    beside: dict[str, list[float]] = {}
    first: dict[str, int] = {}  # seed of those who hold the same samples
    for run in sorted(runs, key=lambda run: run.seed):
        rows = run.rows()
        known = moments(figure, rows, run.summary(), watched_by(run.config, rows))
        if figure.report not in known:
            continue
        value.seeds[run.seed] = scale * known[figure.report]
        for moment in BESIDE:
            if moment in known:
                beside.setdefault(moment, []).append(scale * known[moment])
        value.partitions[run.seed] = run.clients
        seed = first.setdefault(run.holders or str(run.seed), run.seed)
        of_clients = _of_clients(run, figure, rows)
        for client, (own, share) in sorted(of_clients.items()) if figure.pairs_clients else ():
            _count(value, (seed, client), scale * own, share)
        value.spreads += [scale * float(np.std([own for own, _ in of_clients.values()]))] if of_clients else []
    value.beside = {moment: float(np.mean(own)) for moment, own in beside.items()}
    return value


def _count(value: Value, client: tuple[int, int], own: float, share: float) -> None:
    """Take in a client's figure and its share of a seed's mean, beside those of it in other seeds."""
    before = value.weights.get(client, 0.0)
    if before:
        own = (before * value.clients[client] + share * own) / (before + share)
    value.clients[client], value.weights[client] = own, before + share


def figure_of(run: Cell, figure: Figure) -> float | None:
    """What one run has; None where it has no such figure (yet), or one that ran away to infinity or no number."""
    rows = run.rows()
    return moments(figure, rows, run.summary(), watched_by(run.config, rows)).get(figure.report)


def of_fewer_seeds(values: Values, seeds: Set[int]) -> list[str]:
    """A line on each cell that is the mean of fewer seeds than the table has; none on cells without any.

    Args:
        values: what is known.
        seeds: the table's.
    """
    alike: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for (row, head), value in values.items():
        if value.seeds and seeds - value.seeds.keys():
            alike.setdefault((row, head.column, tuple(sorted(value.seeds))), []).append(str(head))
    found, all_alike = [], len({tuple(sorted(value.seeds)) for value in values.values() if value.seeds}) == 1
    for (row, column, own), heads in alike.items():
        lacking = ", ".join(map(str, sorted(seeds - set(own))))
        said = f"the mean of seed{'s' if own[1:] else ''} {', '.join(map(str, own))}, without {lacking}"
        if all_alike and len(alike) > 1:
            return [f"every figure is {said}"]
        whole = len(heads) == sum((row, column) == (other, head.column) for other, head in values)
        found += [f"{row}, {name}: {said}" for name in ([column] if whole else heads)]
    return found


def left_out(runs: Sequence[Cell]) -> list[str]:
    """A line on each run whose clients fell sick and were left out of rounds (`federation.on_client_error: skip`).

    Its figures are of the others, or of what those clients had before.
    """
    found = []
    for run in runs:
        skipped = [int(row.get("skipped") or 0) for row in run.rows()]
        if any(skipped):
            rounds = f"{sum(map(bool, skipped))} of {len(skipped)} rounds"
            found.append(f"{run.title}: in {rounds} clients that fell sick were left out, {sum(skipped)} in all")
    return found


def trained_nobody(run: Cell) -> bool:
    """Whether no client came to the end of a fit in any round: a run's figures are those of untrained models then."""
    rows = run.rows()
    return bool(rows) and all(int(row.get("participants", 1) or 0) == 0 for row in rows)


def on_validation(runs: Sequence[Cell]) -> str:
    """Which figures are on validation parts, under the names of those on test parts; empty where none are."""
    own = [run for run in runs if run.config["data"]["evaluate_on"] == "validation"]
    places = dict.fromkeys(f"{run.row.name}, {run.column.name}" for run in own)
    which = "All figures" if len(own) == len(runs) else f"The figures of {'; '.join(places)}"
    return f"{which} are on validation parts; the test parts were laid aside." if own else ""


def _of_clients(run: Cell, figure: Figure, rows: Sequence[Record]) -> dict[int, tuple[float, float]]:
    """Each client's figure at the same moment, and its share of the mean; empty where it has none.

    A round counts by the client's share of that round's mean: where not all clients are tested in every round, too,
    the sum of all shares, each times its client's figure, is what is printed.
    """
    rounds = [row["round"] for row in evaluated(figure, rows)]
    if figure.report == "final_received" or not figure.of_clients or not rounds:
        return {}  # the final receive is a mean alone
    watched = watched_by(run.config, rows)
    best = best_round(figure, rows, run.summary(), watched) if figure.report == "best" else None
    if best is not None:
        chosen = {best["round"]}
    else:
        chosen = set({"last": rounds[-1:], "mean_last_10": rounds[-10:]}.get(figure.report, rounds))
    weighted = figure.column.endswith("_weighted")
    sizes = _validation_sizes(run) if weighted and is_validated(figure.column) else {}
    by_round: dict[int, list[tuple[int, float, float]]] = {}
    for row in counting_rows(run.folder, run.config):
        if row["round"] in chosen and is_number(row.get(figure.of_clients)):
            client, own = row["client"], row[figure.of_clients]
            weight = float(sizes.get(client, row.get("num_test") or 0)) if weighted else 1.0
            by_round.setdefault(row["round"], []).append((client, own, weight))
    totals: dict[int, float] = {}
    shares: dict[int, float] = {}
    for tested in by_round.values():
        whole = len(by_round) * math.fsum(weight for _, _, weight in tested)
        for client, own, weight in tested if whole else ():
            shares[client] = shares.get(client, 0.0) + weight / whole
            totals[client] = totals.get(client, 0.0) + weight / whole * own
    return {client: (totals[client] / share, share) for client, share in shares.items() if share}


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

    Where rows print figures of which more and of which less is better, none is the best; nor is a row that another is
    ahead of on the seeds that both have.
    """
    if len({value.less_is_better for value in values.values()}) > 1:
        return
    ranked = sorted(values.values(), key=lambda value: (value.mean or 0.0) * (1 if value.less_is_better else -1))
    for place, (own, mark) in enumerate(zip(ranked, ("best", "second"), strict=False)):
        if place and len(ranked) > 1 and ranked[0].mean == ranked[1].mean:
            return  # which of the two is the second best, the file's order would say
        others = ranked[place + 1 :]
        if others and differ(own, others[0]) and not any(_denied(own, other) for other in others):
            own.mark, own.rests_on = mark, paired_by(own, others[0])


def _denied(better: Value, worse: Value) -> bool:
    """Whether the seeds that two cells have in common say the opposite of their means, because others are missing."""
    gaps = pairs(better.seeds, worse.seeds)
    return len(gaps) > 0 and bool((gaps.mean() if better.less_is_better else -gaps.mean()) > 0)


def differ(first: Value, second: Value) -> bool:
    """Whether two cells can be told apart at the 5 % level, runs with the same seed and clients being pairs.

    With three seeds or more, a paired t-test over seeds; else, of runs with the same seeds, partitions and three
    clients or more, a paired t-test over clients, which says nothing of other seeds; none where all are tested on the
    same samples (`Global-T`), for they are one test, however many they are. Neither is corrected for how many
    rows there are. Cells whose pairs say the opposite of their means, because seeds are missing, are not told apart.
    """
    means = first.mean or 0.0, second.mean or 0.0
    apart = means[0] - means[1]
    if abs(apart) <= ROUNDING * max(map(abs, means)):
        return False
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


def paired_by(first: Value, second: Value) -> str:
    """What a test and an interval of two cells rest on, ``5 seeds`` or ``20 clients``; empty without pairs."""
    seeds = len(first.seeds.keys() & second.seeds.keys())
    if seeds >= LEAST_SEEDS:
        return f"{seeds} seeds"
    either = sorted(first.clients.keys() | second.clients.keys())
    if math.isnan(over_clients(first, second)[0]):
        return ""
    there = (_weighed(first, either)[1] > 0) | (_weighed(second, either)[1] > 0)
    return f"{int(there.sum())} clients"


def over_clients(first: Value, second: Value) -> tuple[float, float]:
    """The 95 % interval of a difference over clients; NaN where runs or clients are no pairs, or fewer than three.

    A client of another seed or partition is another client, whose number says nothing: who holds what is drawn anew.
    """
    common = first.clients.keys() & second.clients.keys()
    same = first.seeds.keys() == second.seeds.keys() and first.partitions == second.partitions
    if len(common) < LEAST_CLIENTS or not same:
        return math.nan, math.nan
    either = sorted(first.clients.keys() | second.clients.keys())
    return students(*(_weighed(value, either) for value in (first, second)))


def _weighed(value: Value, clients: Sequence[tuple[int, int]]) -> np.ndarray:
    """[2, P] the figure of each of some clients and its weight; both are 0 where it has none."""
    own, weights = value.clients, value.weights
    return np.array([(own[key], weights.get(key, 1.0)) if key in own else (0.0, 0.0) for key in clients]).T


def pairs(first: Mapping[int, float], second: Mapping[int, float]) -> np.ndarray:
    """Differences [P] of what both have, in the order of their keys."""
    return np.array([first[key] - second[key] for key in sorted(first.keys() & second.keys())])


def students(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the difference of two weighted means over the same clients: Student's t, by the jackknife.

    With D the difference and D_i the same without client i, the standard error is s² = (P − 1)/P Σ (D_i − D)², and
    the degrees of freedom are 1/Σ h_i² − 1, those of as many clients as count by their shares h_i: the usual paired
    interval where all count the same. (A bootstrap's percentiles are far too narrow for few clients: one null
    comparison in five is told apart with four of them.) NaN where fewer than three count at all, or one is all that a
    row has.

    Args:
        first: [2, P] figures and weights >= 0.
        second: the same of the other.
    """
    from scipy import stats

    there = (first[1] > 0) | (second[1] > 0)
    (one, weights), (other, its_weights) = first[:, there], second[:, there]
    whole, its_whole = weights.sum(), its_weights.sum()
    if len(one) < LEAST_CLIENTS or (weights >= whole).any() or (its_weights >= its_whole).any():
        return math.nan, math.nan

    def without(values: np.ndarray, own: np.ndarray, total: float) -> np.ndarray:
        products = own * values
        return (products.sum() - np.append(products, 0.0)) / (total - np.append(own, 0.0))

    # Exactly 0 where all are equal, as is the second line for equal weights; the last entry leaves nobody out.
    gaps = without(one - other, weights, whole)
    gaps += without(other, weights, whole) - without(other, its_weights, its_whole)
    error = math.sqrt((1 - 1 / len(one)) * float(np.square(gaps[:-1] - gaps[-1]).sum()))
    shares = (weights / whole + its_weights / its_whole) / 2
    half = float(stats.t.ppf(1 - LEVEL / 2, 1 / float(shares @ shares) - 1)) * error
    return float(gaps[-1]) - half, float(gaps[-1]) + half
