"""What a later part of a configuration makes of an earlier one: it is laid over it, or takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.errors import ConfigError
from fl_lightning.reading import UnreadableError, load_yaml
from fl_lightning.trust import is_known

CLASS_KEYS = {
    "method": "methods",
    "model": "models",
    "data.dataset": "datasets",
    "data.partition": "partitions",
    "data.shift": "shifts",
    "federation.exchange": "exchanges",
    "federation.server_optimizer": "server_optimizers",
    "federation.aggregator": "aggregators",
    "federation.wire": "filters",
    "federation.selection": "selections",
    "extra_terms": "terms",
}
"""Keys that name a class -> the kind that the package offers for it; the method's terms have keys of their own."""
ONE_CLASS = {"optimizer", *CLASS_KEYS} - {"federation.wire", "extra_terms"}
"""Keys that take one class and nothing else, so that a name alone is one."""
_NODE = ("class_path", "init_args", "dict_kwargs", "clients")


class Text(str):
    """A value as it stands on a command line: a text, or what it says in YAML, as the key expects."""

    __slots__ = ()

    @property
    def parsed(self) -> Any:
        """What it says in YAML; the text where that is nothing."""
        return read_value(self)


class Brief(dict[str, Any]):
    """Arguments under their class's key, as options name them: ``--optimizer.lr`` is ``optimizer.init_args.lr``."""


class Nothing(dict[str, Any]):
    """An option's ``{}``: what was said of the mapping before is taken back, where a file's says nothing."""


class More(list[Any]):
    """What an option adds to a list: ``--trainer.callbacks+ Timer``."""


class Renamed(dict[str, Any]):
    """A class that took another one's place, and the arguments of that one, of which it takes what it can."""

    def __init__(self, node: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        super().__init__(node)
        self.before = before


def read_value(text: str) -> Any:
    """What a text says in YAML; the text itself where that is nothing, as where it is a comment.

    >>> read_value("0.1"), read_value("null"), read_value("#subject"), read_value("")
    (0.1, None, '#subject', '')
    """
    try:
        found = load_yaml(text)
    except UnreadableError:
        return str(text)
    is_empty = found is None and all(line.lstrip()[:1] in ("", "#") for line in text.splitlines())
    return str(text) if is_empty else found


def merged(old: Any, new: Any, key: str) -> Any:
    """What a later part makes of an earlier one: mappings are laid over each other, all else is replaced.

    Args:
        old: what was said so far; None for nothing.
        new: the later part.
        key: the dotted key of both.
    """
    if isinstance(new, More):
        return [*(old if isinstance(old, list) else [] if old is None else [old]), *new]
    if isinstance(new, str) and _is_class(new, old, key):
        new = {"class_path": str(new)}
    if not isinstance(new, Mapping):
        return new
    if isinstance(new, Brief) and isinstance(old, list) and old:
        ((name, value),) = new.items()
        index, inside = (int(name), value) if name.isdecimal() else (len(old) - 1, new)
        if index >= len(old):
            raise ConfigError(f"{key}.{name}", f"the list has {len(old)} entries")
        return [*old[:index], merged(old[index], inside, f"{key}.{index}"), *old[index + 1 :]]
    if isinstance(new, Brief) and isinstance(old, str):
        old = {"class_path": str(old)}
    before: Mapping[str, Any] = old if isinstance(old, Mapping) else {}
    if isinstance(new, Nothing) and "class_path" not in before:
        return {}
    is_class = key in ONE_CLASS or "class_path" in before
    if isinstance(new, Brief) and is_class and not any(name in _NODE for name in new):
        new = {"init_args": new}
    inherited = {**getattr(before, "before", {}), **getattr(new, "before", {})}
    renames = "class_path" in new and "class_path" in before and not is_same_class(*map(class_of, (new, before)))
    if renames and isinstance(before.get("init_args"), Mapping):
        inherited = {**getattr(before, "before", {}), **before["init_args"], **getattr(new, "before", {})}
        before = {}
    whole: dict[str, Any] = {
        **before,
        **{name: merged(before.get(name), value, f"{key}.{name}") for name, value in new.items()},
    }
    return Renamed(whole, inherited) if inherited else whole


def _is_class(name: str, before: Any, key: str) -> bool:
    """Whether a text names a class: where a key takes one alone, or the one that is there, as a wrapped module."""
    if key in ONE_CLASS:
        return not (isinstance(name, Text) and name.parsed is None)
    return isinstance(before, Mapping) and "class_path" in before and is_same_class(name, class_of(before))


def class_of(node: Mapping[str, Any]) -> str:
    """What a mapping names its class."""
    return str(node.get("class_path"))


def is_same_class(one: str, other: str) -> bool:
    """Whether two names are of one class: the last name alone is that of one of ours, Lightning's or torch's."""
    alike = one.rpartition(".")[2] == other.rpartition(".")[2]
    return one == other or (alike and all("." not in name or is_known(name) for name in (one, other)))
