"""What one client leaves in the attributes of somebody's own classes for the next one."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fl_lightning.terminal import say
from fl_lightning.trust import is_known

_OF_BASES = frozenset({*vars(nn.Module()), *vars(L.LightningModule()), "facts", "fit", "_division"}) - {"_hparams"}
"""What torch, Lightning and the machine set."""
_TORCHS, _NUMPYS, _OTHERS = torch.Generator, np.random.Generator, (random.Random, np.random.RandomState)

_IN_FITS = (
    "keep it in a buffer; random numbers from the global streams (torch's, NumPy's, Python's) are seeded for every fit"
)


class RunningOn:
    """Says, once, which attribute of some objects runs on from one client to the next.

    One module, and one filter, stands for all clients of its kind, and what is swapped and saved are parameters,
    buffers, and what filters are given to remember: whatever else a client starts from is left by the one before it,
    of the same worker. Numbers, flags, containers of them and random generators are looked at.

    Args:
        owners: what clients share. Those that are not somebody's own are not looked at.
        remedy: where to keep such a thing.
        tensors: whether tensors are looked at, too; in a fit they are mostly what a step has put aside for itself.
    """

    def __init__(self, owners: Iterable[object], remedy: str = _IN_FITS, tensors: bool = False) -> None:
        self._owners = [own for own in owners if not is_known(type(own).__module__)]
        self._remedy, self._tensors = remedy, tensors
        self._began: dict[tuple[int, str], Hashable] = {}
        self._changed: dict[tuple[int, str], Hashable] = {}

    def begin(self) -> None:
        """A client's turn has come."""
        if not self._owners:
            return
        self._began = self._marks()
        ran = next((key for key, mark in self._changed.items() if self._began.get(key) == mark), None)
        if ran is None:
            return
        place, name = ran
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
            say(
                f"fl-lightning: {type(self._owners[place]).__name__}.{name} runs on from one client to the next and is "
                f"saved nowhere, so that a resumed run, or one on several workers, may differ: {self._remedy}"
            )
        self._owners = []

    def end(self) -> None:
        """Its turn is over."""
        if self._owners:
            self._changed = {key: mark for key, mark in self._marks().items() if self._began.get(key) != mark}

    def _marks(self) -> dict[tuple[int, str], Hashable]:
        found = {
            (place, name): _mark(value, self._tensors)
            for place, own in enumerate(self._owners)
            for name, value in vars(own).items()
            if name not in _OF_BASES
        }
        return {key: mark for key, mark in found.items() if mark is not None}


def mark_of(tensor: Tensor) -> Hashable:
    """What tells a tensor's values from others: its shape, and what it and its squares add up to."""
    values = tensor.detach().double()
    sums = values.sum().item(), values.square().sum().item()
    return tuple(tensor.shape), *(float(own).hex() for own in sums)  # as text NaN is itself


def mark_of_generator(value: Any) -> Hashable:
    """What tells a random generator's state from another; None for what is none."""
    if isinstance(value, _TORCHS):
        return bytes(value.get_state().tolist())
    if isinstance(value, _NUMPYS):
        return repr(value.bit_generator.state)
    if isinstance(value, _OTHERS):
        return repr(value.getstate() if isinstance(value, random.Random) else value.get_state(legacy=False))
    return None


def _mark(value: Any, tensors: bool) -> Hashable:
    """What tells a number, a flag, a generator, an optimizer's moments or a container of them from another.

    None for anything else.
    """
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.optim.Optimizer):
        moments = [each for own in value.state.values() for each in own.values() if isinstance(each, Tensor)]
        return (id(value), len(moments), sum(each._version for each in moments)) if moments else None
    if isinstance(value, Tensor):
        return mark_of(value) if tensors and not value.is_complex() else None
    if (state := mark_of_generator(value)) is not None:
        return state
    if isinstance(value, Mapping):
        return tuple((str(key), _mark(own, tensors)) for key, own in value.items())
    if isinstance(value, (list, tuple)):
        return (len(value), *(_mark(own, tensors) for own in value))
    return len(value) if isinstance(value, (set, frozenset)) else None
