"""What pictures share: a figure that a notebook shows by itself, without pyplot, which would keep it; a legend."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fl_lightning.report.drawing import as_shipped


class Picture(Figure):
    """A figure of matplotlib's; the last value of a notebook's cell is shown."""

    @as_shipped()
    def draw(self, renderer: Any) -> None:
        """Draw it; marks of its axes are made only now."""
        super().draw(renderer)

    @as_shipped()
    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_figure(file, format="png", dpi=self.dpi)
        return file.getvalue()


def add_legend(owner: Any, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """Add a legend that shows names as they are: no dollar sign begins mathematics, no underscore hides one.

    Args:
        owner: a figure or axes.
        handles: lines.
        labels: a name each.
        options: of matplotlib's legend; it has no frame unless they say so.
    """
    shown = [f" {label}" if label.startswith("_") else label for label in labels]
    for text in owner.legend(handles=handles, labels=shown, **{"frameon": False, **options}).get_texts():
        text.set_parse_math(False)
