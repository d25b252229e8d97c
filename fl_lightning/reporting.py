"""``fl-lightning report``: runs and tables as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import require
from fl_lightning.files import expanded
from fl_lightning.parser import one_line_parser
from fl_lightning.report.page.figure import Figure
from fl_lightning.report.page.tables import PublishedTable
from fl_lightning.report.page.writing import write_page
from fl_lightning.report.recorded_run import read_run, rows_of
from fl_lightning.report.series import Member, Series
from fl_lightning.trust import Trust

DESCRIPTION = (
    "Show runs on one HTML page that needs no network: runs' folders, a folder of them, a table's definition or the "
    "folder of its results. Nothing that a run's folder names is imported, but with --embed and --attention."
)
PAGE = "report.html"
TRUST = "a package of your own that --embed and --attention may import for a run; may be given several times"


class _Found(NamedTuple):
    """What an argument stands for."""

    members: list[Member]
    folder: Path
    table: PublishedTable | None = None
    notes: Sequence[str] = ()


def report(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: what follows ``report``.

    Returns:
        0.

    Raises:
        ConfigError: if an argument is no run and no table, or Vega-Lite is not installed.
    """
    options = _parser().parse_args(list(argv))
    require(bool(options.what), "report", "name runs' folders or a table: fl-lightning report runs/a runs/b")
    found = [_find(Path(name), Path(options.runs)) for name in options.what]
    found_tables = [each for each in found if each.table is not None]
    require(len(found_tables) <= 1, "report", "one table a page; give the others pages of their own")
    members = [member for each in found for member in each.members]
    table = found_tables[0].table if found_tables else None
    require(bool(members) or table is not None, "report", "none of these runs has a round yet", " ".join(options.what))
    title = options.title or (table.title if table else _title(members))
    path = expanded(options.output) if options.output else (found[0].folder if len(found) == 1 else Path()) / PAGE
    require(not path.is_dir(), "--output", "must be a file, as report.html", str(path))
    pictures = Path(options.figures) if options.figures else None
    notes = [note for each in found for note in each.notes]
    trust = Trust(tuple(options.trust))
    builds = options.embed or options.attention is not None
    rule = "is for --embed and --attention; nothing else is imported"
    require(builds or not options.trust, "--trust", rule, options.trust)
    more = partial(_from_models, options.embed, options.attention, trust)
    written = write_page(members, path, title, table, notes, more, pictures)
    print(f"written to {path} ({path.stat().st_size / 2**20:.1f} MiB), {len(members)} runs")
    if pictures is not None:
        print(f"{len(written) - 1} pictures in {pictures}")
    return 0


def _from_models(embed: bool, attention: str | None, trust: Trust, lines: Sequence[Series]) -> Iterator[Figure]:
    """The figures for which runs are built again."""
    if embed:
        from fl_lightning.embedding import embeddings

        yield from embeddings(lines, trust)
    if attention is not None:
        from fl_lightning.attention import attentions

        yield from attentions(lines, attention, trust)


def _find(path: Path, runs: Path) -> _Found:
    if path.is_file():
        return _from_definition(path, runs)
    require(path.is_dir(), "report", "there is no such folder or file", str(path))
    if (path / "table.csv").is_file():
        from fl_lightning.table.page import read_results

        table, members, notes = read_results(path)
        return _Found(members, path, table, notes)
    if (path / "metrics.csv").is_file():
        return _Found([Member(read_run(path, "report"))], path)
    inside = sorted(folder for folder in path.iterdir() if (folder / "metrics.csv").is_file())
    require(bool(inside), "report", "there is neither a run nor a table in that folder", str(path))
    begun = [folder for folder in inside if rows_of(folder / "metrics.csv")]
    notes = [f"{folder.name} has no round yet" for folder in inside if folder not in begun]
    return _Found([Member(read_run(folder, "report")) for folder in begun], path, None, notes)


def _from_definition(path: Path, runs: Path) -> _Found:
    """A table's file: its cells below `runs`, and the figures that they give."""
    from fl_lightning.table.cells import Choice, cells_of, of_extended_runs
    from fl_lightning.table.definition import read_definition
    from fl_lightning.table.figures import left_out, of_fewer_seeds, on_validation, values_of
    from fl_lightning.table.page import members_of, shown

    require(
        path.suffix in (".yaml", ".yml"),
        "report",
        "must be a run's folder, or a table's folder or YAML file",
        str(path),
    )
    definition = read_definition(path)
    cells = cells_of(definition, Choice(runs))
    values = values_of(definition, cells)
    definition = definition.noted(on_validation(cells))
    left = sum(not cell.finished for cell in cells)
    notes = [f"{left} of {len(cells)} runs are not finished: fl-lightning table {path}"] if left else []
    notes += [*of_extended_runs(cells), *of_fewer_seeds(values, set(definition.seeds)), *left_out(cells)]
    return _Found(members_of(cells), runs / "tables" / definition.name, shown(definition, values), notes)


def _title(members: Sequence[Member]) -> str:
    if len(members) == 1:
        return f"{members[0].run.method}: {members[0].run.name}"
    methods = list(dict.fromkeys(member.run.method for member in members))
    named = ", ".join(methods[:6]) + (", …" if len(methods) > 6 else "")
    return f"{len(members)} runs: {named}"


def _parser() -> Any:
    parser = one_line_parser("report", description=DESCRIPTION)
    parser.add_argument("what", type=str, nargs="*", help="runs' folders, a folder of runs, a table's file or results")
    parser.add_argument("--output", help="the HTML file; else report.html in the run's or table's folder, or here")
    parser.add_argument("--figures", help="a folder that gets every figure as PNG and SVG, too")
    parser.add_argument("--title", help="of the page")
    embed = (
        "draw test samples' embeddings, too (t-SNE); builds each line's first run again and needs its models and data"
    )
    parser.add_argument("--embed", action="store_true", help=embed)
    attention = "draw where the clients' networks look at test images of this class (Grad-CAM); builds runs again, too"
    parser.add_argument("--attention", metavar="CLASS", help=attention)
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    parser.add_argument("--runs", type=str, default="runs", help="where the cells of a table's file are looked for")
    return parser
