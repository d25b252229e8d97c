"""Who holds what: a partition as a picture and as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.report.drawing import as_shipped
from fl_lightning.report.figures import DPI, GRID, INK, NAME_LENGTH, NAMED_CLASSES, save, ticks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

BUBBLE = "#0072B2"
COUNTED_CLASSES = 12  # a table shows the counts of at most so many classes


def label_skew(class_counts: np.ndarray | Sequence[Sequence[int]]) -> float:
    """How far clients' mixes of classes are from all clients' together, from 0 (the same) to below 1.

    The total variation distance ½ Σ_c |p_k(c) - p(c)|, in the mean over clients by their samples: the share of its
    samples that a client would have to change for samples of other classes.

    Args:
        class_counts: [K, C] training samples of each client and class.
    """
    counts = np.asarray(class_counts, dtype=np.float64)
    total = counts.sum()
    if total == 0:
        return 0.0
    own = counts.sum(1, keepdims=True)
    return float(np.abs(counts - own * (counts.sum(0) / total)).sum() / (2 * total))


@as_shipped()
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
    xticks = ticks_of(num_clients, 30)
    axes.set_xticks(xticks, list(map(str, xticks)), fontsize=8)
    yticks = ticks_of(num_classes, NAMED_CLASSES)
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


def partition_table(
    class_counts: np.ndarray, num_test: Sequence[int], classes: Sequence[str], tested_on: str = "test"
) -> Table:
    """Tabulate who holds what, one row a client and a row of totals.

    Args:
        class_counts: [K, C] training samples of each client and class.
        num_test: [K] samples that each client is tested on.
        classes: [C] class names.
        tested_on: the part that these are, for its head.

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
    for header in ("client", "train", tested_on, "classes"):
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


def _checked(class_counts: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    counts = np.asarray(class_counts)
    if counts.ndim != 2 or 0 in counts.shape or counts.shape[1] != len(classes):
        raise ValueError(f"class_counts: must be [clients, {len(classes)} classes], got shape {counts.shape}")
    return counts
