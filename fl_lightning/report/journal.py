"""A run's tables, and the journal from which they are made again whatever happened to them."""

from __future__ import annotations

import csv
import json
import math
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError
from fl_lightning.files import append_text, content_of, holds, sync_file, write_text
from fl_lightning.report.columns import is_time
from fl_lightning.report.record import MetricsFile, Row, read_rows, rows_in
from fl_lightning.terminal import say

JOURNAL = "journal.txt"
"""Its name, beside the checkpoints."""

Texts = dict[str, str]
"""A table's name -> lines of it."""


class Sum:
    """The CRC-32 of a table's lines, its header's first.

    Seconds are left out, which are never the same twice, so that equal runs have equal checkpoints.

    Args:
        header: the header's line.
    """

    def __init__(self, header: str) -> None:
        columns = header.rstrip("\n").split(",")
        self._skipped = frozenset(place for place, name in enumerate(columns) if is_time(name))
        self.value = zlib.crc32(header.encode())
        self.size = len(header.encode())
        """Bytes of all lines."""

    def add(self, lines: str) -> Sum:
        """Add lines to it."""
        self.size += len(lines.encode())
        if self._skipped:
            rows = [line.split(",") for line in lines.splitlines()]
            kept = ([cell for place, cell in enumerate(row) if place not in self._skipped] for row in rows)
            lines = "".join(",".join(row) + "\n" for row in kept)
        self.value = zlib.crc32(lines.encode(), self.value)
        return self


class Journal:
    """The lines of all tables, a record a round: ``<CRC-32 of the rest> {"round": 3, "tables": {"metrics.csv": "…"}}``.

    The first record, of round 0, holds the tables' headers. A later one begins with that of a table whose columns have
    changed, as those of a resumed run may: what was written stays as it is, for checkpoints of before count on it. A
    kill can cut the last record short, which no checkpoint counts on yet.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, up_to: int) -> list[Texts]:
        """The whole records of round 0, 1, … `up_to`; they end before the first one that is missing or damaged.

        `in_columns` brings them under one header.
        """
        try:
            lines = content_of(self.path).splitlines(keepends=True)
        except OSError:
            return []
        found: list[Texts] = []
        for line in lines:
            texts = _record(line, len(found))
            if texts is None or len(found) > up_to:
                break
            found.append(texts)
        return found

    def rewrite(self, records: Sequence[Texts]) -> None:
        """Make the file hold these records, atomically; leave it alone where it does already."""
        whole = "".join(_line(round, texts) for round, texts in enumerate(records))
        if not holds(self.path, whole):
            write_text(self.path, whole)

    def append(self, round: int, texts: Texts) -> None:
        """Add a round's record; `sync` makes it safe."""
        append_text(self.path, _line(round, texts), sync=False)

    def sync(self) -> None:
        """Make all records survive a power cut."""
        sync_file(self.path)


def _line(round: int, texts: Texts) -> str:
    content = json.dumps({"round": round, "tables": texts})
    return f"{zlib.crc32(content.encode()):08x} {content}\n"


def _record(line: bytes, round: int) -> Texts | None:
    """What a line says, if it is whole and of that round."""
    crc, _, content = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(content):
        return None
    try:
        record = json.loads(content)
        return record["tables"] if record["round"] == round else None
    except (ValueError, KeyError, TypeError):
        return None


class RunTables:
    """`metrics.csv`, `clients.csv` and what else a run writes rows into.

    Args:
        folder: the run's.
        columns: a table's name -> its columns, `round` first.
        journal: where the journal lies; None keeps none, for a run that is never resumed.
    """

    def __init__(self, folder: Path, columns: Mapping[str, Sequence[str]], journal: Path | None) -> None:
        self.folder = folder
        self.files = {name: MetricsFile(folder / name, own) for name, own in columns.items()}
        self.journal = None if journal is None else Journal(journal)
        self._sums: dict[str, Sum] = {}
        self._new: Texts = {}  # headers that the journal has not, which go there with the next rows

    def start(self, round: int, saved: Mapping[str, Any] | None = None) -> str:
        """Bring all files to where they were after `round`, whatever they hold now.

        A column that they had stays, empty from now on, where the run goes on without it: no figure is lost.

        Args:
            round: the last round that is done, 0 for none.
            saved: what `state_dict` said then.

        Returns:
            What had to be said of it; mostly nothing.

        Raises:
            ConfigError: if journal and tables are damaged both.
        """
        records, notice = [self._headers()], ""
        if round > 0 and self.journal is not None:
            records, notice = recover(self.journal, self.folder, round, saved or {})
        if self.journal is not None:
            self.journal.rewrite(records)
        known = in_columns(records)[0]
        for name, file in self.files.items():
            file.columns += [column for column in _columns(known.get(name, "")) if column not in file.columns]
        headers = self._headers()
        self._new = {name: header for name, header in headers.items() if header != known.get(name)}
        (_, *later) = in_columns(records, headers)
        for name, file in self.files.items():
            text = "".join(record[name] for record in later)
            file.start(text)
            self._sums[name] = Sum(headers[name]).add(text)
        return notice

    def _headers(self) -> Texts:
        return {name: file.lines([_header(file.columns)]) for name, file in self.files.items()}

    def append(self, round: int, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Add a round's rows, in the journal first.

        Args:
            round: 1-based.
            rows: a table's name -> its rows of the round.
        """
        texts = {name: self.files[name].lines(own) for name, own in rows.items()}
        if self.journal is not None:
            self.journal.append(round, {name: self._new.pop(name, "") + text for name, text in texts.items()})
        for name, text in texts.items():
            self.files[name].append(text, sync=self.journal is None)
            self._sums[name].add(text)

    def rows(self, name: str) -> list[Row]:
        """A table's rows, as they stand in its file."""
        return read_rows(self.files[name].path)

    def restore(self, read: str) -> None:
        """Make those files again, from the journal, that somebody has changed or deleted since.

        Args:
            read: the table that is read next, whose lines are looked at; of others, which may be very large, the size.
        """
        for name, file in self.files.items():
            if name == read or not _has_size(file.path, self._sums[name].size):
                self._restore(name, file.path)

    def _restore(self, name: str, path: Path) -> None:
        crc = self._sums[name].value
        if self.journal is not None and not _cut(path, math.inf, crc):
            records = in_columns(self.journal.read(sys.maxsize), self._headers())
            if records and _sum(records, name) == crc:
                say(f"{path} was changed while the run wrote into it; it is made again from {self.journal.path}")
                write_text(path, "".join(texts.get(name, "") for texts in records))

    def sync(self) -> None:
        """Make the tables survive a power cut, at the end of a run; until then the journal does."""
        for file in self.files.values():
            sync_file(file.path)

    def state_dict(self) -> dict[str, int]:
        """Each table's sum; the journal is safe then, so that a checkpoint may count on it."""
        if self.journal is not None:
            self.journal.sync()
        return self.sums

    @property
    def sums(self) -> dict[str, int]:
        """Each table's sum, by name."""
        return {name: own.value for name, own in self._sums.items()}


def recover(journal: Journal, folder: Path, round: int, saved: Mapping[str, Any]) -> tuple[list[Texts], str]:
    """All records up to a round, from the journal or, where that is damaged, from the tables themselves.

    Args:
        journal: the journal.
        folder: where the tables lie.
        round: the round of the checkpoint.
        saved: the tables' sums then, by name.

    Returns:
        The records, as the journal has them, and what is to be said where it was damaged.

    Raises:
        ConfigError: if both are damaged.
    """
    records = journal.read(round)
    known = in_columns(records)
    if len(records) == round + 1 and all(_sum(known, name) == crc for name, crc in saved.items()):
        return records, ""
    problem = f"{journal.path} is damaged or cut short"
    tables = {name: _cut(folder / name, round, crc) for name, crc in saved.items()}
    broken = [name for name, lines in tables.items() if not lines]
    if broken or not tables:
        raise ConfigError("--resume", f"{problem}, and so is {' and '.join(broken)}")
    return _by_round(tables, round), f"{problem}; it is made again from {', '.join(tables)}"


def rows_up_to(journal: Path, round: int) -> list[Row]:
    """The rows of ``metrics.csv`` up to a round, whatever became of that file; none where the journal is damaged."""
    records = in_columns(Journal(journal).read(round))
    return rows_in("".join(own.get("metrics.csv", "") for own in records)) if len(records) > round else []


def altered(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """The tables of a run that are not what it wrote, by what its ``summary.json`` says of them.

    Args:
        folder: the run's.
        summary: its summary; of an older version's, which says nothing of tables, none are known.
    """
    tables = summary.get("tables")
    if not isinstance(tables, Mapping):
        return []
    return [name for name, crc in tables.items() if not _cut(folder / name, math.inf, crc)]


def _sum(records: Sequence[Texts], name: str) -> int:
    return Sum(records[0].get(name, "")).add("".join(texts.get(name, "") for texts in records[1:])).value


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _cut(path: Path, round: float, crc: int) -> list[str]:
    """The lines of a table, header first, up to a round; none if they are not those that were written."""
    try:
        header, *lines = content_of(path).decode().splitlines(keepends=True)
        lines = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= round]
    except (OSError, ValueError):
        return []
    return [header, *lines] if Sum(header).add("".join(lines)).value == crc else []


def _by_round(tables: Mapping[str, Sequence[str]], last: int) -> list[Texts]:
    records: list[Texts] = [dict.fromkeys(tables, "") for _ in range(last + 1)]
    for name, (header, *lines) in tables.items():
        records[0][name] = header
        for line in lines:
            records[int(line.partition(",")[0])][name] += line
    return records


def in_columns(records: Sequence[Texts], headers: Texts | None = None) -> list[Texts]:
    """Records under one header a table, which the first of them holds.

    Args:
        records: as the journal has them.
        headers: by a table's name; None takes those that the tables had last.
    """
    last: Texts = {}
    told: list[dict[str, tuple[str, str]]] = []
    for texts in records:
        parts = {name: _parted(text) for name, text in texts.items()}
        last |= {name: header for name, (header, _) in parts.items() if header}
        told.append({name: (last.get(name, ""), rows) for name, (_, rows) in parts.items()})
    wanted = last if headers is None else headers
    none = ("", "")
    later = [{name: _under(own, *texts.get(name, none)) for name, own in wanted.items()} for texts in told[1:]]
    return [dict(wanted), *later] if told else []


def _parted(text: str) -> tuple[str, str]:
    """The header that a record's lines begin with, if they do, and the rows."""
    if not text.startswith("round,"):
        return "", text
    header, end, rows = text.partition("\n")
    return header + end, rows


def _under(header: str, before: str, rows: str) -> str:
    """Rows under a header that stood under another one."""
    return rows if header == before else _reordered(rows, before, _columns(header))


def _reordered(text: str, header: str, columns: Sequence[str]) -> str:
    """Lines under other columns: cells keep their text, by the names of the columns."""
    names = _columns(header)
    rows = [dict(zip(names, cells, strict=False)) for cells in csv.reader(text.splitlines())]
    return "".join(",".join(row.get(name, "") for name in columns) + "\n" for row in rows)


def _columns(header: str) -> list[str]:
    return next(csv.reader([header]))


def _header(columns: Sequence[str]) -> dict[str, str]:
    return dict(zip(columns, columns, strict=True))
