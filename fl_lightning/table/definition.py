"""What a table's file says: rows, columns, seeds, what a figure means, and what was published."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.reading import read_yaml
from fl_lightning.resuming import check_name
from fl_lightning.shipped import path_of
from fl_lightning.table.overlays import Overlay, given_in, known_keys, name_in, read_overlay
from fl_lightning.table.quantity import Figure, is_scale, read_figure
from fl_lightning.terminal import printable

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
ALL_DIGITS = ".15g"
"""How a published number is written: each of its digits, without the zeros that it may end in."""
_SPREAD = re.compile(rf"\s*(-?{_NUMBER})\s*(?:(?:±|\+-|\+/-)\s*({_NUMBER}))?\s*", re.ASCII)
_KEYS = (
    "title",
    "source",
    "note",
    "name",
    "seeds",
    "figure",
    "figures",
    "spread",
    "scale",
    "rank",
    "base",
    "columns",
    "rows",
    "published",
)


@dataclass(frozen=True)
class Published:
    """A printed figure, in the table's unit, and what it prints after ±."""

    value: float
    spread: float | None = None

    def __str__(self) -> str:
        return " ± ".join(all_digits(number) for number in (self.value, self.spread) if number is not None)


def all_digits(number: float) -> str:
    """A published number.

    >>> all_digits(66.20), all_digits(16986640.0)
    ('66.2', '16986640')
    """
    return format(number, ALL_DIGITS)


@dataclass(frozen=True)
class Column:
    """A setting of the grid: its runs, and the figures that are printed of each, by name (one has the name "")."""

    name: str
    overlay: Overlay
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class Row:
    """A method.

    Args:
        name: as printed.
        overlay: over the column's.
        figure: what is printed of it where that is not the column's.
        figures: the same by the figure's name; None where the row has none of it.
        columns: what differs in a column; None where the row has no cell in it.
    """

    name: str
    overlay: Overlay
    figure: Figure | None = None
    figures: Mapping[str, Figure | None] = field(default_factory=dict)
    columns: Mapping[str, Overlay | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """A table's file.

    Args:
        path: the file.
        name: of the folder of its results.
        title: for people.
        source: where the published figures stand.
        note: what the reader must know.
        seeds: of the runs.
        spread: what ± of the published figures is over: ``seeds``, ``clients`` or nothing.
        scale: factor of the figures; None leaves it to each of them.
        base: under all columns.
        columns: in their order.
        rows: in their order.
        published: row -> column -> figure's name -> what was printed.
        rank: names of the figures by which rows are ranked, with what the seeds leave open.
    """

    path: Path
    name: str
    title: str
    source: str
    note: str
    seeds: tuple[int, ...]
    spread: str
    scale: float | None
    base: Overlay
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    published: Mapping[str, Mapping[str, Mapping[str, Published]]]
    rank: tuple[str, ...] = ()

    def noted(self, said: str) -> Definition:
        """The same with one more thing that a reader must know."""
        return replace(self, note=f"{self.note.strip()} {said}".strip())

    @property
    def heads(self) -> list[tuple[Column, str]]:
        """The printed columns: each column with each of its figures' names."""
        return [(column, name) for column in self.columns for name in column.figures]

    def figure(self, row: Row, column: Column, name: str) -> Figure | None:
        """What a cell prints; None where the row has nothing there."""
        return row.figures[name] if name in row.figures else row.figure or column.figures[name]

    def scale_of(self, figure: Figure) -> float:
        """The factor that a figure is printed with."""
        return next(scale for scale in (figure.scale, self.scale, figure.usual_scale) if scale is not None)


def read_definition(path: Path) -> Definition:
    """Read a table's file.

    Raises:
        ConfigError: naming the key that is wrong, and what is allowed.
    """
    path = path_of(path)
    content = read_yaml(path, "table")
    require(isinstance(content, Mapping), "table", f"{path} must hold {', '.join(_KEYS[-4:])}")
    known_keys(content, _KEYS, "")
    return _Reader(path, content).definition()


class _Reader:
    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.content = content

    def definition(self) -> Definition:
        content, path = self.content, self.path
        default = self._figures(content, "") or {"": read_figure("Local-T.mean_last_10", "figure")}
        columns = tuple(self._column(name, node, default) for name, node in self._section("columns"))
        self._require_heads_that_differ(columns)
        rows = tuple(self._row(name, node, columns) for name, node in self._section("rows"))
        seeds = content.get("seeds", [0])
        whole = (
            isinstance(seeds, list) and bool(seeds) and all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
        )
        require(whole, "seeds", "must be a list of whole numbers >= 0 and below 2^63", seeds)
        require(len(set(seeds)) == len(seeds), "seeds", "must differ from each other", seeds)
        spread = content.get("spread", "")
        require(spread in ("seeds", "clients", ""), "spread", "must be seeds or clients, or be left out", spread)
        scale = content.get("scale")
        require("scale" not in content or is_scale(scale), "scale", "must be a finite number above 0", scale)
        name = text_of(content, "name", f"{path.resolve().parent.parent.name}-{path.stem}")
        check_name(name)
        table = Definition(
            path,
            name,
            text_of(content, "title", path.stem),
            text_of(content, "source"),
            text_of(content, "note"),
            tuple(seeds),
            spread,
            None if scale is None else float(scale),
            self._overlay(content.get("base"), "base"),
            columns,
            rows,
            self._published(rows, columns),
            self._rank(columns),
        )
        _require_comparable(table)
        return table

    @staticmethod
    def _require_heads_that_differ(columns: Sequence[Column]) -> None:
        """Refuse two columns that are printed under one head: ``A`` with a figure ``B C``, and ``A B`` with ``C``."""
        heads = [f"{column.name} {name}".strip() for column in columns for name in column.figures]
        twice = next((head for head in heads if heads.count(head) > 1), None)
        require(twice is None, "columns", "must have names that differ with their figures' behind them", twice)

    def _rank(self, columns: Sequence[Column]) -> tuple[str, ...]:
        names = self.content.get("rank", [])
        names = [names] if isinstance(names, str) else names
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        require(listed, "rank", "must name figures of the table, as a list", names)
        known = dict.fromkeys(name for column in columns for name in column.figures)
        for name in names:
            _among(name, known, "rank")
        return tuple(names)

    def _section(self, key: str) -> list[tuple[str, Any]]:
        node = self.content.get(key)
        require(isinstance(node, Mapping) and bool(node), key, f"must name the table's {key}", node)
        assert isinstance(node, Mapping)
        return [(name, {} if value is None else value) for name, value in _named(node, key)]

    def _column(self, name: str, node: Any, default: Mapping[str, Figure]) -> Column:
        key = f"columns.{name}"
        overlay = self._overlay(node, key, ("figure", "figures"))
        return Column(name, overlay, self._figures(node, f"{key}.") or default)

    def _figures(self, node: Mapping[str, Any], key: str) -> dict[str, Figure]:
        """`figures` by name, or `figure` without one; empty where there is neither."""
        given = given_in(node, "figures", {})
        require(isinstance(given, Mapping), f"{key}figures", "must hold figures by name", given)
        require(
            not given or "figure" not in node, f"{key}figure", "must be left out beside figures", node.get("figure")
        )
        named = _named(given, f"{key}figures")
        figures = {name: read_figure(figure, f"{key}figures.{name}") for name, figure in named}
        one = {"": read_figure(node["figure"], f"{key}figure")} if "figure" in node else {}
        return figures or one

    def _row(self, name: str, node: Any, columns: Sequence[Column]) -> Row:
        key = f"rows.{name}"
        overlay = self._overlay(node, key, ("figure", "figures", "columns"))
        own = given_in(node, "columns", {})
        require(isinstance(own, Mapping), f"{key}.columns", "must hold what differs, by column", own)
        for column in own:
            _among(str(column), [c.name for c in columns], f"{key}.columns.{column}")
        different = {str(c): None if o is None else self._overlay(o, f"{key}.columns.{c}") for c, o in own.items()}
        figure = read_figure(node["figure"], f"{key}.figure") if "figure" in node else None
        given = given_in(node, "figures", {})
        require(isinstance(given, Mapping), f"{key}.figures", "must hold figures by name", given)
        printed = dict(_named(given, f"{key}.figures"))
        for head in printed:
            _among(head, dict.fromkeys(n for c in columns for n in c.figures), f"{key}.figures.{head}")
        shown = {head: one for head, one in printed.items() if one is not None}
        figures = {**dict.fromkeys(printed), **self._figures({"figures": shown}, f"{key}.")}
        return Row(name, overlay, figure, figures, different)

    def _overlay(self, node: Any, key: str, beside: Sequence[str] = ()) -> Overlay:
        return read_overlay(node, key, self.path, beside)

    def _published(self, rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, dict[str, dict[str, Published]]]:
        node = given_in(self.content, "published", {})
        require(isinstance(node, Mapping), "published", "must hold figures by row and column", node)
        found: dict[str, dict[str, dict[str, Published]]] = {}
        by_name = {column.name: column for column in columns}
        for row, cells in node.items():
            _among(str(row), [r.name for r in rows], f"published.{row}")
            require(isinstance(cells, Mapping), f"published.{row}", "must hold figures by column", cells)
            for column, cell in cells.items():
                key = f"published.{row}.{column}"
                _among(str(column), by_name, key)
                figures = cell if isinstance(cell, Mapping) else {"": cell}
                for name in figures:
                    _among(str(name), by_name[str(column)].figures, f"{key}.{name}" if name else key)
                printed = {str(n): _printed(value, key) for n, value in figures.items() if value is not None}
                found.setdefault(str(row), {})[str(column)] = printed
        return found


def _named(node: Mapping[Any, Any], key: str) -> list[tuple[str, Any]]:
    """What a part of a file holds by name, with names as they are printed.

    Raises:
        ConfigError: if two of them are printed alike.
    """
    named = [(printable(name_in(key, name)), value) for name, value in node.items()]
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, key, "must have names that differ when they are printed", twice)
    return named


def _require_comparable(table: Definition) -> None:
    """Refuse a ranking of rows that print figures of which more and of which less is better."""
    for column, name in table.heads:
        cells = (row for row in table.rows if row.columns.get(column.name, column) is not None)
        figures = [figure for row in cells if (figure := table.figure(row, column, name)) is not None]
        alike = len({figure.less_is_better for figure in figures}) < 2
        rule = f"{column.name} has rows with figures of which more and of which less is better; they have no ranking"
        require(alike or name not in table.rank, "rank", rule, name)


def text_of(content: Mapping[str, Any], key: str, default: str = "") -> str:
    """A text of a table's file in one line, as it is printed; a number may stand for it.

    Raises:
        ConfigError: for anything else.
    """
    value = content.get(key)
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    require(value is None or plain, key, "must be a text", value)
    return printable(" ".join(("" if value is None else str(value)).split())) or default


def _among(name: str, choices: Iterable[str], key: str) -> None:
    names = list(choices)
    rule = "there is one figure a column, without a name" if names == [""] else suggest(name, names)
    require(name in names, key, f"the table has none of that name; {rule}")


def _printed(value: Any, key: str) -> Published:
    """``66.24 ± 0.6``, or a number, or a list of the two."""
    parts = value if isinstance(value, list) and len(value) == 2 else [value]
    if all(type(part) in (int, float) and math.isfinite(part) for part in parts):
        return Published(*map(float, parts))
    match = _SPREAD.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(key, "must be a number, alone or with ± and another", value)
    return Published(float(match[1]), None if match[2] is None else float(match[2]))
