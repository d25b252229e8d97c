"""A run's numbers on disk: `metrics.csv`, `clients.csv` and what `summary.json` says of them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.files import append_text, content_of, holds, write_text

Row = dict[str, Any]
ACCURACIES = ("Local-T", "Global-T", "Server-T")


class MetricsFile:
    """A CSV file of one or more rows a round.

    Args:
        path: the file.
        columns: names of the columns, `round` first.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)

    def start(self, text: str = "") -> None:
        """Make the file hold its header and these lines, atomically; leave it alone where it does already."""
        whole = self.lines([dict(zip(self.columns, self.columns, strict=True))]) + text
        if not holds(self.path, whole):
            write_text(self.path, whole)

    def append(self, text: str, sync: bool = True) -> None:
        """Add lines."""
        append_text(self.path, text, sync)

    def lines(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """The lines of some rows; a column that a row lacks is empty."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([_cell(row.get(name)) for name in self.columns] for row in rows)
        return buffer.getvalue()


def _cell(value: Any) -> str:
    """What does not apply is empty, never 0; a loss that is no number is `nan`."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file of numbers; a cell that is empty or no number becomes None, a row cut short is left out."""
    if not path.is_file():
        return []
    text = content_of(path).decode(errors="replace").replace("\0", "\ufffd")
    rows = [line.split(",") for line in text.split("\n")[:-1]]  # what follows the last line break was cut short
    columns = [name.rstrip("\r") for name in rows[0]] if rows else []
    return [dict(zip(columns, map(_number, cells), strict=True)) for cells in rows[1:] if len(cells) == len(columns)]


def _number(cell: str) -> float | int | None:
    if not cell:
        return None
    try:
        return int(cell)
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The last evaluated round, the best round and the mean of the last ten evaluated rounds, by column.

    ``best`` is the highest value over rounds, and so chosen on the test split: a column of its own beside the others.

    Args:
        rows: rows of `metrics.csv`.
    """
    names = [name for name in (rows[0] if rows else {}) if name.startswith(ACCURACIES)]
    summary: dict[str, dict[str, Any]] = {"last": {}, "best": {}, "mean_last_10": {}}
    for name in names:
        known = [(row[name], row["round"]) for row in rows if row.get(name) is not None]
        if not known:
            continue
        last_ten = [value for value, _ in known[-10:]]
        summary["last"][name] = known[-1][0]
        summary["mean_last_10"][name] = math.fsum(last_ten) / len(last_ten)
        if not name.endswith("_std"):
            value, round = max(known, key=lambda pair: (pair[0], -pair[1]))
            summary["best"][name] = {"value": value, "round": round}
    return summary
