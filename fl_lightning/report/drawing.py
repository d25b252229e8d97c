"""How matplotlib draws: as it comes, whatever a matplotlibrc says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

BACKEND = "MPLBACKEND"
LONG = 200
"""Points of a curve above which its running mean is drawn, and each value faintly: they would be a band."""
SHARE = 50
"""The mean runs over the curve's points divided by this."""
FAINT: dict[str, Any] = {"linestyle": "-", "linewidth": 0.5, "alpha": 0.25}
SAID = f"running means over {100 // SHARE} % of the rounds, each value faintly"
"""What a picture says where such means are drawn."""


@contextmanager
def as_shipped() -> Iterator[None]:
    """Draw with matplotlib's own settings, those of the user's ``matplotlibrc`` aside; decorates functions, too.

    A picture is the same on every machine and at every time then, an SVG's names of its parts among it, and none is
    wanting because the file asks for a LaTeX that is not there, or to which a column's name is no text.
    """
    with _any_backend():
        from matplotlib import style
    with style.context(["default", {"svg.hashsalt": "fl-lightning"}]):
        yield


def trend(values: np.ndarray) -> np.ndarray:
    """The running mean of a long curve, over fewer values at both ends; a short one as it is.

    >>> trend(np.arange(3.0)), trend(np.arange(400) % 2)[200:202]
    (array([0., 1., 2.]), array([0.44444444, 0.55555556]))
    """
    if len(values) <= LONG:
        return values
    window = np.ones(len(values) // SHARE | 1)
    means = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    return np.clip(means, values.min(), values.max())  # or rounding would be all that a constant curve's axis shows


@contextmanager
def _any_backend() -> Iterator[None]:
    """Let matplotlib be imported under a backend's name in the environment that it does not know."""
    named = os.environ.pop(BACKEND, None)
    try:
        yield
    finally:
        if named is not None:
            os.environ[BACKEND] = named
