"""The direction of dependencies, read off the source."""

import ast
import re
from pathlib import Path

import pytest

import fl_lightning

ROOT = Path(fl_lightning.__file__).parent
PACKAGE = "fl_lightning"
FLOORS = ("core", "data", "federation", "losses", "methods", "models", "report")

# What a floor may import at run time, beside itself and the modules at the root that stand below everything.
BELOW = ("errors", "seeding")
ALLOWED = {
    "models": set(),
    "data": set(),
    "report": {"data"},
    "core": {"models"},
    "losses": {"core", "models"},
    "methods": {"losses", "core", "models"},
    "federation": {"core", "models", "data", "report"},
}


def is_type_checking(test):
    return "TYPE_CHECKING" in ast.dump(test)


def runtime_imports(tree):
    """Every import that can run, those inside functions too; blocks for the type checker are left out."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and is_type_checking(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def resolve(name):
    """The module of this package that an import brings in; None for others."""
    while name.startswith(PACKAGE):
        if name in SOURCES:
            return name
        name = name.rpartition(".")[0]
    return None


def imports_of(name):
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    return {found for found in map(resolve, runtime_imports(tree)) if found not in (None, name)}


GRAPH = {name: imports_of(name) for name in SOURCES}


def floor_of(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def method_names():
    """Names of the classes in `methods/` that go by the name of a method: those that a module there defines."""
    for name, path in SOURCES.items():
        if floor_of(name) == "methods":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                bases = {ast.unparse(base) for base in getattr(node, "bases", ())}
                if isinstance(node, ast.ClassDef) and "ClientModule" in bases:
                    yield node.name


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) or hasattr(node, "body"):
            for inner in node.body if isinstance(node.body, list) else ():
                if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                    yield inner.value


def words(tree):
    """Identifiers and texts of the code; docstrings may cite papers."""
    prose = set(map(id, docstrings(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.mark.parametrize("floor", FLOORS)
def test_floor_imports_only_what_lies_below_it(floor):
    allowed = {floor, *BELOW, *ALLOWED[floor], ""}
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        if floor_of(name) == floor
        for target in sorted(targets)
        if floor_of(target) not in allowed
    ]
    assert wrong == []


def test_what_lies_below_everything_imports_nothing_of_the_package():
    assert [f"{below} imports {GRAPH[f'{PACKAGE}.{below}']}" for below in BELOW if GRAPH[f"{PACKAGE}.{below}"]] == []


def test_no_method_imports_another():
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if floor_of(name) == floor_of(target) == "methods" and target != f"{PACKAGE}.methods"
    ]
    assert wrong == []


def test_there_are_no_import_cycles():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in sorted(GRAPH[name]):
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(GRAPH):
        visit(name)


def test_nothing_but_methods_and_losses_knows_a_method_by_name():
    """Models and partitions may name the paper that they come from."""
    names = sorted(set(method_names()))
    assert len(names) >= 4
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b(?!-T)")
    wrong = [
        f"{name}: {word}"
        for name, path in SOURCES.items()
        if floor_of(name) not in ("methods", "losses", "models", "data")
        for word in words(ast.parse(path.read_text(encoding="utf-8")))
        if pattern.search(word)
    ]
    assert wrong == []


def test_a_method_is_one_class_that_nobody_subclasses():
    names = set(method_names())
    wrong = []
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                wrong += [f"{module}: {node.name}" for base in node.bases if ast.unparse(base) in names]
    assert wrong == []
