"""A picture that a notebook shows by itself, without pyplot, which would keep it."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure of matplotlib's; the last value of a notebook's cell is shown."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_figure(file, format="png", dpi=self.dpi)
        return file.getvalue()
