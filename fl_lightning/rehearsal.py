"""What constructors refuse, found without importing them.

A constructor of ours refuses bad values in its first lines (`require`, `require_choices`), and so do torch's optimizers
(``if …: raise ValueError``). Those lines are taken from its source and run by themselves, as far as they speak of its
arguments alone; the others are passed over. What is refused here is refused in the same words as by the real class.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any, Literal

from fl_lightning import catalog, static
from fl_lightning.building import Maker, build_with, construct
from fl_lightning.core.alternation import check_alternation
from fl_lightning.errors import ConfigError, require, require_at_least, require_choices, require_positive
from fl_lightning.federation.flags import check_flags
from fl_lightning.models.checks import require_choice, require_dropout, require_size, require_sizes
from fl_lightning.resuming import check_name
from fl_lightning.source import Named, UnreadableError, lookup

_PLAIN = (
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len", "list", "max",
    "min", "range", "set", "sorted", "str", "sum", "tuple", "type", "zip", "ValueError", "TypeError",
)  # fmt: skip


class _Open:
    """What takes all arguments and says nothing of them: a class that cannot be read, a tensor."""

    def __init__(self, **_: Any) -> None: ...


_KNOWN: dict[str, Any] = {
    **{name: getattr(builtins, name) for name in _PLAIN},
    **{
        "math": math,
        "require": require,
        "require_choices": require_choices,
        "require_at_least": require_at_least,
        "require_positive": require_positive,
        "ConfigError": ConfigError,
        "Literal": Literal,
        "Tensor": _Open,
    },
    **{
        each.__name__: each
        for each in (check_alternation, require_choice, require_dropout, require_size, require_sizes)
    },
}
_METHODS = ("items", "keys", "values", "isfinite", "isnan", "isinf", "is_integer")
_MAY_FAIL = (NameError, AttributeError, TypeError, KeyError, IndexError, UnreadableError, ZeroDivisionError)


def rehearse(config: Mapping[str, Any]) -> None:
    """Refuse what constructors will refuse, in the order in which an experiment is built.

    Args:
        config: a resolved configuration.

    Raises:
        ConfigError: as the constructor would.
    """
    check_name(config["name"] or "run")
    data = {**config["data"], "augmentation": None}
    sections = {name: static.load(path) for name, path in catalog.GROUPS.items()}
    construct(_READ, sections["data"], data, ("data", "data"), {})
    construct(_READ, sections["federation"], config["federation"], ("federation", "federation"), {})
    check_flags({name: value for name, value in config["trainer"].items() if value is not None})
    build_with(_READ, config["model"], "model")
    build_with(_READ, config["method"], "method", {"model": _Open()})
    build_with(_READ, config["optimizer"], "optimizer")


def _load(path: str, key: str) -> Any:
    try:
        cls = static.load(path, key)
        static.parameters(cls)
        return cls
    except UnreadableError:
        return _Open


def _make(cls: Any, given: Mapping[str, Any]) -> Any:
    """Run what a constructor says of its arguments; returns a stand-in that has them, and defaults, as attributes."""
    if not isinstance(cls, static.StaticClass):
        return _Open()
    known = static.parameters(cls)
    values = {name: given.get(name, default) for name, (_, default, _) in known.items()}
    values = {name: value for name, value in values.items() if value is not static.EMPTY}
    made: Any = object.__new__(cls)  # type: ignore[arg-type]
    made.__dict__.update(values)
    space = {"__builtins__": {}, **_KNOWN, **_constants(cls), **values, "self": made}
    for code in _checks(cls):
        with suppress(*_MAY_FAIL):
            exec(code, space)
    return made


_READ = Maker(_load, _make)


@lru_cache
def _constructor(cls: type) -> tuple[str, list[ast.stmt]]:
    """The module and the body of the constructor that a class has; of a dataclass, of what follows it."""
    for owner in cls.__mro__[:-1]:
        source: Named = owner.source  # type: ignore[attr-defined]
        functions = {each.name: each for each in source.node.body if isinstance(each, ast.FunctionDef)}  # type: ignore[union-attr]
        found = functions.get("__init__") or functions.get("__post_init__")
        if found is not None:
            return source.module, found.body
    return cls.__module__, []


@lru_cache
def _constants(cls: type) -> dict[str, Any]:
    """The constants of its module that a constructor uses, and the aliases of types."""
    module, body = _constructor(cls)
    found: dict[str, Any] = {}
    for name in {each.id for statement in body for each in ast.walk(statement) if isinstance(each, ast.Name)}:
        named = lookup(module, name)
        if named is not None and isinstance(named.node, ast.expr):
            for read in (static.constant, static.evaluate):
                with suppress(UnreadableError, TypeError):
                    found.setdefault(name, read(named.node, named.module))
    return found


@lru_cache
def _checks(cls: type) -> tuple[CodeType, ...]:
    """The lines of a constructor that can be run by themselves."""
    module, body = _constructor(cls)
    known = {*_KNOWN, *_constants(cls), *static.parameters(cls), "self", "Literal"}
    found = []
    for statement in body:
        if _is_plain(statement, known):
            known |= {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and _is_set(each)}
            found.append(compile(ast.Module([statement], []), module, "exec"))
    return tuple(found)


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_plain(statement: ast.stmt, known: set[str]) -> bool:
    """Whether a statement is a check, or prepares one: it uses and calls nothing but what is known."""
    if not isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.For, ast.If)):
        return False
    nodes = list(ast.walk(statement))
    own = {each.id for each in nodes if isinstance(each, ast.Name) and _is_set(each)}
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    calls = [each.func for each in nodes if isinstance(each, ast.Call)]
    return names <= known | own and all(
        each.id in _KNOWN if isinstance(each, ast.Name) else getattr(each, "attr", "") in _METHODS for each in calls
    )
