"""A figure of the page: what is drawn, from which numbers, and what it says to those who do not see it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning.report.series import Series

Spec = dict[str, Any]
COLOUR, DASH, SHAPE, LABELS = "$colour", "$dash", "$shape", "$labels"
"""Stand in a specification for colours, dashes, shapes of points and names of lines: theme and setting decide."""
WHOLE, THIRD, FULL, LIMIT = "$whole", "$third", "$full", "$limit"
"""Stand for a plot's width beside an axis of numbers, for a third of it, for all of the width, names of lines among it
(`BY_NAME`), and for the width that such a name may have."""
ROUNDS = "$rounds"
"""Stands for an axis of those rounds that are shown (`axis_of`)."""
LEAST_ROUNDS = 3
"""Between the first and the last, for ticks to be chosen by the library."""
AREA = "$area"
"""Stands for the largest area of a bubble, of which there is a column a client."""
BY_NAME: Spec = {"type": "fit-x", "contains": "padding"}
"""How a plot that has names at its side keeps within its width."""
MOST_POINTS = 400
"""Of a line; longer runs are thinned."""
DIGITS = 5
"""Significant digits of what is drawn; every digit is in the run's files."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        key: its name in addresses and files.
        section: heading that it stands under.
        title: for people.
        text: what it shows and how it is read.
        spec: Vega-Lite, without data, with the stand-ins above.
        columns: field -> one value a row. ``s`` is the line's place among all lines, ``g`` the setting's, ``pick`` the
            place of what the reader chooses among `picks`.
        heads: field -> heading, the columns of the table behind it.
        names: field -> the texts that its whole numbers stand for.
        picks: what the reader chooses from, where there is a choice.
        facts: what the figure says, in sentences.
        wide: whether it takes the page's whole width.
    """

    key: str
    section: str
    title: str
    text: str
    spec: Spec
    columns: Mapping[str, Sequence[Any]]
    heads: Mapping[str, str]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    picks: Sequence[str] = ()
    facts: Sequence[str] = ()
    wide: bool = False

    def rows(self, lines: Sequence[Series]) -> list[dict[str, Any]]:
        """The rows as a renderer takes them, texts in place of numbers."""
        found = []
        for values in zip(*self.columns.values(), strict=True):
            row = dict(zip(self.columns, values, strict=True))
            row |= {name: texts[row[name]] for name, texts in self.names.items()}
            if "s" in row:
                row["label"] = lines[row["s"]].label
            found.append(row)
        return found


class Rows:
    """Gathers a figure's rows, column by column, in as few digits as are seen."""

    def __init__(self, *fields: str) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in fields}

    def add(self, **values: Any) -> None:
        """Add a row; every field is given."""
        for name, column in self.columns.items():
            column.append(rounded(values[name]))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def rounded(value: Any) -> Any:
    """A number in `DIGITS` digits; None for what is not finite."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        return None
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def thinned(count: int, most: int = MOST_POINTS) -> Sequence[int]:
    """Places of at most `most` of `count` points, evenly spread, the first and the last among them.

    >>> list(thinned(5, 3)), list(thinned(3, 5))
    ([0, 2, 4], [0, 1, 2])
    """
    if count <= most:
        return range(count)
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def colour(**more: Any) -> Spec:
    """The encoding by the line's colour."""
    return {"field": "label", "type": "nominal", "scale": COLOUR, "legend": None, **more}


def shape() -> Spec:
    """The encoding by the shape of points: what a line's dash tells it by."""
    return {"field": "label", "type": "nominal", "scale": SHAPE, "legend": None}


def largest_bubble(width: int, columns: int) -> int:
    """The area that a bubble may have where so many stand side by side, so that neighbours do not run into one another.

    Args:
        width: of the plot, in pixels.
        columns: across it.
    """
    return max(4, min(620, round((1.1 * width / max(1, columns)) ** 2)))


def axis_of(rounds: Iterable[Any]) -> Spec:
    """The axis of rounds: of few, it has a tick each; the library would put ticks between them, named alike.

    >>> axis_of([3, 1, 1])["values"], "values" in axis_of([1, 4])
    ([1, 3], False)
    """
    there = sorted(set(rounds))
    few = bool(there) and there[-1] - there[0] < LEAST_ROUNDS
    return {"tickMinStep": 1, "format": "d", **({"values": there} if few else {})}


def quantity(name: str, title: str | None, **more: Any) -> Spec:
    """A number's encoding."""
    return {"field": name, "type": "quantitative", "title": title, **more}


def tips(*pairs: tuple[str, str]) -> list[Spec]:
    """What hovering over a mark says, (field, heading) by (field, heading)."""
    return [{"field": name, "title": title, "type": "nominal"} for name, title in pairs]


def known(values: Iterable[Any]) -> list[float]:
    """Those that are finite numbers."""
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
