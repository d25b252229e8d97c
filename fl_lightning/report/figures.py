"""Pictures of a run and of a partition, and the partition as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.errors import require
from fl_lightning.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

# Okabe and Ito's palette: distinct for colour-blind readers; line styles differ, too.
CURVES = {
    "Local-T": ("#0072B2", "-"),
    "Local-T_received": ("#56B4E9", "--"),
    "Global-T": ("#D55E00", "-"),
    "Server-T": ("#009E73", "-."),
}
TERM_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#0072B2")
TERM_STYLES = ("--", "-.", ":")
INK, GRID, BUBBLE = "#222222", "#DDDDDD", "#0072B2"
DPI = 100
ENDINGS = (".png", ".svg", ".pdf")
MARKED_POINTS = 30  # curves of at most so many points show them
LOG_RANGE = 100  # a loss axis that spans more than this factor is logarithmic
COUNTED_CLASSES = 12  # a partition's table shows the counts of at most so many classes
NAMED_CLASSES, NAME_LENGTH = 40, 14  # class names label the axis up to these limits


def learning_curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Draw the accuracies of a run over its rounds on the left, its losses on the right; 1200 × 450 pixels.

    Args:
        rows: the rows of ``metrics.csv``; what is None, empty or missing is skipped, the evaluated rounds are joined.
        path: the picture to write: PNG, SVG or PDF.
        title: the picture's title.

    Returns:
        `path`.
    """
    return save(draw_learning_curves(rows, title), path)


def draw_learning_curves(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """What `learning_curves` writes, as a figure."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from fl_lightning.report.picture import Picture

    figure = Picture(figsize=(12, 4.5), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    figure.suptitle(title, fontsize=13, color=INK, parse_math=False)
    left, right = figure.subplots(1, 2)
    _draw_accuracies(left, rows)
    _draw_losses(right, rows)
    return figure


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
        low, high = np.clip(mean - std, 0, 1), np.clip(mean + std, 0, 1)
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
    axes.plot(rounds, values, style, color=color, label=label, linewidth=1.8, marker=marker, markersize=4)


def _style(axes: Axes, ylabel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    from fl_lightning.report.picture import add_legend

    axes.set_xlabel("round", color=INK)
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


# --- who holds what -------------------------------------------------------------------------------------------------


def partition_bubbles(class_counts: np.ndarray, path: Path, classes: Sequence[str], title: str) -> Path:
    """Draw who holds what, as DRDFL's Figure 4 does: clients on x, classes on y, a bubble's area the training samples.

    Args:
        class_counts: [K, C] training samples of each client and class.
        path: the picture to write: PNG, SVG or PDF; its size follows the number of clients and classes.
        classes: [C] class names; they label the axis where they are few and short, else their indices do.
        title: the picture's title.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    counts = _checked(class_counts, classes)
    num_clients, num_classes = counts.shape
    named = num_classes <= NAMED_CLASSES and max(len(str(name)) for name in classes) <= NAME_LENGTH
    labels = list(map(str, classes)) if named else list(map(str, range(num_classes)))
    width, height = _extent(num_clients, 3.6, 11.0), _extent(num_classes, 2.4, 9.0)  # of the axes, in inches
    left, bottom, right = 0.6 + 0.075 * max(map(len, labels)), 0.6, 1.15
    lines = textwrap.wrap(title, int((width + right) / 0.1))
    top = 0.3 + 0.2 * max(1, len(lines))
    figure = Figure(figsize=(left + width + right, bottom + height + top), dpi=DPI)
    full_width, full_height = figure.get_size_inches()
    axes = figure.add_axes((left / full_width, bottom / full_height, width / full_width, height / full_height))
    client, label = np.nonzero(counts)
    held = counts[client, label]
    peak = max(1, int(counts.max()))
    diameter = _largest_diameter(held, min(width / num_clients, height / num_classes))
    _draw_bubbles(axes, client, label, _areas(held, peak, diameter))
    axes.set_xlim(-0.6, num_clients - 0.4)
    axes.set_ylim(-0.6, num_classes - 0.4)
    axes.set_xlabel("client", color=INK)
    axes.set_ylabel("class", color=INK)
    axes.set_title("\n".join(lines), fontsize=11, color=INK, loc="left", parse_math=False)
    xticks = _ticks(num_clients, 30)
    axes.set_xticks(xticks, list(map(str, xticks)), fontsize=8)
    yticks = _ticks(num_classes, NAMED_CLASSES)
    axes.set_yticks(yticks, [labels[tick] for tick in yticks], fontsize=8, parse_math=False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=2)
    axes.spines[:].set_color("#AAAAAA")
    key = figure.add_axes(((left + width) / full_width, bottom / full_height, right / full_width, height / full_height))
    _draw_key(key, right, height, peak, diameter)
    return save(figure, path)


def _draw_bubbles(axes: Axes, x: np.ndarray, y: np.ndarray, areas: np.ndarray) -> None:
    axes.scatter(x, y, s=areas, color=BUBBLE, alpha=0.8, linewidths=0, clip_on=False)


def _draw_key(axes: Axes, width: float, height: float, peak: int, diameter: float) -> None:
    """Say what the sizes mean, in axes of `width` by `height` inches beside the picture."""
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.text(0.15, height, "training\nsamples", fontsize=8, color=INK, va="top")
    x, y = 0.15 + max(0.1, diameter / 144), height - 0.42
    for size in _legend_sizes(peak):
        area = _areas(np.array([size]), peak, diameter)
        step = max(0.1, float(np.sqrt(area[0])) / 144 + 0.04)  # half of this entry's height
        y -= step
        _draw_bubbles(axes, np.array([x]), np.array([y]), area)
        axes.text(2 * x - 0.15 + 0.08, y, f"{size:,}", fontsize=8, color=INK, va="center_baseline")
        y -= step


def _extent(count: int, least: float, most: float) -> float:
    """Inches for `count` cells: a third of an inch each, within limits."""
    return min(most, max(least, 0.34 * count))


def _largest_diameter(held: np.ndarray, pitch: float) -> float:
    """Diameter in points of the largest bubble: nine in ten bubbles fit into a cell, few large ones may overlap.

    Args:
        held: the counts above 0.
        pitch: the smaller side of a cell, in inches.
    """
    excess = math.sqrt(held.max() / np.quantile(held, 0.9)) if len(held) else 1.0
    return float(72 * min(0.45, 0.95 * pitch * min(2.0, excess)))


def _areas(counts: np.ndarray, peak: int, diameter: float) -> np.ndarray:
    """Areas in square points, in proportion to the counts; a single sample still shows as a dot."""
    return np.maximum(diameter**2 * counts / peak, 1.2**2)


def _ticks(count: int, all_below: int) -> list[int]:
    step = 1 if count <= all_below else 5 if count <= 60 else 10
    return list(range(0, count, step))


def _legend_sizes(peak: int) -> list[int]:
    """Up to three round numbers of samples, the largest at most `peak`.

    >>> _legend_sizes(730), _legend_sizes(3), _legend_sizes(1)
    ([500, 100, 20], [2, 1], [1])
    """
    nice = [step * 10**power for power in range(len(str(peak))) for step in (1, 2, 5)]
    largest = max(number for number in nice if number <= peak)
    sizes = [largest, largest // 5, largest // 25] if largest >= 25 else [largest, max(1, largest // 4)]
    return list(dict.fromkeys(_leading_digit(size) for size in sizes))


def _leading_digit(number: int) -> int:
    return int(str(number)[0]) * 10 ** (len(str(number)) - 1)


def partition_table(class_counts: np.ndarray, num_test: Sequence[int], classes: Sequence[str]) -> Table:
    """Tabulate who holds what, one row a client and a row of totals.

    Args:
        class_counts: [K, C] training samples of each client and class.
        num_test: [K] test samples of each client.
        classes: [C] class names.

    Returns:
        A table with the counts of every class where there are at most twelve, else of each client's five largest.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    counts = _checked(class_counts, classes)
    counted = counts.shape[1] <= COUNTED_CLASSES
    gap = 0 if 6 < counts.shape[1] <= COUNTED_CLASSES else 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for header in ("client", "train", "test", "classes"):
        table.add_column(header, justify="right", no_wrap=True, min_width=len(header))
    if counted:
        for label, name in enumerate(classes):
            digits = len(str(counts[:, label].sum()))
            table.add_column(Text(str(name)), justify="right", overflow="fold", min_width=digits)
    else:
        table.add_column("largest classes")

    def cells(own: np.ndarray) -> list[Text]:
        if counted:
            return [Text(str(count)) if count else Text("·", style="dim") for count in own]
        order = [label for label in np.argsort(-own, kind="stable")[:5] if own[label]]
        return [Text(", ".join(f"{classes[label]}: {own[label]}" for label in order))]

    for client, own in enumerate(counts):
        held = str(int((own > 0).sum()))
        last = client == len(counts) - 1
        table.add_row(str(client), str(own.sum()), str(num_test[client]), held, *cells(own), end_section=last)
    total = counts.sum(0)
    sums = (str(total.sum()), str(sum(num_test)), str(int((total > 0).sum())))
    table.add_row("total", *sums, *cells(total), style="bold")
    return table


# --- what clients share of the classes ------------------------------------------------------------------------------


def class_relation_map(matrix: np.ndarray, path: Path, classes: Sequence[str], title: str) -> Path:
    """Draw how classes relate to classes as a heat map; shares are drawn from 0 to 1, other numbers around 0.

    Args:
        matrix: [C, C], row i what class i says of every class; NaN rows are absent and stay grey.
        path: the picture to write: PNG, SVG or PDF.
        classes: [C] class names.
        title: the picture's title.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    known = matrix[np.isfinite(matrix)]
    share = not len(known) or (known.min() >= 0 and known.max() <= 1)
    limit = 1.0 if share else float(np.abs(known).max())
    figure = Figure(figsize=(5.6, 4.8), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    colors, low = ("viridis", 0.0) if share else ("RdBu_r", -limit)
    axes.set_facecolor("#BBBBBB")
    image = axes.imshow(np.ma.masked_invalid(matrix), colors, vmin=low, vmax=limit, interpolation="nearest")
    ticks = _ticks(len(matrix), 20)
    labels = _short_names(classes)
    axes.set_xticks(ticks, [labels[t] for t in ticks], fontsize=8, rotation=90, parse_math=False)
    axes.set_yticks(ticks, [labels[t] for t in ticks], fontsize=8, parse_math=False)
    axes.tick_params(length=2)
    axes.set_title(title, fontsize=11, color=INK, loc="left", parse_math=False)
    figure.colorbar(image, ax=axes, fraction=0.046).ax.tick_params(labelsize=8)
    return save(figure, path)


def class_projection(rows: np.ndarray, path: Path, classes: Sequence[str], title: str) -> Path:
    """Draw one point a class: the two directions in which the points differ most (PCA).

    Args:
        rows: [C, D], NaN rows are absent and left out.
        path: the picture to write: PNG, SVG or PDF.
        classes: [C] class names; each point has its own.
        title: the picture's title.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure

    there = np.flatnonzero(np.isfinite(rows).all(1))
    points, shares = principal_plane(rows[there])
    figure = Figure(figsize=(5.6, 4.8), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    colors = [TERM_COLORS[index % len(TERM_COLORS)] for index in there]
    axes.scatter(points[:, 0], points[:, 1], s=60, c=colors or None, linewidths=0)
    labels = _short_names(classes)
    for index, (x, y) in zip(there, points, strict=True):
        where: dict[str, Any] = {"textcoords": "offset points", "xytext": (6, 4), "parse_math": False}
        axes.annotate(labels[index], (x, y), color=INK, fontsize=9, **where)
    axes.set_xlabel(f"first component, {100 * shares[0]:.0f} % of the variance", color=INK)
    axes.set_ylabel(f"second component, {100 * shares[1]:.0f} %", color=INK)
    axes.margins(0.12)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=11, color=INK, loc="left", parse_math=False)
    return save(figure, path)


def principal_plane(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Project points onto their first two principal components.

    Args:
        rows: [n, D] points.

    Returns:
        [n, 2] coordinates and [2] shares of the variance; what there is too little of is 0. Each component points to
        where its largest entry is positive, so that pictures of successive rounds can be compared.

    >>> points, shares = principal_plane(np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]]))
    >>> points.tolist(), shares.tolist()
    ([[-2.0, 0.0], [0.0, 0.0], [2.0, 0.0]], [1.0, 0.0])
    """
    points, shares = np.zeros((len(rows), 2)), np.zeros(2)
    if len(rows) < 2:
        return points, shares
    centred = rows.astype(np.float64) - rows.mean(0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    total = float((sizes**2).sum())
    for index, direction in enumerate(directions[:2]):
        sign = math.copysign(1.0, direction[np.abs(direction).argmax()])
        points[:, index] = centred @ (sign * direction)
        shares[index] = sizes[index] ** 2 / total if total else 0.0
    return points, shares


def _short_names(classes: Sequence[str]) -> list[str]:
    """Class names, or their indices where one of them is too long."""
    short = max(map(len, map(str, classes))) <= NAME_LENGTH
    return list(map(str, classes)) if short else list(map(str, range(len(classes))))


def _checked(class_counts: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    counts = np.asarray(class_counts)
    if counts.ndim != 2 or 0 in counts.shape or counts.shape[1] != len(classes):
        raise ValueError(f"class_counts: must be [clients, {len(classes)} classes], got shape {counts.shape}")
    return counts


def check_ending(path: Path, key: str) -> None:
    """Refuse a picture's file that no format goes by.

    Raises:
        ConfigError: naming the option `key`.
    """
    require(path.suffix.lower() in ENDINGS, key, f"must end in {', '.join(ENDINGS)}", str(path))


def save(figure: Figure, path: Path) -> Path:
    """Write a picture whole or not at all: PNG, SVG or PDF, as its name ends."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_ending(Path(path), "picture")
    kind = Path(path).suffix.lower()[1:]
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    canvas = FigureCanvasAgg(figure)
    with rc_context({"svg.hashsalt": "fl-lightning"}):
        write_atomically(
            Path(path), lambda file: canvas.print_figure(file, format=kind, metadata=undated, dpi=figure.dpi)
        )
    return Path(path)
