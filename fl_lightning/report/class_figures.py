"""What clients share of the classes, as pictures: relations between them, and where their means lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.report.drawing import as_shipped
from fl_lightning.report.figures import DPI, GRID, INK, NAME_LENGTH, TERM_COLORS, save, ticks_of


@as_shipped()
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
    ticks = ticks_of(len(matrix), 20)
    labels = _short_names(classes)
    axes.set_xticks(ticks, [labels[t] for t in ticks], fontsize=8, rotation=90, parse_math=False)
    axes.set_yticks(ticks, [labels[t] for t in ticks], fontsize=8, parse_math=False)
    axes.tick_params(length=2)
    axes.set_title(title, fontsize=11, color=INK, loc="left", parse_math=False)
    figure.colorbar(image, ax=axes, fraction=0.046).ax.tick_params(labelsize=8)
    return save(figure, path)


@as_shipped()
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
