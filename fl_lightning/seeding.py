"""Seeds derived from (seed, purpose, round, client), so that order, workers and resumption change nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fl_lightning.shapes import CHECKS


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


def stream_states(device: torch.device | None = None) -> tuple[Any, ...]:
    """The states of the global streams of torch, NumPy and Python, and of a GPU's, if the device is one."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    return states if device is None or device.type != "cuda" else (*states, torch.cuda.get_rng_state(device))


def set_stream_states(states: tuple[Any, ...]) -> None:
    """Bring back what `stream_states` gave without a device."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def same_stream_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether nobody has drawn between two calls of `stream_states`."""
    (torchs, (_, keys, *places), pythons, *gpus), (others, (_, more, *ends), last, *rest) = one, other
    same = (pythons == last or CHECKS) and places == ends and np.array_equal(keys, more)  # beartype draws Python's
    return same and all(map(torch.equal, (torchs, *gpus), (others, *rest)))


def drawn_from_torch(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether nobody has drawn between two calls of `stream_states` but from torch's stream."""
    return same_stream_states((after[0], *before[1:]), after)


@lru_cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


@contextmanager
def kept_streams() -> Iterator[None]:
    """Run a block on the global streams as they are, and put them back afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = (
        list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


@contextmanager
def isolated_streams(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[None]:
    """Run a block under streams of its own and put the global streams back afterwards."""
    with kept_streams():
        seed_global_streams(seed, purpose, round, client)
        yield


def streams_of_own_code(
    parts: Iterable[object], seed: int, purpose: str, round: int = 0, client: int = -1
) -> AbstractContextManager[None]:
    """`isolated_streams` for a block in which somebody's own code runs, which may draw from the global streams.

    Of this package's own classes none does where numbers rest on it, and nothing is spent on them.

    Args:
        parts: the objects whose code runs; None among them are passed over.
        seed: the run's.
        purpose: as of `derive_seed`.
        round: likewise.
        client: likewise.
    """
    foreign = any(part is not None and type(part).__module__.partition(".")[0] != __package__ for part in parts)
    return isolated_streams(seed, purpose, round, client) if foreign else nullcontext()
