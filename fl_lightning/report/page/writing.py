"""Runs in, one HTML page out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fl_lightning.errors import ConfigError
from fl_lightning.files import write_text
from fl_lightning.report.page import bundle, classifier, clients, curves, partition
from fl_lightning.report.page.document import document
from fl_lightning.report.page.figure import Figure
from fl_lightning.report.page.ranking import rankings
from fl_lightning.report.page.tables import PublishedTable
from fl_lightning.report.recorded_run import RecordedRun
from fl_lightning.report.series import Member, Series, series_of


def figures_of(lines: Sequence[Series]) -> Iterator[Figure]:
    """Every figure that the runs have something for."""
    yield from curves.accuracies(lines)
    yield from curves.receive_drop(lines)
    yield from curves.measures(lines)
    yield from clients.both_moments(lines)
    yield from clients.spread(lines)
    yield from clients.bars(lines)
    yield from clients.hurt(lines)
    yield from partition.bubbles(lines)
    yield from curves.communication(lines)
    yield from curves.seconds(lines)
    yield from curves.losses(lines)
    yield from curves.logged(lines)
    heads = [classifier.heads_of(line.runs[0]) for line in lines]
    yield from classifier.relations(lines, heads)
    yield from classifier.norms(lines, heads)


def write_page(
    members: Iterable[Member],
    path: Path,
    title: str,
    table: PublishedTable | None = None,
    notes: Sequence[str] = (),
    more: Callable[[Sequence[Series]], Iterable[Figure]] = lambda lines: (),
    pictures: Path | None = None,
) -> list[Path]:
    """Write the page.

    Args:
        members: the runs, in the order in which they are to be shown.
        path: the HTML file.
        title: its heading.
        table: beside published figures, where there is one.
        notes: what is missing, and why.
        more: figures of the lines that need more than the runs' folders.
        pictures: folder that gets every figure as PNG and SVG, too; None for none.

    Returns:
        What was written, the page first.

    Raises:
        ConfigError: if Vega-Lite is not installed, or there can be no such folder.
        WriteError: if a file cannot be written.
    """
    bundle.renderer()
    lines = series_of(members)
    ranked = () if table is None else table.ranked
    figures = [*rankings(lines, ranked), *figures_of(lines), *more(lines)]
    notes = [*notes, *(f"{name}: {note}" for name, run in _named(_runs(lines)) for note in run.notes), *_uneven(lines)]
    text = document(title, lines, figures, table, notes)
    if pictures is not None:
        try:
            pictures.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # said before the page is written
            raise ConfigError("--figures", f"must be a folder: {error}") from error
    write_text(path, text)
    written = [path]
    if pictures is not None:
        written += bundle.write_pictures(figures, lines, pictures)
    return written


def _named(runs: Iterable[RecordedRun]) -> Iterator[tuple[str, RecordedRun]]:
    """Runs by what they are called; by their folders where several are called the same."""
    all_of_them = list(runs)
    names = Counter(run.name for run in all_of_them)
    for run in all_of_them:
        yield (run.name if names[run.name] == 1 else str(run.path)), run


def _uneven(lines: Sequence[Series]) -> Iterator[str]:
    """A line on each whose runs have different rounds, by early stopping or because some are not finished."""
    for line in lines:
        ends = sorted({run.rows[-1]["round"] for run in line.runs})
        if len(ends) > 1:
            yield (
                f"{line.label}: its runs have {ends[0]} to {ends[-1]} rounds; from round {ends[0] + 1} on its curves "
                "are the means of those that have more"
            )


def _runs(lines: Sequence[Series]) -> Iterator[RecordedRun]:
    for line in lines:
        yield from line.runs
