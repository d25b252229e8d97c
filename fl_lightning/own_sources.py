"""The files of code of one's own that a configuration names a class of: found and read, never imported."""

from __future__ import annotations

import ast
import hashlib
import inspect
import marshal
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fl_lightning.errors import is_installed
from fl_lightning.files import LOADED

_IMPORTED: dict[str, tuple[ModuleSpec | None, str, Any]] = {}
"""Modules of one's own that this process has imported -> what told that import from a later one, the file's digest when
it was last found to be what runs, and what the module did beside its functions."""
_ASIDE = frozenset({"logger", "federation.callbacks"})
"""Sections whose classes change no number."""
_MADE_ANEW = frozenset({"__dict__", "__weakref__", "__doc__", "_abc_impl", "__firstlineno__", "__static_attributes__"})
"""What no class shares with another that was made of the same text."""


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
    """The modules whose files hold something else by now than what this process has imported and goes on with.

    Functions are held against the file by their code, so that they may be changed in place (IPython's autoreload).
    What else a module does is held against what it did when it was last looked at, and for the first time against what
    Python has kept of the import (``__pycache__``), where it has; `importlib.reload` begins anew. Of a file that nobody
    has touched in this process's time functions may be other ones: decorators make them anew (typeguard's).

    Args:
        sources: the files now, as `own_sources` gives them.
    """
    edited = []
    for name, digest in sources.items():
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is None or spec is None:
            continue
        known, seen, before = _IMPORTED.get(name, (None, "", None))
        if known is spec and seen == digest:
            continue
        # what another loader makes of a file, as pytest's does, is its own matter: there the whole text counts
        code = _compiled(name) if type(spec.loader) is SourceFileLoader else None
        now = digest if code is None else _signature(code, outline=True)
        if known is not spec:
            kept = None if code is None else _kept(spec)
            before = now if kept is None else _signature(kept, outline=True)
        same = now == before and (code is None or _is_older(module) or _runs(module, code))
        _IMPORTED[name] = spec, digest if same else "", before
        if not same:
            edited.append(name)
    return edited


def _is_older(module: ModuleType) -> bool:
    """Whether a module's file was last touched before this process imported the package."""
    try:
        status = os.stat(module.__file__ or "")
    except OSError:
        return False
    return max(status.st_mtime, status.st_ctime) < LOADED


def _compiled(name: str) -> CodeType:
    """A module's file as it is now; what is no Python is nothing."""
    file = _file_of(name)
    with suppress(OSError, SyntaxError, ValueError):
        return compile(file.read_bytes() if file else b"", str(file), "exec", dont_inherit=True)
    return compile(b"", str(file), "exec", dont_inherit=True)


def _kept(spec: ModuleSpec) -> CodeType | None:
    """What Python keeps of a module's last import, of any process; None where it keeps nothing, or cannot."""
    if sys.dont_write_bytecode or spec.cached is None or not os.access(os.path.dirname(spec.cached), os.W_OK):
        return None
    with suppress(OSError, EOFError, TypeError, ValueError):
        kept = Path(spec.cached).read_bytes()
        code = marshal.loads(kept[16:]) if kept[:4] == MAGIC_NUMBER else None
        return code if isinstance(code, CodeType) else None
    return None


def _signature(code: CodeType, outline: bool = False) -> tuple[Any, ...]:
    """What code does, wherever it stands: nothing of lines and files.

    Args:
        code: of a module, a class or a function.
        outline: leave out what is within named functions.
    """
    if outline and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
        return (code.co_name,)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    flags = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    constants = code.co_consts
    if "__static_attributes__" in code.co_names:  # Python 3.13's, in another order with every compilation
        constants = tuple(tuple(sorted(each)) if _are_texts(each) else each for each in constants)
    return code.co_name, arguments, flags, names, code.co_code, _constant(constants, outline)


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


def _constant(value: Any, outline: bool) -> Any:
    """A constant with its type: 1 is not 1.0."""
    if isinstance(value, CodeType):
        return _signature(value, outline)
    if isinstance(value, tuple):
        return tuple(_constant(each, outline) for each in value)
    if isinstance(value, frozenset):
        return frozenset(_constant(each, outline) for each in value)
    return type(value), repr(value)


def _runs(module: ModuleType, code: CodeType) -> bool:
    """Whether the functions of a module, and of its classes, are all of this code."""
    known, inner = set(), [code]
    while inner:
        one = inner.pop()
        known.add(_signature(one))
        inner += [each for each in one.co_consts if isinstance(each, CodeType)]
    named = [value for name, value in vars(module).items() if name in code.co_names]  # a reload leaves what is gone
    own = (one for one in _functions(module.__name__, named) if one.co_filename == module.__file__)
    return all(_signature(one) in known for one in own)


def is_same(one: type, other: type) -> bool:
    """Whether two classes of one name do the same: autoreload brings an older one up to date, in place."""
    return [_contents(each) for each in one.__mro__] == [_contents(each) for each in other.__mro__]


def _contents(kind: type) -> dict[str, Any]:
    own = {name: value for name, value in vars(kind).items() if name not in _MADE_ANEW}
    codes = {name: [_signature(one) for one in _functions(kind.__module__, [value])] for name, value in own.items()}
    return {"": kind.__qualname__, **{name: codes[name] or repr(value) for name, value in own.items()}}


def _functions(module: str, values: list[Any]) -> Iterator[CodeType]:
    """The code of functions, of what they wrap, and of those of a module's classes."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            values += vars(value).values() if value.__module__ == module else ()
        elif isinstance(value, property):
            values += [value.fget, value.fset, value.fdel]
        elif isinstance(value, (staticmethod, classmethod)):
            values.append(value.__func__)
        elif isinstance(value, cached_property):
            values.append(value.func)
        elif isinstance(value, FunctionType):
            values.append(vars(value).get("__wrapped__"))
            yield value.__code__


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
