"""The direction of dependencies, the size of what is written, and what a method may say: read off the source."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import fl_lightning
from fl_lightning.core.method import Method

ROOT = Path(fl_lightning.__file__).parent
CONTRIBUTING = ROOT.parent / "CONTRIBUTING.md"
PACKAGE = "fl_lightning"
FLOORS = ("core", "data", "federation", "losses", "methods", "models", "report")

# What a floor may import at run time, beside itself and the modules at the root that stand below everything.
BELOW = (
    "terminal", "errors", "archives", "files", "sealed", "source", "static", "identity", "shapes", "seeding", "catalog",
    "shipped", "reading", "resuming", "trust", "heap", "own_sources", "marks", "running_on", "own_methods",
)  # fmt: skip
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


def imports_in(tree, for_types):
    """Every import that can run, those inside functions too; those for the type checker, too, if so asked."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and is_type_checking(node.test) and not for_types:
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


@cache
def trees():
    """Every module's source; read once somebody asks, which most processes of a test run never do."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(name, for_types=False):
    return {found for found in map(resolve, imports_in(trees()[name], for_types)) if found not in (None, name)}


@cache
def graph():
    """Every module -> those of the package that it imports."""
    return {name: imports_of(name) for name in SOURCES}


def floor_of(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def method_names():
    """Names of the classes in `methods/` that go by the name of a method: those that a module there defines."""
    for name, tree in trees().items():
        if floor_of(name) == "methods":
            for node in tree.body:
                bases = {ast.unparse(base) for base in getattr(node, "bases", ())}
                if isinstance(node, ast.ClassDef) and "Method" in bases:
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
        for name, targets in graph().items()
        if floor_of(name) == floor
        for target in sorted(targets)
        if floor_of(target) not in allowed
    ]
    assert wrong == []


def test_what_lies_below_everything_imports_nothing_of_the_package_but_what_lies_below_it():
    for index, name in enumerate(BELOW):
        lower = {f"{PACKAGE}.{below}" for below in BELOW[:index]}
        assert graph()[f"{PACKAGE}.{name}"] <= lower, name


def test_the_wall_clock_which_can_be_set_back_measures_nothing():
    """How old a file is, is the one thing that it tells."""
    found = {
        path.name
        for path in SOURCES.values()
        if re.search(r"\btime\.time\(|\bdatetime\b.*\bnow\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"files.py"}


def test_no_method_imports_another():
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if floor_of(name) == floor_of(target) == "methods" and target != f"{PACKAGE}.methods"
    ]
    assert wrong == []


@pytest.mark.parametrize("for_types", [False, True], ids=["at run time", "for the type checker, too"])
def test_there_are_no_import_cycles(for_types):
    graph = {name: imports_of(name, for_types) for name in SOURCES}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in sorted(graph[name]):
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_nothing_but_methods_and_losses_knows_a_method_by_name():
    """Models and partitions may name the paper that they come from."""
    names = sorted(set(method_names()))
    assert len(names) >= 25
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b(?!-[TV])")
    wrong = [
        f"{name}: {word}"
        for name, tree in trees().items()
        if floor_of(name) not in ("methods", "losses", "models", "data")
        for word in words(tree)
        if pattern.search(word)
    ]
    assert wrong == []


def test_a_method_is_one_class_that_nobody_subclasses():
    names = set(method_names())
    wrong = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                wrong += [f"{module}: {node.name}" for base in node.bases if ast.unparse(base) in names]
    assert wrong == []


# --- what a method may say --------------------------------------------------------------------------------------------

MOST_NAMES = 24


@pytest.fixture
def method_says(mlp):
    """The names that a method may use or override: of the class, and of what its constructor sets."""
    method = Method(mlp())
    said = {*vars(Method), *Method.__annotations__, *vars(method), *method._modules}
    return sorted(name for name in said if not name.startswith("_") and name not in vars(nn.Module()) | vars(nn.Module))


def test_a_method_may_say_so_much_and_no_more(method_says):
    assert {"shared", "facts", "model", "local_step", "make_server"} < set(method_says)
    assert len(method_says) <= MOST_NAMES, method_says


def names_in_tables(text, heading):
    """Backticked names in the first column of the tables below a heading, up to the next heading."""
    section = re.search(rf"^{re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"{CONTRIBUTING.name} has no heading {heading!r}"
    first = section[1].split("\n\nState that", 1)[0]
    cells = [line.split("|")[1] for line in first.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_contributing_lists_exactly_what_a_method_may_say(method_says):
    listed = names_in_tables(CONTRIBUTING.read_text(encoding="utf-8"), "## What a method may say")
    assert [name for name, times in Counter(listed).items() if times > 1] == []
    assert sorted(listed) == method_says


OTHERS = {"self", "cls", "super()", "host", "step", "data", "client", "server", "message", "facts", "fit", "out"}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def defined_in(tree):
    """Names that a file defines: functions, classes, what is assigned to, and buffers and parameters by their names."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.register_"):
            yield from (ast.literal_eval(name) for name in node.args[:1] if isinstance(name, ast.Constant))


@pytest.mark.parametrize("floor", ["methods", "losses"])
def test_methods_and_losses_use_no_private_name_of_somebody_else(floor):
    wrong = []
    for name, tree in trees().items():
        if floor_of(name) == floor:
            own = set(defined_in(tree))
            wrong += [
                f"{name}:{node.lineno} {ast.unparse(node)}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
                if ast.unparse(node.value) in OTHERS
            ]
    assert wrong == []


# --- limits -----------------------------------------------------------------------------------------------------------

LONGEST_CLASS, MOST_METHODS = 250, 25  # lines without docstrings
LONGEST_FUNCTION, MOST_PARAMETERS = 60, 10
MOST_NOQA = 2  # a 1,000 lines
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def num_lines(node):
    """Lines of a class or a function, from its own to its last, without docstrings."""
    inside = [
        n for n in ast.walk(node) if isinstance(n, (ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(n, clean=False)
    ]
    prose = sum(n.body[0].end_lineno - n.body[0].lineno + 1 for n in inside)
    return node.end_lineno - node.lineno + 1 - prose


def num_parameters(function):
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return (
        len(named) - (named[:1] in (["self"], ["cls"])) + (arguments.vararg is not None) + (arguments.kwarg is not None)
    )


def all_of(*kinds):
    return [
        (f"{name}: {node.name}", node)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def beyond(measured, limit):
    return [f"{where}: {number}" for where, number in measured if number > limit]


def test_no_class_is_too_long_or_has_too_many_methods():
    classes = all_of(ast.ClassDef)
    assert beyond([(where, num_lines(node)) for where, node in classes], LONGEST_CLASS) == []
    methods = [(where, sum(isinstance(inner, FUNCTIONS) for inner in node.body)) for where, node in classes]
    assert beyond(methods, MOST_METHODS) == []


def test_no_function_is_too_long():
    assert beyond([(where, num_lines(node)) for where, node in all_of(*FUNCTIONS)], LONGEST_FUNCTION) == []


def test_no_function_has_too_many_parameters():
    functions = [(f"{where}:{node.lineno}", num_parameters(node)) for where, node in all_of(*FUNCTIONS)]
    assert beyond(functions, MOST_PARAMETERS) == []


def test_the_linter_is_seldom_overruled():
    texts = [path.read_text(encoding="utf-8") for path in SOURCES.values()]
    overruled = sum(text.count("# noqa") for text in texts)
    assert overruled <= MOST_NOQA * sum(text.count("\n") for text in texts) / 1000


def test_every_benchmark_is_named_in_its_list():
    folder = ROOT.parent / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("*.py") if f"`{path.name}`" not in text] == []
    named = re.findall(r"`(\w+\.(?:json|md|csv))`", text)
    assert [name for name in named if not (folder / "results" / name).is_file()] == []
