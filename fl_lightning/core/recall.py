"""What networks at rest make of a client's samples, kept over the epochs of a phase.

A teacher, the model that came in or a frozen body gives the same for a sample in every epoch, but for the rounding that
depends on a mini-batch's other samples. So the first epoch's passes serve all later ones, where samples come as they
are (an augmented one is another every time). What is kept ends with the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.reads import flat

_CLOSE, _COARSE = 1e-4, 3e-2
"""Relative difference of two passes of the same samples up to which it is rounding; where there is half precision."""

_FEW, _MOST = 4096, 8
"""Numbers of a tensor, and tensors, that are compared at every mini-batch: enough for who moves all of a network."""

Make = Callable[[], Any]


class Memory:
    """What is kept in one phase of one fit.

    Args:
        most_bytes: that may be kept, of all networks together; what would take more is made anew every time.
        num_samples: of the client's training part.
        coarse: whether passes are made in half precision somewhere, so that their roundings are large.
    """

    def __init__(self, most_bytes: int, num_samples: int = 0, coarse: bool = False) -> None:
        self.coarse = coarse
        self.left = most_bytes
        self.num_samples = num_samples
        self._kept: dict[Hashable, _Kept | None] = {}

    def begin_epoch(self) -> None:
        """Let each network be tried when it is asked first: whether it is the same, and says the same."""
        for kept in self._kept.values():
            if kept is not None:
                kept.is_sure = False

    def clear(self) -> None:
        """Forget all, and keep nothing any more."""
        self._kept.clear()
        self.left = 0

    def of(self, key: Hashable, parts: Sequence[nn.Module], rows: Tensor, make: Make, x: Tensor | None = None) -> Any:
        """What `make` makes of some samples: as it was made before, or now.

        Args:
            key: the network, and the way in which it is passed.
            parts: the modules that it passes samples through.
            rows: [B] int64 on the CPU, the samples' places in the training part.
            make: gives a tensor [B, …], or tuples and lists of such tensors.
            x: the samples; a network that writes into them is asked every time.
        """
        if key not in self._kept:
            return self._first(key, parts, rows, make, x)
        kept = self._kept[key]
        if kept is None or kept.was_written() or not (kept.is_sure or kept.has_its_values()):
            self._forget(key)
            return make()
        known = kept.holds(rows)
        if known and kept.is_sure:
            return kept.take(rows)
        made = make()
        if known:
            kept.is_sure = kept.agrees(rows, made, self.coarse)
        if not (kept.is_sure if known else kept.put(rows, made)):
            self._forget(key)
        return made

    def _forget(self, key: Hashable) -> None:
        kept, self._kept[key] = self._kept[key], None
        self.left += 0 if kept is None else kept.num_bytes

    def _first(self, key: Hashable, parts: Sequence[nn.Module], rows: Tensor, make: Make, x: Tensor | None) -> Any:
        """The first mini-batch of a network, which shows whether there is anything to keep."""
        drawn, version = _drawn(parts), None if x is None else x._version
        made = make()
        self._kept[key] = None
        tensors = _rows_of(made, len(rows))
        size = sum(tensor.nbytes for tensor in tensors) // max(len(rows), 1) * self.num_samples
        size += sum(tensor.nbytes for _, _, tensor in _state(parts)) if tensors else 0
        quiet = torch.equal(drawn, _drawn(parts)) and (x is None or x._version == version)
        if 0 < size <= self.left and quiet and _is_each_samples_own(parts, tensors, make):
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
        """Whether inputs are the mini-batch's, nobody has written into them, and nobody asks for their gradient."""
        return x is self.x and x._version == self.version and not x.requires_grad

    def of(self, way: str, network: Any, parts: Sequence[nn.Module], make: Make) -> Any:
        """What `make` makes of the mini-batch; see `Memory.of`.

        Args:
            way: in which the network is passed; each way keeps its own.
            network: a module or a bound method; what any other function does is not known to last.
            parts: the modules that it passes samples through; without any nothing is kept.
            make: makes it.
        """
        lasts = isinstance(network, nn.Module) or getattr(network, "__self__", None) is not None
        if not lasts or not parts:
            return make()
        return self.memory.of((way, network, *(part.training for part in parts)), parts, self.rows, make, self.x)


class _Kept:
    """What one network made of the samples that it has seen.

    Args:
        like: what it made of some.
        parts: its modules.
        num_samples: rows to keep.
        num_bytes: that they take, and a copy of the network.
    """

    def __init__(self, like: Any, parts: Sequence[nn.Module], num_samples: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_sure = True
        """Whether the network has been tried in this epoch."""
        self._form = _form(like)
        self._columns = [_Column(tensor, num_samples) for tensor in flat(like)]
        self._known = torch.zeros(num_samples, dtype=torch.bool)
        self._state = _state(parts)
        self._marks = [(tensor._version, tensor.data_ptr()) for _, _, tensor in self._state]
        self._values = [tensor.detach().clone() for _, _, tensor in self._state]
        small = [(t, value) for (_, _, t), value in zip(self._state, self._values, strict=True) if t.numel() <= _FEW]
        floating = [(t, value) for t, value in small if t.is_floating_point() and t.device.type == "cpu"]
        self._watched = sorted(floating, key=lambda pair: pair[0].numel())[:_MOST]

    def holds(self, rows: Tensor) -> bool:
        """Whether all these samples have been seen."""
        return bool(self._known[rows].all())

    def was_written(self) -> bool:
        """Whether somebody has written into the network, as torch counts it, or by `.data` into its small tensors.

        It misses what `.data` writes into large tensors alone, and on a GPU, which it does not wait for.
        """
        marked = zip(self._state, self._marks, strict=True)
        if any(owner.get(n) is not t or (t._version, t.data_ptr()) != mark for (owner, n, t), mark in marked):
            return True
        return not all(torch.equal(tensor.detach(), value) for tensor, value in self._watched)

    def has_its_values(self) -> bool:
        """Whether the network's values are those that it had."""
        others = [(t.detach() != value).any() for (_, _, t), value in zip(self._state, self._values, strict=True)]
        return not others or not bool(torch.stack(others).any())

    def agrees(self, rows: Tensor, made: Any, coarse: bool) -> bool:
        """Whether what is made of some samples now is what was made of them, but for rounding."""
        tensors = _rows_of(made, len(rows))
        if _form(made) != self._form or not all(map(_Column.fits, self._columns, tensors)):
            return False
        apart = [column.distance(rows, tensor) for column, tensor in zip(self._columns, tensors, strict=True)]
        return bool(torch.stack(apart).max() <= (_COARSE if coarse else _CLOSE))

    def put(self, rows: Tensor, made: Any) -> bool:
        """Keep what was made of some samples; false if it is of another form than before."""
        tensors = _rows_of(made, len(rows))
        if _form(made) != self._form or not all(map(_Column.fits, self._columns, tensors)):
            return False
        for column, tensor in zip(self._columns, tensors, strict=True):
            column.put(rows, tensor)
        self._known[rows] = True
        return True

    def take(self, rows: Tensor) -> Any:
        """What was made of some samples."""
        return _formed(self._form, (column.take(rows) for column in self._columns))


class _Column:
    """Rows [num_samples, …] of one tensor, in the layout in which it is made."""

    def __init__(self, like: Tensor, num_samples: int) -> None:
        channels_last = like.ndim == 4 and not like.is_contiguous()
        self._order = (0, 2, 3, 1) if channels_last else tuple(range(like.ndim))
        self._back = (0, 3, 1, 2) if channels_last else self._order
        rows = like.detach().permute(self._order)
        self._rows = rows.new_empty((num_samples, *rows.shape[1:]))

    def fits(self, value: Tensor) -> bool:
        rows = self._rows.permute(self._back)
        return value.shape[1:] == rows.shape[1:] and (value.dtype, value.device) == (rows.dtype, rows.device)

    def put(self, rows: Tensor, value: Tensor) -> None:
        self._rows.index_copy_(0, rows.to(self._rows.device, non_blocking=True), value.detach().permute(self._order))

    def distance(self, rows: Tensor, value: Tensor) -> Tensor:
        """The largest difference in units of the largest value; half precision's is that of its roundings, too."""
        known = self.take(rows)
        scale = _COARSE / _CLOSE if known.dtype in (torch.float16, torch.bfloat16) else 1.0
        wide = accumulation_dtype(known.device)
        known, value = known.to(wide), value.detach().to(wide)
        return (known - value).abs().max() / known.abs().max().clamp(min=1e-30) / scale

    def take(self, rows: Tensor) -> Tensor:
        return self._rows.index_select(0, rows.to(self._rows.device, non_blocking=True)).permute(self._back)


def _is_each_samples_own(parts: Sequence[nn.Module], made: Sequence[Tensor], make: Make) -> bool:
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
        again = _rows_of(make(), len(made[0]))
    finally:
        for module in active:
            module.training = True
    return len(again) == len(made) and all(map(torch.equal, made, again))


def _drawn(parts: Sequence[nn.Module]) -> Tensor:
    """How far the random streams are, that a pass may draw from."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device) for device in {t.device for *_, t in _state(parts) if t.is_cuda}]
    return torch.cat(states)


def _state(parts: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Parameters and buffers, each with the dictionary that holds it and its name there."""
    modules = {id(module): module for part in parts for module in part.modules()}.values()
    owners = [owner for module in modules for owner in (module._parameters, module._buffers)]
    return [(owner, name, tensor) for owner in owners for name, tensor in owner.items() if tensor is not None]


def _form(made: Any) -> Any:
    """The tuples and lists that something is made of, with None for what is in them."""
    return type(made)(map(_form, made)) if type(made) in (tuple, list) else None


def _rows_of(made: Any, number: int) -> list[Tensor]:
    """The tensors in tuples and lists, if there is nothing else, and each has so many rows; none otherwise."""
    found = list(flat(made))
    fits = all(torch.is_tensor(each) and each.ndim > 0 and len(each) == number for each in found)
    return found if fits else []


def _formed(form: Any, tensors: Iterator[Tensor]) -> Any:
    return next(tensors) if form is None else type(form)([_formed(part, tensors) for part in form])
