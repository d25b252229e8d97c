"""What was written into: one client must leave what others hold, too, as it was."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning.core.leaves import OF_LAYERS, PLAIN, SIMPLE, leaves, sums

_DULL = SIMPLE | {tuple}
_NOTHING: Mapping[str, Hashable] = MappingProxyType({})
Layer = tuple[tuple[str, ...], tuple[Any, ...], Mapping[str, Hashable]]
"""Names and values of what one of torch's own layers has, and what of it can be written into comes to."""


class Contents(NamedTuple):
    """What attributes hold that can be written into.

    Args:
        objects: by their names, with what they come to.
        layers: names and values of what each of torch's own layers has, and what can be written into comes to.
    """

    objects: Mapping[str, tuple[Any, Hashable]] = MappingProxyType({})
    layers: Sequence[Layer] = ()


@dataclass(frozen=True, eq=False)
class Filled:
    """A list, mapping or set as it was: who else holds the very one finds in it what is brought back.

    Args:
        value: the very one.
        held: a copy.
    """

    value: Any
    held: Any

    def again(self) -> Any:
        """The very one, which holds what it held."""
        refill(self.value, self.held)
        return self.value


def refill(home: Any, were: Any) -> None:
    """Let a list, mapping or set hold what it held; one that does is not written to, for which compiled code looks."""
    own, before = ([*each, *each.values()] if isinstance(each, dict) else list(each) for each in (home, were))
    if list(map(id, own)) != list(map(id, before)):
        home.clear()
        (home.extend if isinstance(home, list) else home.update)(were)


def beneath(value: Any) -> Iterator[tuple[str, Any]]:
    """What can be written into, and `Attributes.taken` makes no copy of, in a value; with the way to it."""
    if not isinstance(value, (list, dict, set)):
        inside = [("", value)]
    elif isinstance(value, dict):
        inside = [(f"[{key!r}]", own) for key, own in value.items()]
    else:
        inside = [(f"[{place}]", own) for place, own in enumerate(value)]
    return (pair for pair in inside if not isinstance(pair[1], PLAIN))


def is_constant(value: Any) -> bool:
    """Whether nothing can be written into a value."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return all(is_constant(getattr(value, own.name, None)) for own in fields(value))
    return type(value) in SIMPLE


def of_layer(attributes: Mapping[str, Any], passed: Collection[int]) -> Layer:
    """What a layer of torch's has, with what is in the objects that somebody has set on it."""
    keys = tuple(attributes)
    names = [key for key in _loose(keys) if type(attributes[key]) not in _DULL]
    if not names:
        return keys, tuple(attributes.values()), _NOTHING
    held = {key: tuple(sums(attributes[key], passed).items()) for key in names}
    return keys, tuple(attributes.values()), held


@functools.lru_cache(256)
def _loose(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes of a layer's that torch itself does not set."""
    return tuple(key for key in keys if key not in OF_LAYERS)


def overwritten(before: Contents, now: Contents) -> str:
    """The name of an object that holds something else than it held; empty where none does."""
    known = before.objects
    there = (name for name, (value, own) in now.objects.items() if name in known and known[name][0] is value)
    name = next((name for name in there if known[name][1] != now.objects[name][1]), "")
    if name or not before.layers:
        return name
    return next(filter(None, map(_set_anew, before.layers, now.layers)), "")


def _set_anew(before: Layer, now: Layer) -> str:
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
