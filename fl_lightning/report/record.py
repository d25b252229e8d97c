"""A run's numbers on disk: `metrics.csv`, `clients.csv`, `logged.csv` and what `summary.json` says of them."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fl_lightning.files import append_text, content_of, holds, write_text
from fl_lightning.report.columns import LOG, accuracy_of, is_score, less_is_better
from fl_lightning.report.packed import PackedRows, Row, packed
from fl_lightning.terminal import printable

LOGGED = "logged.csv"
"""What fits have logged by themselves: a row a value, and a row without a client for the mean over those that count."""
LOGGED_COLUMNS = ("round", "client", "value", "name")
ACCURACIES = ("Local-T", "Global-T", "Server-T")
_LONGEST = 18
"""Digits of a whole number that surely fits into 64 bits."""


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
    return list(read_packed(path))


def read_packed(path: Path) -> PackedRows:
    """The same for a file that may be long: a row a client and round."""
    if not path.is_file():
        return PackedRows({})
    return _packed_in(content_of(path).decode("utf-8-sig", errors="replace"))  # an editor puts a mark in front


def rows_in(text: str) -> list[Row]:
    """The rows of a CSV text, as `read_rows` reads a file's."""
    return list(_packed_in(text))


def _packed_in(text: str) -> PackedRows:
    lines = text.replace("\0", "\ufffd").split("\n")[:-1]  # what follows the last line break was cut short
    columns = [printable(name) for name in _header(lines[0].rstrip("\r"))] if lines else []
    rows = (line.split(",") for line in islice(lines, 1, None))
    return packed(columns, (map(_number, cells) for cells in rows if len(cells) == len(columns)))


def _header(line: str) -> list[str]:
    """The names in a table's first line; one that has a comma stands in quotes."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error:  # longer than any name
        return []


def ever_trained(rows: PackedRows) -> set[Any]:
    """Clients that came through a local fit, of rows of ``clients.csv``; all of them where the file does not say."""
    took_part, failed, skipped = rows.column("participated", 1), rows.column("failed"), rows.column("skipped")
    columns = zip(rows.column("client"), took_part, failed, skipped, strict=True)
    return {client for client, *fit in columns if fit[0] and not fit[1] and not fit[2]}


def _number(cell: str) -> float | int | None:
    """What a cell says; a whole number that no machine word may hold is a fraction, as NumPy takes none other."""
    if not cell:
        return None
    try:  # most cells are fractions, and to refuse one takes long
        return float(cell) if "." in cell or len(cell) > _LONGEST else int(cell)
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None


def as_logged(values: Mapping[str, float]) -> dict[str, float]:
    r"""Logged values by the names that they have in a line of `logged.csv`, and so to loggers and everywhere else.

    >>> as_logged({"two  words\nand \x1b": 1.0})
    {'two words and \\x1b': 1.0}
    """
    return {printable(" ".join(name.split())): value for name, value in values.items()}


def read_logged(path: Path) -> PackedRows:
    """Read a run's `logged.csv`; a row that is damaged, or cut short, is left out."""
    if not path.is_file():
        return PackedRows({})
    text = content_of(path).decode(errors="replace").replace("\0", "\ufffd")
    whole, _, _ = text.rpartition("\n")
    names: dict[str, str | None] = {}  # one text of each
    lines = (line.rstrip("\r\n").split(",", 3) for line in io.StringIO(whole))  # where a lost quote ends, too
    rows = (
        (*map(_number, cells[:3]), name)
        for cells in lines
        if len(cells) == len(LOGGED_COLUMNS) and cells[0].isdigit() and (name := _name(cells[3], names)) is not None
    )
    return packed(LOGGED_COLUMNS, rows)


def _name(cell: str, known: dict[str, str | None]) -> str | None:
    """The name in a cell, once looked up in `known` and put there; None for what no name is written as."""
    if cell not in known:
        quoted = cell[:1] == '"'
        whole = re.fullmatch(r'"(?:[^"]|"")*"' if quoted else '[^",]*', cell) is not None
        known[cell] = printable(cell[1:-1].replace('""', '"') if quoted else cell) if whole else None
    return known[cell]


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run's `metrics.csv`, with the means of what its fits logged as ``log/<name>``."""
    rows = read_rows(folder / "metrics.csv")
    means = [own for own in read_logged(folder / LOGGED) if own["client"] is None]
    names = dict.fromkeys(LOG + own["name"] for own in means)
    by_round = {row.get("round"): dict.fromkeys(names) for row in rows}
    for own in means:
        by_round.get(own["round"], {})[LOG + own["name"]] = own["value"]
    return [{**row, **by_round[row.get("round")]} for row in rows]


def summarise(rows: Sequence[Row], monitor: str = "", less: bool | None = None) -> dict[str, Any]:
    """The last evaluated round, the best round and the mean of the last ten rounds with a value, by column.

    What has no value in a round in which its accuracy was tested has no last one, and not that of another round: a
    measure that is not defined there, or a share of clients of whom nobody knows what they reach alone.

    Where there are figures on validation parts, ``best`` is the round in which one of them, ``best_by``, is best: its
    test figures are honest. Without, it is each column's own best round, chosen on what it is reported on.

    Args:
        rows: rows of `metrics.csv`.
        monitor: the column that chooses the best round; empty, and one that has no number in any round, takes the
            first of `CHOOSERS` that there is.
        less: whether less of `monitor` is better; None goes by its name.
    """
    names = [name for name in (rows[0] if rows else {}) if is_score(name)]
    summary: dict[str, Any] = {"last": {}, "best": {}, "mean_last_10": {}}
    numbers = (row.get(monitor) for row in rows)
    has_numbers = any(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers)
    chooser = monitor if monitor in names and has_numbers else chosen_by(rows)
    chosen = best_round(rows, chooser, less if chooser == monitor else None) if chooser else None
    summary |= {"best_by": chooser} if chosen else {}
    for name in names:
        places = [place for place, row in enumerate(rows) if row.get(name) is not None]
        known = [(rows[place][name], rows[place]["round"]) for place in places]
        if not known:
            continue
        last_ten = [value for value, _ in known[-10:]]
        if not any(row.get(accuracy_of(name)) is not None for row in rows[places[-1] + 1 :]):
            summary["last"][name] = known[-1][0]
        summary["mean_last_10"][name] = _mean(last_ten)
        own = chosen if chosen is not None else best_round(rows, name)
        if not name.endswith("_std") and own is not None and own.get(name) is not None:
            summary["best"][name] = {"value": own[name], "round": own["round"]}
    return summary


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):  # infinities of both signs, numbers at the end of what a float holds
        return sum(values) / len(values)


def num_evaluated(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many rounds have a score of any kind.

    Args:
        rows: rows of `metrics.csv`.
    """
    return sum(any(is_score(name) and value is not None for name, value in row.items()) for row in rows)


CHOOSERS = ("Local-V", "Local-V_received", "Server-V")
"""The figure on validation parts that chooses the best round: the first that there is."""


def chosen_by(rows: Sequence[Row]) -> str:
    """The column on validation parts that chooses a run's best round; empty where there is none."""
    return next((name for name in CHOOSERS if any(row.get(name) is not None for row in rows)), "")


WATCHED = (*CHOOSERS, "Local-T", "Local-T_received", "Server-T")
"""What early stopping watches where nothing is said: the first that there is; the latter where test parts are laid
aside."""


def watched_by(config: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, bool | None]:
    """What a run's configuration says of its best round: `monitor` and `less` of `summarise`.

    Args:
        config: the run's, as it may be read back: of any form.
        rows: of `metrics.csv`.
    """
    federation = config.get("federation")
    stopping = federation.get("early_stopping") if isinstance(federation, Mapping) else None
    if not isinstance(stopping, Mapping):
        return "", None
    usual = next((name for name in WATCHED if any(row.get(name) is not None for row in rows)), "")
    return str(stopping.get("monitor") or usual), {"min": True, "max": False}.get(str(stopping.get("mode")))


def best_round(rows: Sequence[Row], column: str, less: bool | None = None) -> Row | None:
    """The row in which a column is best, the earliest of equals; None where it has no number.

    Args:
        rows: of `metrics.csv`.
        column: the column.
        less: whether less of it is better; None goes by its name.
    """
    sign = -1 if (less_is_better(column) if less is None else less) else 1
    known = [row for row in rows if row.get(column) is not None and math.isfinite(row[column])]
    return max(known, key=lambda row: (sign * row[column], -row["round"]), default=None)
