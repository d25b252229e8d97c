"""The cells of a table: each an ordinary run in a folder of its own, found again by what it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fl_lightning.configuration import Config, read_config, short_name
from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.identity import (
    care,
    computed_otherwise,
    contents,
    data_files,
    data_folders,
    folders,
    identity,
    last_change,
    own_files,
    reference_figures,
)
from fl_lightning.own_sources import own_sources
from fl_lightning.parser import configured
from fl_lightning.rehearsal import rehearse
from fl_lightning.report.journal import altered
from fl_lightning.report.record import Row as Record
from fl_lightning.report.record import num_evaluated
from fl_lightning.report.recorded_run import has_ended, rows_of, who_holds
from fl_lightning.report.wandb_name import CLASS_PATH
from fl_lightning.sealed import read_json
from fl_lightning.table.definition import Column, Definition, Row
from fl_lightning.table.lacking import why_lacking
from fl_lightning.table.overlays import Overlay


@dataclass(frozen=True)
class Choice:
    """Which cells are wanted, and what is laid over all of them.

    Args:
        output: folder of runs; the cells are in its ``cells``.
        rows: names of the rows that are wanted; none are all.
        columns: names of the columns that are wanted; none are all.
        seeds: of the runs; none are the table's own.
        rounds: of every run; None leaves what the files say.
        overrides: options of a configuration, over everything.
    """

    output: Path = Path("runs")
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    rounds: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def laid_over(self) -> tuple[str, ...]:
        """What the command line changes in every run."""
        rounds = () if self.rounds is None else (f"--federation.rounds={self.rounds}",)
        return (*rounds, *self.overrides)


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    Args:
        row: the method.
        column: the setting.
        seed: of the run.
        config: resolved.
        options: the command line that it was resolved from, without the run's folder.
        output: folder of all cells.
    """

    row: Row
    column: Column
    seed: int
    config: Config
    options: tuple[str, ...]
    output: Path

    @cached_property
    def name(self) -> str:
        """The name of the run: its method, data set and seed, and a hash of all that makes it this run."""
        what = {**identity(self.config), **care(self.config), **self.read}
        what["federation.rounds"] = self.rounds
        stopping = self.config["federation"].get("early_stopping")
        what |= {} if stopping is None else {"federation.early_stopping": stopping}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:10]
        method, dataset = short_name(self.config["method"]), short_name(self.config["data"]["dataset"])
        return f"{method}-{dataset}-{self.seed}-{digest}".lower()

    @cached_property
    def files(self) -> Mapping[str, str]:
        """What the files hold that it reads, data, weights, another run, its classes' own: key -> digits of the sum."""
        own = (contents, data_files, own_files, reference_figures)
        return {key: digest for read in own for key, digest in read(self.config).items()}

    @cached_property
    def read(self) -> Mapping[str, str]:
        """The same, and the source of one's own classes: what is not in its configuration and makes it another run."""
        return {**self.files, **own_sources(self.config)}

    def edited_files(self) -> list[str]:
        """The keys of those that hold something else now than when the run got its name."""
        now = replace(self).files
        return [
            key.partition(" (")[0] for key in sorted(self.files.keys() | now) if self.files.get(key) != now.get(key)
        ]

    @property
    def folder(self) -> Path:
        """Where it runs; cells of other tables that are the same run share it."""
        return self.output / self.name

    @property
    def rounds(self) -> int:
        """How many it has in all."""
        return int(self.config["federation"]["rounds"])

    @property
    def words(self) -> list[str]:
        """The command line after ``fl-lightning``, whether the run is begun or goes on."""
        place = ["--output", str(self.output), "--name", self.name, "--resume", "auto"]
        return ["fit", *self.options, *place]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"

    def rows(self) -> list[Record]:
        """The rounds that are done, without those by which somebody has extended the run since."""
        rows = rows_of(self.folder / "metrics.csv")
        end = self._end(rows)
        return [row for row in rows if row["round"] <= end]

    def summary(self) -> Mapping[str, Any]:
        """What the run says of itself; empty before its end, and where it is of more rounds than the cell has."""
        summary = self._said()
        return {} if self._extended_to(summary) else summary

    @property
    def clients(self) -> str:
        """Who holds which samples: runs that have it in common have the same clients; empty where nothing says it."""
        return self._who_holds[0]

    @property
    def holders(self) -> str:
        """The same in whatever parts, which each seed may cut anew; empty where nothing lists them."""
        return self._who_holds[1]

    @property
    def _who_holds(self) -> tuple[str, str]:
        path = self.folder / "partition.json"
        return _clients_of(path, path.stat().st_mtime_ns) if path.is_file() else ("", "")

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and its tables are what it wrote; a damaged one is gone on with, and mended."""
        summary = self._said()
        return has_ended(summary, self.rounds) and not altered(self.folder, summary)

    @property
    def extended_to(self) -> int:
        """To how many rounds somebody has extended the run since; 0 where nobody has."""
        return self._extended_to(self._said())

    def _extended_to(self, summary: Mapping[str, Any]) -> int:
        rounds = summary.get("rounds")
        return rounds if isinstance(rounds, int) and rounds > self.end else 0

    @property
    def end(self) -> int:
        """The round after which it ends by itself: its last one, or where its own early stopping ends it."""
        return self._end(rows_of(self.folder / "metrics.csv"))

    def _end(self, rows: Sequence[Record]) -> int:
        federation = self.config["federation"]
        if federation.get("early_stopping") is None or not rows:
            return self.rounds
        from fl_lightning.federation.early_stopping import EarlyStopping, Patience

        settings, later = EarlyStopping(**federation["early_stopping"]), federation.get("newcomers") or {}
        on_validation = self.config["data"]["evaluate_on"] == "validation"
        try:
            filled = [name for name in rows[0] if any(row[name] is not None for row in rows)]
            patience = Patience(settings, filled, on_validation, later.get("after") or 0)
        except ConfigError:  # its tables are not what it wrote
            return self.rounds
        return min(patience.replay(rows) or self.rounds, self.rounds)

    def _said(self) -> Mapping[str, Any]:
        try:
            return read_json(self.folder / "summary.json", "table")
        except ConfigError:
            return {}

    def keep_results(self) -> None:
        """Delete what only a run that goes on needs, its checkpoints and its clients' models."""
        for name in ("checkpoints", "models"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


@lru_cache(maxsize=4096)
def _clients_of(path: Path, changed: int) -> tuple[str, str]:
    """What a `partition.json` says of its clients, read once until it changes: in their parts, and in whatever ones."""
    try:
        record = read_json(path, "table")
    except ConfigError:
        return "", ""
    clients = record.get("clients") or []  # a `Population` lists none
    pools = [sorted(index for part in own.values() for index in part) for own in clients]
    text = json.dumps([record.get("samples"), pools])
    return who_holds(record), hashlib.sha256(text.encode()).hexdigest() if pools else ""


def cells_of(table: Definition, choice: Choice) -> list[Cell]:
    """The cells that are wanted, column by column, each row's seeds together.

    Raises:
        ConfigError: for a row or column that the table has not, or a configuration that is none.
    """
    _check_names("--only", choice.rows, [row.name for row in table.rows])
    _check_names("--columns", choice.columns, [column.name for column in table.columns])
    return list(_cells(table, choice))


def _cells(table: Definition, choice: Choice) -> Iterator[Cell]:
    for column in table.columns:
        for row in table.rows:
            left_out = column.name in row.columns and row.columns[column.name] is None
            wanted = row.name in (choice.rows or (row.name,)) and column.name in (choice.columns or (column.name,))
            if not wanted or left_out:
                continue
            options = [word for overlay in _overlays(table, row, column) for word in overlay.words()]
            options += choice.laid_over
            config = _resolved(options, row, column)
            _check_figures(table, row, column, config)
            for seed in choice.seeds or table.seeds:
                own = (*options, f"--seed={seed}")
                yield Cell(row, column, seed, {**config, "seed": seed}, own, choice.output / "cells")


def cell_of(row: Row, column: Column, options: Sequence[str], seed: int, output: Path) -> Cell:
    """One run.

    Args:
        row: the method.
        column: the setting.
        options: the command line, without seed and folder.
        seed: of the run.
        output: folder of all cells.

    Raises:
        ConfigError: if the configuration is none.
    """
    return Cell(
        row, column, seed, {**_resolved(options, row, column), "seed": seed}, (*options, f"--seed={seed}"), output
    )


def of_two_data_sets(cells: Sequence[Cell]) -> tuple[Cell, Cell] | None:
    """Two cells that would be one run, though they are of two folders of images; None where there are none."""
    first: dict[Path, Cell] = {}
    for cell in cells:
        other = first.setdefault(cell.folder, cell)
        if folders(other.config) != folders(cell.config):
            return other, cell
    return None


def of_one_run(cells: Iterable[Cell]) -> list[str]:
    """A line on each place of a table whose figures are another one's run's, though it is to be computed otherwise.

    Two such rows are one run, since no number tells them apart; but how long it took, and its rounding, are of one.
    """
    first: dict[Path, Cell] = {}
    found: dict[str, None] = {}
    for cell in cells:
        other = first.setdefault(cell.folder, cell)
        keys = ", ".join(computed_otherwise(other.config, cell.config))
        here, there = (f"{own.row.name}, {own.column.name}" for own in (cell, other))
        said = f"{here} is the run of {there}, its seconds, too: they differ in {keys} alone, which tells no runs apart"
        found |= {said: None} if keys else {}
    return list(found)


def of_other_folders(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The finished cells whose images lay elsewhere when they ran: (folder then, folder now) -> cells.

    The folder may have been moved since, or be another one, which only reading the images again could tell.
    """
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in (cell for cell in cells if cell.finished):
        try:
            then, now = folders(read_config(cell.folder / "config.yaml")), folders(cell.config)
        except ConfigError:
            continue
        for key in then.keys() & now.keys():
            if then[key] != now[key] and os.path.realpath(then[key]) != os.path.realpath(now[key]):
                found.setdefault((then[key], now[key]), []).append(cell)
    return found


def of_edited_folders(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The finished cells in whose folders of data something has changed since they ended: folder -> cells."""
    found: dict[str, list[Cell]] = {}
    changed: dict[str, float] = {}
    for cell in (cell for cell in cells if cell.finished):
        around = {str(path) for path in cell.folder.resolve().parents}  # they change with every run
        for folder in sorted(data_folders(cell.config) - around):
            if folder not in changed:
                changed[folder] = last_change(folder)
            if changed[folder] > (cell.folder / "summary.json").stat().st_mtime:
                found.setdefault(folder, []).append(cell)
    return found


def of_extended_runs(cells: Iterable[Cell]) -> list[str]:
    """A line on each finished cell whose run somebody has extended since: what is known of its own rounds alone.

    A run that was extended before its end has not tested what would have been its last round, if no other is due there.
    """
    found = []
    for cell in (cell for cell in cells if cell.extended_to and cell.finished):
        own = f"its run was extended to {cell.extended_to} rounds; its figures are of the first {cell.end}"
        tested = [row["round"] for row in cell.rows() if num_evaluated([row])]
        lacks = tested[-1:] if cell.end == cell.rounds and cell.end not in tested else []
        said = f", of which round {cell.end} was not tested, so that round {lacks[0]} stands for it" if lacks else ""
        found.append(f"{cell.title}: {own}{said}, and what a run says of itself at its end is missing")
    return found


def made_alike(table: Definition, choice: Choice, cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of cells of two rows or columns that are one run because of the command line's options, and two without."""
    first: dict[Path, Cell] = {}
    pairs = []
    for cell in cells if choice.laid_over else ():
        other = first.setdefault(cell.folder, cell)
        if (other.row.name, other.column.name) != (cell.row.name, cell.column.name) and _differ(
            table, choice, cell, other
        ):
            pairs.append((other, cell))
    return pairs


def _differ(table: Definition, choice: Choice, *cells: Cell) -> bool:
    """Whether cells are different runs as the table's file has them."""
    plain = replace(choice, seeds=(cells[0].seed,), rounds=None, overrides=())
    own = [replace(plain, rows=(cell.row.name,), columns=(cell.column.name,)) for cell in cells]
    return len({cell.folder for one in own for cell in cells_of(table, one)}) > 1


def _overlays(table: Definition, row: Row, column: Column) -> list[Overlay]:
    return [table.base, column.overlay, row.overlay, row.columns.get(column.name) or Overlay()]


def _resolved(options: Sequence[str], row: Row, column: Column) -> Config:
    try:
        config = configured("fit", "", list(options))[1]
        rehearse(config)  # what its constructors will refuse is refused before the first run
        _check_loggers(config)
        return config
    except ConfigError as error:
        raise ConfigError(f"rows.{row.name}, columns.{column.name}", str(error)) from error


def _check_loggers(config: Config) -> None:
    """Refuse a logger's name for the run, under which all would log; a version in the run's own folder is none."""
    for index, node in enumerate(config["logger"] or ()):
        own, ours = node.get("init_args") or {}, node["class_path"] == CLASS_PATH
        alone = not ours and own.get("save_dir") is None
        for name in ("run_id", "experiment_key", *(["id"] if ours else []), *([] if alone else ["version"])):
            rule = "must be left out: all runs of a table or a search would log under it"
            require(own.get(name) is None, f"logger.{index}.{name}", rule, own.get(name))


def _check_figures(table: Definition, row: Row, column: Column, config: Config) -> None:
    """Refuse a figure that a cell's runs cannot have."""
    for figure in filter(None, (table.figure(row, column, name) for name in column.figures)):
        why = why_lacking(figure, config)
        require(not why, f"rows.{row.name}, columns.{column.name}", f"there is no {figure}: {why}")


def _check_names(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        require(name in known, option, f"the table has none of that name; {suggest(name, known)}", name)
