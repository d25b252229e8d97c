"""``fl-lightning table``: run a table's cells, and put the figures beside the published ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from fl_lightning.command_line import as_shell_says, said_around
from fl_lightning.errors import ConfigError, chosen_names, require
from fl_lightning.files import expanded, write_text
from fl_lightning.parser import one_line_parser
from fl_lightning.report.plain import PlainConsole
from fl_lightning.table.cells import (
    Cell,
    Choice,
    cells_of,
    made_alike,
    of_edited_folders,
    of_extended_runs,
    of_one_run,
    of_other_folders,
    of_two_data_sets,
)
from fl_lightning.table.definition import Definition, read_definition
from fl_lightning.table.figures import Values, left_out, of_fewer_seeds, on_validation, values_of
from fl_lightning.table.overlays import split_options
from fl_lightning.table.page import CELLS, cells_as_csv, write_table_page
from fl_lightning.table.progress import Progress, forecast
from fl_lightning.table.results import claim
from fl_lightning.table.running import Command, Crew, distinct
from fl_lightning.table.writing import markdown, write
from fl_lightning.terminal import say

DESCRIPTION = (
    "Run a table: rows x columns x seeds, each cell an ordinary run; what is finished is not run again. Options of a "
    "configuration (--data.dataset.root DIR) are laid over every cell."
)


def table(argv: Sequence[str], command: Command) -> int:
    """The command.

    Args:
        argv: what follows ``table``.
        command: runs one cell's command line, in a process of its own.

    Returns:
        0 if every cell that was wanted is finished, 1 if some failed, 128 + a signal's number.
    """
    own, overrides = split_options(argv, "say --seeds for a table")
    options = _parser().parse_args(own)
    definition = read_definition(Path(options.file))
    choice = Choice(
        expanded(options.output),
        chosen_names("--only", options.only, [row.name for row in definition.rows]),
        chosen_names("--columns", options.columns, [column.name for column in definition.columns]),
        tuple(_number("--seeds", seed) for seed in chosen_names("--seeds", options.seeds, ())),
        options.rounds,
        tuple(overrides),
    )
    cells = cells_of(definition, choice)
    rule = "have no cell together with the columns that were asked for" if choice.columns else "have no cell"
    key = "--only" if choice.rows else "--columns" if choice.columns else "rows"
    names = choice.rows or (row.name for row in definition.rows)
    require(bool(cells), key, rule, ",".join(names))
    _refuse_alike(definition, choice, cells)
    require(options.rounds is None or options.rounds >= 1, "--rounds", "must be >= 1", options.rounds)
    require(options.jobs >= 1, "--jobs", "must be >= 1", options.jobs)
    shard = _shard(options.shard, cells)
    if options.print_commands:
        for cell in distinct(shard):
            print(as_shell_says(cell.words))
        return 0
    _check_references(shard)
    console = PlainConsole(quiet=options.quiet)
    if options.dry_run:
        forecast(console, [(cell.title, cell) for cell in distinct(shard)], options.jobs)
        return 0
    if choice.laid_over:  # whoever reads the table must know that its runs are not the file's
        said = f"Every run was started with {shlex.join(choice.laid_over)} over what the file says."
        definition = definition.noted(said)
    if around := said_around():
        definition = definition.noted(around)
    folder = choice.output / "tables" / definition.name
    claim(folder, definition.path)
    lacking = _without_data(shard)
    left = [cell for cell in shard if cell.title not in lacking]
    missing = _empty_columns(cells, lacking)
    with Progress(console, cells) as progress:
        crew = Crew(left, folder / "logs", options.jobs, command, progress)
        code = crew.run() or int(bool(lacking))
    notes = [f"column {column}: {said}" for column, said in missing.items()]
    rest = (cell for cell in shard if cell.title in lacking and cell.column.name not in missing)
    notes += [f"{cell.title}: {lacking[cell.title]}" for cell in rest]
    every = [cell for cell in [*cells, *_others(definition, choice, cells)] if cell.column.name not in missing]
    _conclude(console, definition, every, crew, notes, folder)
    return code


def _refuse_alike(definition: Definition, choice: Choice, cells: Sequence[Cell]) -> None:
    """Refuse cells that would be one run, by the command line's options or because only their data's place differs."""
    for one, other in made_alike(definition, choice, cells)[:1]:
        of_rows = one.row.name != other.row.name
        option, kind = ("--only", "rows") if of_rows else ("--columns", "columns")
        names = " and ".join(own.row.name if of_rows else own.column.name for own in (one, other))
        said = f"turn the {kind} {names} into the same run; say which with {option}"
        raise ConfigError(option, f"the command line's options {said}")
    alike = of_two_data_sets(cells)
    if alike is not None:
        names = " and ".join(f"({cell.title})" for cell in alike)
        rule = (
            f"{names} differ in where their data lie alone, and would be one run; make a table of each, with --output"
        )
        raise ConfigError("data.dataset", rule)


def _others(definition: Definition, choice: Choice, cells: Sequence[Cell]) -> list[Cell]:
    """The finished cells that were not asked for; without those that are ones that were, by the command line alone."""
    if not (choice.rows or choice.columns or choice.seeds):
        return []
    done: list[Cell] = []
    seeds = tuple(dict.fromkeys((*definition.seeds, *choice.seeds)))
    for column, row in product(definition.columns, definition.rows):
        one = replace(choice, rows=(row.name,), columns=(column.name,), seeds=seeds)
        with suppress(ConfigError):  # what the command line says of the cells asked for need not fit this one
            done += (cell for cell in cells_of(definition, one) if cell.finished)
    alike = {id(cell) for pair in made_alike(definition, choice, [*cells, *done]) for cell in pair}
    return [cell for cell in done if id(cell) not in alike]


def _conclude(
    console: Console,
    definition: Definition,
    cells: Sequence[Cell],
    crew: Crew,
    notes: list[str],
    folder: Path,
) -> None:
    """Write what is known, and say what is not."""
    notes += [f"{job.cell.title}: {job.said}" for job in crew.jobs if job.state == "failed"]
    kept = list({(cell.row.name, cell.column.name, cell.seed): cell for cell in cells}.values())
    definition = definition.noted(on_validation(kept))
    unfinished = [cell for cell in kept if not cell.finished]
    notes += [f"{len(unfinished)} of {len(kept)} runs are not finished"] if unfinished else []
    for (then, now), own in of_other_folders(kept).items():
        notes.append(f"{_runs(own)} read the images in {then}, not in {now}, and were not run again")
    for edited, own in of_edited_folders(kept).items():
        notes.append(f"{_runs(own)} ended before something changed in {edited}, and were not run again")
    notes += [*of_one_run(kept), *of_extended_runs(kept)]
    values = values_of(definition, kept)
    done = {(cell.row.name, cell.column.name) for cell in kept if cell.finished}
    none = (place for place, value in values.items() if not value.seeds and (place[0], place[1].column) in done)
    notes += [f"{row}, {head}: its finished runs have no such figure" for row, head in none]
    notes += [*of_fewer_seeds(values, set(definition.seeds)), *left_out(kept)]
    console.print(markdown(definition, values, notes), highlight=False, soft_wrap=True)  # whatever the disk says then
    written = write(folder, definition, values, notes)
    written += _with_page(folder, definition, values, kept, notes)
    console.print(f"written to {', '.join(map(str, written))}", soft_wrap=True, highlight=False)


def _runs(cells: Sequence[Cell]) -> str:
    """What some runs are called in a note."""
    return cells[0].title if len(cells) == 1 else f"{cells[0].title} and {len(cells) - 1} more runs"


def _with_page(
    folder: Path, definition: Definition, values: Values, cells: Sequence[Cell], notes: Sequence[str]
) -> list[Path]:
    """Say which runs the cells are, and write the page, where its extra is installed."""
    write_text(folder / CELLS, cells_as_csv(cells, folder))
    try:
        return [folder / CELLS, write_table_page(folder, definition, values, cells, notes)]
    except ConfigError as error:
        say(f"the table has no page: {error}")
        return [folder / CELLS]


def _empty_columns(cells: Sequence[Cell], lacking: Mapping[str, str]) -> dict[str, str]:
    """Columns all of whose cells lack their data -> what one of them says."""
    some = {cell.column.name for cell in cells if cell.title not in lacking}
    return {cell.column.name: lacking[cell.title] for cell in cells if cell.column.name not in some}


def _without_data(cells: Sequence[Cell]) -> dict[str, str]:
    """Titles of cells that are not done and whose data set is not there -> what it says.

    The others' data are decoded once here, for all their cells.
    """
    import torch

    from fl_lightning.building import build
    from fl_lightning.data.cache import load

    torch.set_num_threads(1)  # a forked process cannot use the threads of the one that it came from
    found: dict[str, str] = {}
    lacks: dict[str, str] = {}
    for cell in cells:
        data = cell.config["data"]
        key = repr((data["dataset"], data.get("cache")))
        if key not in lacks and not cell.finished:
            try:
                load(build(data["dataset"], "data.dataset"), data.get("cache") and Path(data["cache"]))
                lacks[key] = ""
            except ConfigError as error:
                lacks[key] = str(error)
        if lacks.get(key) and not cell.finished:
            found[cell.title] = lacks[key]
    return found


def _check_references(cells: Sequence[Cell]) -> None:
    """Refuse a cell whose clients are not those of the run with which they are compared, of another seed mostly."""
    compared = [cell for cell in cells if (cell.config["federation"].get("evaluate") or {}).get("reference")]
    first: dict[str, Cell] = {}
    for cell in (cell for cell in compared if not cell.finished):
        folder, data = cell.config["federation"]["evaluate"]["reference"], cell.config["data"]
        first.setdefault(repr((folder, data, cell.seed)), cell)
    if not first:
        return
    import torch

    from fl_lightning.experiment import build_data
    from fl_lightning.federation.fairness import read_reference

    torch.set_num_threads(1)  # before anything uses them, as for `_without_data`
    for cell in first.values():
        try:
            data = build_data(cell.config["data"])
            data.setup(cell.seed)
        except ConfigError:  # which is said of the cell itself
            continue
        try:
            read_reference(cell.config["federation"]["evaluate"]["reference"], data)
        except ConfigError as error:
            place = f"rows.{cell.row.name}, columns.{cell.column.name}, seed {cell.seed}"
            raise ConfigError(place, str(error)) from error


def _parser() -> Any:
    parser = one_line_parser("table", description=DESCRIPTION)
    parser.add_argument("file", type=str, help="the table's YAML file, e.g. experiments/feddw/tables/table1.yaml")
    parser.add_argument("--only", help="rows, separated by commas")
    parser.add_argument("--columns", help="columns, separated by commas")
    parser.add_argument("--seeds", help="seeds instead of the table's own, separated by commas")
    parser.add_argument("--rounds", type=int, help="rounds of every run instead of the files'")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; the cores are shared out among them")
    parser.add_argument("--shard", help="K/N: the K-th of N equal parts of the cells")
    parser.add_argument("--output", type=str, default="runs", help="folder of runs; cells are shared between tables")
    parser.add_argument("--print-commands", action="store_true", help="print one command a cell, and run none")
    parser.add_argument("--dry-run", action="store_true", help="say what there is to do, and how long it takes")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    return parser


def _number(option: str, text: str) -> int:
    whole = text.isascii() and text.isdigit() and int(text) < 2**63
    require(whole, option, "must be whole numbers >= 0 and below 2^63, separated by commas", text)
    return int(text)


def _shard(text: str | None, cells: list[Cell]) -> list[Cell]:
    if text is None:
        return cells
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    fits = match is not None and 1 <= int(match[1]) <= int(match[2])
    require(fits, "--shard", "must be K/N with 1 <= K <= N, as in 2/8", text)
    assert match is not None
    return cells[int(match[1]) - 1 :: int(match[2])]
