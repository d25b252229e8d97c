"""Seeds derived from (seed, purpose, round, client), so that order, workers and resumption change nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

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
    torch.manual_seed(derived)
    np.random.seed(derived % 2**32)  # noqa: NPY002 - user code may draw from the global stream
    random.seed(derived)


@contextmanager
def isolated_streams(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[None]:
    """Run a block under streams of its own and put the global streams back afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        seed_global_streams(seed, purpose, round, client)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
