"""Marks: by what the attributes of one moment are told from those of another moment, or of another client."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.leaves import PLAIN, is_blind
from fl_lightning.core.message import version_of
from fl_lightning.core.reads import address
from fl_lightning.core.rows import Unstackable

_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_InObject = tuple[Mapping[str, Any], Mapping[str, tuple[Tensor, int]]]
"""What an object comes to, and its tensors and how often they were written to, by the ways to them."""


class Mark(NamedTuple):
    """A value by which attributes can be told from those of another moment or another client.

    Args:
        modes: of every module, whether it trains.
        attributes: module, attribute, and what stands for its value.
        free: of every parameter, whether it is not frozen.
    """

    modes: tuple[bool, ...]
    attributes: tuple[tuple[str, str, Hashable], ...]
    free: tuple[bool, ...] = ()

    @property
    def kind(self) -> Hashable:
        """The same, whichever tensors the attributes hold: what works for one works for all of them."""
        return self._replace(attributes=_without_ids(self.attributes))


def stand_in(
    value: Any, name: str, numbers: Mapping[int, int], memory: Callable[[], Collection[int]] = frozenset
) -> Hashable:
    """What stands for an attribute's value: by it clients are told apart, and a step's beginning from its end.

    Args:
        value: the value.
        name: of the attribute, for errors.
        numbers: the places of parameters and buffers, by their ids.
        memory: gives addresses of theirs, which nothing else may show.

    Raises:
        Unstackable: if it draws random numbers, is an iterator, or shows such memory.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        known = numbers.get(id(value))
        if known is None and _has_memory(value) and address(value) in memory():  # clients have it elsewhere
            raise Unstackable(f"{name} shows memory of a parameter or buffer")
        return ("tensor", id(value), value._version) if known is None else ("entry", known)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(stand_in(own, name, numbers, memory) for own in value)
    if isinstance(value, Mapping):
        return "mapping", tuple((str(key), stand_in(own, name, numbers, memory)) for key, own in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, frozenset(stand_in(own, name, numbers, memory) for own in value)
    if isinstance(value, _RANDOM):
        raise Unstackable(f"{name} draws random numbers of its own")
    if is_blind(value):
        raise Unstackable(f"{name} is an iterator")
    return type(value).__name__, id(value)


def written_to(tensor: Tensor, memory: Callable[[], Collection[int]]) -> int:
    """How often a tensor was written to; 0 where it shows memory of a parameter or buffer, or has none."""
    return version_of(tensor) if _has_memory(tensor) and address(tensor) not in memory() else 0


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def difference(one: Mark, other: Mark) -> str:
    """The name of an attribute in which two marks differ; empty where they do not."""
    known = {own[:2]: own for own in one.attributes}
    for own in other.attributes:
        if known.pop(own[:2], None) != own:
            return f"{own[0]}.{own[1]}"
    for name, key in known:
        return f"{name}.{key}"
    if one.free != other.free:
        return "which parameters are frozen"
    return "" if one.modes == other.modes else "its modules' modes"


def changed(before: Mark, after: Mark, is_read: Callable[[str, str], bool]) -> str:
    """The name of an attribute that steps have changed, other than a new one whose tensor is for the step alone.

    Who had the attribute before, be it as None, may read it after the fit.

    Args:
        before: as steps found the attributes.
        after: as they left them.
        is_read: whether a new attribute may be read after the fit.
    """
    known = {own[:2] for own in before.attributes}
    new = {own[:2] for own in after.attributes if _is_tensor(own[2]) and own[:2] not in known}
    kept = tuple(own for own in after.attributes if own[:2] not in new or is_read(*own[:2]))
    return difference(before, after._replace(attributes=kept))


def changed_object(before: Mapping[Any, _InObject], after: Mapping[Any, _InObject]) -> str:
    """The name of an attribute whose object has other numbers, or tensors, in it than before; empty for none.

    Args:
        before: what `Attributes.objects` gave.
        after: what it gives now.
    """
    for name, (own, tensors) in before.items():
        now, others = after.get(name, ({}, {}))
        pairs = ((each, others.get(way, each)) for way, each in tensors.items())
        anew = any(one is not other or written != later for (one, written), (other, later) in pairs)
        if anew or any(way in now and now[way] != value for way, value in without_tensors(own).items()):
            return ".".join(name)
    return ""


def without_tensors(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What an object comes to but for its tensors: their numbers may be the model's, of one client and another."""
    return {way: value for way, value in leaves.items() if value[0] != "tensor"}


def set_on_layer(before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]) -> str:
    """What says which of what torch's own layers have is another one; empty where none is."""
    pairs = itertools.zip_longest(before, after, fillvalue=("", None))
    return next((f"{one[0] or other[0]} of one of torch's layers" for one, other in pairs if one != other), "")


def _without_ids(stand_in: Any) -> Any:
    if _is_tensor(stand_in):
        return "tensor"
    return tuple(map(_without_ids, stand_in)) if type(stand_in) is tuple else stand_in


def _is_tensor(stand_in: Hashable) -> bool:
    """Whether what stands for an attribute's value is that of a tensor without a place of its own."""
    return isinstance(stand_in, tuple) and stand_in[:1] == ("tensor",)
