"""The working directory, from where what a run writes may be named, and which somebody else's code may change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def directory_kept(changed: Callable[[], object]) -> Iterator[None]:
    """Set the working directory back that a block has changed, also where the block fails.

    Args:
        changed: called where it was.
    """
    here = _working_directory()
    try:
        yield
    finally:
        if here and _working_directory() != here:
            with suppress(OSError):  # somebody has deleted it meanwhile
                os.chdir(here)
            changed()


def _working_directory() -> str:
    """Where relative names begin; empty where somebody has deleted it."""
    try:
        return os.getcwd()
    except OSError:
        return ""
