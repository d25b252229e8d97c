"""Whether what a partition has made is one: whole numbers in range, each sample at most once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_lightning.errors import ConfigError, require


def checked_shares(made: Any, num_samples: int, num_clients: int, key: str, maker: str) -> list[np.ndarray]:
    """A partition's lists, each sorted, as int64.

    Args:
        made: for each client its indices.
        num_samples: how many samples there are.
        num_clients: how many clients there are.
        key: of the partition, for messages.
        maker: who made the lists.

    Raises:
        ConfigError: if they are not one list a client, hold anything but whole numbers from 0 to below `num_samples`,
            or hold a sample twice.
    """
    lists = isinstance(made, Sequence) and not isinstance(made, str)
    require(lists, key, f"{maker} must give a list of indices for each client", type(made).__name__)
    rule = f"{maker} must give one list of indices for each of the {num_clients} clients"
    require(len(made) == num_clients, key, rule, len(made))
    parts = [_checked(part, num_samples, f"{key}: {maker}, client {client}") for client, part in enumerate(made)]
    _check_once(parts, num_samples, key, maker)
    return parts


def _checked(part: Any, num_samples: int, who: str) -> np.ndarray:
    try:
        indices = np.asarray(part)
    except ValueError:  # lists of several lengths are in each other
        indices = np.asarray(part, dtype=object)
    if indices.size == 0:
        return np.empty(0, dtype=np.int64)
    key, _, who = who.partition(": ")
    flat = indices.ndim == 1 and indices.dtype.kind in "iu"
    require(flat, key, f"{who}: indices must be whole numbers in a flat list", f"{indices.dtype} {list(indices.shape)}")
    for index in (indices.min(), indices.max()):
        rule = f"{who}: indices must be from 0 to {num_samples - 1}"
        require(0 <= int(index) < num_samples, key, rule, int(index))
    return np.sort(indices).astype(np.int64)


def _check_once(parts: Sequence[np.ndarray], num_samples: int, key: str, maker: str) -> None:
    owner = np.full(num_samples, -1, dtype=np.int64)
    for client, part in enumerate(parts):
        twice = part[1:][part[1:] == part[:-1]]
        require(len(twice) == 0, key, f"{maker} gives client {client} sample {twice[0] if len(twice) else 0} twice")
        taken = owner[part] >= 0
        if taken.any():
            sample = int(part[taken][0])
            rule = f"{maker} gives sample {sample} to client {owner[sample]} and to client {client}"
            raise ConfigError(key, f"{rule} ({int(taken.sum())} samples of client {client} are others' already)")
        owner[part] = client
