"""Two runs side by side: are they equal, and where do they first differ?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fl_lightning.errors import require
from fl_lightning.files import content_of, plain_json
from fl_lightning.reading import read_yaml
from fl_lightning.report.columns import LOG, is_time
from fl_lightning.report.plain import PlainConsole
from fl_lightning.report.record import LOGGED, read_logged, read_packed

FILES = {
    "metrics.csv": ("round",),
    "clients.csv": ("round", "client"),
    "topology.csv": ("round", "sender", "receiver"),
}
"""File -> the columns that say which row it is."""
SUMMARY = "summary.json"
ORDER = [*FILES, LOGGED, SUMMARY]
TWICE = "written twice"
SHOWN = 20  # figures of the first round that differs

Figures = dict[tuple[Any, ...], str]
"""(round, file, row, column) -> the figure, every digit of it."""


def compare(a: Path, b: Path, console: Console | None = None) -> bool:
    """Say which keys of two runs' configurations differ, and whether their figures are equal, bit for bit.

    Seconds are left out; they are never the same twice.

    Args:
        a: a run's folder.
        b: another.
        console: where to write; None writes to the standard output.

    Returns:
        Whether all figures are equal and the rounds are as many.

    Raises:
        ConfigError: if one of them is no run's folder.
    """
    console = console or PlainConsole(soft_wrap=True)
    for line in _differing_keys(_settings(a), _settings(b)):
        console.print(line, highlight=False)
    left, right = _Tables(a), _Tables(b)
    rounds = left.last(), right.last()
    both = min(rounds)
    require(both > 0, "compare", "there is no round in its metrics.csv", str(a if rounds[0] == 0 else b))
    ends: tuple[Figures, Figures] = (_final(a, both), _final(b, both)) if rounds[0] == rounds[1] else ({}, {})
    found = _differing(left, right, both, ends)
    if rounds[0] != rounds[1]:
        console.print(f"{a} has {rounds[0]} rounds, {b} has {rounds[1]}", highlight=False)
    if not found.rounds:
        rounds_of = "round" if both == 1 else "rounds"
        said = "equal:" if rounds[0] == rounds[1] else "equal as far as both go:"
        console.print(f"{said} {both} {rounds_of}, {found.figures} figures, bit for bit", highlight=False)
        return rounds[0] == rounds[1]
    first = found.rounds[0]
    console.print(_table(f"first differing round: {first}", *found.shown))
    last = len(found.rounds)
    often = "every round" if last == both - first + 1 else f"{last} of the {both - first + 1} rounds"
    console.print(f"different in {often} from round {first} on, of {both}", highlight=False)
    return False


def _table(title: str, places: list[tuple[Any, ...]], left: Figures, right: Figures) -> Table:
    """The figures of one round that differ; figures of single clients come last."""
    more = f"… and {len(places) - SHOWN} more" if len(places) > SHOWN else None
    table = Table(title=title, caption=more)
    for column in ("file", "figure", "first", "second"):
        table.add_column(column, overflow="fold")
    for at in places[:SHOWN]:
        _, file, row, column = at
        whose = " to ".join(f"client {client}" for client in row[1:] if client is not None)
        where = f"{whose}: {column}" if whose else column
        table.add_row(file, where, left.get(at, "–"), right.get(at, "–"))
    return table


class _Tables:
    """A run's rows, of which the figures of one round at a time are looked at: all of them would fill the memory.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self.rows = {file: read_packed(run / file) for file in FILES} | {LOGGED: read_logged(run / LOGGED)}
        self.places: dict[int, list[tuple[str, int]]] = {}
        for file, rows in self.rows.items():
            for place, round in enumerate(rows.column("round")):
                if isinstance(round, int):  # else a damaged line, which `evaluate` and `--resume` name
                    self.places.setdefault(round, []).append((file, place))

    def last(self) -> int:
        """The last round that has a figure; 0 where none has."""
        return next((round for round in sorted(self.places, reverse=True) if self.figures(round)), 0)

    def figures(self, round: int) -> Figures:
        """Those of a round."""
        found: Figures = {}
        seen: set[tuple[Any, ...]] = set()
        for file, at in self.places.get(round, ()):
            row = self.rows[file][at]
            if file == LOGGED:
                found[round, file, (round, row["client"]), LOG + row["name"]] = repr(row["value"])
                continue
            names = FILES[file]
            place = tuple(row.get(name) for name in names)
            if (file, *place) in seen:  # which of them is the run's, nobody knows
                found[round, file, place, TWICE] = "yes"
            seen.add((file, *place))
            for column, value in row.items():
                if value is not None and column not in names and not is_time(column):
                    found[round, file, place, column] = repr(value)
        return found


class _Differing(NamedTuple):
    """In which rounds two runs differ; of the first, where, and both runs' figures; how many the left one has."""

    rounds: list[int]
    shown: tuple[list[tuple[Any, ...]], Figures, Figures]
    figures: int


def _differing(left: _Tables, right: _Tables, last: int, ends: tuple[Figures, Figures]) -> _Differing:
    told = ends[0].keys() & ends[1].keys()  # a run that was stopped tells none
    rounds: list[int] = []
    shown: tuple[list[tuple[Any, ...]], Figures, Figures] = ([], {}, {})
    count = 0
    for round in sorted(own for own in {*left.places, *right.places} if own <= last):
        first, second = left.figures(round), right.figures(round)
        if round == last:
            first |= {at: ends[0][at] for at in told}
            second |= {at: ends[1][at] for at in told}
        count += len(first)
        places = [at for at in {**first, **second} if first.get(at) != second.get(at)]
        if places and not rounds:
            shown = sorted(places, key=lambda at: ORDER.index(at[1])), first, second
        rounds += [round] if places else []
    return _Differing(rounds, shown, count)


def _final(run: Path, round: int) -> Figures:
    """What a finished run scores after one more receive, which is in no row; nothing of one that says none."""
    try:
        said = plain_json(content_of(run / SUMMARY)).get("final_received") or {}
        return {(round, SUMMARY, (round,), f"final_received.{name}"): repr(value) for name, value in said.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _settings(run: Path) -> dict[str, str]:
    file = run / "config.yaml"
    require(file.is_file(), "compare", "there is no run in that folder", str(run))
    config = read_yaml(file, "compare")
    require(isinstance(config, dict), "compare", f"{file} is no run's configuration")
    return dict(_flatten(config))


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, (Mapping, list)) and node:
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
        for name, value in items:
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, repr(node)


def _differing_keys(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    for key in {**left, **right}:
        if left.get(key) != right.get(key):
            yield f"{key}: {left.get(key, '–')} | {right.get(key, '–')}"
