"""Building what a resolved configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning.command_line import SECTIONS
from fl_lightning.errors import ConfigError, require
from fl_lightning.schema import parameters, section_of, typed
from fl_lightning.trust import Load, import_name


class Maker(NamedTuple):
    """How classes are found and called.

    Args:
        load: from the path of a class and its key to the class.
        make: from a class and its arguments to an object.
    """

    load: Load
    make: Callable[[Callable[..., Any], Mapping[str, Any]], Any]


REAL = Maker(import_name, lambda cls, arguments: cls(**arguments))
"""They are imported and called."""


def build(node: Any, key: str, /, **given: Any) -> Any:
    """Build ``{class_path, init_args}`` and what is inside it; plain values stay as they are.

    Args:
        node: part of a configuration that `parser.resolve` has checked.
        key: its dotted key, for errors.
        given: constructor arguments that do not come from the configuration.

    Raises:
        ConfigError: for what a constructor refuses.
    """
    return build_with(REAL, node, key, given)


def build_as(cls: Callable[..., Any], node: Mapping[str, Any], key: str, /, **given: Any) -> Any:
    """Call a constructor with what `node` holds, built.

    A mapping becomes the dataclass that the constructor's annotation names.

    Args:
        cls: the class.
        node: its arguments' part of a configuration.
        key: its dotted key, for errors.
        given: constructor arguments that do not come from the configuration.
    """
    return construct(REAL, cls, node, (key, key), given)


def build_with(maker: Maker, node: Any, key: str, given: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """As `build`, by a maker."""
    if isinstance(node, list):
        return [build_with(maker, item, f"{key}.{index}") for index, item in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    if "class_path" not in node:
        return {name: build_with(maker, value, f"{key}.{name}") for name, value in node.items()}
    cls = maker.load(node["class_path"], key)
    require(isinstance(cls, type), key, "must be a class", node["class_path"])  # checked before; nothing else is called
    given = {**given, **(node.get("dict_kwargs") or {})}
    return construct(maker, cls, node.get("init_args") or {}, (key, f"{key}.init_args"), given)


def construct(
    maker: Maker, cls: Callable[..., Any], node: Mapping[str, Any], keys: tuple[str, str], given: Mapping[str, Any]
) -> Any:
    """Call a constructor; what it refuses becomes one line about one of its arguments, or about its key.

    Args:
        maker: what gives the classes inside, and calls them.
        cls: the constructor.
        node: arguments, as a configuration says them.
        keys: the class's own, and that of its arguments.
        given: arguments that do not come from the configuration.
    """
    key, inside = keys
    arguments = {}
    for name, value in node.items():
        section = None
        if isinstance(value, Mapping) and "class_path" not in value:
            section = section_of(cls, name)
        if section is not None:
            arguments[name] = construct(maker, section, value, (f"{inside}.{name}",) * 2, {})
        else:
            arguments[name] = typed(cls, name, build_with(maker, value, f"{inside}.{name}"))
    try:
        return maker.make(cls, {**arguments, **given})
    except ConfigError as error:
        raise error.at(_whole(error.key, key, inside, {*parameters(cls)} - {*given})) from error
    except Exception as error:  # whatever a constructor raises: an extra that is not installed, a path that is none
        own = isinstance(error, (ValueError, TypeError, ImportError))
        said = f"{error}" if own else f"{type(error).__name__}: {error}"
        raise ConfigError(key, f"{getattr(cls, '__name__', cls)}: {said}") from error


def _whole(named: str, key: str, inside: str, arguments: set[str]) -> str:
    """The whole key of what a class names by its own short name for it.

    Args:
        named: e.g. ``data.partition.beta``, ``extra_terms.weight`` or ``model``.
        key: of the class.
        inside: what the keys of its arguments begin with.
        arguments: their names.
    """
    parts = named.split(".")
    if named.startswith((f"{inside}.", f"{key}.init_args.")) or (
        parts[0] in SECTIONS and parts[0] != key.partition(".")[0]
    ):
        return named
    for index, part in enumerate(parts):
        if part in arguments:
            return ".".join([inside, *parts[index:]])
    return key if key.startswith(f"{named}.") else named


def architectures(models: Any, num_clients: int) -> list[int] | None:
    """Each client's entry of a list of models, [N]; None where `models` is one model for all.

    Where the entries have `clients`, so many consecutive clients have them; otherwise client i has entry i mod length.

    Raises:
        ConfigError: if some entries have `clients` and others do not, or their numbers do not fit.
    """
    if not isinstance(models, list):
        return None
    counts = [entry["clients"] for entry in models if "clients" in entry]
    if not counts:
        some = f"has more entries than there are clients ({num_clients}); take some away, or raise data.num_clients"
        require(len(models) <= num_clients, "model", some, len(models))
        return [client % len(models) for client in range(num_clients)]
    for index, entry in enumerate(models):
        require("clients" in entry, f"model.{index}.clients", "must be given for every entry of the list, or for none")
        count = entry["clients"]
        whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        require(whole, f"model.{index}.clients", "must be a whole number >= 1", count)
    fits = sum(counts) == num_clients
    require(fits, "model", f"the entries' `clients` must add up to data.num_clients ({num_clients})", sum(counts))
    return [index for index, count in enumerate(counts) for _ in range(count)]
