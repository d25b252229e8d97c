"""A population of clients of any number: each one's samples are drawn when it is looked at, and never all at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.partitions import KEY, Partition
from fl_lightning.data.splits import ClientIndices, require_test_part
from fl_lightning.data.store import ClientData
from fl_lightning.errors import ConfigError, require
from fl_lightning.seeding import numpy_generator

KEPT = 8
"""Clients of which something is kept at hand once it was computed."""
LISTED = 1000
"""Clients that a picture or a record of a population shows: the first ones."""


class Population(Partition):
    """As many clients as you like, of so many samples each, drawn for each client by itself from its seed and number.

    For federations of up to millions of registered clients: nothing is computed or kept of a client before it takes
    part. **Clients overlap**: a data set has fewer samples than such a federation, so the same one may be held by many
    clients, though by none twice. Samples for training, validation and testing come from three parts of the data set
    that have none in common, so that nobody is tested on what anybody was trained on. What is tested on the union of
    all clients' parts (`Global-T`, `Server-T`, `Server-V`) is tested on the whole of the part that they are drawn from.

    Args:
        samples: of each client, >= 1: under ``holdout`` test samples among them, under ``matched`` beside them, in the
            same ratio as the official parts.
        beta: concentration of the symmetric Dirichlet distribution from which each client's own mix of classes is
            drawn, in (0, 1e9]; null gives all the mix of the data set. A class that has no more samples gives its share
            to the others.
    """

    paper = (
        "Hsu et al., 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
    )

    def __init__(self, samples: int = 50, beta: float | None = None) -> None:
        require(samples >= 1, f"{KEY}.samples", "must be at least 1", samples)
        fits = beta is None or 0 < beta <= 1e9
        require(fits, f"{KEY}.beta", "must be above 0 and at most 1e9, or null", beta)
        self.samples = samples
        self.beta = beta

    def assign(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Nothing: clients are drawn one by one (`drawn`), and share samples.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(KEY, "Population draws each client by itself: nobody can list its clients' samples at once")

    def drawn(
        self, arrays: Arrays, seed: int, split: str, test_fraction: float, validation_fraction: float
    ) -> DrawnClients:
        """What draws clients.

        Args:
            arrays: the data set.
            seed: the run's.
            split: ``holdout``, ``matched`` or ``global``.
            test_fraction: each client's share of test samples under ``holdout``.
            validation_fraction: share of each client's training part that is for validation.

        Raises:
            ConfigError: if the split is another one, or the data set too small for such a client.
        """
        require(split != "file", "data.split", "'file' needs a partition that lists each part, as FromFile does", split)
        if split != "holdout":
            require_test_part(arrays, split)
        rest, test = np.arange(len(arrays.y)), np.empty(0, dtype=np.int64)
        left = self.samples
        if split == "holdout":
            shuffled = numpy_generator(seed, "population/test").permutation(rest)
            left -= (tests := _share(left, test_fraction, 1))
            cut = _share(len(rest), test_fraction, 1)
            rest, test = shuffled[cut:], np.sort(shuffled[:cut])
        else:
            rest, test = rest[: arrays.num_train], rest[arrays.num_train :]
            tests = max(1, round(self.samples * len(test) / arrays.num_train)) if split == "matched" else 0
            test = test[: len(test) if tests else 0]
        shuffled = numpy_generator(seed, "population/validation").permutation(rest)
        cut, validations = _share(len(rest), validation_fraction, 0), _share(left, validation_fraction, 0)
        pools = np.sort(shuffled[cut:]), np.sort(shuffled[:cut]), test
        return DrawnClients(self, arrays, seed, pools, (left - validations, validations, tests))


def _share(count: int, fraction: float, at_least: int) -> int:
    """How many of so many are cut off: a fraction, rounded, but never the last one."""
    return max(0, min(max(round(count * fraction), at_least if fraction > 0 else 0), count - 1))


@dataclass(frozen=True)
class _Pool:
    """The samples from which one part of every client is drawn.

    Args:
        indices: int64, sorted.
        by_class: the same by class.
        held: how many there are of each class.
    """

    indices: np.ndarray
    by_class: Sequence[np.ndarray]
    held: np.ndarray

    @classmethod
    def of(cls, indices: np.ndarray, y: np.ndarray, num_classes: int) -> _Pool:
        """The pool of some samples, whose labels are among `y`."""
        labels = y[indices]
        by_class = [indices[labels == label] for label in range(num_classes)]
        return cls(indices, by_class, np.array([len(own) for own in by_class]))

    def draw(self, count: int, mix: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """So many different samples, sorted; of the classes in a mix, or as they come."""
        if mix is None:
            return np.sort(self.indices[rng.choice(len(self.indices), count, replace=False)])
        taken = np.zeros(len(self.held), dtype=np.int64)
        while (missing := count - int(taken.sum())) > 0:
            room = np.where(taken < self.held, mix, 0.0)
            room = room if room.sum() > 0 else (self.held - taken).astype(float)
            taken = np.minimum(taken + rng.multinomial(missing, room / room.sum()), self.held)
        chosen = [own[rng.choice(len(own), n, replace=False)] for own, n in zip(self.by_class, taken, strict=True) if n]
        return np.sort(np.concatenate(chosen)) if chosen else self.indices[:0]


class DrawnClients:
    """Draws a client's samples from its number, the same ones whenever it is asked.

    Args:
        population: the rule.
        arrays: the data set.
        seed: the run's.
        pools: samples for training, validation and testing.
        sizes: how many of each a client has.

    Raises:
        ConfigError: if a pool has fewer samples than one client.
    """

    def __init__(
        self,
        population: Population,
        arrays: Arrays,
        seed: int,
        pools: tuple[np.ndarray, np.ndarray, np.ndarray],
        sizes: tuple[int, int, int],
    ) -> None:
        for part, pool, size in zip(("training", "validation", "test"), pools, sizes, strict=True):
            few = f"a client has {size} of them for the {part} part, and the data set only {len(pool)}; lower it"
            require(size <= len(pool), f"{KEY}.samples", few, population.samples)
        y, self.num_classes = arrays.y.numpy(), len(arrays.classes)
        self.beta, self.seed, self.pools, self.sizes = population.beta, seed, pools, sizes
        self._pools = [_Pool.of(pool, y, self.num_classes) for pool in pools]

    def __call__(self, client: int) -> ClientIndices:
        """One client's samples."""
        rng = numpy_generator(self.seed, "population", client=client)
        mix = None if self.beta is None else rng.dirichlet(np.full(self.num_classes, self.beta))
        return ClientIndices(*(pool.draw(n, mix, rng) for pool, n in zip(self._pools, self.sizes, strict=True)))

    def hash(self, num_clients: int, labels: bool = True) -> str:
        """SHA-256 over all that decides who holds what.

        Args:
            num_clients: how many clients there are.
            labels: whether labels count, after which samples are drawn where clients have their own mixes of classes.
                Before, they did not.
        """
        digest = hashlib.sha256(f"population/{num_clients}/{self.beta}/{self.seed}/{self.sizes}".encode())
        for pool in self.pools:
            digest.update(np.ascontiguousarray(pool, dtype="<i8").tobytes())
        if labels and self.beta is not None:
            for own in (own for pool in self._pools for own in pool.by_class):
                digest.update(len(own).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(own, dtype="<i8").tobytes())
        return digest.hexdigest()


class LazyClients(Sequence[ClientData]):
    """Clients that are made when they are asked for; the last few of them are kept.

    Args:
        make: makes a client.
        number: how many there are.
    """

    def __init__(self, make: Callable[[int], ClientData], number: int) -> None:
        self._make = lru_cache(maxsize=KEPT)(make)
        self._number = number

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientData]: ...
    def __getitem__(self, index: int | slice) -> ClientData | Sequence[ClientData]:
        if isinstance(index, slice):
            return [self._make(client) for client in range(self._number)[index]]
        return self._make(range(self._number)[index])
