"""The files of code of one's own that a configuration names a class of: found and read, never imported."""

from __future__ import annotations

import ast
import hashlib
import inspect
import marshal
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from fl_lightning.errors import is_installed
from fl_lightning.files import LOADED

_IMPORTED: dict[str, tuple[ModuleSpec, str]] = {}
"""Modules of one's own that this process has imported -> what told that import from a later one, and what was in it."""
_ASIDE = frozenset({"logger", "federation.callbacks"})
"""Sections whose classes change no number."""
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"})
"""What two classes of one text do not share, or what does nothing."""


def own_sources(config: Mapping[str, Any]) -> dict[str, str]:
    """What the files hold in which a configuration's own classes stand, and what they import of one's own.

    Returns:
        The file, by its module's name -> first digits of its SHA-256; what is not found, or installed, is left out.
    """
    found: dict[str, str] = {}
    for class_path in _class_paths(config):
        _add(class_path.rpartition(".")[0], found)
    return dict(sorted(found.items()))


def imported_sources(kind: type) -> dict[str, str]:
    """What the files hold that the file of a class imports of one's own, and that these import, as `own_sources` says.

    Args:
        kind: a class; its file may be a script.

    Raises:
        OSError: if it stands in no file.
        TypeError: likewise.
        SyntaxError: if the file has been edited since to something that is no Python.
    """
    file, module = Path(inspect.getfile(kind)), kind.__module__
    found: dict[str, str] = {}
    for name in _imported(ast.parse(file.read_bytes()), _package_of(module, file)):
        _add(name, found)
    return dict(sorted(found.items()))


def source_of(kind: type) -> dict[str, str]:
    """What the file holds in which a class stands, and those of one's own that it imports, as `own_sources` says."""
    found: dict[str, str] = {}
    _add(kind.__module__, found)
    return found


def edited_since_import(sources: Mapping[str, str]) -> list[str]:
    """The modules that this process goes on with as they were, though their files hold something else by now.

    Args:
        sources: the files now, as `own_sources` gives them. What is seen here for the first time is taken for what was
            imported, unless Python's copy of it (``__pycache__``) says otherwise; `importlib.reload` begins anew.
    """
    edited = []
    for name, digest in sources.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            continue
        known, before = _IMPORTED.get(name, (None, ""))
        if known is not spec and not _was_saved_since(spec):
            _IMPORTED[name] = spec, digest
        elif known is not spec or before != digest:
            edited.append(name)
    return edited


def _was_saved_since(spec: ModuleSpec) -> bool:
    """Whether a file was saved in this process's time, and by Python's copy something else was imported before.

    The copy is of the last import by any process: where another one has imported the file since, it tells nothing.
    """
    with suppress(OSError, EOFError, TypeError, ValueError):  # no file, no copy, or a damaged one
        file, kept = Path(spec.origin or ""), Path(spec.cached or "")
        if sys.dont_write_bytecode or not os.access(kept.parent, os.W_OK):  # it is none of this process's import
            return False
        status, copy = file.stat(), kept.read_bytes()
        magic, flags, of = copy[:4], copy[4:8], copy[8:16]
        now = struct.pack("<II", int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
        told = magic == MAGIC_NUMBER and not any(flags)  # by the file's time, not by its hash
        if told and of != now and max(status.st_mtime, status.st_ctime) > LOADED:
            return bool(marshal.loads(copy[16:]) != compile(file.read_bytes(), file, "exec", dont_inherit=True))
    return False


def is_same(one: type, other: type) -> bool:
    """Whether two classes of one name do the same, as far as can be told without their objects' addresses.

    IPython's autoreload brings an old class up to date in place, and a reload makes one of an unedited file anew.
    """
    return [_told_of(each) for each in one.__mro__] == [_told_of(each) for each in other.__mro__]


def _told_of(kind: type) -> dict[str, Any]:
    own = ((name, value) for name, value in vars(kind).items() if name not in _OF_CLASSES)
    return {"": (kind.__module__, kind.__qualname__), **{name: _told(value, set()) for name, value in own}}


def _told(value: Any, known: set[int]) -> Any:
    """What a value is: of a function its code, defaults and what it closes over; of most others their `repr`."""
    if id(value) in known:
        return "again"
    known, kind = {*known, id(value)}, value if isinstance(value, type) else type(value)
    name = kind.__module__, kind.__qualname__  # a reload makes another class of that name
    if isinstance(value, type):
        return name
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # some may be empty
        return value.__code__, *(_told(own, known) for own in (value.__defaults__, value.__kwdefaults__, cells))
    if isinstance(value, property):
        return tuple(_told(own, known) for own in (value.fget, value.fset, value.fdel))
    if isinstance(value, (list, tuple)):
        return name, [_told(own, known) for own in value]
    if isinstance(value, dict):
        return name, [(key, _told(own, known)) for key, own in value.items()]
    for inner in ("__func__", "__wrapped__", "func"):  # class methods, caches, cached properties, partial functions
        if hasattr(value, inner):
            more = [getattr(value, given, None) for given in ("args", "keywords")]
            return name, _told(getattr(value, inner), known), _told(more, known)
    return name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _class_paths(node: Any, place: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        named = node.get("class_path")
        if isinstance(named, str):
            yield named
        for key, value in node.items():
            inside = f"{place}.{key}" if place else str(key)
            if inside not in _ASIDE:
                yield from _class_paths(value, inside)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _class_paths(value, place)


def _add(module: str, found: dict[str, str]) -> None:
    """Take down a module's file, those that it imports, and those of the packages that it lies in: they run first."""
    package, _, _ = module.rpartition(".")
    if package:
        _add(package, found)
    file = None if module in found else _file_of(module)
    if file is None:
        return
    with suppress(OSError, SyntaxError, ValueError):
        text = file.read_bytes()
        found[module] = hashlib.sha256(text).hexdigest()[:16]
        for name in _imported(ast.parse(text), _package_of(module, file)):
            _add(name, found)


def _package_of(module: str, file: Path) -> str:
    """What the relative imports of a module start from."""
    return module if file.name == "__init__.py" else module.rpartition(".")[0]


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Names of the modules that a file imports, or may: what follows ``from a import`` is one, or stands in ``a``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            yield home
            yield from (f"{home}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    """A module's file where it is one's own: in the folder of the command, or on Python's path and not installed."""
    first, *inner = module.split(".")
    if first == "fl_lightning" or not all(part.isidentifier() for part in (first, *inner)):
        return None
    spec = _spec_of(first)
    if spec is None:
        return None
    if not inner:
        return _own(Path(spec.origin or ""))
    for base in (Path(place).joinpath(*inner) for place in spec.submodule_search_locations or ()):
        for file in (base / "__init__.py", base.with_suffix(".py")):  # a package goes before a module, as in an import
            if file.is_file():
                return _own(file)
    return None


def _spec_of(name: str) -> ModuleSpec | None:
    """Where an import of a module or package without a dot would find it; none is imported for that."""
    here = os.getcwd()
    spec = PathFinder.find_spec(name, sys.path if here in sys.path else [here, *sys.path])
    if spec is None:
        with suppress(ImportError, ValueError):  # what an editable installation has found by a hook of its own
            spec = find_spec(name)
    return spec


def _own(file: Path) -> Path | None:
    return file if file.suffix == ".py" and file.is_file() and not is_installed(file.resolve()) else None
