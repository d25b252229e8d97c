"""How matplotlib draws: as it comes, whatever a matplotlibrc says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

BACKEND = "MPLBACKEND"


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


@contextmanager
def _any_backend() -> Iterator[None]:
    """Let matplotlib be imported under a backend's name in the environment that it does not know."""
    named = os.environ.pop(BACKEND, None)
    try:
        yield
    finally:
        if named is not None:
            os.environ[BACKEND] = named
