"""What a configuration's values must be: read off constructors' signatures, and checked value by value.

Nothing is called. A class is looked up where a signature has one, and nowhere else, through `trust`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fl_lightning import static
from fl_lightning.class_names import find_class, path_of, short_names
from fl_lightning.errors import ConfigError, suggest
from fl_lightning.merging import Renamed, Text
from fl_lightning.precheck import check_argument
from fl_lightning.reading import finite, plain, refuse_class, text, whole
from fl_lightning.static import StaticClass
from fl_lightning.trust import Load, Trust

NODE = ("class_path", "init_args", "dict_kwargs")
_LISTS = (list, tuple, set, frozenset)
_EMPTY = inspect.Parameter.empty
_INFINITE = re.compile(r"\binf|∞")


class Parameter(NamedTuple):
    """One argument of a constructor: its type, its default and what its docstring says of it."""

    hint: Any
    default: Any
    doc: str


class MismatchError(ConfigError):
    """A value of another type; `wanted` names the types that would do."""

    def __init__(self, key: str, value: object, *wanted: str) -> None:
        names = sorted(dict.fromkeys(wanted), key="null".__eq__)
        super().__init__(key, f"must be {' or '.join(names)}", value)
        self.wanted = wanted


@cache
def parameters(cls: Callable[..., Any]) -> Mapping[str, Parameter]:
    """A constructor's parameters by name; those that it hands on behind ``**kwargs``, too, where that can be read.

    Raises:
        UnreadableError: for a class that was not imported, if its source does not tell.
    """
    if isinstance(cls, StaticClass):
        return {name: Parameter(*each) for name, each in static.parameters(cls).items()}
    from jsonargparse._parameter_resolvers import get_signature_parameters

    try:
        found = get_signature_parameters(cls, None)
    except (ValueError, AttributeError):  # a constructor in C, which has no signature
        return {}
    known = {each.name: Parameter(each.annotation, each.default, str(each.doc or "")) for each in found}
    for each in fields(cls) if is_dataclass(cls) else ():
        if each.name in known and each.default_factory is not MISSING:
            known[each.name] = known[each.name]._replace(default=each.default_factory())
    return known


def is_open(cls: Callable[..., Any]) -> bool:
    """Whether a constructor may take arguments that cannot be read off it."""
    if isinstance(cls, StaticClass):
        return False  # else its parameters could not be told
    try:
        kinds = [parameter.kind for parameter in inspect.signature(cls).parameters.values()]
    except (ValueError, TypeError):
        return True
    return inspect.Parameter.VAR_KEYWORD in kinds


def options(cls: Callable[..., Any]) -> dict[str, Any]:
    """A constructor's parameters, each with the dataclass that its annotation is, alone or beside None; else None."""
    return {name: dataclass_of(parameter.hint) for name, parameter in parameters(cls).items()}


def section_of(cls: Callable[..., Any], name: str) -> Any:
    """The dataclass that an argument's annotation is, alone or beside None; else None."""
    if not isinstance(cls, StaticClass):
        with suppress(NameError, TypeError):
            hints = get_type_hints(cls if is_dataclass(cls) else getattr(cls, "__init__", cls))
            return dataclass_of(hints.get(name))
    known = parameters(cls)
    return dataclass_of(known[name].hint) if name in known else None


def typed(cls: Callable[..., Any], name: str, value: Any) -> Any:
    """A checked argument as its annotation has it, of the plain value that a file holds.

    An enumeration's member, a path, a tuple and a set; in containers, too.
    """
    known = {} if isinstance(cls, StaticClass) else parameters(cls)
    return _typed(known[name].hint, value) if name in known else value


def _typed(hint: Any, value: Any) -> Any:
    members = _members(hint)
    for member in members:
        origin, inside = get_origin(member) or member, get_args(member)
        if isinstance(member, type) and issubclass(member, Enum):
            found = next((own for own in member if own.value == value and type(own.value) is type(value)), None)
            if found is not None:
                return found
        elif member is Path and isinstance(value, str) and str not in members:
            return Path(value)
        elif origin in _LISTS and isinstance(value, list):
            fixed = origin is tuple and inside and inside[-1] is not ...
            kinds = inside if fixed else (inside[:1] or (Any,)) * len(value)
            if len(kinds) == len(value):
                return origin(map(_typed, kinds, value))
        elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict) and inside:
            return {key: _typed(inside[1], own) for key, own in value.items()}
    return value


def dataclass_of(hint: Any) -> Any:
    """The dataclass that an annotation is, alone or beside None; else None."""
    return next((kind for kind in _members(hint) if isinstance(kind, type) and is_dataclass(kind)), None)


def _members(hint: Any) -> list[Any]:
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    if get_origin(hint) in (Union, UnionType):
        return [inner for member in get_args(hint) for inner in _members(member)]
    return [NoneType if hint is None else hint]


def classes_of(hint: Any) -> list[type]:
    """The classes that an annotation allows, alone, beside others or in a list."""
    found: list[type] = []
    for member in _members(hint):
        inside = get_args(member) if get_origin(member) is not Literal else ()
        found += [member] if _is_class(member) else [each for inner in inside for each in classes_of(inner)]
    return list(dict.fromkeys(found))


def _is_class(hint: Any) -> bool:
    simple = (bool, int, float, complex, str, bytes, dict, NoneType, object, type, Any, _EMPTY, *_LISTS)
    if not isinstance(hint, type) or hint in simple or get_origin(hint) is not None or is_dataclass(hint):
        return False
    if (hint.__module__, hint.__name__) == ("torch", "Tensor"):  # beside a number, as of a learning rate
        return False
    return not issubclass(hint, (Enum, Path)) and hint.__module__ not in (
        "builtins",
        "collections.abc",
        "datetime",
        "os",
    )


class Checker:
    """Checks values against types, and gives them back in plain containers, defaults filled in.

    Args:
        trust: what classes may come from.
        load: what gives a library's class by its path, instead of an import.
    """

    def __init__(self, trust: Trust, load: Load | None = None) -> None:
        self.trust = trust
        self.load = load

    def value(self, hint: Any, given: Any, key: str, doc: str = "") -> Any:
        """A value of a type.

        Args:
            hint: the annotation.
            given: the value, or a `Text`.
            key: its whole key.
            doc: what is documented of it.

        Raises:
            ConfigError: for anything else, about `key` or what lies below it.
        """
        members = sorted(_members(hint), key=_rank)
        classes = [member for member in members if _is_class(member)]
        by_name = isinstance(given, str) and str in members  # a text that may be a class's name, if it is one
        wanted: list[str] = []
        deep: ConfigError | None = None
        for member in members:
            if member in classes:
                if member is not classes[0] or (by_name and not path_of(given, classes)):
                    continue
                if isinstance(given, str) and "." not in given and members[1:] and not short_names(classes):
                    continue  # no class goes by its name alone, so another type is meant
                member = tuple(classes)
            try:
                return self._one(member, given, key, doc)
            except MismatchError as error:
                if error.key == key:
                    wanted += error.wanted
                else:
                    deep = deep or error
            except ConfigError as error:
                deep = deep or error
        if deep is not None and deep.allowed.startswith("must hold") and {*wanted} - {"null"}:
            raise MismatchError(key, _parsed(given), *wanted, deep.allowed.removeprefix("must "))
        raise deep or MismatchError(key, _parsed(given), *wanted or ["left out: nothing that can be written here fits"])

    def _one(self, hint: Any, given: Any, key: str, doc: str) -> Any:
        origin, inside = get_origin(hint) or hint, get_args(hint)
        if isinstance(hint, tuple):
            return self.node(hint, given, key)
        if hint is str and isinstance(given, Text):
            return text(str(given), key)
        value = _parsed(given)
        if hint in _SCALARS:
            return _SCALARS[hint](value, key, doc)
        if origin is Literal:
            return _literal(inside, given, value, key)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enumerated(hint, value, key)
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, Mapping):
                rule = f"must hold {hint.__name__}'s fields by name"
                if value is None:
                    rule += f" ({', '.join(parameters(hint))}); leave it out for their defaults"
                raise ConfigError(key, rule, value)
            return self.arguments(hint, value, key)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(inside, value, key, doc)
        if origin in _LISTS or (getattr(origin, "__module__", "") == "collections.abc" and origin is not Callable):
            return self._list(origin, inside, value, key, doc)
        if hint in (Any, object, _EMPTY):
            return plain(value, key)
        raise MismatchError(key, value)  # a function, a type: nothing that a text can say

    def _mapping(self, inside: Sequence[Any], value: Any, key: str, doc: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise MismatchError(key, value, "dict")
        if not inside:
            return plain(value, key)
        refuse_class(value, key)
        return {name: self.value(inside[1], each, f"{key}.{name}", doc) for name, each in value.items()}

    def _list(self, origin: Any, inside: Sequence[Any], value: Any, key: str, doc: str) -> list[Any]:
        if not isinstance(value, _LISTS):
            raise MismatchError(key, value, "list")
        kinds = list(inside) or [Any]
        if origin is tuple and kinds[-1] is not ... and inside:
            if len(value) != len(kinds):
                raise MismatchError(key, value, f"a list of {len(kinds)}")
        else:
            kinds = kinds[:1] * len(value)
        return [
            self.value(kind, each, f"{key}.{n}", doc) for n, (kind, each) in enumerate(zip(kinds, value, strict=True))
        ]

    def node(
        self, bases: Sequence[type], given: Any, key: str, skip: Collection[str] = (), free: Collection[str] = ()
    ) -> Any:
        """A class that a key names, with its arguments.

        Args:
            bases: it must derive from one of them.
            given: its name, or ``{class_path, init_args}``.
            key: its whole key.
            skip: arguments that do not come from a configuration.
            free: arguments that may be left out.
        """
        value = {"class_path": str(given)} if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            raise MismatchError(key, value, *(f"a {base.__name__}" for base in bases))
        name = value.get("class_path")
        if not isinstance(name, str):
            if name is None:
                raise ConfigError(key, "must be a class's name, or hold one under class_path", value)
            raise ConfigError(f"{key}.class_path", "must be a class's name", name)
        for member in value:
            if member not in NODE:
                hint = f"{suggest(str(member), NODE[:2])}; arguments stand under {key}.init_args"
                raise ConfigError(f"{key}.{member}", f"there is no such key; {hint}")
        cls, path = find_class(bases, name, key, self.trust, self.load)
        node: dict[str, Any] = {"class_path": path}
        arguments, others = (_by_name(value.get(part), f"{key}.{part}") for part in NODE[1:])
        fitting = self._fitting(cls, value.before, key) if isinstance(value, Renamed) else {}
        if found := self.arguments(cls, {**fitting, **arguments}, f"{key}.init_args", skip, free):
            node["init_args"] = found
        for each in others:
            if not is_open(cls):
                check_argument(f"{key}.dict_kwargs.{each}", str(each), cls, options, f" of {cls.__name__}")
        if others:
            node["dict_kwargs"] = plain(others, f"{key}.dict_kwargs")
        return node

    def _fitting(self, cls: type, before: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Of the arguments of a class whose place another one took, those that this one takes."""
        fitting = {}
        for name, value in before.items():
            if isinstance(number := _parsed(value), float):
                finite(number, f"{key}.init_args.{name}", may_be_infinite=True)  # no class takes NaN
            with suppress(ConfigError, KeyError):
                fitting[name] = self.value(parameters(cls)[name].hint, value, name)
        return fitting

    def arguments(
        self,
        cls: Callable[..., Any],
        given: Mapping[Any, Any],
        key: str,
        skip: Collection[str] = (),
        free: Collection[str] = (),
    ) -> dict[str, Any]:
        """A constructor's arguments, those that are left out with their defaults."""
        known = {name: each for name, each in parameters(cls).items() if name not in skip}
        for name in given:
            if name not in known:
                of = f" of {cls.__name__}" if key.endswith(".init_args") else ""
                check_argument(f"{key}.{name}", str(name), cls, options, of, skip)
                raise ConfigError(f"{key}.{name}", "there is no such key")  # one with a dot in it
        found: dict[str, Any] = {}
        for name, (hint, default, doc) in known.items():
            if name in given:
                found[name] = self.value(hint, given[name], f"{key}.{name}", doc)
            elif default is _EMPTY and name not in free:
                option = f"{key.removesuffix('.init_args')}.{name}"
                said = f"must be given; {cls.__name__} has no default for it. On a command line: --{option} VALUE"
                raise ConfigError(f"{key}.{name}", said)
            elif name not in free:
                found |= self._default(name, hint, default)
        return found

    def _default(self, name: str, hint: Any, default: Any) -> dict[str, Any]:
        """A default under its name; nothing where only Python can say it."""
        try:
            if is_dataclass(default) and not isinstance(default, type):
                known = parameters(type(default))
                default = {each: getattr(default, each) for each in known}
                inner = [self._default(each, known[each].hint, value) for each, value in default.items()]
                return {name: {each: value for one in inner for each, value in one.items()}}
            return {name: self.value(hint, default, name, "inf")}
        except ConfigError:
            return {}


# --- values ---------------------------------------------------------------------------------------------------------


def _parsed(given: Any) -> Any:
    return given.parsed if isinstance(given, Text) else given


def _by_name(given: Any, key: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(key, "must hold arguments by name", given)
    return given


def _rank(hint: Any) -> int:
    """The order in which types are tried: what is narrow first."""
    order = (NoneType, bool, int, float)
    if hint in order:
        return order.index(hint)
    return {str: 8, Any: 9, object: 9, _EMPTY: 9}.get(hint, 7 if _is_class(hint) else 5)


def _bool(value: Any, key: str, doc: str) -> bool:
    if not isinstance(value, bool):
        raise MismatchError(key, value, "bool")
    return value


def _int(value: Any, key: str, doc: str) -> int:
    if type(value) is not int:
        raise MismatchError(key, value, "int")
    return whole(value, key)


def _float(value: Any, key: str, doc: str) -> float:
    if type(value) not in (int, float):
        raise MismatchError(key, value, "float")
    return finite(value, key, bool(_INFINITE.search(doc)))


def _none(value: Any, key: str, doc: str) -> None:
    if value is not None:
        raise MismatchError(key, value, "null")


def _text(value: Any, key: str, doc: str) -> str:
    if not isinstance(value, (str, Path)):
        raise MismatchError(key, value, "str")
    return text(str(value.value if isinstance(value, Enum) else value), key)


_SCALARS: dict[Any, Callable[[Any, str, str], Any]] = {
    bool: _bool, int: _int, float: _float, NoneType: _none, str: _text, Path: _text
}  # fmt: skip


def _literal(allowed: Sequence[Any], given: Any, value: Any, key: str) -> Any:
    for each in (value, given):
        if any(each == one and type(one) is (str if isinstance(each, str) else type(each)) for one in allowed):
            return str(each) if isinstance(each, str) else each
    raise MismatchError(key, value, f"{'one of ' if len(allowed) > 1 else ''}{', '.join(map(str, allowed))}")


def _enumerated(cls: type[Enum], value: Any, key: str) -> Any:
    if isinstance(value, cls):
        return value.value
    for member in cls:
        if value == member.value or (isinstance(value, str) and value.lower() == member.name.lower()):
            return member.value
    raise MismatchError(key, value, ", ".join(str(member.value) for member in cls))
