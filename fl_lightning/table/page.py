"""A table as the page shows it, from its definition's cells or from the folder of its results."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import ConfigError, require
from fl_lightning.files import content_of, plain_json
from fl_lightning.report.escaping import in_spreadsheet, out_of_markdown, out_of_spreadsheet
from fl_lightning.report.page.ranking import RankedRow
from fl_lightning.report.page.tables import MOMENTS, PublishedCell, PublishedTable
from fl_lightning.report.page.writing import write_page
from fl_lightning.report.recorded_run import read_run, rows_of
from fl_lightning.report.series import Member
from fl_lightning.table import ranking
from fl_lightning.table.cells import Cell
from fl_lightning.table.definition import ALL_DIGITS, Definition
from fl_lightning.table.figures import Values
from fl_lightning.table.quantity import decimals
from fl_lightning.table.writing import ABOUT, RANKING, as_csv, heads_of, how_many_seeds
from fl_lightning.terminal import printable

CELLS = "cells.csv"
"""In the folder of a table's results: which run is which cell."""
PAGE = "report.html"


def members_of(cells: Iterable[Cell]) -> list[Member]:
    """The cells that have a round to show, by row and column."""
    there = [cell for cell in cells if rows_of(cell.folder / "metrics.csv")]
    runs = [(cell, read_run(cell.folder, "report").first(cell.end)) for cell in there]
    return [Member(run, cell.row.name, cell.column.name) for cell, run in runs]


def cells_as_csv(cells: Iterable[Cell], folder: Path) -> str:
    """Row, column, seed, rounds until its own end and folder of every cell, as seen from `folder`."""
    lines = [["row", "column", "seed", "rounds", "folder"]]
    lines += [[c.row.name, c.column.name, str(c.seed), str(c.end), os.path.relpath(c.folder, folder)] for c in cells]
    return _as_text([list(map(in_spreadsheet, line)) for line in lines])


def _as_text(lines: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()


def shown(table: Definition, values: Values) -> PublishedTable:
    """A table's figures as the page shows them."""
    about = _About(table.note, table.source, list(map(str, heads_of(table, values))))
    found = _published(as_csv(table, values).splitlines(), table.title, about)
    return replace(found, ranked=_ranked(ranking.as_csv(table, values).splitlines()))


class _About(NamedTuple):
    """What a reader must know beside the figures, and the order of their columns; `missing` is what is not there."""

    note: str = ""
    source: str = ""
    columns: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        return [f"Published figures: {self.source}." if self.source else "", self.note]


def _about(folder: Path) -> _About:
    """What a folder of results says; nothing where an earlier version wrote it, or it is damaged."""
    try:
        said = plain_json(content_of(folder / ABOUT))
    except (OSError, ValueError):
        return _About()
    said = said if isinstance(said, Mapping) else {}
    note, source = (_line(said.get(name) or "") for name in ("note", "source"))
    lists = (said.get(name) for name in ("columns", "missing"))
    columns, missing = ([_line(own) for own in each] if isinstance(each, list) else [] for each in lists)
    return _About(note, source, columns, missing)


def read_results(folder: Path) -> tuple[PublishedTable, list[Member], list[str]]:
    """What the folder of a table's results holds.

    Returns:
        The table, its runs, and a line on each that is missing.

    Raises:
        ConfigError: if it holds no table.
    """
    try:
        notes: list[str] = []
        lines = _lines(folder / "table.csv")
        first = _lines(folder / "table.md")[0]
        file = folder / CELLS
        cells = list(csv.DictReader(_lines(file))) if file.is_file() else []
        about = _about(folder)
        table = _published(lines, printable(out_of_markdown(first.removeprefix("# "))) or folder.name, about)
        notes += about.missing
        if (folder / RANKING).is_file():
            ranked = _lines(folder / RANKING)
            table = replace(table, ranked=_ranked(ranked))
            notes += [f"a line of {folder / RANKING} is damaged"] if _rows(ranked)[1] else []
        notes += _rows_left_out(table, cells)
    except (OSError, UnicodeDecodeError, csv.Error, IndexError) as error:
        said = f"there is no whole table in {folder} ({getattr(error, 'strerror', None) or error})"
        raise ConfigError("report", said) from error
    members, missing = [], []
    notes += [] if cells else [f"{folder} does not say which runs its cells are; run the table again for the curves"]
    for cell in cells:
        if not all(isinstance(cell.get(name), str) for name in ("row", "column", "folder")):
            notes.append(f"a line of {file} is damaged")
            continue
        run = Path(os.path.normpath(folder / out_of_spreadsheet(cell["folder"])))
        if rows_of(run / "metrics.csv"):
            named = (printable(out_of_spreadsheet(cell[name])) for name in ("row", "column"))
            found, rounds = read_run(run, "report"), cell.get("rounds") or ""  # which earlier versions do not say
            members.append(Member(found.first(int(rounds)) if rounds.isdecimal() else found, *named))
        else:
            missing.append(run)
    gone = [run.name for run in missing if not run.is_dir()]
    new = [run.name for run in missing if run.is_dir()]
    if gone:
        where = f"where {file.name} says, seen from {folder}"
        notes.append(f"{len(gone)} of {len(cells)} runs are not {where}: {', '.join(gone[:5])}")
    if new:
        notes.append(f"{len(new)} of {len(cells)} runs have no round yet: {', '.join(new[:5])}")
    return table, members, notes


def _line(said: object) -> str:
    return printable(" ".join(str(said).split()))


def _lines(file: Path) -> list[str]:
    return content_of(file).decode().replace("\0", "\ufffd").splitlines()


def _rows(lines: Sequence[str]) -> tuple[list[dict[str, str]], bool]:
    """The rows of a table's file, and whether one is cut short, and left out: of a number a part is another one."""
    rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    whole = [row for row in rows if None not in row.values()]
    return whole, len(whole) < len(rows)


def _rows_left_out(table: PublishedTable, cells: Iterable[Mapping[str, str | None]]) -> list[str]:
    """A line on the rows whose cells ran and that the table has not: its file was cut between two lines."""
    there = {name for name, _ in table.rows}
    named = dict.fromkeys(printable(out_of_spreadsheet(cell.get("row") or "")) for cell in cells)
    gone = [name for name in named if name and name not in there]
    of_it = 0 < len(gone) < len(named)
    return [f"table.csv has no line of {', '.join(gone)}; run the table again"] if of_it else []


def _published(lines: Sequence[str], title: str, about: _About) -> PublishedTable:
    """A table from the lines of its CSV file."""
    heads: dict[str, None] = {}
    rows: dict[str, dict[str, PublishedCell]] = {}
    seeds: list[int] = []
    found, is_cut = _rows(lines)
    require(not is_cut, "report", "table.csv is cut short; run the table again")
    for line in found:
        require(line.get("row") is not None and line.get("column") is not None, "report", "table.csv is no table")
        named = {name: printable(out_of_spreadsheet(line.get(name) or "")) for name in ("row", "column", "figure")}
        head = f"{named['column']} {named['figure']}".strip()
        heads[head] = None
        seeds.append(len((line.get("seeds") or "").split()))
        rows.setdefault(named["row"], {})[head] = _cell(line)
    heads = dict.fromkeys([*(head for head in about.columns if head in heads), *heads])
    many = how_many_seeds(seeds)
    said = f"Means over {many}, ± over seeds; in parentheses the standard deviation over clients."
    marked = "Bold and underlined: a paired t-test at 5 % tells the row from the next one; of how many pairs, it says."
    is_marked = any(cell.mark for cells in rows.values() for cell in cells.values())
    notes = [marked, *about.lines] if is_marked else about.lines
    body = [(name, [cells.get(head) for head in heads]) for name, cells in rows.items()]
    return PublishedTable(title, [said, *notes], list(heads), body)


def _ranked(lines: Sequence[str]) -> list[RankedRow]:
    """Who is ahead in a table's columns, from the lines of their CSV file; what is no number is left out."""
    found = []
    for line in _rows(lines)[0]:
        column, figure, row = (printable(out_of_spreadsheet(line.get(name) or "")) for name in ranking.COLUMNS[:3])
        numbers = (_number(line.get(name)) for name in ranking.COLUMNS[3:9])
        first, last, mean, gap, low, high = (n if n is not None and math.isfinite(n) else None for n in numbers)
        if first is not None and last is not None and mean is not None and gap is not None:
            pairs = printable(line.get("pairs") or "")  # ranking.csv of earlier versions does not say it
            found.append(RankedRow(column, figure, row, int(first), int(last), mean, gap, low, high, pairs))
    return found


def _number(text: str | None) -> float | None:
    """What a cell holds; None where it is no number."""
    try:
        return float(text or "")
    except ValueError:
        return None


def _cell(line: Mapping[str, str | None]) -> PublishedCell:
    def number(name: str, form: str = "") -> str:
        found = _number(line.get(name))
        return "" if found is None else format(found, form or decimals(found))

    form = decimals(_number(line.get("mean")))
    mean, seeds, clients = (number(name, form) for name in ("mean", "over_seeds", "over_clients"))
    text = mean or "…"
    text += f" ± {seeds}" if seeds else ""
    text += f" ({clients})" if clients else ""
    spread = number("published_spread", ALL_DIGITS)
    printed = number("published", ALL_DIGITS) + (f" ± {spread}" if spread else "")
    moments = {name: number(name) for name in MOMENTS if number(name)}
    mark, pairs = line.get("mark") or "", printable(line.get("mark_rests_on") or "")
    return PublishedCell(text, printed, number("difference", f"+{form}"), mark, moments, pairs)


def write_table_page(
    folder: Path, table: Definition, values: Values, cells: Sequence[Cell], notes: Sequence[str]
) -> Path:
    """Write the page beside a table's other results.

    Raises:
        ConfigError: if Vega-Lite is not installed.
        WriteError: if the page cannot be written.
    """
    return write_page(members_of(cells), folder / PAGE, table.title, shown(table, values), notes)[0]
