"""Classes as their sources describe them: names, bases, constructors' types and defaults, read without importing.

Such a class stands in for the real one where a configuration is checked. It has its name, module, bases and abstract
methods; `parameters` reads its constructor. It is never called.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Any, Literal

from fl_lightning.source import Named, UnreadableError, exports, file_of, is_standard, lookup, statements

EMPTY = inspect.Parameter.empty
_BUILTINS: dict[str, Any] = {
    each.__name__: each
    for each in (bool, int, float, complex, str, bytes, list, dict, tuple, set, frozenset, type, object)
}
_CALLS: dict[str, Any] = {each.__name__: each for each in (float, tuple, list, dict, set, frozenset)}


class StaticClass(ABCMeta):
    """A class that was read; `source` is None where only its name is known."""

    source: Named | None


def load(path: str, key: str = "class_path") -> type:
    """The class that a dotted path names.

    Raises:
        UnreadableError: if the sources do not tell.
    """
    module, _, name = path.rpartition(".")
    found = lookup(module, name)
    if found is None or found.node is None or not isinstance(found.node, ast.ClassDef):
        raise UnreadableError(f"{key}: {path}")
    return class_of(found)


@cache
def class_of(found: Named) -> type:
    """The class that stands for a source."""
    node = found.node
    if not isinstance(node, ast.ClassDef):
        return StaticClass(found.name, (), {"__module__": found.module, "source": None})
    bases = [base for each in node.bases if (base := _base(each, found.module)) is not None]
    enums = [base for base in bases if isinstance(base, type) and issubclass(base, Enum)]
    if enums:
        return _enum(found, node, enums[0])
    space: dict[str, Any] = {"__module__": found.module, "__doc__": _docstring(found, node), "source": found}
    if is_dataclass(node):
        space["__dataclass_fields__"] = {}
    if any(keyword.arg == "metaclass" for keyword in node.keywords) or _is_abstract(node, bases):
        space["__abstracts__"] = True
    abstracts = any(getattr(base, "__abstracts__", False) for base in bases) or "__abstracts__" in space
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name not in ("__init__", "__new__", "__call__"):
            space[statement.name] = _method(statement, abstracts)
    return StaticClass(found.name, tuple(bases), space)


def _docstring(found: Named, node: ast.ClassDef) -> str | None:
    """What stands in the class, or is given to it afterwards: ``SGD.__doc__ = …``."""
    own = ast.get_docstring(node)
    for statement in statements(found.module) if own is None else ():
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == f"{found.name}.__doc__":
            with suppress(UnreadableError):
                return inspect.cleandoc(constant(statement.value, found.module))
    return own


def _base(node: ast.expr, module: str) -> Any:
    """A base class; None for those that only typing knows."""
    inner = node.value if isinstance(node, ast.Subscript) else node
    base = evaluate(inner, module)
    plain = isinstance(base, type) and base is not object and base.__module__ not in ("typing", "abc")
    return base if plain and (isinstance(base, StaticClass) or issubclass(base, Enum)) else None


def _is_abstract(node: ast.ClassDef, bases: list[Any]) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "ABC" for base in node.bases)


def _method(node: ast.FunctionDef, abstracts: bool) -> Any:
    def method() -> None: ...

    names = {getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list}
    method.__isabstractmethod__ = abstracts and "abstractmethod" in names  # type: ignore[attr-defined]
    return method


def _enum(found: Named, node: ast.ClassDef, base: type) -> type:
    members = {
        target.id: constant(statement.value, found.module)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return base(found.name, members, module=found.module)  # type: ignore[call-arg,no-any-return]


# --- types ------------------------------------------------------------------------------------------------------------


def evaluate(node: ast.expr, module: str) -> Any:
    """The type that an annotation, or an alias, stands for.

    Raises:
        UnreadableError: if the sources do not tell.
    """
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return evaluate(ast.parse(node.value, mode="eval").body, module)
        return node.value
    if isinstance(node, ast.Name):
        return _named(lookup(module, node.id), node.id)
    if isinstance(node, ast.Attribute):
        return _named(lookup(_module(node.value, module), node.attr), node.attr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return evaluate(node.left, module) | evaluate(node.right, module)
    if isinstance(node, ast.List):
        return [evaluate(each, module) for each in node.elts]
    if isinstance(node, ast.Subscript):
        origin = evaluate(node.value, module)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if origin is Literal:
            return Literal[tuple(constant(each, module) for each in inner)]  # type: ignore[valid-type]
        if isinstance(origin, StaticClass):  # a generic one
            return origin
        arguments = tuple(evaluate(each, module) for each in inner)
        return origin[arguments if len(arguments) > 1 else arguments[0]]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TypeVar":
        bound = next((each.value for each in node.keywords if each.arg == "bound"), None)
        return evaluate(bound, module) if bound is not None else Any
    raise UnreadableError(ast.unparse(node))


def _named(found: Named | None, name: str) -> Any:
    if found is None:
        if name in _BUILTINS:
            return _BUILTINS[name]
        raise UnreadableError(name)
    if not found.name:
        raise UnreadableError(found.module)
    if is_standard(found.module):
        return getattr(importlib.import_module(found.module), found.name)
    if found.node is None or isinstance(found.node, ast.ClassDef):
        return class_of(found)
    return evaluate(found.node, found.module)


def _module(node: ast.expr, module: str) -> str:
    """The module that an expression names."""
    if isinstance(node, ast.Name):
        found = lookup(module, node.id)
    elif isinstance(node, ast.Attribute):
        found = lookup(_module(node.value, module), node.attr)
    else:
        found = None
    if found is None:
        raise UnreadableError(ast.unparse(node))
    if found.name and not is_standard(found.module):  # a name of a package that is not read
        return f"{found.module}.{found.name}"
    return found.module


# --- values -----------------------------------------------------------------------------------------------------------


def constant(node: ast.expr, module: str) -> Any:
    """The value of an expression of literals, constants of the module and a few plain calls.

    Raises:
        UnreadableError: for any other.
    """
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        pass
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return kind(constant(each, module) for each in node.elts)
    if isinstance(node, ast.Name):
        found = lookup(module, node.id)
        if found is not None and isinstance(found.node, ast.expr):
            return constant(found.node, found.module)
    if isinstance(node, ast.Call):
        return _called(node, module)
    if isinstance(node, ast.Attribute):
        with _unreadable(node):
            return getattr(evaluate(node.value, module), node.attr)  # a member of an Enum
    if isinstance(node, ast.BinOp):
        return _operated(node, module)
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.FormattedValue) else each for each in node.values)
        return "".join(str(constant(each, module)) for each in parts)
    raise UnreadableError(ast.unparse(node))


class _unreadable:
    def __init__(self, node: ast.expr) -> None:
        self.node = node

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if error is not None and not isinstance(error, UnreadableError):
            raise UnreadableError(ast.unparse(self.node)) from error


def _operated(node: ast.BinOp, module: str) -> Any:
    left, right = constant(node.left, module), constant(node.right, module)
    if isinstance(node.op, ast.Pow):
        return left**right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Add):
        return left + right
    raise UnreadableError(ast.unparse(node))


def _called(node: ast.Call, module: str) -> Any:
    arguments = [constant(each, module) for each in node.args]
    named = {str(each.arg): constant(each.value, module) for each in node.keywords}
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _CALLS and lookup(module, name) is None:
        return _CALLS[name](*arguments, **named)
    kind = evaluate(node.func, module)
    if isinstance(kind, StaticClass) and hasattr(kind, "__dataclass_fields__") and not arguments:
        return default_of(kind, named)
    if getattr(kind, "__module__", "") == "datetime":
        return kind(*arguments, **named)
    raise UnreadableError(ast.unparse(node))


def default_of(cls: type, given: Mapping[str, Any]) -> Any:
    """A dataclass's stand-in with these fields, and defaults elsewhere."""
    made: Any = object.__new__(cls)
    for name, (_, default, _) in parameters(cls).items():
        setattr(made, name, given.get(name, default))
    return made


# --- constructors -----------------------------------------------------------------------------------------------------


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass by its decorator."""
    names = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
    return any(getattr(name, "attr", getattr(name, "id", "")) == "dataclass" for name in names)


@cache
def parameters(cls: type) -> Mapping[str, tuple[Any, Any, str]]:
    """A constructor's parameters: type, default (`EMPTY` for none) and what its docstring says, by name.

    Raises:
        UnreadableError: if the sources do not tell them all.
    """
    for owner in cls.__mro__[:-1]:
        source: Named | None = getattr(owner, "source", None) if isinstance(owner, StaticClass) else None
        if source is None or not isinstance(source.node, ast.ClassDef):
            raise UnreadableError(owner.__name__)
        constructor = constructor_of(source.node)
        if constructor is not None:
            found = dict(_arguments(constructor, source.module))
            docs = _documented(cls, constructor)
            return {name: (hint, default, docs.get(name, "")) for name, (hint, default) in found.items()}
        if is_dataclass(source.node):
            return _fields(cls)
        if any(isinstance(each, ast.FunctionDef) and each.name == "__new__" for each in source.node.body):
            raise UnreadableError(owner.__name__)
    return {}


def constructor_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The source of a class's own constructor."""
    return next((s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)


def _arguments(constructor: ast.FunctionDef, module: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    own = constructor.args
    if own.vararg is not None or own.kwarg is not None:  # who knows where they are handed on to
        raise UnreadableError(f"{module}: **kwargs")
    placed = [*own.posonlyargs, *own.args]
    defaults: list[ast.expr | None] = [None] * (len(placed) - len(own.defaults)) + list(own.defaults)
    for argument, default in [*zip(placed, defaults, strict=True), *zip(own.kwonlyargs, own.kw_defaults, strict=True)]:
        if argument.arg != "self":
            hint = EMPTY if argument.annotation is None else evaluate(argument.annotation, module)
            yield argument.arg, (hint, EMPTY if default is None else constant(default, module))


def _fields(cls: type) -> dict[str, tuple[Any, Any, str]]:
    found: dict[str, tuple[Any, Any]] = {}
    for owner in reversed(cls.__mro__[:-1]):
        source = owner.source  # type: ignore[attr-defined]
        for statement in source.node.body if is_dataclass(source.node) else ():
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                default = _field_default(statement.value, source.module)
                name = statement.target.id
                if default is not ... and "ClassVar" not in ast.unparse(statement.annotation):
                    found[name] = (evaluate(statement.annotation, source.module), default)
    docs = _documented(cls, None)
    return {name: (hint, default, docs.get(name, "")) for name, (hint, default) in found.items()}


def _field_default(node: ast.expr | None, module: str) -> Any:
    """A field's default; `...` for one that is no argument."""
    if node is None:
        return EMPTY
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
        options = {each.arg: each.value for each in node.keywords}
        if "init" in options:
            return ...
        if "default" in options:
            return constant(options["default"], module)
        factory = options.get("default_factory")
        if factory is None:
            return EMPTY
        if isinstance(factory, ast.Lambda):
            return constant(factory.body, module)
        return constant(ast.Call(factory, [], []), module)
    return constant(node, module)


def _documented(cls: type, constructor: ast.FunctionDef | None) -> dict[str, str]:
    """What docstrings say of arguments: base classes' first, then the constructor's, then the class's own."""
    import docstring_parser

    docs = [owner.__doc__ for owner in reversed(cls.__mro__[1:-1])]
    docs += [ast.get_docstring(constructor) if constructor is not None else None, cls.__doc__]
    found: dict[str, str] = {}
    for doc in filter(None, docs):
        with suppress(ValueError, docstring_parser.ParseError):
            parsed = docstring_parser.parse(doc)
            found |= {each.arg_name: each.description for each in parsed.params if each.description}
    return found


# --- what checkers ask ------------------------------------------------------------------------------------------------


def offered(package: str, base: type, wanted: str = "") -> dict[str, type]:
    """The classes of a package that derive from a class, by the names under which it offers them.

    Args:
        package: e.g. ``torch.optim``.
        base: the class.
        wanted: a name; others are not looked at.
    """
    found = {}
    for name in (each for each in exports(package) if wanted in ("", each)):
        named = lookup(package, name)
        if named is not None and isinstance(named.node, ast.ClassDef):
            cls = class_of(named)
            if issubclass(cls, base) and cls is not base and not inspect.isabstract(cls):
                found[name] = cls
    return found


def public_path(cls: type) -> str:
    """The shortest path under which a class is found: ``torch.optim.SGD``, not ``torch.optim.sgd.SGD``."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        file = file_of(module)
        if file is not None and cls.__name__ in file.read_text(encoding="utf-8"):
            found = lookup(module, cls.__name__)
            if found is not None and found.module == cls.__module__ and found.name == cls.__name__:
                return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__name__}"
