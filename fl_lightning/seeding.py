"""Seeds derived from (seed, purpose, round, client), so that order, workers and resumption change nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, round: int = 0, client: int = -1) -> int:
    """Return a 63-bit seed that depends on all four arguments and on nothing else.

    Args:
        seed: the run's seed.
        purpose: what the randomness is for, e.g. ``"fit"``, ``"partition"``, ``"participants"``.
        round: 1-based round, 0 for what happens before the first.
        client: 0-based client, -1 for what concerns no single client.
    """
    key = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = -1) -> np.random.Generator:
    """A NumPy generator of its own for one purpose."""
    return np.random.default_rng(derive_seed(seed, purpose, round, client))


def torch_generator(seed: int, purpose: str, round: int = 0, client: int = -1) -> torch.Generator:
    """A CPU torch generator of its own for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round, client))


def seed_global_streams(seed: int, purpose: str, round: int = 0, client: int = -1) -> None:
    """Seed the global streams (dropout, noise, user code) of torch, NumPy and Python."""
    derived = derive_seed(seed, purpose, round, client)
    _seed_torch(derived)
    np.random.seed(derived % 2**32)  # noqa: NPY002 - user code may draw from the global stream
    random.seed(derived)


def _seed_torch(seed: int) -> None:
    """What `torch.manual_seed` does, but 200 times faster on a machine without a GPU under a CUDA build of torch."""
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@lru_cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


@contextmanager
def isolated_streams(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[None]:
    """Run a block under streams of its own and put the global streams back afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = (
        list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )
    with torch.random.fork_rng(devices=devices):
        seed_global_streams(seed, purpose, round, client)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
