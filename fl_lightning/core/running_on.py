"""What one client's fit leaves in the attributes of somebody's own classes for the next one's."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fl_lightning.terminal import say
from fl_lightning.trust import is_known

_OF_BASES = frozenset({*vars(nn.Module()), *vars(L.LightningModule()), "facts", "fit", "_division"}) - {"_hparams"}
"""What torch, Lightning and the machine set."""


class RunningOn:
    """Says, once, which attribute of a method, its terms or its networks runs on from one fit into the next.

    One module stands for all clients of its kind, and parameters and buffers alone are swapped and saved: whatever
    else a fit starts from is that of the client before, of the same worker. Numbers, flags, containers of them and
    random generators are looked at; a tensor is mostly one that a step has put aside for itself.

    Args:
        method: the resident one. Parts that are not somebody's own are not looked at.
    """

    def __init__(self, method: nn.Module) -> None:
        own = {id(part): part for part in method.modules() if not is_known(type(part).__module__)}
        self._parts = list(own.values())
        self._began: dict[tuple[int, str], Hashable] = {}
        self._changed: dict[tuple[int, str], Hashable] = {}

    def begin(self) -> None:
        """A fit's first step is about to be done."""
        if not self._parts:
            return
        self._began = self._marks()
        ran = next((key for key, mark in self._changed.items() if self._began.get(key) == mark), None)
        if ran is None:
            return
        place, name = ran
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
            say(
                f"fl-lightning: {type(self._parts[place]).__name__}.{name} runs on from one client's fit into the next "
                "one's and is saved nowhere, so that a resumed run, or one on several workers, may differ: keep it in "
                "a buffer; random numbers from the global streams (torch's, NumPy's, Python's) are seeded for every fit"
            )
        self._parts = []

    def end(self) -> None:
        """The fit is over."""
        if self._parts:
            self._changed = {key: mark for key, mark in self._marks().items() if self._began.get(key) != mark}

    def _marks(self) -> dict[tuple[int, str], Hashable]:
        found = {
            (place, name): _mark(value)
            for place, part in enumerate(self._parts)
            for name, value in vars(part).items()
            if name not in _OF_BASES
        }
        return {key: mark for key, mark in found.items() if mark is not None}


def _mark(value: Any) -> Hashable:
    """What tells a number, a flag, a generator or a container of them from another; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, (random.Random, np.random.RandomState)):
        return repr(value.getstate() if isinstance(value, random.Random) else value.get_state(legacy=False))
    if isinstance(value, Mapping):
        return tuple((str(key), _mark(own)) for key, own in value.items())
    if isinstance(value, (list, tuple)):
        return (len(value), *map(_mark, value))
    return len(value) if isinstance(value, (set, frozenset)) else None
