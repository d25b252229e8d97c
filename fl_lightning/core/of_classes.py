"""What classes of somebody's own hold for all of their objects: a stacked step must leave it alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from fl_lightning.core.leaves import SIMPLE
from fl_lightning.core.mark import stand_in

_HOLD = (list, dict, set, deque)
_OTHERS = frozenset({"torch", "lightning", "fl_lightning", "builtins", "abc", "typing"})
"""Packages whose classes hold nothing that a client's step writes into."""


class OfClass(NamedTuple):
    """A list, mapping or set of a class, as it was.

    Args:
        name: of the module and the attribute.
        value: the very one.
        before: a copy.
        numbers: the places of parameters and buffers, by their ids.
        mark: what stood for it.
    """

    name: str
    value: Any
    before: Any
    numbers: Mapping[int, int]
    mark: Hashable


def of_classes(modules: Iterable[tuple[str, nn.Module]], numbers: Mapping[int, int]) -> list[OfClass]:
    """What the classes of some modules hold at present.

    Args:
        modules: by what they are called.
        numbers: the places of parameters and buffers, by their ids.

    Raises:
        Unstackable: for what draws random numbers.
    """
    found: dict[int, tuple[str, Any]] = {}
    known: set[type] = set()  # a deep model has hundreds of modules of few classes
    for name, module in modules:
        for kind in type(module).__mro__:
            if kind not in known and kind.__module__.partition(".")[0] not in _OTHERS:
                for key, value in vars(kind).items():
                    if isinstance(value, _HOLD) and not key.startswith("__"):
                        found.setdefault(id(value), (f"{name}.{key}", value))
            known.add(kind)
    return [OfClass(name, own, _plain(own), numbers, _mark(name, own, numbers)) for name, own in found.values()]


def written_into(held: Iterable[OfClass]) -> str:
    """The name of the first that holds something else by now; empty for none."""
    return next((own.name for own in held if _mark(own.name, own.value, own.numbers) != own.mark), "")


def put_back(held: Iterable[OfClass]) -> None:
    """Let all hold what they held."""
    for own in held:
        own.value.clear()
        (own.value.extend if isinstance(own.value, (list, deque)) else own.value.update)(own.before)


def _plain(value: Any) -> list[Any] | dict[Any, Any]:
    """What it holds; its class may know no copies."""
    return dict(value) if isinstance(value, dict) else list(value)


def _mark(name: str, value: Any, numbers: Mapping[int, int]) -> Hashable:
    parts = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
    if SIMPLE.issuperset(map(type, parts)):
        return parts  # a vocabulary, say: a look at each word by itself takes longer than a step
    try:
        return stand_in(value if isinstance(value, (list, dict)) else list(value), name, numbers)
    except RecursionError:  # it is in itself
        return tuple(map(id, parts))
