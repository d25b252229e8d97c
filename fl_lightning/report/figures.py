"""Learning curves, and what all pictures have in common."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.errors import TRACEBACK, ConfigError, require
from fl_lightning.files import write_atomically
from fl_lightning.report.drawing import FAINT, LONG, SAID, as_shipped, trend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct for colour-blind readers; line styles differ, too.
CURVES = {
    "Local-T": ("#0072B2", "-"),
    "Local-T_received": ("#56B4E9", "--"),
    "Global-T": ("#D55E00", "-"),
    "Server-T": ("#009E73", "-."),
}
TERM_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#0072B2")
TERM_STYLES = ("--", "-.", ":")
INK, GRID = "#222222", "#DDDDDD"
DPI = 100
ENDINGS = (".png", ".svg", ".pdf")
MARKED_POINTS = 30  # curves of at most so many points show them
LOG_RANGE = 100  # a loss axis that spans more than this factor is logarithmic
NAMED_CLASSES, NAME_LENGTH = 40, 14  # class names label the axis up to these limits
TITLE_LETTER = 0.1  # inches, of a letter in a picture's title


def learning_curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Draw the accuracies of a run over its rounds on the left, its losses on the right; 1200 × 450 pixels.

    Of a curve of more than 200 values the running mean is drawn, and each value faintly.

    Args:
        rows: the rows of ``metrics.csv``; what is None, empty or missing is skipped, the evaluated rounds are joined.
        path: the picture to write: PNG, SVG or PDF.
        title: the picture's title.

    Returns:
        `path`.
    """
    return save(draw_learning_curves(rows, title), path)


@as_shipped()
def draw_learning_curves(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """What `learning_curves` writes, as a figure."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from fl_lightning.report.picture import Picture

    figure = Picture(figsize=(12, 4.5), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    figure.suptitle("\n".join(title_lines(title, 12)), fontsize=13, color=INK, parse_math=False)
    left, right = figure.subplots(1, 2)
    _draw_accuracies(left, rows)
    _draw_losses(right, rows)
    return figure


def title_lines(title: str, width: float) -> list[str]:
    """A picture's title in lines that fit into so many inches; at least one."""
    return textwrap.wrap(title, int(width / TITLE_LETTER)) or [""]


def _draw_accuracies(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for name, (color, style) in CURVES.items():
        rounds, values = _points(rows, name)
        if not len(rounds):
            continue
        _line(axes, rounds, 100 * values, f"{name} {100 * values[-1]:.1f} %", color, style)
        if name == "Local-T":
            _draw_band(axes, rows, color)
    _style(axes, "accuracy, %", rows)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2.0), min(high, 102.0))


def _draw_band(axes: Axes, rows: Sequence[Mapping[str, Any]], color: str) -> None:
    both = [row for row in rows if None not in (_number(row.get("Local-T")), _number(row.get("Local-T_std")))]
    (rounds, mean), (_, std) = _points(both, "Local-T"), _points(both, "Local-T_std")
    if len(rounds) == 1:
        low, high = min(std[0], mean[0]), min(std[0], 1 - mean[0])
        axes.errorbar(rounds, 100 * mean, 100 * np.array([[low], [high]]), color=color, alpha=0.5, capsize=4)
    elif len(rounds):
        low, high = trend(np.clip(mean - std, 0, 1)), trend(np.clip(mean + std, 0, 1))
        label = "± std over clients"
        axes.fill_between(rounds, 100 * low, 100 * high, color=color, alpha=0.13, linewidth=0, label=label)


def _draw_losses(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    terms = [name for name in dict.fromkeys(key for row in rows for key in row) if name.startswith("loss/")]
    terms = [name for name in terms if len(_points(rows, name)[0])]
    names = ["loss", *(terms if len(terms) > 1 else [])]
    drawn = []
    for index, name in enumerate(names):
        rounds, values = _points(rows, name)
        if len(rounds):
            color = INK if name == "loss" else TERM_COLORS[(index - 1) % len(TERM_COLORS)]
            style = "-" if name == "loss" else TERM_STYLES[(index - 1) % len(TERM_STYLES)]
            label = "loss" if name == "loss" else name.removeprefix("loss/")
            _line(axes, rounds, values, label, color, style)
            drawn.append(values)
    _style(axes, "training loss", rows)
    log_if_wide(axes, drawn)


def log_if_wide(axes: Axes, drawn: Sequence[np.ndarray]) -> bool:
    """Make the axis logarithmic where the values span more than it can show otherwise; returns whether it is."""
    low, high = min(map(np.min, drawn), default=0), max(map(np.max, drawn), default=0)
    if low > 0 and high > LOG_RANGE * low:
        axes.set_yscale("log")
        return True
    return False


def _line(axes: Axes, rounds: np.ndarray, values: np.ndarray, label: str, color: str, style: str) -> None:
    marker = "o" if len(rounds) <= MARKED_POINTS else ""
    axes.plot(rounds, trend(values), style, color=color, label=label, linewidth=1.8, marker=marker, markersize=4)
    if len(rounds) > LONG:
        axes.plot(rounds, values, color=color, **FAINT)
        axes.set_xlabel(f"round ({SAID})")


def _style(axes: Axes, ylabel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    from fl_lightning.report.picture import add_legend

    axes.set_xlabel(axes.get_xlabel() or "round", color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    rounds = [int(row["round"]) for row in rows]
    if rounds:
        pad = max(0.5, 0.02 * (rounds[-1] - rounds[0]))
        axes.set_xlim(rounds[0] - pad, rounds[-1] + pad)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 3 if len(handles) > 4 else 2
        where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
        add_legend(axes, handles, labels, fontsize=9, **where)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no values yet", transform=axes.transAxes, ha="center", va="center", color="#777777")


def _points(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The rounds in which a column has a value, and the values."""
    known = [(int(row["round"]), value) for row in rows if (value := _number(row.get(name))) is not None]
    return np.array([round for round, _ in known]), np.array([value for _, value in known])


def _number(value: Any) -> float | None:
    """A finite number, or None; rows read back from a CSV file hold text."""
    if value is None or value == "":
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def ticks_of(count: int, all_below: int) -> list[int]:
    """Which of `count` places on an axis are labelled: all up to `all_below`, else every fifth, tenth, fiftieth, ….

    >>> ticks_of(3, 20), ticks_of(21, 20), ticks_of(61, 20)[-1], ticks_of(1000, 30)[:3]
    ([0, 1, 2], [0, 5, 10, 15, 20], 60, [0, 50, 100])
    """
    step = 1 if count <= all_below else 5 if count <= 60 else 10
    while count > 20 * step:
        step *= 5 if str(step)[0] == "1" else 2  # 10, 50, 100, 500, …
    return list(range(0, count, step))


def check_ending(path: Path, key: str) -> None:
    """Refuse a picture's file that no format goes by.

    Raises:
        ConfigError: naming the option `key`.
    """
    require(path.suffix.lower() in ENDINGS, key, f"must end in {', '.join(ENDINGS)}", str(path))


@as_shipped()
def save(figure: Figure, path: Path) -> Path:
    """Write a picture whole or not at all: PNG, SVG or PDF, as its name ends.

    Raises:
        ConfigError: if there is no format of that ending, or matplotlib cannot draw it.
        WriteError: if the system refuses.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_ending(Path(path), "picture")
    kind = Path(path).suffix.lower()[1:]
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    canvas = FigureCanvasAgg(figure)
    try:
        write_atomically(
            Path(path), lambda file: canvas.print_figure(file, format=kind, metadata=undated, dpi=figure.dpi)
        )
    except OSError:
        raise
    except Exception as error:  # fonts, memory, an installation that is broken: of matplotlib's anything may come
        if TRACEBACK in os.environ:
            raise
        raise ConfigError(str(path), f"matplotlib cannot draw it: {type(error).__name__}: {error}") from error
    return Path(path)
