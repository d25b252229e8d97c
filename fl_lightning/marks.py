"""What tells a value from what it was: of numbers, texts, tensors, arrays, random generators and what holds them."""

from __future__ import annotations

import functools
import itertools
import math
import random
import types
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.errors import is_own

_TORCHS, _NUMPYS, _OTHERS = torch.Generator, np.random.Generator, (random.Random, np.random.RandomState)
_MOST = 2000
"""Entries of a container, and numbers of a larger tensor or array, by which it is known."""
_BYTES = 500
"""Of an array, that take as long to look at as a value."""
_LISTS, _SETS = (list, tuple, deque), (set, frozenset)
_HOLDING = (*_SETS, functools.partial, types.FunctionType, types.MethodType, types.SimpleNamespace)


@dataclass
class Taken:
    """How many values have been looked at, in one look after another."""

    values: int = 0


@dataclass(frozen=True)
class Look:
    """How closely values are looked at.

    Args:
        tensors: whether tensors count, and modules and optimizers by theirs; otherwise tensors and modules are passed
            over, and of an optimizer it is told how often its moments were written to.
        large: numbers above which a tensor or an array is known by some that are spread over it.
        leaves: values after which the rest of what holds them is passed over.
        most: entries of a container, by which it is known.
    """

    tensors: bool = True
    large: int = 2**20
    leaves: int = 50 * _MOST
    most: int = _MOST

    def mark(self, value: Any, above: tuple[int, ...] = (), taken: Taken | None = None) -> Hashable:
        """What tells a value from another: by value, for what is made anew may be as it was. None for anything else.

        Args:
            value: what an attribute holds.
            above: ids of what holds it.
            taken: counts on what has been looked at.
        """
        taken = taken or Taken()
        return self._mark(value, above, taken, taken.values + self.leaves)

    def _mark(self, value: Any, above: tuple[int, ...], taken: Taken, last: int) -> Hashable:
        taken.values += 1
        if isinstance(value, (bool, int, float, complex, str, bytes)):
            return value if value == value else "nan"
        if isinstance(value, Tensor):
            return self._of_tensor(value, taken) if self.tensors else None
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            some = self._some(value)
            taken.values += some.nbytes // _BYTES
            return value.shape, zlib.crc32(some.tobytes())
        if isinstance(value, itertools.count):
            return repr(value)
        if not self.tensors and isinstance(value, (nn.Module, torch.optim.Optimizer)):
            return None if isinstance(value, nn.Module) else _mark_of_moments(value)
        held = None if id(value) in above else _held(value, self.most)
        if held is None:
            return mark_of_generator(value)
        size, entries = held
        few = itertools.takewhile(lambda _: taken.values < last, entries)
        return size, *((str(key), self._mark(own, (*above, id(value)), taken, last)) for key, own in few)

    def _of_tensor(self, value: Tensor, taken: Taken) -> Hashable:
        value = value.detach()
        some = self._some(torch.view_as_real(value) if value.is_complex() else value)
        taken.values += some.numel() * some.element_size() // _BYTES
        return value.shape, mark_of(some)

    def _some(self, values: Any) -> Any:
        """A tensor or an array; of a large one, a data set, numbers that are spread over it."""
        size = math.prod(values.shape)
        whole = size <= self.large or (isinstance(values, Tensor) and values.layout != torch.strided)
        return values if whole else values.reshape(-1)[:: size // _MOST]


def tensors_held(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors that a value is, or that lists, mappings and modules in it hold.

    A container whose first entry holds none is passed over, or one of many numbers would be looked through.

    Args:
        value: what an attribute holds.
        depth: how many containers inside each other are looked into.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from itertools.chain(value.parameters(), value.buffers())
    elif depth and isinstance(value, (*_LISTS, Mapping)):
        entries = (own for _, own in value.items()) if isinstance(value, Mapping) else iter(value)
        first = list(tensors_held(next(entries, None), depth - 1))
        yield from first
        for own in entries if first else ():
            yield from tensors_held(own, depth - 1)


def mark_of(tensor: Tensor) -> Hashable:
    """What tells a tensor's values from others: its shape, and what it and its squares add up to."""
    values = tensor.detach().cpu().double()  # not every GPU has float64
    sums = values.sum().item(), values.square().sum().item()
    return tuple(tensor.shape), *(float(own).hex() for own in sums)  # as text NaN is itself


def mark_of_generator(value: Any) -> Hashable:
    """What tells a random generator's state from another; None for what is none."""
    if isinstance(value, _TORCHS):
        return value.get_state().numpy().tobytes()
    if isinstance(value, _NUMPYS):
        return repr(value.bit_generator.state)
    if isinstance(value, _OTHERS):
        return value.getstate() if isinstance(value, random.Random) else repr(value.get_state(legacy=False))
    return None


def _mark_of_moments(optimizer: torch.optim.Optimizer) -> Hashable:
    moments = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, Tensor)]
    return (id(optimizer), len(moments), sum(each._version for each in moments)) if moments else None


def _held(value: Any, most: int) -> tuple[int, Iterable[tuple[Any, Any]]] | None:
    """How much a container, a module, a function or an object of one's own holds, and what; None of anything else.

    Of a long list it is the beginning and the end, of a large set nothing.
    """
    if isinstance(value, np.ndarray):
        return value.size, enumerate(itertools.islice(value.flat, most))
    if isinstance(value, _LISTS) and len(value) > most:
        half = most // 2
        ends = itertools.chain(itertools.islice(value, half), itertools.islice(reversed(value), half))
        return len(value), enumerate(ends)
    if isinstance(value, _LISTS):
        return len(value), enumerate(value)
    if isinstance(value, _SETS) and len(value) > most:
        return len(value), ()
    held: Mapping[Any, Any] | None
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        held = value.state_dict()
    elif isinstance(value, Mapping):
        held = value
    elif isinstance(value, _HOLDING):
        held = inside(value)
    else:
        held = attributes_of(value) if is_own(type(value)) else None
    return None if held is None else (len(held), itertools.islice(held.items(), most))


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """What `inside` finds in an object, but for what `functools.cached_property` has put there."""
    held, kind = inside(value), type(value)
    if held is None:
        return None
    return {name: own for name, own in held.items() if not is_cached(kind, name)}


def is_cached(kind: type, name: Any) -> bool:
    """Whether an attribute of objects of a class is what a `functools.cached_property` keeps."""
    return isinstance(name, str) and isinstance(getattr(kind, name, None), functools.cached_property)


def inside(value: Any) -> Mapping[Any, Any] | None:
    """What an object holds, by name or number; None where nobody can look."""
    if isinstance(value, (dict, types.MappingProxyType)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "func": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents if _is_full(cell) else None for cell in value.__closure__ or ()]
        told = value.__defaults__, value.__kwdefaults__, value.__code__
        return dict(enumerate([*cells, *told]))
    if isinstance(value, (type, types.ModuleType, types.CodeType, nn.Module)):
        return None
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name != "__dict__"}}


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
