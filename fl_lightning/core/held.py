"""The tensors that attributes hold: recorded steps find those of every fit in the places of the first one's."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.core.leaves import FEW, PLAIN, leaves
from fl_lightning.core.loose import OF_METHODS
from fl_lightning.core.mark import stand_in
from fl_lightning.core.reads import Unrecordable
from fl_lightning.core.rows import Layout
from fl_lightning.core.written import Filled


class Held(NamedTuple):
    """The tensors that attributes hold, apart from parameters and buffers.

    Args:
        key: what stands for the attributes, whatever the tensors' values.
        tensors: each once, in order.
        attributes: of the method's modules.
    """

    key: Hashable
    tensors: list[Tensor]
    attributes: Sequence[Mapping[str, Any]]

    def holding(self, others: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The same attributes with other tensors in these ones' places."""
        by_id = {id(own): other for own, other in zip(self.tensors, others, strict=True)}
        return [
            {key: value if key in OF_METHODS else _with(value, by_id) for key, value in own.items()}
            for own in self.attributes
        ]


def held(attributes: Sequence[Mapping[str, Any]], layout: Layout, own: Collection[int] = ()) -> Held:
    """Find the tensors that attributes hold on the layout's device.

    Args:
        attributes: as `Attributes.taken` gives them.
        layout: where parameters and buffers stand.
        own: ids of the modules that they are of.

    Raises:
        Unrecordable: for a tensor on another device that has many numbers, one that has a gradient, or an iterator.
    """
    numbers, found = layout.numbers(), dict[int, Tensor]()

    def key_of(value: Any, name: str) -> Hashable:
        if isinstance(value, Filled):
            return key_of(value.held, name)
        if isinstance(value, Tensor) and id(value) not in numbers:
            if value.requires_grad:
                raise Unrecordable(f"{name} is a tensor that has a gradient")
            if value.device != layout.device:
                if value.numel() > FEW:
                    raise Unrecordable(f"{name} is a tensor on {value.device}")
                return "numbers", str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist())
            place = list(found).index(id(value)) if id(value) in found else len(found)
            found[id(value)] = value
            return "tensor", place, value.dtype, value.shape, value.stride()
        if _is_rebuilt(value):
            if isinstance(value, dict):
                return "mapping", tuple((str(key), key_of(own, name)) for key, own in value.items())
            return type(value).__name__, tuple(key_of(own, name) for own in value)
        if isinstance(value, Iterator):
            raise Unrecordable(f"{name} is an iterator")
        mark = stand_in(value, name, numbers)
        if isinstance(value, (Tensor, *PLAIN)):
            return mark
        return type(value).__name__, tuple(leaves(value, own).items())

    keys = [
        tuple((key, key_of(value, key)) for key, value in own.items() if key not in OF_METHODS) for own in attributes
    ]
    return Held(tuple(keys), list(found.values()), attributes)


def _with(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A value with other tensors; the very value where it holds none of them."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, Filled):
        return Filled(value.value, _with(value.held, others))
    if not _is_rebuilt(value):
        return value
    if isinstance(value, dict):
        made = {key: _with(each, others) for key, each in value.items()}
        if all(made[key] is each for key, each in value.items()):
            return value
        whole = copy.copy(value)
        whole.update(made)
        return whole
    own = [_with(each, others) for each in value]
    if all(one is other for one, other in zip(own, value, strict=True)):
        return value
    return type(value)(*own) if hasattr(value, "_fields") else type(value)(own)


def _is_rebuilt(value: Any) -> bool:
    """Whether a value is a container that can be made anew with other tensors in it."""
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or type(value) in (list, tuple) or isinstance(value, dict)
