"""The memory that the C library hands out: kept between steps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_KEPT = {_TRIM_THRESHOLD: -1, _MMAP_MAX: 0}  # nothing is given back
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}  # where glibc's own adjusting ends
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let this process keep what a step frees for the next step to take, until `give_back`.

    As it comes, glibc gives freed memory back to the system: the end of its heap when a few megabytes of it are free,
    and a block of more than 32 MiB at once. A step that makes and drops gradients and activations of that size asks for
    the same pages again, tens of thousands a second, each of which the system clears first: a third of a step of a
    small convolutional network, and of one of an LSTM (`benchmarks/fits.py`). Numbers are the same; a process holds
    what it had held at its peak.

    What the environment says of the allocator stands (``MALLOC_TRIM_THRESHOLD_`` and its like, ``GLIBC_TUNABLES``).

    Returns:
        Whether it was set: not with another C library than glibc.
    """
    return _is_ours() and _set(_KEPT)


def give_back() -> None:
    """Return to the system what is free, and let glibc do so again: a run that is over has no further step."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        if _is_ours():
            _set(_USUAL)
        trim(0)


def _is_ours() -> bool:
    """Whether the environment says nothing of the allocator."""
    return not any(name in os.environ for name in _SAID) and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "")


def _set(options: Mapping[int, int]) -> bool:
    set_option = getattr(_c_library(), "mallopt", None)
    return set_option is not None and all(set_option(name, value) for name, value in options.items())


def _c_library() -> ctypes.CDLL | None:
    """What this process was linked with; None where that can't be said."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such name
        return None
