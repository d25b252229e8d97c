"""A run's folder as it is read back: tolerant of what is missing, and never believing what it says to be code."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fl_lightning.errors import require
from fl_lightning.files import content_of, plain_json
from fl_lightning.identity import course, folders, identity, rounding
from fl_lightning.reading import DEEPEST, MOST_VALUES
from fl_lightning.report.journal import altered
from fl_lightning.report.packed import PackedRows
from fl_lightning.report.record import Row, read_metrics, read_packed, read_rows, summarise, watched_by
from fl_lightning.sealed import fits_checksum
from fl_lightning.terminal import printable

_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_OfClient = TypeVar("_OfClient", bound=Mapping[str, Any])


@dataclass(frozen=True)
class RecordedRun:
    """What a run's folder says.

    Args:
        path: the folder.
        config: ``config.yaml``; empty where it is missing or damaged.
        summary: ``summary.json``, likewise.
        partition: ``partition.json`` without the samples' indices, likewise.
        rows: the rounds of ``metrics.csv``, at least one.
        notes: what is missing or damaged, a line each.
        is_past: whether the folder has later rounds than the rows: its models and checkpoints are of these.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    partition: Mapping[str, Any]
    rows: Sequence[Row]
    notes: tuple[str, ...] = ()
    is_past: bool = False

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.summary.get("name") or self.config.get("name") or printable(self.path.resolve().name))

    @property
    def method(self) -> str:
        """The method's name; the run's where nothing says which method it is."""
        return str(self.summary.get("method") or class_name(self.config.get("method")) or self.name)

    @property
    def seed(self) -> int | None:
        """Of the run."""
        seed = self.summary.get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """The last, the best and the mean of the last ten rounds, and what chose the best, as `summarise` says them."""
        monitor, less = watched_by(self.config, self.rows)
        return summarise(self.rows, monitor or str(self.summary.get("best_by", "")), less)

    @property
    def unfinished(self) -> str:
        """How far it is; empty where it is over, or nothing says how many rounds it is to have."""
        done, planned = self.rows[-1]["round"], _entry(self.config, "federation", "rounds")
        left = isinstance(planned, int) and done < planned and not has_ended(self.summary, planned, done)
        return f"it is not finished: {done} of its {planned} rounds are done" if left else ""

    @property
    def partition_hash(self) -> str:
        """Of who holds what; empty where nothing says it."""
        return str(self.summary.get("partition_hash") or self.partition.get("hash") or "")

    @property
    def clients(self) -> str:
        """Who holds which samples: runs that have it in common have the same clients; empty where nothing says it."""
        return who_holds({"hash": self.partition_hash, "samples": self.partition.get("samples")})

    @cached_property
    def between_clients(self) -> bool:
        """Whether clients send to one another, so that what one takes in is what another has sent."""
        return (self.path / "topology.csv").is_file()

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """All keys that change a number, if by rounding, but the seed; and the run's course. Empty without a file."""
        found = {key: value for key, value in identity(self.config).items() if key != "seed"}
        return {**found, **course(self.config), **folders(self.config), **rounding(self.config)}

    @cached_property
    def client_rows(self) -> PackedRows:
        """The rows of ``clients.csv`` that count in the means of `rows`; empty where there are none."""
        last = self.rows[-1]["round"]
        return counting_rows(self.path, self.config).where(lambda round: round <= last, "round")

    def first(self, rounds: int) -> RecordedRun:
        """As it was with so many rounds, where somebody has extended it since.

        Args:
            rounds: at least 1.
        """
        rows = [row for row in self.rows if row["round"] <= rounds]
        if len(rows) in (0, len(self.rows)):
            return self
        federation = self.config.get("federation")
        federation = {**(federation if isinstance(federation, Mapping) else {}), "rounds": rounds}
        notes = tuple(note for note in self.notes if note != self.unfinished)
        config = {**self.config, "federation": federation}
        return replace(self, config=config, summary={}, rows=rows, notes=notes, is_past=True)


def read_run(path: Path, command: str) -> RecordedRun:
    """Read a run's folder.

    Args:
        path: the folder.
        command: who asks, for the error.

    Raises:
        ConfigError: if it holds no round of a run.
    """
    rows = list({row["round"]: row for row in _with_round(read_metrics, path)}.values())  # the last of a round
    require(bool(rows), command, "there is no run with at least one round in that folder", str(path))
    notes: list[str] = []
    config = _mapping(path / "config.yaml", notes)
    summary = _mapping(path / "summary.json", notes)
    partition = _mapping(path / "partition.json", notes, left_out="clients")
    notes += [f"{name} is not what the run wrote" for name in altered_tables(path, rows, summary)]
    run = RecordedRun(path, config, summary, partition, rows)
    notes += [run.unfinished] if run.unfinished else []
    return replace(run, notes=tuple(notes))


def altered_tables(path: Path, rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """The tables of a run that are not what it wrote, or not all of it; none are known of one that goes on.

    Args:
        path: the run's folder.
        rows: of its ``metrics.csv``, of which one that goes on has more than its summary says.
        summary: its summary.
    """
    rounds, done = summary.get("rounds"), rows[-1]["round"] if rows else 0
    return altered(path, summary) if isinstance(rounds, int) and done <= rounds else []


def has_ended(summary: Mapping[str, Any], planned: int, done: int = 0) -> bool:
    """Whether a run is over: with all its rounds, or early because something told it to stop.

    Args:
        summary: what ``summary.json`` says; of a run that was extended and goes on it is of its first end.
        planned: rounds that it is to have.
        done: rounds that its tables have.
    """
    rounds = summary.get("rounds")
    rounds = rounds if isinstance(rounds, int) else 0
    whole = rounds >= planned or bool(summary.get("stopped"))
    return bool(summary.get("finished")) and whole and rounds >= done


def who_holds(record: Mapping[str, Any]) -> str:
    """Which clients hold which samples, of a `partition.json`; empty where it does not say."""
    return " ".join(str(record.get(name) or "") for name in ("hash", "samples")) if record.get("hash") else ""


def rows_of(path: Path) -> list[Row]:
    """The rows of a run's CSV file that name a round; empty where it is missing or no such file."""
    return _with_round(read_rows, path)


def _with_round(read: Callable[[Path], list[Row]], path: Path) -> list[Row]:
    try:
        return [row for row in read(path) if isinstance(row.get("round"), int)]
    except (OSError, ValueError, csv.Error):
        return []


def counting_rows(path: Path, config: Mapping[str, Any]) -> PackedRows:
    """The rows of clients that count in a run's means: attackers do not, nor do those who joined later.

    Args:
        path: the run's folder.
        config: the run's.
    """
    number, joining = _entry(config, "data", "num_clients"), _entry(config, "federation", "newcomers")
    later = _entry({"newcomers": joining}, "newcomers", "clients")
    founders = number - later if isinstance(number, int) and isinstance(later, int) else None
    try:
        rows = read_packed(path / "clients.csv")
    except (OSError, ValueError):
        return PackedRows({})
    known = rows.where(lambda round: isinstance(round, int), "round")
    return known.where(lambda client, attacker: _counts(client, attacker, founders), "client", "attacker")


def those_that_count(rows: Sequence[_OfClient], num_founders: int | None) -> list[_OfClient]:
    """The rows of the first clients, so many, without attackers; None for all that are none."""
    return [row for row in rows if _counts(row.get("client"), row.get("attacker"), num_founders)]


def _counts(client: Any, attacker: Any, num_founders: int | None) -> bool:
    return isinstance(client, int) and (num_founders is None or client < num_founders) and not attacker


def _entry(config: Mapping[str, Any], section: str, key: str) -> Any:
    """What a section of a configuration says; None where it is no section."""
    node = config.get(section)
    return node.get(key) if isinstance(node, Mapping) else None


def class_name(node: Any) -> str:
    """The class's name in a section of a configuration."""
    path = node.get("class_path") if isinstance(node, Mapping) else node
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def _plain_yaml(text: str) -> Any:
    """What a YAML text says; libyaml's constructor would end the whole process over thousands of brackets.

    Raises:
        ValueError: if it is nested too deep, or aliases make it grow to more than `MOST_VALUES` values.
    """
    known: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values of what is not closed yet
    for event in yaml.parse(text, Loader=_FAST_LOADER):
        anchor, count = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((anchor, 1))
            if len(open_) > DEEPEST:
                raise ValueError("it is nested too deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, count = open_.pop()
        elif isinstance(event, yaml.AliasEvent):
            count = known.get(str(anchor), MOST_VALUES + 1)  # of what it is a part of itself
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            known[anchor] = count
        open_[-1] = open_[-1][0], open_[-1][1] + count
        if open_[-1][1] > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
    return yaml.load(text, Loader=_FAST_LOADER)


def _printable(node: Any) -> Any:
    """The same with every text such that a terminal, a page or a picture can show it."""
    if isinstance(node, str):
        return printable(node)
    if isinstance(node, Mapping):
        return {_printable(name): _printable(value) for name, value in node.items()}
    return [_printable(value) for value in node] if isinstance(node, list) else node


def _mapping(path: Path, notes: list[str], left_out: str = "") -> Mapping[str, Any]:
    """A YAML or JSON file that holds a mapping, without one of its keys; else empty, and a note says why."""
    try:
        text = content_of(path).decode()
        content = plain_json(text) if path.suffix == ".json" else _plain_yaml(text)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        content = None
    if not isinstance(content, Mapping) or not fits_checksum(content):
        notes.append(f"{path.name} is damaged")
        return {}
    return _printable({name: value for name, value in content.items() if name != left_out})
