"""What the package offers, read from its sources without importing them: a list answers at once."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parent
KINDS = {
    "methods": ("methods", "Method"),
    "models": ("models", "SplitModel"),
    "datasets": ("data", "Dataset"),
    "partitions": ("data", "Partition"),
    "exchanges": ("federation", "Exchange"),
    "terms": ("losses", "Term"),
}
"""Kind -> (folder, base class)."""


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
    folder, base = KINDS[kind]
    found: dict[str, tuple[str, ast.ClassDef]] = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        module = f"fl_lightning.{folder}.{path.stem}"
        found |= {name: (module, node) for name, node in _classes_of_file(path).items()}
    names = {base}
    while more := {name for name, (_, node) in found.items() if name not in names and names & set(_bases(node))}:
        names |= more
    public = [name for name in sorted(names - {base}) if name in found and not name.startswith("_")]
    return tuple(_entry(name, found) for name in public if not _is_abstract(found[name][1]))


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


def _is_abstract(node: ast.ClassDef) -> bool:
    return "ABC" in _bases(node)


def _paper(node: ast.ClassDef) -> str:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id == "paper" and isinstance(value, ast.Constant):
            return str(value.value)
    return ""


@lru_cache
def parameters(class_path: str) -> tuple[str, ...]:
    """Names of the constructor's parameters of one of the package's own classes.

    Args:
        class_path: e.g. ``fl_lightning.federation.loop.FederatedLoop``.
    """
    module, _, name = class_path.rpartition(".")
    path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    classes = {**_classes(path.parent), **_classes_of_file(path)}
    node: ast.ClassDef | None = classes[name]
    while node is not None:
        own = _own_parameters(node)
        if own is not None:
            return own
        node = next((classes[base] for base in _bases(node) if base in classes), None)
    return ()


def _classes(folder: Path) -> dict[str, ast.ClassDef]:
    return {name: node for path in sorted(folder.glob("*.py")) for name, node in _classes_of_file(path).items()}


def _classes_of_file(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def _own_parameters(node: ast.ClassDef) -> tuple[str, ...] | None:
    """Parameters of the class's own constructor, or fields of a dataclass; None if it inherits its constructor."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = (*statement.args.args, *statement.args.kwonlyargs)
            return tuple(argument.arg for argument in arguments if argument.arg != "self")
    if any(isinstance(d, ast.Call) and getattr(d.func, "id", "") == "dataclass" for d in node.decorator_list):
        return tuple(s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name))
    return None


def modules(kind: str) -> list[str]:
    """The modules that hold the classes of a kind."""
    return sorted({entry.class_path.rpartition(".")[0] for entry in entries(kind)})
