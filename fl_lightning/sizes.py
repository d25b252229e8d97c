"""Whether a model fits into this machine's memory, asked before it takes any."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fl_lightning.errors import require

LARGE = 2048
"""A whole number or a length in a configuration from which on layers are counted before they are made."""
COPIES = 3  # weights, their gradients, what a run starts from


def largest(node: Any) -> int:
    """The largest whole number in a part of a configuration, lengths of lists included."""
    if isinstance(node, Mapping):
        return max(map(largest, node.values()), default=0)
    if isinstance(node, (list, tuple)):
        return max([len(node), *map(largest, node)])
    return node if isinstance(node, int) else 0


def check_memory(make: Callable[[], nn.Module], nodes: Any, key: str) -> None:
    """Refuse what would need more than the machine has.

    It is made without values, which takes no memory; where that does not work, nothing is said.

    Args:
        make: makes the module.
        nodes: what the configuration says of it.
        key: where, for the error.

    Raises:
        ConfigError: with what it needs and what there is.
    """
    if largest(nodes) < LARGE or not hasattr(os, "sysconf"):
        return
    needs = 0
    with suppress(Exception), torch.device("meta"):  # a user's own model may look at values
        module = make()
        needs = COPIES * sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    much = f"needs {needs / 2**30:,.0f} GiB for a client, and this machine has {there / 2**30:,.0f}; make it smaller"
    require(needs <= there, key, much)
