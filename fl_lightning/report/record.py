"""A run's numbers on disk: `metrics.csv`, `clients.csv` and what `summary.json` says of them."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ACCURACIES = ("Local-T", "Global-T", "Server-T")


class MetricsFile:
    """A CSV file of one or more rows a round, that survives a kill at any moment.

    Rows are appended and synced. A file that a killed run left is cut back to the rounds that its checkpoint covers.

    Args:
        path: the file.
        columns: names of the columns, `round` first.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)

    def start(self, after_round: int) -> None:
        """Keep the rows of rounds 1 to `after_round` and drop the others, atomically."""
        kept = [row for row in read_rows(self.path) if row.get("round") is not None and row["round"] <= after_round]
        write_whole(self.path, self._lines([dict(zip(self.columns, self.columns, strict=True)), *kept]))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows and sync."""
        with self.path.open("a", newline="") as file:
            file.write(self._lines(rows))
            file.flush()
            os.fsync(file.fileno())

    def _lines(self, rows: Iterable[Mapping[str, Any]]) -> str:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([_cell(row.get(name)) for name in self.columns] for row in rows)
        return buffer.getvalue()


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is either whole or as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _cell(value: Any) -> str:
    """What does not apply is empty, never 0; a loss that is no number is `nan`."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file of numbers; empty cells become None, a row that was cut short is left out."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        return [
            {name: _number(cell) for name, cell in zip(columns, cells, strict=True)}
            for cells in reader
            if len(cells) == len(columns)
        ]


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
