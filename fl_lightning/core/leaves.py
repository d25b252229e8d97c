"""What objects come to, by the way to it: by that they are told from others, or from what they were."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.message import version_of
from fl_lightning.marks import inside, mark_of_generator

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Values that nobody can write into."""
SIMPLE = frozenset(PLAIN)
"""Types of most of them: a look is faster."""
FEW = 64
"""Numbers of a tensor on the CPU that count as part of what a step was told."""
OF_MODULES = frozenset(vars(nn.Module()))
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""What recurrent layers make of their parameters, at every pass anew."""
OF_LAYERS = OF_MODULES | _OF_PARAMETERS
"""What every layer has of torch's; the rest is an attribute of its own."""
MOST_BYTES, MOST_LEAVES = 2**20, 2000
"""Larger arrays, and what comes after so many values of an object, are told by which objects they are."""


def leaves(value: Any, own: Collection[int] = ()) -> dict[str, Hashable]:
    """What an object is, by the way to it: numbers, words, sizes; of large tensors only what they look like.

    An iterator that does not show how far it has come is never the same.

    Args:
        value: the object.
        own: ids of modules that stand for themselves; of others the attributes count, too, but for their tensors.
    """
    found: dict[str, Hashable] = {}
    _take(value, "", found, set(), own)
    return found


def tensors_of(value: Any) -> dict[str, Tensor]:
    """The tensors that an object holds, but for modules', by the way to them."""
    found: dict[str, Any] = {}
    _take_tensor(value, "", found, set(), ())
    return {way: own for way, own in found.items() if isinstance(own, Tensor)}


def sums(value: Any, passed: Collection[int]) -> dict[str, Hashable]:
    """What changes when something is written into an object, by the way to it; all tensors, arrays and modules count.

    Args:
        value: the object.
        passed: ids of modules and tensors that are passed over.
    """
    found: dict[str, Hashable] = {}
    _take_sum(value, "", found, set(), passed)
    return found


def _take(value: Any, way: str, found: dict[str, Hashable], known: set[int], own: Collection[int]) -> None:
    """Note what a value is."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        found[way] = type(value).__name__, value
    elif isinstance(value, Tensor):
        small = value.device.type == "cpu" and value.numel() <= FEW
        small = small and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        numbers = tuple(value.detach().flatten().tolist()) if small else ()
        found[way] = "tensor", value.dtype, tuple(value.shape), numbers
    elif isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= MOST_BYTES:
        found[way] = "array", value.dtype.str, value.shape, value.tobytes()
    elif isinstance(value, bytearray):
        found[way] = "bytes", bytes(value)
    elif (state := mark_of_generator(value)) is not None:
        found[way] = type(value).__name__, state
    elif isinstance(value, nn.Module) and (id(value) in own or id(value) in known):
        found[way] = "own", id(value)
    elif isinstance(value, nn.Module):
        known.add(id(value))
        found[way] = type(value).__name__, id(value)
        for key, held in (*_loose(value).items(), *value._modules.items()):
            _take(held, f"{way}.{key}", found, known, own)
    else:
        _look_into(value, way, found, known, _take, own)


def _take_tensor(value: Any, way: str, found: dict[str, Any], known: set[int], own: Collection[int]) -> None:
    """Note a value that is a tensor."""
    if isinstance(value, Tensor):
        found[way] = value
    elif not isinstance(value, (*PLAIN, np.ndarray, nn.Module)):
        _look_into(value, way, found, known, _take_tensor, own)


def _take_sum(value: Any, way: str, found: dict[str, Hashable], known: set[int], passed: Collection[int]) -> None:
    """Note what changes when something is written into a value."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        found[way] = type(value).__name__, value
    elif isinstance(value, (Tensor, np.ndarray, bytearray, nn.Module)):
        if id(value) not in passed:
            found[way] = _sum_of(value, passed, known)
    else:
        _look_into(value, way, found, known, _take_sum, passed)


def _look_into(
    value: Any, way: str, found: dict[str, Hashable], known: set[int], take: Callable[..., None], apart: Collection[int]
) -> None:
    """Note how much a container or an object holds, and let `take` note what.

    Of one that holds too much the rest is passed over: where sums are taken it counts as written into, as far as it is
    no dictionary's.
    """
    if id(value) in known:
        found[way] = "again"
    elif (held := inside(value)) is not None:
        known.add(id(value))
        found[way] = type(value).__name__, len(held)
        most, rest = (MOST_LEAVES, value) if take is _take else (50 * MOST_LEAVES, held)
        for key, own in held.items():
            if len(found) > most:
                found[way] = type(value).__name__, len(held), id(rest)
                break
            take(own, f"{way}.{key}", found, known, apart)
    else:
        found[way] = type(value).__name__, object() if take is _take and is_blind(value) else id(value)


def is_blind(value: Any) -> bool:
    """Whether a value is an iterator that does not show how far it has come."""
    return isinstance(value, Iterator) and inside(value) is None


def _loose(module: nn.Module) -> dict[str, Any]:
    """A module's attributes but for what torch gives to all of them."""
    return {key: value for key, value in vars(module).items() if key not in OF_LAYERS}


def _sum_of(value: Any, passed: Collection[int], known: set[int]) -> Hashable:
    """What changes when something is written into a tensor, an array, bytes or a module."""
    if isinstance(value, nn.Module):
        if id(value) in known:
            return "again"
        known.add(id(value))
        found: dict[str, Hashable] = {}
        for home in (value._parameters, value._buffers, value._modules, _loose(value)):
            for key, held in home.items():
                _take_sum(held, f".{key}", found, known, passed)
        return tuple(found.items())
    if isinstance(value, Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):  # what a stacked step has left there
            return None
        if value.device.type != "cpu" or value.layout != torch.strided:
            return version_of(value)
        whole = value.detach().flatten().clone(memory_format=torch.contiguous_format)
        # `.data` is written to uncounted
        return version_of(value), zlib.crc32(whole.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return tuple(sums(value.tolist(), passed).items())
    return zlib.crc32(value.tobytes() if isinstance(value, np.ndarray) else bytes(value))
