"""Who is ahead in a column, by how much, and which places the seeds leave open."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fl_lightning.report.escaping import in_markdown, in_spreadsheet
from fl_lightning.report.page.ranking import places
from fl_lightning.table.definition import Definition
from fl_lightning.table.figures import (
    LEAST_SEEDS,
    LEVEL,
    Head,
    Value,
    Values,
    differ,
    over_clients,
    paired_by,
    pairs,
)
from fl_lightning.table.quantity import decimals

EXPLAINED = (
    "Places are those that paired tests at 5 % leave open: 1 and one more for each row that is told to be ahead, to "
    "the last and one less for each that is told to be behind. The gap to the first has a 95 % interval over the same "
    "seeds (Student's t, from three seeds on over them, else over clients), as many as stand beside it; of three or "
    "four, which is few, a test finds more by chance than it should. Nothing is corrected for the number of "
    "rows: of the pairs of {rows} rows, {chance} would be told apart by chance if all were alike."
)

COLUMNS = (
    "column",
    "figure",
    "row",
    "first_place",
    "last_place",
    "mean",
    "gap",
    "gap_low",
    "gap_high",
    "pairs",
    "seeds",
)
"""Of `ranking.csv`."""


@dataclass(frozen=True)
class Rank:
    """A row's place in a column.

    Args:
        row: its name.
        value: what is printed.
        first: the best place that is left open to it, 1-based.
        last: the worst one.
        gap: mean difference to the row with the best mean, in the table's unit; 0 for that one.
        low: lower end of its interval; NaN where there is nothing to pair.
        high: upper end.
        pairs: what the interval rests on: ``5 seeds``, ``20 clients``; empty for the first and where there is none.
    """

    row: str
    value: Value
    first: int
    last: int
    gap: float
    low: float
    high: float
    pairs: str = ""


def ranked(values: Values, head: Head) -> list[Rank]:
    """The rows of a printed column that have a figure, the best mean first.

    Those that lack seeds which others have come behind those that have them all: of seeds that are harder or easier
    than the others a mean is no better or worse.
    """
    known = [(row, value) for (row, own), value in values.items() if own == head and value.mean is not None]
    seeds = {seed for _, value in known for seed in value.seeds}
    sign = 1 if known and known[0][1].less_is_better else -1
    known.sort(key=lambda each: (each[1].seeds.keys() != seeds, sign * (each[1].mean or 0.0)))
    ahead, behind = [0] * len(known), [0] * len(known)
    for (one, (_, first)), (other, (_, second)) in combinations(enumerate(known), 2):
        if differ(first, second):
            better, worse = (one, other) if sign * _gap_of(first, second) <= 0 else (other, one)
            ahead[worse] += 1
            behind[better] += 1
    gaps = [interval(value, known[0][1]) for _, value in known]
    rests_on = ["", *(paired_by(value, known[0][1]) for _, value in known[1:])]
    return [
        Rank(row, value, 1 + ahead[place], len(known) - behind[place], *gaps[place], rests_on[place])
        for place, (row, value) in enumerate(known)
    ]


def interval(value: Value, other: Value) -> tuple[float, float, float]:
    """The difference of two cells and its 95 % interval, runs with the same seed or clients being pairs.

    Seeds that one of them lacks do not count, unless they have none in common.
    """
    if value is other:
        return 0.0, 0.0, 0.0
    gaps, gap = pairs(value.seeds, other.seeds), _gap_of(value, other)
    if len(gaps) >= LEAST_SEEDS:
        from scipy import stats

        half = float(stats.t.ppf(1 - LEVEL / 2, len(gaps) - 1)) * float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
        return gap, gap - half, gap + half
    return (gap, *over_clients(value, other))


def _gap_of(value: Value, other: Value) -> float:
    """The mean difference of two cells over the seeds that both have, else of their means."""
    gaps = pairs(value.seeds, other.seeds)
    return float(gaps.mean()) if len(gaps) else (value.mean or 0.0) - (other.mean or 0.0)


def heads_ranked(table: Definition, values: Values) -> list[Head]:
    """The printed columns that the file wants ranked, and that have a figure."""
    heads = [Head(column.name, name) for column, name in table.heads if name in table.rank]
    return [head for head in heads if any(own == head and value.seeds for (_, own), value in values.items())]


def as_markdown(table: Definition, values: Values) -> list[str]:
    """A section of lines; none where the file wants no ranking."""
    lines: list[str] = []
    for head in heads_ranked(table, values):
        rows = ranked(values, head)
        chance = round(LEVEL * len(rows) * (len(rows) - 1) / 2)
        lines += ["", f"## Ranking by {in_markdown(str(head))}", ""]
        lines += [EXPLAINED.format(rows=len(rows), chance=chance), ""]
        lines += ["| places | | mean | gap to the first |", "|---|---|---|---|"]
        most = max((len(own.value.seeds) for own in rows), default=0)
        for own in rows:
            first = f"| {places(own.first, own.last)} | {in_markdown(own.row)}"
            lacks = f" ({len(own.value.seeds)} of {most} seeds)" if len(own.value.seeds) < most else ""
            lines.append(f"{first} | {_mean(own.value)}{lacks} | {_gap(own)} |")
    return lines


def as_csv(table: Definition, values: Values) -> str:
    """One line a row of each ranked column, every digit."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for head in heads_ranked(table, values):
        for own in ranked(values, head):
            numbers = [repr(number) for number in (own.value.mean, own.gap, own.low, own.high)]
            names = [in_spreadsheet(name) for name in (head.column, head.figure, own.row)]
            writer.writerow([*names, own.first, own.last, *numbers, own.pairs, len(own.value.seeds)])
    return buffer.getvalue()


def _mean(value: Value) -> str:
    form = decimals(value.mean)
    return f"{value.mean:{form}}" + ("" if value.over_seeds is None else f" ± {value.over_seeds:{form}}")


def _gap(own: Rank) -> str:
    if own.gap == own.low == own.high == 0 and not own.pairs:
        return ""  # the first itself
    form = f"+{decimals(own.value.mean)}"
    inside = "" if math.isnan(own.low) else f" [{own.low:{form}}, {own.high:{form}}] ({own.pairs})"
    return f"{own.gap:{form}}{inside}"
