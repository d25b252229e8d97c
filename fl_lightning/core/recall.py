"""What networks at rest make of a client's samples, kept over the epochs of a phase.

A teacher, the model that came in or a frozen body gives the same for a sample in every epoch, but for the rounding that
depends on a mini-batch's other samples. So the first epoch's passes serve all later ones, where samples come as they
are (an augmented one is another every time). What is kept ends with the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Make = Callable[[], Any]


class Memory:
    """What is kept in one phase of one fit.

    Args:
        most_bytes: that may be kept, of all networks together; what would take more is made anew every time.
        num_samples: of the client's training part.
    """

    def __init__(self, most_bytes: int, num_samples: int = 0) -> None:
        self.left = most_bytes
        self.num_samples = num_samples
        self._kept: dict[Hashable, _Kept | None] = {}

    def begin_epoch(self) -> None:
        """Forget what networks made that have changed since."""
        for key, kept in self._kept.items():
            if kept is not None and kept.has_other_values():
                self.left += kept.num_bytes
                self._kept[key] = None

    def of(self, key: Hashable, parts: Sequence[nn.Module], rows: Tensor, make: Make) -> Any:
        """What `make` makes of some samples: as it was made before, or now.

        Args:
            key: the network.
            parts: the modules that it passes samples through.
            rows: [B] int64 on the CPU, the samples' places in the training part.
            make: gives a tensor [B, …], or tuples and lists of such tensors.
        """
        if key not in self._kept:
            return self._first(key, parts, rows, make)
        kept = self._kept[key]
        if kept is None or not kept.holds(rows):
            made = make()
            if kept is not None:
                kept.put(rows, made)
            return made
        if kept.was_written():
            self.left += kept.num_bytes
            self._kept[key] = None
            return make()
        return kept.take(rows)

    def _first(self, key: Hashable, parts: Sequence[nn.Module], rows: Tensor, make: Make) -> Any:
        """The first mini-batch of a network, which shows whether there is anything to keep."""
        drawn = _drawn(parts)
        made = make()
        self._kept[key] = None
        tensors = list(_tensors(made))
        fits = bool(tensors) and all(len(tensor) == len(rows) for tensor in tensors)
        size = sum(tensor.nbytes for tensor in tensors) // max(len(rows), 1) * self.num_samples if fits else 0
        if 0 < size <= self.left and torch.equal(drawn, _drawn(parts)) and _rests(parts, made, make):
            self.left -= size
            self._kept[key] = kept = _Kept(made, parts, self.num_samples, size)
            kept.put(rows, made)
        return made


class Recall(NamedTuple):
    """One mini-batch's access to what is kept.

    Args:
        memory: the phase's.
        rows: [B] int64 on the CPU, the samples' places in the training part.
        x: [B, …] their inputs.
        version: of `x`, as torch counts writes.
    """

    memory: Memory
    rows: Tensor
    x: Tensor
    version: int

    def is_of(self, x: Tensor) -> bool:
        """Whether inputs are the mini-batch's, and nobody has written into them."""
        return x is self.x and x._version == self.version

    def of(self, key: Hashable, parts: Sequence[nn.Module], make: Make) -> Any:
        """See `Memory.of`."""
        return self.memory.of(key, parts, self.rows, make)


class _Kept:
    """What one network made of the samples that it has seen.

    Args:
        like: what it made of some.
        parts: its modules.
        num_samples: rows to keep.
        num_bytes: that they take.
    """

    def __init__(self, like: Any, parts: Sequence[nn.Module], num_samples: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._like = like
        self._columns = [_Column(tensor, num_samples) for tensor in _tensors(like)]
        self._known = torch.zeros(num_samples, dtype=torch.bool)
        self._parts = parts
        self._state = _state(parts)
        self._marks = [(tensor._version, tensor.data_ptr()) for tensor in self._state]
        self._sums = _sums(self._state)

    def holds(self, rows: Tensor) -> bool:
        """Whether all these samples have been seen."""
        return bool(self._known[rows].all())

    def was_written(self) -> bool:
        """Whether somebody wrote into the network, as torch counts it: cheap, but it misses writes by `.data`."""
        return any((t._version, t.data_ptr()) != mark for t, mark in zip(self._state, self._marks, strict=True))

    def has_other_values(self) -> bool:
        """Whether the network's values are others."""
        return self.was_written() or not torch.equal(self._sums, _sums(_state(self._parts)))

    def put(self, rows: Tensor, made: Any) -> None:
        """Keep what was made of some samples."""
        for column, tensor in zip(self._columns, _tensors(made), strict=True):
            column.put(rows, tensor)
        self._known[rows] = True

    def take(self, rows: Tensor) -> Any:
        """What was made of some samples."""
        return _shaped(self._like, (column.take(rows) for column in self._columns))


class _Column:
    """Rows [num_samples, …] of one tensor, in the layout in which it is made."""

    def __init__(self, like: Tensor, num_samples: int) -> None:
        channels_last = like.ndim == 4 and not like.is_contiguous()
        self._order = (0, 2, 3, 1) if channels_last else tuple(range(like.ndim))
        self._back = (0, 3, 1, 2) if channels_last else self._order
        rows = like.detach().permute(self._order)
        self._rows = rows.new_empty((num_samples, *rows.shape[1:]))

    def put(self, rows: Tensor, value: Tensor) -> None:
        self._rows.index_copy_(0, rows.to(self._rows.device, non_blocking=True), value.detach().permute(self._order))

    def take(self, rows: Tensor) -> Tensor:
        return self._rows.index_select(0, rows.to(self._rows.device, non_blocking=True)).permute(self._back)


def _rests(parts: Sequence[nn.Module], made: Any, make: Make) -> bool:
    """Whether a sample's values are its own: no statistics of the mini-batch, and in train mode what eval mode does."""
    modules = [module for part in parts for module in part.modules()]
    if any(isinstance(module, _BatchNorm) and module.running_mean is None for module in modules):
        return False
    active = [module for module in modules if module.training]
    if not active:
        return True
    for module in active:
        module.training = False
    try:
        again = make()
    finally:
        for module in active:
            module.training = True
    return all(torch.equal(one, other) for one, other in zip(_tensors(made), _tensors(again), strict=True))


def _drawn(parts: Sequence[nn.Module]) -> Tensor:
    """How far the random streams are, that a pass may draw from."""
    device = next((p.device for part in parts for p in part.parameters()), torch.device("cpu"))
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _state(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for part in parts for tensor in chain(part.parameters(), part.buffers())]


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's bits, taken as whole numbers: exact, so that any change shows."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    sums = [t.view(kinds[t.element_size()]).sum(dtype=torch.int64) for t in real]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _tensors(made: Any) -> Iterator[Tensor]:
    if torch.is_tensor(made):
        yield made
        return
    for part in made:
        yield from _tensors(part)


def _shaped(like: Any, tensors: Iterator[Tensor]) -> Any:
    """Tensors in the tuples and lists of what they are like."""
    return next(tensors) if torch.is_tensor(like) else type(like)([_shaped(part, tensors) for part in like])
