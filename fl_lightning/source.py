"""Sources of modules, found and read without importing them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

READ = ("fl_lightning", "lightning", "torch", "torchvision")
"""Packages whose sources are read; of others a class is known by its name alone."""
_OPAQUE = ("torch", "torch.nn", "torch._tensor", "torch.utils", "torch.distributed", "torchvision")
"""Modules of thousands of lines, or of compiled names: what they hold is known by its name alone."""


class UnreadableError(Exception):
    """The sources do not tell; who wants to know has to import."""


class Named(NamedTuple):
    """What a name in a module stands for.

    Args:
        module: where it is defined.
        name: its name there; empty for a module.
        node: its source: a class, or the expression of an assignment; None for a module, and where it is not read.
    """

    module: str
    name: str
    node: ast.ClassDef | ast.expr | None


@cache
def file_of(module: str) -> Path | None:
    """A module's file; None if there is none to be read."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package) if package in READ else None
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *parts)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file if file.is_file() else None


@cache  # without a limit: a class that were read twice would be two classes
def body(module: str) -> tuple[ast.stmt, ...]:
    """A module's statements; none if there is no file to be read."""
    file = file_of(module)
    return tuple(ast.parse(file.read_text(encoding="utf-8")).body) if file else ()


@cache
def statements(module: str) -> tuple[ast.stmt, ...]:
    """A module's statements, those under a condition among them; none if there is no file to be read."""
    return tuple(_flat(body(module)))


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _flat(statement.body)
            yield from _flat(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _flat(statement.body)
            yield from (inner for handler in statement.handlers for inner in _flat(handler.body))
        else:
            yield statement


@cache
def lookup(module: str, name: str) -> Named | None:
    """What a module calls `name`; None if it calls nothing so."""
    if file_of(module) is None or module in _OPAQUE:
        return Named(f"{module}.{name}", "", None) if file_of(f"{module}.{name}") else Named(module, name, None)
    for statement in statements(module):
        if (found := _bound(statement, module, name)) is not None:
            return found
    return Named(f"{module}.{name}", "", None) if file_of(f"{module}.{name}") else None


def _bound(statement: ast.stmt, module: str, name: str) -> Named | None:
    if isinstance(statement, ast.ClassDef):
        return Named(module, name, statement) if statement.name == name else None
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Named(module, name, None) if statement.name == name else None
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        ours = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        return Named(module, name, statement.value) if ours and statement.value is not None else None
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if name == (alias.asname or alias.name.partition(".")[0]):
                return Named(alias.name if alias.asname else name, "", None)
    if isinstance(statement, ast.ImportFrom):
        return _imported(statement, module, name)
    return None


def _imported(statement: ast.ImportFrom, module: str, name: str) -> Named | None:
    for alias in statement.names:
        if name == (alias.asname or alias.name):
            origin = _origin(statement, module)
            return lookup(origin, alias.name) if origin != module else None  # a package's own part
    return None


def _origin(statement: ast.ImportFrom, module: str) -> str:
    """The module that a statement imports from."""
    if not statement.level:
        return statement.module or ""
    file = file_of(module)
    up = statement.level - (file is not None and file.name == "__init__.py")
    parts = module.split(".")[: len(module.split(".")) - up]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


@cache
def exports(module: str) -> tuple[str, ...]:
    """The names that a package's own file imports or defines, in their order."""
    names: dict[str, None] = {}
    for statement in statements(module):
        if isinstance(statement, ast.ImportFrom):
            names |= dict.fromkeys(alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.ClassDef):
            names[statement.name] = None
    return tuple(name for name in names if name != "*" and not name.startswith("_"))


def is_standard(module: str) -> bool:
    """Whether a module is of Python's own library, or of the one that backs its types."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package == "typing_extensions"
