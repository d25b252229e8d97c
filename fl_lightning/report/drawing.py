"""How matplotlib draws: as it comes, whatever a matplotlibrc says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_shipped() -> Iterator[None]:
    """Draw with matplotlib's own settings, those of the user's ``matplotlibrc`` aside; decorates functions, too.

    A picture is the same on every machine then, and none is wanting because the file asks for a LaTeX that is not
    there, or to which a column's name is no text.
    """
    from matplotlib import style

    with style.context("default"):
        yield
