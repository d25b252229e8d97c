"""What one client leaves in the attributes of somebody's own classes for the next one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fl_lightning.marks import Look, Taken, is_cached, tensors_held
from fl_lightning.terminal import say
from fl_lightning.trust import is_known

_OF_BASES = frozenset({*vars(nn.Module()), *vars(L.LightningModule()), "facts", "fit", "_division"}) - {"_hparams"}
"""What torch, Lightning and the machine set."""
_AT_ONCE = (
    *(bool, int, float, list, tuple, set, frozenset, Mapping, Tensor),
    *(torch.optim.Optimizer, torch.Generator, np.random.Generator, np.random.RandomState, random.Random),
)
"""What is said once it has run on; of others, that the first fit may have made once for all, only if it does again."""
_IN_A_FIT, _OUTSIDE = Look(tensors=False, large=2**14, leaves=500, most=400), Look(leaves=2000)
_TURNS, _VALUES = 3, 100
"""Turns that are looked at whatever they hold, and values for which each one after them is rested."""
_IN_FITS = (
    "keep it in a buffer; random numbers from the global streams (torch's, NumPy's, Python's) are seeded for every fit"
)


def speaks_for_all() -> bool:
    """Whether this process says what all of a run's workers, or devices, would say."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


class RunningOn:
    """Says, once, which attribute of some objects runs on from one client to the next.

    One module, and one filter, stands for all clients of its kind, and what is swapped and saved are parameters,
    buffers, and what filters are given to remember: whatever else a client starts from is left by the one before it,
    of the same worker. Numbers, texts, arrays, random generators and what holds them are looked at, an object of one's
    own included; of much only some, and after the first turns not in each.

    Args:
        owners: what clients share. Those that are not somebody's own are not looked at.
        remedy: where to keep such a thing.
        tensors: whether all tensors are looked at, too. In a fit they are mostly what a step has put aside for itself:
            there only those that were there from the start, in their shape, and have no graph, and those of lists,
            mappings and modules beside the registered ones of which all are so.
    """

    def __init__(self, owners: Iterable[object], remedy: str = _IN_FITS, tensors: bool = False) -> None:
        every = list(owners)
        self._owners = [own for own in every if not is_known(type(own).__module__)]
        self.any_own = bool(self._owners)
        """Whether there are any."""
        self._remedy, self._look = remedy, _OUTSIDE if tensors else _IN_A_FIT
        self._began: dict[tuple[int, str], Hashable] = {}
        self._changed: dict[tuple[int, str], Hashable] | None = None
        self._turns = self._rest = 0
        self._times: Counter[tuple[int, str]] = Counter()
        registered = {id(own) for module in every if isinstance(module, nn.Module) for own in _registered(module)}
        held = {key: list(tensors_held(value)) for key, value in self._attributes()}
        free = {key: own for key, own in held.items() if own and registered.isdisjoint(map(id, own))}
        self._shapes = {key: [tensor.shape for tensor in own] for key, own in free.items()}

    def begin(self) -> None:
        """A client's turn has come."""
        if not self._owners:
            return
        self._rest = max(0, self._rest - 1)
        if self._rest:
            return
        self._turns += 1
        self._began, values = self._marks()
        if self._changed is None:
            return
        ran_on = [key for key, mark in self._changed.items() if self._began.get(key) == mark]
        self._changed = None
        self._rest = values // _VALUES if self._turns > _TURNS else 0
        self._times.update(ran_on)
        ran = next((key for key in ran_on if self._times[key] > 1 or self._is_told_at_once(*key)), None)
        if ran is None:
            return
        place, name = ran
        if speaks_for_all():
            say(
                f"fl-lightning: {type(self._owners[place]).__name__}.{name} runs on from one client to the next and is "
                f"saved nowhere, so that a resumed run, or one on several workers, may differ: {self._remedy}"
            )
        self._owners = []

    def end(self) -> None:
        """Its turn is over."""
        if self._owners and not self._rest:
            marks, _ = self._marks()
            self._changed = {key: mark for key, mark in marks.items() if self._began.get(key) != mark}

    def _is_told_at_once(self, place: int, name: str) -> bool:
        return isinstance(vars(self._owners[place])[name], _AT_ONCE)

    def _marks(self) -> tuple[dict[tuple[int, str], Hashable], int]:
        """What stands for the attributes, and how many values have been looked at."""
        taken = Taken()
        found = {
            key: (_OUTSIDE if self._lasts(key, value) else self._look).mark(value, (id(self._owners[key[0]]),), taken)
            for key, value in self._attributes()
        }
        return {key: mark for key, mark in found.items() if mark is not None}, taken.values

    def _attributes(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """The owners' attributes, by the owner's place and their name."""
        for place, own in enumerate(self._owners):
            for name, value in vars(own).items():
                if name not in _OF_BASES and not is_cached(type(own), name):
                    yield (place, name), value

    def _lasts(self, key: tuple[int, str], value: Any) -> bool:
        """Whether a value is, or holds, tensors that are meant to last, and not what a step has put aside."""
        if key not in self._shapes:
            return False
        held = list(tensors_held(value))
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, held)):
            return False  # what a stacked step has left there cannot be looked at
        return all(own.is_leaf for own in held) and self._shapes[key] == [own.shape for own in held]


def _registered(module: nn.Module) -> Iterator[Tensor]:
    yield from (own for home in (module._parameters, module._buffers) for own in home.values() if own is not None)
