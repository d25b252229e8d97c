"""From a partition to each client's training, validation and test samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.listed import ListedPartition
from fl_lightning.data.partitions import KEY, Partition
from fl_lightning.data.shares import checked_shares
from fl_lightning.errors import own_code, require
from fl_lightning.seeding import numpy_generator


@dataclass
class ClientIndices:
    """One client's samples, as sorted int64 indices into `Arrays.x`.

    Args:
        train: training part.
        validation: validation part; may be empty.
        test: test part of its own; may be empty.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def holdout(
    partition: Partition,
    arrays: Arrays,
    num_clients: int,
    seed: int,
    test_fraction: float = 0.25,
    validation_fraction: float = 0.0,
) -> list[ClientIndices]:
    """Merge the official parts, share everything out, then cut each client's samples at random (PFLlib).

    A client's test part is `test_fraction` of its samples, rounded, at least 1 where it has two; its training part is
    never empty.

    Raises:
        ConfigError: if the partition cannot share these labels out.
    """
    parts = _assign(partition, arrays, len(arrays.y), num_clients, seed)
    clients = []
    for client, indices in enumerate(parts):
        train, test = _cut(indices, test_fraction, 1, numpy_generator(seed, "partition/test", client=client))
        clients.append(_client(client, train, test, validation_fraction, seed))
    return clients


def matched(
    partition: Partition, arrays: Arrays, num_clients: int, seed: int, validation_fraction: float = 0.0
) -> list[ClientIndices]:
    """Share the official training part out, and the test part after each client's own class mix (DRDFL).

    Raises:
        ConfigError: if there is no official test part, the partition cannot share these labels out, or no client has a
            test sample.
    """
    require_test_part(arrays, "matched")
    parts = _assign(partition, arrays, arrays.num_train, num_clients, seed)
    with own_code(KEY, partition):
        shared = partition.share_tests(arrays, parts, numpy_generator(seed, "partition/match"))
    name, num_tests = type(partition).__name__, len(arrays.y) - arrays.num_train
    tests = checked_shares(shared, num_tests, num_clients, KEY, f"{name}'s test part")
    rule = "leaves every client without a test sample: the official test part has none of their classes, or groups; use"
    require(any(map(len, tests)), "data.split", f"{rule} global, or holdout", "matched")
    return [
        _client(client, train, test + arrays.num_train, validation_fraction, seed)
        for client, (train, test) in enumerate(zip(parts, tests, strict=True))
    ]


def server_only(
    partition: Partition, arrays: Arrays, num_clients: int, seed: int, validation_fraction: float = 0.0
) -> list[ClientIndices]:
    """Share the official training part out; the official test part is the server's, clients have none (FedDW).

    A file that lists validation parts and no test part, as a run's own ``partition.json`` of this split does, is taken
    as it is.

    Raises:
        ConfigError: if there is no official test part, or the partition cannot share these labels out.
    """
    require_test_part(arrays, "global")
    if isinstance(partition, ListedPartition):
        listed = from_file(partition, arrays, num_clients, seed)
        if any(len(own.validation) for own in listed) and not any(len(own.test) for own in listed):
            rule = "must be 0 where the partition's file says what is for validation"
            require(validation_fraction == 0, "data.validation_fraction", rule, validation_fraction)
            last = max(int(part.max()) for own in listed for part in (own.train, own.validation) if len(part))
            rule = f"{type(partition).__name__}'s file: indices must be from 0 to {arrays.num_train - 1} under 'global'"
            require(last < arrays.num_train, KEY, rule, last)
            return listed
    parts = _assign(partition, arrays, arrays.num_train, num_clients, seed)
    nothing = np.empty(0, dtype=np.int64)
    return [_client(client, train, nothing, validation_fraction, seed) for client, train in enumerate(parts)]


def from_file(
    partition: Partition, arrays: Arrays, num_clients: int, seed: int, validation_fraction: float = 0.0
) -> list[ClientIndices]:
    """Each client's training, validation and test samples, as a file of indices lists them.

    Raises:
        ConfigError: if the partition is none that lists them, or a sample is listed twice.
    """
    known = isinstance(partition, ListedPartition)
    require(known, "data.split", "'file' needs a partition that lists each part, as FromFile does", "file")
    assert isinstance(partition, ListedPartition)
    rule = "must be 0 where the split is 'file': the file says what is for validation"
    require(validation_fraction == 0, "data.validation_fraction", rule, validation_fraction)
    with own_code(KEY, partition):
        partition.check(arrays)
        listed = partition.listed(num_clients)
    maker, size = f"{type(partition).__name__}'s file", len(arrays.y)
    parts = [checked_shares(own, size, num_clients, KEY, maker) for own in zip(*listed, strict=True)]
    everything = [np.concatenate(own) for own in zip(*parts, strict=True)]
    checked_shares(everything, size, num_clients, KEY, maker)  # nor is a sample in two parts
    return [ClientIndices(*own) for own in zip(*parts, strict=True)]


def _assign(partition: Partition, arrays: Arrays, num_samples: int, num_clients: int, seed: int) -> list[np.ndarray]:
    with own_code(KEY, partition):
        made = partition.share(arrays, num_samples, num_clients, numpy_generator(seed, "partition"))
    return checked_shares(made, num_samples, num_clients, KEY, type(partition).__name__)


def _client(client: int, train: np.ndarray, test: np.ndarray, validation_fraction: float, seed: int) -> ClientIndices:
    rng = numpy_generator(seed, "partition/validation", client=client)
    train, validation = _cut(train, validation_fraction, 0, rng)
    return ClientIndices(train, validation, test)


def _cut(
    indices: np.ndarray, fraction: float, at_least: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split off a random `fraction`, rounded, but never the last sample; returns what stays and what is cut off."""
    size = max(round(len(indices) * fraction), at_least if fraction > 0 else 0)
    size = max(0, min(size, len(indices) - 1))
    shuffled = rng.permutation(indices)
    return np.sort(shuffled[size:]), np.sort(shuffled[:size])


def require_test_part(arrays: Arrays, split: str) -> None:
    """Refuse a split that needs an official test part where there is none.

    Raises:
        ConfigError: naming the split.
    """
    require(
        arrays.num_train < len(arrays.y),
        "data.split",
        f"{split!r} needs an official test part and this data set has none; use 'holdout'",
        split,
    )
