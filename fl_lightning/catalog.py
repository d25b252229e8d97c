"""What the package offers, read from its sources without importing them: a list answers at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fl_lightning.source import body

ROOT = Path(__file__).parent
KINDS = {
    "methods": ("methods", "fl_lightning.core.method.Method"),
    "models": ("models", "fl_lightning.models.split.SplitModel"),
    "datasets": ("data", "fl_lightning.data.dataset.Dataset"),
    "partitions": ("data", "fl_lightning.data.partitions.Partition"),
    "shifts": ("data", "fl_lightning.data.shifts.Shift"),
    "exchanges": ("federation", "fl_lightning.federation.exchange.Exchange"),
    "terms": ("losses", "fl_lightning.core.term.Term"),
    "server_optimizers": ("core", "fl_lightning.core.server_optimizer.ServerOptimizer"),
    "aggregators": ("core", "fl_lightning.core.aggregator.Aggregator"),
    "filters": ("federation", "fl_lightning.federation.wire.WireFilter"),
    "selections": ("federation", "fl_lightning.federation.selection.ClientSelection"),
}
"""Kind -> (folder, base class)."""
GROUPS = {
    "data": "fl_lightning.data.module.FederatedData",
    "federation": "fl_lightning.federation.settings.Federation",
}
"""Section -> the class whose constructor's parameters are its keys."""


@dataclass(frozen=True)
class Entry:
    """One class of the package: its short name, where it lives, its first docstring line and its paper."""

    name: str
    class_path: str
    summary: str
    paper: str


@lru_cache
def entries(kind: str) -> tuple[Entry, ...]:
    """The classes of a kind, by name. A new file in the folder is found by itself."""
    folder, base = KINDS[kind][0], KINDS[kind][1].rpartition(".")[2]
    found: dict[str, tuple[str, ast.ClassDef]] = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        module = f"fl_lightning.{folder}.{path.stem}"
        found |= {node.name: (module, node) for node in _body(module) if isinstance(node, ast.ClassDef)}
    names = {base}
    while more := {name for name, (_, node) in found.items() if name not in names and names & set(_bases(node))}:
        names |= more
    public = [name for name in sorted(names - {base}) if name in found and not name.startswith("_")]
    return tuple(_entry(name, found) for name in public if "ABC" not in _bases(found[name][1]))


@lru_cache
def path_of(kind: str, name: str) -> str | None:
    """The path of the class of a kind that goes by a name; reads the file that defines it, and no other."""
    folder, base = KINDS[kind][0], KINDS[kind][1].rpartition(".")[2]
    wanted = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE)
    for path in sorted((ROOT / folder).glob("*.py")):
        module = f"{ROOT.name}.{folder}.{path.stem}"
        if wanted.search(path.read_text(encoding="utf-8")) and (found := find(module, name)) is not None:
            concrete = not name.startswith("_") and "ABC" not in _bases(found[1])
            return f"{module}.{name}" if concrete and _derives(module, found[1], base) else None
    return None


def _derives(module: str, node: ast.ClassDef, base: str) -> bool:
    known = [(name, find(module, name)) for name in _bases(node)]
    return any(name == base or (found is not None and _derives(*found, base)) for name, found in known)


def _entry(name: str, found: Mapping[str, tuple[str, ast.ClassDef]]) -> Entry:
    module, node = found[name]
    summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    paper, bases = _paper(node), _bases(node)
    while not paper and bases:
        base = bases.pop(0)
        if base in found:
            paper = _paper(found[base][1])
            bases += _bases(found[base][1])
    return Entry(name, f"{module}.{name}", summary, paper)


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]


def _paper(node: ast.ClassDef) -> str:
    for statement in node.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == "paper" for target in targets):
                return str(statement.value.value)
    return ""


@lru_cache
def options(class_path: str) -> Mapping[str, str | None]:
    """The parameters of the constructor of one of the package's own classes, or the fields of a dataclass.

    Args:
        class_path: e.g. ``fl_lightning.data.module.FederatedData``.

    Returns:
        Each parameter's name -> the path of the dataclass that its annotation names, None where it names none.
    """
    module, _, name = class_path.rpartition(".")
    found = find(module, name)
    if found is None:
        return {}
    module, node = found
    own = _own_parameters(node)
    bases = [options(f"{module}.{base}") for base in _bases(node) if find(module, base)]
    if own is None:
        return next(iter(bases), {})
    inherited = {name: kind for base in reversed(bases) for name, kind in base.items()} if _is_dataclass(node) else {}
    return inherited | {name: _dataclass(module, annotation) for name, annotation in own}


def _dataclass(module: str, annotation: ast.expr | None) -> str | None:
    """The dataclass that an annotation is, alone or beside None."""
    if isinstance(annotation, ast.BinOp):
        return _dataclass(module, annotation.left) or _dataclass(module, annotation.right)
    found = find(module, annotation.id) if isinstance(annotation, ast.Name) else None
    return f"{found[0]}.{found[1].name}" if found and _is_dataclass(found[1]) else None


@lru_cache
def find(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The module that defines what a module calls `name`, and its source; None for what is no class of the package."""
    for node in _body(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module:
            original = next((alias.name for alias in node.names if name == (alias.asname or alias.name)), None)
            if original:
                return find(node.module, original)
    return None


def _body(module: str) -> Sequence[ast.stmt]:
    return body(module) if module.partition(".")[0] == ROOT.name else ()


def _own_parameters(node: ast.ClassDef) -> list[tuple[str, ast.expr | None]] | None:
    """Parameters of the class's own constructor, or fields of a dataclass; None if it inherits its constructor."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = (*statement.args.args, *statement.args.kwonlyargs)
            return [(argument.arg, argument.annotation) for argument in arguments if argument.arg != "self"]
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and not _is_made_later(s.value)]
    return [(ast.unparse(field.target), field.annotation) for field in fields] if _is_dataclass(node) else None


def _is_made_later(default: ast.expr | None) -> bool:
    """Whether a field is none of the constructor's: ``field(init=False)``."""
    return isinstance(default, ast.Call) and any(option.arg == "init" for option in default.keywords)


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list)
    return any(isinstance(name, ast.Name) and name.id == "dataclass" for name in names)


def modules(kind: str) -> list[str]:
    """The modules that hold the classes of a kind."""
    return sorted({entry.class_path.rpartition(".")[0] for entry in entries(kind)})
