"""The dashboard as a picture: panels of columns over rounds, a colour a method, bands over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.report.colours import DASHES
from fl_lightning.report.figures import DPI, GRID, INK, log_if_wide, save
from fl_lightning.report.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 12.8, 2.35  # inches, of the picture and of a row of panels
COLUMN_STYLES = ("-", "--", ":", "-.")
LEGEND_LETTER, TITLE_LETTER = 0.075, 0.1  # inches, of a letter in the legend and in the title
HANDLE = 5  # length of the legend's lines, in letters: the longest dashes show twice


def panel_grid(
    panels: Sequence[tuple[str, Sequence[str], bool]], runs: Sequence[Series], path: Path, title: str
) -> Path:
    """Draw panels of columns over rounds, four in a row: a colour a method, a band of ± std over seeds.

    Line styles tell a panel's columns apart, and in panels of one column the lines of one method.

    Args:
        panels: each panel's title, the columns that it draws (one that ends in ``*`` stands for all that start so), and
            whether they are fractions, drawn in percent.
        runs: the lines.
        path: the picture to write: PNG, SVG or PDF.
        title: the picture's title.

    Returns:
        `path`.
    """
    return save(draw_panel_grid(panels, runs, title), path)


def draw_panel_grid(panels: Sequence[tuple[str, Sequence[str], bool]], runs: Sequence[Series], title: str) -> Figure:
    """What `panel_grid` writes, as a figure."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    from fl_lightning.report.picture import Picture, add_legend

    across = min(4, len(panels))
    rows = -(-len(panels) // across)
    labels = [_label(line) for line in runs]
    columns = max(1, min(len(runs), int(WIDTH / (1.1 + LEGEND_LETTER * max(map(len, labels))))))
    legend = 0.25 + 0.2 * -(-len(runs) // columns)
    seeds = any(len(line.runs) > 1 for line in runs)
    said = textwrap.wrap(f"{title}: mean and ± std over seeds" if seeds else title, int(WIDTH / TITLE_LETTER)) or [""]
    size = (WIDTH, 0.2 + 0.2 * len(said) + HEIGHT * rows + legend)
    figure = Picture(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    figure.suptitle("\n".join(said), x=0.012, ha="left", fontsize=13, color=INK, parse_math=False)
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    for axes, (name, named, is_share) in zip(grid, panels, strict=False):
        _draw_panel(axes, named, runs, 100.0 if is_share else 1.0)
        axes.set_title(f"{name}, %" if is_share else name, fontsize=10, color=INK, loc="left", parse_math=False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=line.light, linestyle=(0, DASHES[line.dash]), linewidth=2.2) for line in runs]
    add_legend(figure, handles, labels, loc="outside lower left", ncols=columns, fontsize=9, handlelength=HANDLE)
    return figure


def has_any(columns: Sequence[str], runs: Sequence[Series]) -> bool:
    """Whether a line has a value of some of a panel's columns."""
    names = matching(columns, (row for line in runs for run in line.runs for row in run.rows))
    return any(len(line.curve(name).rounds) for line in runs for name in names)


def _label(line: Series) -> str:
    """Its name, and how many seeds it is of; where one has come further than another, how far."""
    if len(line.runs) == 1:
        return line.label
    ends = {run.rows[-1]["round"] for run in line.runs}
    return f"{line.label}, {len(line.runs)} seeds" + (f" of {min(ends)} to {max(ends)} rounds" if len(ends) > 1 else "")


def _draw_panel(axes: Axes, columns: Sequence[str], runs: Sequence[Series], factor: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator

    from fl_lightning.report.picture import add_legend

    names = matching(columns, (row for line in runs for run in line.runs for row in run.rows))
    styles = {name: COLUMN_STYLES[place % len(COLUMN_STYLES)] for place, name in enumerate(names)}
    drawn = [values for line in runs for name in names if len(values := _draw_line(axes, line, name, styles, factor))]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    if len(styles) > 1:
        shown = [Line2D([], [], color=INK, linestyle=style, linewidth=1.2) for style in styles.values()]
        add_legend(axes, shown, list(map(_tail, styles)), fontsize=7, handlelength=2.4, labelspacing=0.25)
    if not drawn:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not in these runs", transform=axes.transAxes, ha="center", va="center", color="#777777")
    elif factor == 1.0:
        low, high = min(map(np.min, drawn)), max(map(np.max, drawn))
        if high >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if not log_if_wide(axes, drawn) and low >= 0 and high > 0:
            axes.set_ylim(bottom=0)  # and as high as values and bands reach


def _draw_line(axes: Axes, line: Series, column: str, styles: Mapping[str, str], factor: float) -> np.ndarray:
    """Draw one line with its band; returns its values as they stand in the files."""
    curve = line.curve(column)
    if not len(curve.rounds):
        return curve.mean
    style: Any = styles[column] if len(styles) > 1 else (0, DASHES[line.dash])
    faint = 0.55 if len(styles) > 1 and line.dash else 1.0  # styles are taken there
    marker = "o" if len(curve.rounds) == 1 else ""
    axes.plot(
        curve.rounds,
        factor * curve.mean,
        linestyle=style,
        color=line.light,
        linewidth=1.6,
        alpha=faint,
        marker=marker,
        markersize=4,
    )
    known = np.isfinite(curve.std)
    if known.any() and len(styles) == 1:
        low, high = curve.mean - curve.std, curve.mean + curve.std
        bounds = [factor * side[known] for side in (low, high)]
        axes.fill_between(curve.rounds[known], *bounds, color=line.light, alpha=0.15, linewidth=0)
    return curve.mean


def matching(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of `rows` that are meant: ``loss/*`` stands for all that start so."""
    there = dict.fromkeys(key for row in rows for key in row)
    return [
        name
        for column in columns
        for name in there
        if name == column or (column.endswith("*") and name.startswith(column[:-1]))
    ]


def _tail(column: str) -> str:
    return column.rpartition("/")[2]
