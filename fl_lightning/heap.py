"""The memory that the C library hands out: kept between steps."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h
_NEVER = -1
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let this process keep what a step frees for the next step to take, until `give_back`.

    As it comes, glibc gives freed memory back to the system: the end of its heap when a few megabytes of it are free,
    and a block of more than 32 MiB at once. A step that makes and drops gradients and activations of that size asks for
    the same pages again, tens of thousands a second, each of which the system clears first: a third of a step of a
    small convolutional network, and of one of an LSTM (`benchmarks/fits.py`). Numbers are the same, and a process holds
    no more than it had held at its peak.

    What the environment says of the allocator stands (``MALLOC_TRIM_THRESHOLD_`` and its like, ``GLIBC_TUNABLES``).

    Returns:
        Whether it was set: not with another C library than glibc.
    """
    if any(name in os.environ for name in _SAID) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(_c_library(), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_TRIM_THRESHOLD, _NEVER)) and bool(set_option(_MMAP_MAX, 0))


def give_back() -> None:
    """Return to the system what is free by now: a run that is over has no further step."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _c_library() -> ctypes.CDLL | None:
    """What this process was linked with; None where that can't be said."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such name
        return None
