"""What a method's modules hold beside parameters and buffers: attributes that may differ from client to client."""

from __future__ import annotations

import copy
import functools
import operator
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.leaves import FEW, MOST_LEAVES, OF_LAYERS, OF_MODULES, PLAIN, leaves, sums
from fl_lightning.core.reads import Unrecordable, address, flat
from fl_lightning.core.rows import Alias, Layout, Unstackable
from fl_lightning.core.telling import told_in

_OF_METHODS = frozenset({"facts", "fit", "_division"})
"""What the machine sets; a stacked step is told of it otherwise."""
_BESIDE_FIT = ("receive", "on_fit_end", "after_fit", "send", "predictors", "adapt")
"""Where methods and terms may read what steps have left."""
_SIMPLE = frozenset(PLAIN)
_DULL = _SIMPLE | {tuple, list, dict}
_NOTHING: Mapping[str, Hashable] = MappingProxyType({})
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


Written = tuple[tuple[str, ...], tuple[Any, ...], Mapping[str, Hashable]]


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


class Contents(NamedTuple):
    """What attributes hold that can be written into.

    Args:
        objects: by their names, with what they come to.
        layers: names and values of what each of torch's own layers has, and what can be written into comes to.
    """

    objects: Mapping[str, tuple[Any, Hashable]] = MappingProxyType({})
    layers: Sequence[Written] = ()


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
            {key: value if key in _OF_METHODS else _with(value, by_id) for key, value in own.items()}
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

    def stand_in(value: Any, name: str) -> Hashable:
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
                return "mapping", tuple((str(key), stand_in(own, name)) for key, own in value.items())
            return type(value).__name__, tuple(stand_in(own, name) for own in value)
        if isinstance(value, Iterator):
            raise Unrecordable(f"{name} is an iterator")
        mark = _mark(value, name, numbers)
        if isinstance(value, (Tensor, *PLAIN)):
            return mark
        return type(value).__name__, tuple(leaves(value, own=own).items())

    keys = [
        tuple((key, stand_in(value, key)) for key, value in own.items() if key not in _OF_METHODS) for own in attributes
    ]
    return Held(tuple(keys), list(found.values()), attributes)


def _with(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A value with other tensors; the very value where it holds none of them."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
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
    return type(value) in (list, tuple) or isinstance(value, dict) or hasattr(value, "_fields")


class Attributes:
    """The loose attributes of a method, its terms and its networks.

    Torch's own layers are left out but for their mode: what they have is mostly set by their constructor alone.

    Args:
        method: the resident one.
        layout: where its tensors stand.
    """

    def __init__(self, method: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._modules = list(method.modules())
        self._parameters = list(method.parameters())
        self._constant: dict[int, Any] = {}
        self.own = frozenset(id(module) for module in self._modules)
        """Ids of the method's modules, which are asked by themselves."""
        self._named: list[tuple[str, nn.Module]] = [
            (name or type(method).__name__, module)
            for name, module in method.named_modules()
            if not type(module).__module__.startswith("torch.nn")
        ]
        own = {id(module) for _, module in self._named}
        self._layers = [module for module in self._modules if id(module) not in own]

    def mark(self) -> Mark:
        """What stands for the present attributes.

        Raises:
            Unstackable: for an attribute that draws random numbers, or shows memory of a parameter or buffer.
        """
        numbers, found = self._layout.numbers(), []
        memory = functools.cache(self._memory)
        for name, module in self._named:
            for key, value in vars(module).items():
                if key not in OF_MODULES and key not in _OF_METHODS:
                    found.append((name, key, _mark(value, f"{name}.{key}", numbers, memory)))
        return Mark(self.modes(), tuple(found), self.free())

    def _memory(self) -> set[int]:
        """Addresses of parameters and buffers."""
        tensors = [home[key] for place in self._layout.places for home, key in place.homes]
        return {address(tensor) for tensor in tensors if tensor is not None and tensor.numel()}

    def modes(self) -> tuple[bool, ...]:
        """Of every module, whether it trains."""
        return tuple(module.training for module in self._modules)

    def free(self) -> tuple[bool, ...]:
        """Of every parameter, whether it is not frozen."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    def layers(self) -> Hashable:
        """What torch's own layers have beside their tensors, and what hooks passes run through."""
        found: list[Hashable] = []
        for module in self._layers:
            for key, value in vars(module).items():
                if key not in OF_LAYERS:
                    found.append((key, value if type(value) in _SIMPLE else tuple(leaves(value, own=self.own).items())))
        for module in self._modules:
            if module._forward_pre_hooks or module._forward_hooks:
                hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
                found += [tuple(leaves(hook, own=self.own).items()) for hook in hooks]
        return tuple(found)

    def objects(self) -> dict[tuple[str, str], dict[str, Hashable]]:
        """What the attributes that are objects of somebody's own come to, by module and attribute."""
        return {
            (name, key): leaves(value, own=self.own)
            for name, module in self._named
            for key, value in vars(module).items()
            if key not in OF_MODULES and key not in _OF_METHODS and not isinstance(value, (Tensor, *PLAIN))
        }

    def contents(self) -> Contents:
        """What the attributes hold that can be written into; of torch's own layers, what they have."""
        found: dict[str, tuple[Any, Hashable]] = {}
        passed = self._layout.numbers().keys() | self.own
        for name, module in self._named:
            for key, value in vars(module).items():
                if type(value) in _SIMPLE or key in OF_MODULES or key in _OF_METHODS or id(value) in self._constant:
                    continue
                if _is_constant(value):
                    if len(self._constant) < MOST_LEAVES:  # a receive may make one of its own for every client
                        self._constant[id(value)] = value  # which keeps its address
                    continue
                for way, own in _beneath(value):
                    found[f"{name}.{key}{way}"] = own, tuple(sums(own, passed).items())
        return Contents(found, [_written(vars(layer), passed) for layer in self._layers])

    def is_read(self, module: str, name: str) -> bool:
        """Whether an attribute that steps make may be read after them: the class has it, or code beside the fit."""
        return hasattr(type(dict(self._named)[module]), name) or name in self._told

    @functools.cached_property
    def _told(self) -> frozenset[str]:
        """The names that code speaks of which a method and its terms run beside the fit."""
        return told_in(map(type, self._modules), _BESIDE_FIT)

    def aliases(self) -> list[Alias]:
        """The attributes that hold parameters or buffers."""
        numbers, found = self._layout.numbers(), []
        for _, module in self._named:
            for key, value in vars(module).items():
                held = list(flat(value)) if key not in OF_MODULES else []
                if held and all(id(own) in numbers for own in held):
                    found.append(Alias(vars(module), key, value, numbers))
        return found

    def thaw(self, free: Sequence[bool]) -> None:
        """Let parameters be free, or frozen, as `free` said."""
        for parameter, own in zip(self._parameters, free, strict=True):
            if parameter.requires_grad != own:
                parameter.requires_grad_(own)

    def taken(self) -> list[dict[str, Any]]:
        """The attributes, so that `restore` can bring them back; containers are copied."""
        return [
            {key: _copied(value) for key, value in vars(module).items() if key not in OF_MODULES}
            for _, module in self._named
        ]

    def restore(self, taken: list[dict[str, Any]], mark: Mark | None = None) -> None:
        """Bring attributes back; those that are new go.

        Args:
            taken: what `taken` gave.
            mark: of the same moment: modules train, and parameters are free, as they did; None leaves them.
        """
        if mark is not None:
            self.thaw(mark.free)
            for module, trains in zip(self._modules, mark.modes, strict=True):
                if module.training != trains:
                    module.training = trains
        for (_, module), own in zip(self._named, taken, strict=True):
            there = vars(module)
            for key in [key for key in there if key not in OF_MODULES and key not in own]:
                del there[key]
            there.update(own)


def overwritten(before: Contents, now: Contents) -> str:
    """The name of an object that holds something else than it held; empty where none does."""
    known = before.objects
    there = (name for name, (value, own) in now.objects.items() if name in known and known[name][0] is value)
    name = next((name for name in there if known[name][1] != now.objects[name][1]), "")
    if name or not before.layers:
        return name
    return next(filter(None, map(_set_anew, before.layers, now.layers)), "")


def _written(attributes: Mapping[str, Any], passed: Collection[int]) -> Written:
    """What a layer of torch's has, with what is in the tensors and arrays that somebody has set on it."""
    own = ((key, attributes[key]) for key in attributes.keys() - OF_LAYERS)
    names = [key for key, value in own if type(value) not in _DULL and isinstance(value, (Tensor, np.ndarray))]
    if not names:
        return tuple(attributes), tuple(attributes.values()), _NOTHING
    held = {key: tuple(sums(attributes[key], passed).items()) for key in names}
    return tuple(attributes), tuple(attributes.values()), held


def _set_anew(before: Written, now: Written) -> str:
    """What says which attribute of a layer has another value; empty where none has."""
    (names, values, were), (own, others, there) = before, now
    if names == own and were == there and all(map(operator.is_, values, others)):
        return ""
    was, present = dict(zip(names, values, strict=True)), dict(zip(own, others, strict=True))
    for key in present.keys() - OF_LAYERS:
        odd = key not in was or were.get(key) != there.get(key)
        anew = not odd and key not in there and present[key] is not was[key]
        if odd or (anew and leaves(present[key]) != leaves(was[key])):
            return f"the attribute {key} of one of torch's layers"
    return ""


def _is_constant(value: Any) -> bool:
    """Whether nothing can be written into a value."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return all(_is_constant(getattr(value, own.name, None)) for own in fields(value))
    return type(value) in _SIMPLE


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


def _without_ids(stand_in: Any) -> Any:
    if _is_tensor(stand_in):
        return "tensor"
    return tuple(map(_without_ids, stand_in)) if type(stand_in) is tuple else stand_in


def _is_tensor(stand_in: Hashable) -> bool:
    """Whether what stands for an attribute's value is that of a tensor without a place of its own."""
    return isinstance(stand_in, tuple) and stand_in[:1] == ("tensor",)


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


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _beneath(value: Any) -> Iterator[tuple[str, Any]]:
    """What can be written into, and `_copied` leaves as it is, of a value; with the way to it."""
    if not isinstance(value, (list, dict, set)):
        inside = [("", value)]
    elif isinstance(value, dict):
        inside = [(f"[{key!r}]", own) for key, own in value.items()]
    else:
        inside = [(f"[{place}]", own) for place, own in enumerate(value)]
    return (pair for pair in inside if not isinstance(pair[1], PLAIN))


def _mark(
    value: Any, name: str, numbers: Mapping[int, int], memory: Callable[[], Collection[int]] = frozenset
) -> Hashable:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        known = numbers.get(id(value))
        if known is None and _has_memory(value) and address(value) in memory():  # clients have it elsewhere
            raise Unstackable(f"{name} shows memory of a parameter or buffer")
        return ("tensor", id(value), value._version) if known is None else ("entry", known)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_mark(own, name, numbers, memory) for own in value)
    if isinstance(value, Mapping):
        return "mapping", tuple((str(key), _mark(own, name, numbers, memory)) for key, own in value.items())
    if isinstance(value, _RANDOM):
        raise Unstackable(f"{name} draws random numbers of its own")
    return type(value).__name__, id(value)
