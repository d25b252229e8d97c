"""Who is ahead of whom in a table, and which places its seeds leave open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fl_lightning.report.page.figure import BY_NAME, FULL, LIMIT, Figure, Rows, Spec, quantity, tips
from fl_lightning.report.series import Series

OPEN, BEHIND = "#C8553D", "#3A87C8"
STEP = 17  # height of a row


class RankedRow(NamedTuple):
    """A row's place in a column of a table.

    Args:
        column: the table's setting.
        figure: what is ranked, empty where the table has one figure.
        row: its name.
        first: the best place that is left open to it, 1-based.
        last: the worst one.
        mean: over seeds, in the table's unit.
        gap: to the row with the best mean; 0 for that one.
        low: lower end of its 95 % interval; None where there is nothing to pair.
        high: upper end.
        pairs: what that interval rests on: ``5 seeds``, ``20 clients``.
    """

    column: str
    figure: str
    row: str
    first: int
    last: int
    mean: float
    gap: float
    low: float | None
    high: float | None
    pairs: str = ""

    @property
    def places(self) -> str:
        """``3`` or ``3–10``."""
        return places(self.first, self.last)


def places(first: int, last: int) -> str:
    """What is left open, as it is printed.

    >>> places(3, 3), places(3, 10)
    ('3', '3–10')
    """
    return str(first) if first == last else f"{first}–{last}"


def rankings(lines: Sequence[Series], ranked: Sequence[RankedRow]) -> Iterator[Figure]:
    """Every ranked figure of a table: means, how far behind the first, and the places that are open.

    Args:
        lines: what the page shows.
        ranked: the table's rows, of each column and figure the best first.
    """
    by_name = {(line.label, line.setting): place for place, line in enumerate(lines)}
    picks = list(dict.fromkeys(own.figure for own in ranked))
    rows = Rows("s", "pick", "order", "places", "mean", "gap", "low", "high", "pairs", "from_", "to", "open")
    facts: dict[tuple[str, str], list[str]] = {}
    firsts: dict[tuple[str, str], float] = {}
    for order, own in enumerate(ranked):
        # Not a row's mean less its gap, which is over the seeds that it has in common with the first.
        is_open, best = own.first == 1, firsts.setdefault((own.column, own.figure), own.mean)
        if is_open:
            facts.setdefault((own.column, own.figure), []).append(own.row)
        if (own.row, own.column) in by_name:
            ends = [None if end is None else best + end for end in (own.low, own.high)]
            values: dict[str, Any] = {"mean": own.mean, "gap": own.gap, "low": own.low, "high": own.high}
            values |= {"pairs": own.pairs}
            place, pick = by_name[own.row, own.column], picks.index(own.figure)
            values |= {"from_": ends[0], "to": ends[1], "open": is_open}
            rows.add(s=place, pick=pick, order=order, places=own.places, **values)
    if not len(rows):
        return
    said = [_said(f"{column} {figure}".strip(), names) for (column, figure), names in facts.items()]
    text = (
        "Means over seeds; a line is the 95 % interval of the difference to the first row, runs of the same seed being "
        "pairs (of fewer than three seeds, clients). Beside a name the places that paired tests at 5 % leave open, not "
        "corrected for the number of rows; rows in red may be the first."
    )
    heads = {"places": "places", "label": "row", "mean": "mean", "gap": "gap to the first", "low": "gap, low"}
    heads |= {"high": "gap, high", "pairs": "pairs"}
    yield Figure("ranking", "Ranking", "Ranking", text, _spec(), rows.columns, heads, {}, picks, said, wide=True)


def _spec() -> Spec:
    """A row of the table a line, the best on top."""
    said = tips(
        ("places", "places"),
        ("label", "row"),
        ("mean", "mean"),
        ("gap", "gap"),
        ("low", "low"),
        ("high", "high"),
        ("pairs", "pairs"),
    )
    x = quantity("mean", "mean over seeds", scale={"zero": False})
    shade = {"condition": {"test": "datum.open", "value": OPEN}, "value": BEHIND}
    first: Spec = {"aggregate": [{"op": "argmin", "field": "order", "as": "first"}]}
    return {
        "width": FULL,
        "height": {"step": STEP},
        "autosize": BY_NAME,
        "transform": [{"calculate": "datum.label + ' ' + datum.places", "as": "named"}],
        "layer": [
            {
                "transform": [first, {"calculate": "datum.first.mean", "as": "mean"}],
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#888888"},
                "encoding": {"x": x, "y": None},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": quantity("from_", ""), "x2": {"field": "to"}, "color": shade},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
                "encoding": {"x": x, "color": shade, "tooltip": said},
            },
        ],
        "encoding": {
            "y": {
                "field": "named",
                "type": "nominal",
                "title": None,
                "sort": {"field": "order", "op": "min"},
                "axis": {"labelLimit": LIMIT, "grid": True},
            }
        },
    }


def _said(head: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{head}: only {names[0]} may be the first."
    return f"{head}: {', '.join(names[:-1])} and {names[-1]} may be the first."
