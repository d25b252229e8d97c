"""What a method's modules hold beside parameters and buffers: attributes that may differ from client to client."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.recording import Unrecordable
from fl_lightning.core.rows import Alias, Layout, Unstackable

_OF_MODULES = frozenset(vars(nn.Module()))
_OF_METHODS = frozenset({"facts", "fit", "_division"})
"""What the machine sets; a stacked step is told of it otherwise."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Mark(NamedTuple):
    """A value by which attributes can be told from those of another moment or another client.

    Args:
        modes: of every module, whether it trains.
        attributes: module, attribute, and what stands for its value.
    """

    modes: tuple[bool, ...]
    attributes: tuple[tuple[str, str, Hashable], ...]


FEW = 64
"""Numbers of a tensor on the CPU, or of an array, that count as part of what a step was told."""
DEEP, MANY = 8, 1000
"""How deep objects within objects are looked at, and how many in all."""


class Held(NamedTuple):
    """The tensors that attributes hold, apart from parameters and buffers.

    Args:
        key: what stands for the attributes, whatever the tensors' values.
        tensors: each once, in order.
        attributes: of the method's modules.
        known: objects that the key names by where they are, which must live as long as it is compared.
    """

    key: Hashable
    tensors: list[Tensor]
    attributes: Sequence[Mapping[str, Any]]
    known: list[Any]

    def holding(self, others: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The same attributes with other tensors in these ones' places."""
        by_id = {id(own): other for own, other in zip(self.tensors, others, strict=True)}
        return [
            {key: value if key in _OF_METHODS else _with(value, by_id) for key, value in own.items()}
            for own in self.attributes
        ]


def held(attributes: Sequence[Mapping[str, Any]], layout: Layout) -> Held:
    """Find the tensors that attributes hold on the layout's device.

    Args:
        attributes: as `Attributes.taken` gives them.
        layout: where parameters and buffers stand.

    Raises:
        Unrecordable: for a tensor on another device that has many numbers, or one that has a gradient.
    """
    look = _Look(layout)
    keys = [
        tuple((key, look.at(value, key)) for key, value in own.items() if key not in _OF_METHODS) for own in attributes
    ]
    return Held(tuple(keys), list(look.found.values()), attributes, look.known)


class _Look:
    """Goes through attributes.

    Args:
        layout: where parameters and buffers stand.
    """

    def __init__(self, layout: Layout) -> None:
        self.found: dict[int, Tensor] = {}
        self.known: list[Any] = []
        self._seen: dict[int, int] = {}
        self._numbers = layout.numbers()
        self._device = layout.device

    def at(self, value: Any, name: str) -> Hashable:
        """What stands for an attribute's value; tensors in it are found, and can be put elsewhere."""
        if isinstance(value, Tensor) and id(value) not in self._numbers:
            if value.requires_grad:
                raise Unrecordable(f"{name} is a tensor that has a gradient")
            if value.device == self._device:
                return self._place(value)
            if value.numel() > FEW:
                raise Unrecordable(f"{name} is a tensor on {value.device}")
            return "numbers", str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist())
        if isinstance(value, (list, tuple)):
            return type(value).__name__, tuple(self.at(own, name) for own in value)
        if isinstance(value, Mapping):
            return "mapping", tuple((str(key), self.at(own, name)) for key, own in value.items())
        return self._inside(value, name, DEEP)

    def _place(self, tensor: Tensor) -> Hashable:
        place = list(self.found).index(id(tensor)) if id(tensor) in self.found else len(self.found)
        self.found[id(tensor)] = tensor
        return "tensor", place, tensor.dtype, tensor.shape, tensor.stride()

    def _inside(self, value: Any, name: str, deep: int) -> Hashable:
        """What stands for an object, with what it holds: numbers may change that a recording has in it."""
        if isinstance(value, (*_PLAIN, Tensor, *_RANDOM)):
            return _mark(value, name, self._numbers)
        if isinstance(value, np.ndarray) and value.size <= FEW:
            return "array", str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value).__name__, tuple(self._inside(own, name, deep) for own in value) if deep else ()
        if isinstance(value, Mapping):
            pairs = value.items() if deep else ()
            return "mapping", tuple((str(key), self._inside(own, name, deep)) for key, own in pairs)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        place = self._seen[id(value)] = len(self._seen)
        if place == MANY:
            raise Unrecordable(f"{name} holds more than {MANY} objects")
        code = getattr(value, "__code__", value)  # of a function that is made anew in every round
        self.known.append(code)
        inside = {} if not deep or isinstance(value, (nn.Module, type)) else _contents(value)
        own = tuple((key, self._inside(each, name, deep - 1)) for key, each in inside.items())
        return type(value).__name__, id(code), own


def _contents(value: Any) -> dict[str, Any]:
    """What an object holds: attributes, or what a function has enclosed or was given beforehand."""
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": value.args, "options": value.keywords}
    enclosed = enumerate(getattr(value, "__closure__", None) or ())
    cells = {str(place): cell.cell_contents for place, cell in enclosed if _full(cell)}
    given = {key: getattr(value, key, None) for key in ("__defaults__", "__kwdefaults__")}
    bound = {"self": value.__self__} if inspect.ismethod(value) else {}
    named = {key: getattr(value, key, None) for key in getattr(type(value), "__slots__", ()) if key != "__weakref__"}
    return {**cells, **given, **bound, **named, **(getattr(value, "__dict__", None) or {})}


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that is not given yet
        return False


def _with(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A value with other tensors; the very value where it holds none of them."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, (list, tuple)):
        own = [_with(each, others) for each in value]
        if all(one is other for one, other in zip(own, value, strict=True)):
            return value
        return type(value)(*own) if hasattr(value, "_fields") else type(value)(own)
    if isinstance(value, Mapping):
        made = {key: _with(each, others) for key, each in value.items()}
        if all(made[key] is each for key, each in value.items()):
            return value
        whole = copy.copy(value)
        whole.update(made)  # type: ignore[attr-defined]
        return whole
    return value


class Attributes:
    """The loose attributes of a method, its terms and its networks.

    Torch's own layers are left out but for their mode: nobody but their constructor sets what they have.

    Args:
        method: the resident one.
        layout: where its tensors stand.
    """

    def __init__(self, method: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._modules = list(method.modules())
        self._named = [
            (name or type(method).__name__, module)
            for name, module in method.named_modules()
            if not type(module).__module__.startswith("torch.nn")
        ]

    def mark(self) -> Mark:
        """What stands for the present attributes.

        Raises:
            Unstackable: for an attribute that draws random numbers.
        """
        numbers, found = self._layout.numbers(), []
        for name, module in self._named:
            for key, value in vars(module).items():
                if key not in _OF_MODULES and key not in _OF_METHODS:
                    found.append((name, key, _mark(value, f"{name}.{key}", numbers)))
        return Mark(self.modes(), tuple(found))

    def modes(self) -> tuple[bool, ...]:
        """Of every module, whether it trains."""
        return tuple(module.training for module in self._modules)

    def aliases(self) -> list[Alias]:
        """The attributes that hold parameters or buffers."""
        numbers, found = self._layout.numbers(), []
        for _, module in self._named:
            for key, value in vars(module).items():
                held = [value] if isinstance(value, Tensor) else value if type(value) in (list, tuple) else []
                if key not in _OF_MODULES and held and all(id(own) in numbers for own in held):
                    found.append(Alias(vars(module), key, value, [numbers[id(own)] for own in held]))
        return found

    def taken(self) -> list[dict[str, Any]]:
        """The attributes, so that `restore` can bring them back; containers are copied."""
        return [
            {key: _copied(value) for key, value in vars(module).items() if key not in _OF_MODULES}
            for _, module in self._named
        ]

    def restore(self, taken: list[dict[str, Any]]) -> None:
        """Bring attributes back; those that are new go."""
        for (_, module), own in zip(self._named, taken, strict=True):
            there = vars(module)
            for key in [key for key in there if key not in _OF_MODULES and key not in own]:
                del there[key]
            there.update(own)


def difference(one: Mark, other: Mark) -> str:
    """The name of an attribute in which two marks differ; empty where they do not."""
    known = {own[:2]: own for own in one.attributes}
    for own in other.attributes:
        if known.pop(own[:2], None) != own:
            return f"{own[0]}.{own[1]}"
    for name, key in known:
        return f"{name}.{key}"
    return "" if one.modes == other.modes else "its modules' modes"


def changed(before: Mark, after: Mark) -> str:
    """The name of an attribute that steps have changed, other than one that holds a step's tensor; empty for none."""
    held = {own[:2] for own in after.attributes if isinstance(own[2], tuple) and own[2][0] == "tensor"}
    kept = [Mark(mark.modes, tuple(o for o in mark.attributes if o[:2] not in held)) for mark in (before, after)]
    return difference(*kept)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _mark(value: Any, name: str, numbers: Mapping[int, int]) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        known = numbers.get(id(value))
        return ("tensor", id(value), value._version) if known is None else ("entry", known)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_mark(own, name, numbers) for own in value)
    if isinstance(value, Mapping):
        return "mapping", tuple((str(key), _mark(own, name, numbers)) for key, own in value.items())
    if isinstance(value, _RANDOM):
        raise Unstackable(f"{name} draws random numbers of its own")
    return type(value).__name__, id(value)
