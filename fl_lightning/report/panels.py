"""The dashboard as a picture: panels of columns over rounds, a colour a method, bands over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.report.colours import DASHES
from fl_lightning.report.drawing import FAINT, LONG, SAID, as_shipped, trend
from fl_lightning.report.figures import DPI, GRID, INK, log_if_wide, save, title_lines
from fl_lightning.report.series import Curve, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 12.8, 2.35  # inches, of the picture and of a row of panels
COLUMN_STYLES = ("-", "--", ":", "-.")
COLUMN_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")  # as many as share no factor with the styles: 36 pairs
LINE_MARKS = ("o", "D", "^", "s", "P")  # a line's, by its dash: those of `SHAPES`
MARKS_OF_A_LINE = 6  # about so many of its points have a mark where marks tell columns apart
LEGEND_LETTER = 0.075  # inches, of a letter in the legend
HANDLE = 5  # length of the legend's lines, in letters: the longest dashes show twice


def panel_grid(
    panels: Sequence[tuple[str, Sequence[str], bool]], runs: Sequence[Series], path: Path, title: str
) -> Path:
    """Draw panels of columns over rounds, four in a row: a colour a method, a band of ± std over seeds.

    Line styles tell a panel's columns apart, with marks where they are more than styles, and in panels of one column
    the lines of one method. A curve of one point is a mark, and its ± a bar; of a curve of more than 200 values the
    running mean is drawn, and each value faintly.

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


@as_shipped()
def draw_panel_grid(panels: Sequence[tuple[str, Sequence[str], bool]], runs: Sequence[Series], title: str) -> Figure:
    """What `panel_grid` writes, as a figure."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    from fl_lightning.report.picture import Picture, add_legend

    across = min(4, len(panels))
    rows = -(-len(panels) // across)
    labels = [textwrap.fill(_label(line), int((WIDTH - 1.1) / LEGEND_LETTER)) for line in runs]
    columns = max(1, min(len(runs), int(WIDTH / (1.1 + LEGEND_LETTER * max(map(len, labels))))))
    legend = 0.25 + 0.2 * -(-sum(label.count("\n") + 1 for label in labels) // columns)
    figure = Picture(dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    marked = set[int]()
    for axes, (name, named, is_share) in zip(grid, panels, strict=False):
        marked |= _draw_panel(axes, named, runs, 100.0 if is_share else 1.0)
        axes.set_title(f"{name}, %" if is_share else name, fontsize=10, color=INK, loc="left", parse_math=False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    colours = [line.light for line in runs]
    alike = {place for place in marked if colours.count(colours[place]) > 1}
    looks = [_of_line(line, place in alike) for place, line in enumerate(runs)]
    handles = [Line2D([], [], color=colour, linewidth=2.2, **look) for colour, look in zip(colours, looks, strict=True)]
    add_legend(figure, handles, labels, loc="outside lower left", ncols=columns, fontsize=9, handlelength=HANDLE)
    how = ["mean and ± std over seeds"] if any(len(line.runs) > 1 for line in runs) else []
    how += [SAID] if any(len(line.get_xydata()) > LONG for axes in grid for line in axes.lines) else []
    said = title_lines(f"{title}: {'; '.join(how)}" if how else title, WIDTH)
    figure.set_size_inches(WIDTH, 0.2 + 0.2 * len(said) + HEIGHT * rows + legend)
    figure.suptitle("\n".join(said), x=0.012, ha="left", fontsize=13, color=INK, parse_math=False)
    return figure


def has_any(columns: Sequence[str], runs: Sequence[Series]) -> bool:
    """Whether a line has a value of some of a panel's columns."""
    return bool(_with_values(columns, runs))


def _with_values(columns: Sequence[str], runs: Sequence[Series]) -> list[str]:
    """The columns that are meant and of which a line has a value."""
    names = matching(columns, (row for line in runs for run in line.runs for row in run.rows))
    return [name for name in names if any(len(line.curve(name).rounds) for line in runs)]


def _label(line: Series) -> str:
    """Its name, and how many seeds it is of; where one has come further than another, how far."""
    if len(line.runs) == 1:
        return line.label
    ends = {run.rows[-1]["round"] for run in line.runs}
    return f"{line.label}, {len(line.runs)} seeds" + (f" of {min(ends)} to {max(ends)} rounds" if len(ends) > 1 else "")


def _draw_panel(axes: Axes, columns: Sequence[str], runs: Sequence[Series], factor: float) -> set[int]:
    """Draw a panel; returns the places of the lines that are one point of one column there: a mark."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    names = _with_values(columns, runs)
    curves = {(place, name): line.curve(name) for place, line in enumerate(runs) for name in names}
    curves = {key: curve for key, curve in curves.items() if len(curve.rounds)}
    for (place, name), curve in curves.items():
        _draw_band(axes, curve, runs[place], factor, 1.0 if len(names) == 1 else 0.6)  # where bands lie over others
        _draw_curve(axes, curve, runs[place], factor, names.index(name), len(names))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = [curve.mean for curve in curves.values()]
    if not drawn:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not in these runs", transform=axes.transAxes, ha="center", va="center", color="#777777")
    elif factor == 1.0:
        low, high = min(map(np.min, drawn)), max(map(np.max, drawn))
        if high >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if not log_if_wide(axes, drawn) and low >= 0 and high > 0:
            axes.set_ylim(0, 1.05 * axes.dataLim.y1)  # as high as values and bands reach, and their marks
    lone = {place for (place, _), curve in curves.items() if len(curve.rounds) == 1}
    if names and (len(columns) > 1 or columns[0].endswith("*")):  # one that is left of several is named, too
        _name_columns(axes, names, marked=bool(lone))
    return lone if len(names) == 1 else set()


def _draw_curve(axes: Axes, curve: Curve, line: Series, factor: float, place: int, columns: int) -> None:
    """Draw one column of a line, that of `place` among a panel's columns."""
    lone, many = len(curve.rounds) == 1, columns > len(COLUMN_STYLES)
    look = _of_line(line, lone) if columns == 1 else _of_column(place, lone or many)
    faint = 0.55 if columns > 1 and line.dash else 1.0  # styles are taken there
    step = -(-len(curve.rounds) // MARKS_OF_A_LINE)
    look |= {"color": line.light, "linewidth": 1.6, "alpha": faint, "markersize": 4}
    axes.plot(curve.rounds, trend(factor * curve.mean), markevery=(place % step, step), **look)
    if len(curve.rounds) > LONG:
        axes.plot(curve.rounds, factor * curve.mean, color=line.light, **FAINT)


def _draw_band(axes: Axes, curve: Curve, line: Series, factor: float, strength: float) -> None:
    """Draw a curve's ± std over seeds: a band, or a bar where one round has it; fainter below a strength of 1."""
    known = np.isfinite(curve.std)
    rounds, mean, std = curve.rounds[known], trend(factor * curve.mean)[known], trend(factor * curve.std[known])
    if len(rounds) == 1:
        axes.errorbar(rounds, mean, std, fmt="none", ecolor=line.light, alpha=0.5 * strength, capsize=4)
    elif len(rounds):
        axes.fill_between(rounds, mean - std, mean + std, color=line.light, alpha=0.15 * strength, linewidth=0)


def _of_line(line: Series, marked: bool) -> dict[str, Any]:
    """How a line is told from others of its colour."""
    return {"linestyle": (0, DASHES[line.dash]), "marker": LINE_MARKS[line.dash] if marked else ""}


def _of_column(place: int, marked: bool) -> dict[str, Any]:
    """How a column is told from others of its panel."""
    mark = COLUMN_MARKS[place % len(COLUMN_MARKS)] if marked else ""
    return {"linestyle": COLUMN_STYLES[place % len(COLUMN_STYLES)], "marker": mark}


def _name_columns(axes: Axes, names: Sequence[str], marked: bool) -> None:
    from matplotlib.lines import Line2D

    from fl_lightning.report.picture import add_legend

    many = len(names) > len(COLUMN_STYLES)
    looks = [_of_column(place, marked or many) for place in range(len(names))]
    shown = [Line2D([], [], color=INK, linewidth=1.2, markersize=4, **look) for look in looks]
    paper = {"frameon": True, "framealpha": 0.6, "edgecolor": "none", "borderpad": 0.2}  # where it lies on a line
    add_legend(axes, shown, list(map(_tail, names)), fontsize=7, handlelength=2.4, labelspacing=0.2, **paper)


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
