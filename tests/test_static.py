"""Classes read from their sources are the classes that an import gives."""

import ast
import dataclasses
import inspect
import types
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import pytest

from fl_lightning import catalog, class_names, schema, source, static
from fl_lightning.command_line import CommandLine
from fl_lightning.parser import _resolved as resolved_with
from fl_lightning.shipped import folder
from fl_lightning.source import UnreadableError, exports, lookup
from fl_lightning.trust import Trust, import_name

OURS = [entry.class_path for kind in catalog.KINDS for entry in catalog.entries(kind)]
PACKAGES = ("torch.optim", *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "profilers")))
OPAQUE = {"torch.nn.Module": "torch.nn.modules.module.Module"}
"""Known by the name under which they are imported."""


def library(package):
    named = ((name, lookup(package, name)) for name in exports(package))
    return [f"{package}.{name}" for name, found in named if found and isinstance(found.node, ast.ClassDef)]


def written(hint):
    """A type in one form, whoever made it."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "|".join(sorted({part for each in inside for part in written(each).split("|")}))
    if origin is Literal:
        return f"Literal{inside}"
    if origin is not None:
        return f"{origin}[{','.join(map(written, inside))}]"
    if isinstance(hint, (list, tuple)):
        return f"({','.join(map(written, hint))})"
    if isinstance(hint, type):
        path = f"{hint.__module__}.{hint.__name__}"
        return "None" if hint is type(None) else OPAQUE.get(path, path)
    return str(hint)


def plain(default):
    if isinstance(default, Enum):
        return default.value
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return {name: plain(value) for name, value in vars(default).items()}
    return repr(default)


def differences(path):
    """Where what is read differs from what is imported; None where it cannot be read."""
    try:
        read = static.load(path)
        found = static.parameters(read)
    except UnreadableError:
        return None
    live = import_name(path)
    known = schema.parameters(live)
    pairs = {
        "abstract": (inspect.isabstract(read), inspect.isabstract(live)),
        "path": (static.public_path(read), class_names.public_path(live)),
        "names": (list(found), list(known)),
    }
    for name in found:
        hint, default, doc = found[name]
        if name in known:
            pairs[f"{name}: type"] = written(hint), written(known[name].hint)
            pairs[f"{name}: default"] = plain(default), plain(known[name].default)
            pairs[f"{name}: doc"] = doc, known[name].doc
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("path", [*catalog.GROUPS.values(), *OURS])
def test_class_of_ours_is_read_as_it_is(path):
    assert differences(path) == {}


@pytest.mark.parametrize("path", ["lightning.Trainer", "torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW"])
def test_class_of_everyday_use_is_read_as_it_is(path):
    assert differences(path) == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_can_be_read_of_a_library_is_read_as_it_is(package):
    documented = {path: differences(path) for path in library(package)}
    read = {path: found for path, found in documented.items() if found is not None}
    assert len(read) >= 3
    wrong = {path: {what: pair for what, pair in found.items() if ": doc" not in what} for path, found in read.items()}
    assert {path: found for path, found in wrong.items() if found} in ({}, {MODEL_PRUNING: wrong.get(MODEL_PRUNING)})


MODEL_PRUNING = "lightning.pytorch.callbacks.ModelPruning"
"""Takes a network, which no configuration gives."""


@pytest.mark.parametrize(
    ("package", "base"),
    [
        ("torch.optim", "torch.optim.Optimizer"),
        ("lightning.pytorch.callbacks", "lightning.pytorch.callbacks.Callback"),
        ("lightning.pytorch.loggers", "lightning.pytorch.loggers.Logger"),
    ],
)
def test_short_names_are_the_same(package, base):
    assert class_names.short_names([static.load(base)]) == class_names.short_names([import_name(base)])


def test_class_stays_the_same_however_many_modules_are_read():
    before = static.load("torch.optim.SGD")
    package = source.file_of("torch.nn").parent
    for path in package.rglob("*.py"):
        source.statements(f"torch.nn.{path.relative_to(package).with_suffix('').as_posix().replace('/', '.')}")
    assert source.statements.cache_info().currsize > 128
    static.class_of.cache_clear()
    assert issubclass(static.load("torch.optim.SGD"), static.load("torch.optim.Optimizer"))
    assert static.load("torch.optim.SGD").source == before.source


def test_class_that_hands_arguments_on_is_not_read():
    with pytest.raises(UnreadableError):
        static.parameters(static.load("lightning.pytorch.loggers.TensorBoardLogger"))


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_one_class_is_found_as_all_are(kind):
    entries = {entry.name: entry.class_path for entry in catalog.entries(kind)}
    base = catalog.KINDS[kind][1].rpartition(".")[2]
    assert {name: catalog.path_of(kind, name) for name in [*entries, base, "Arrays", "nothing"]} == {
        **entries, base: None, "Arrays": None, "nothing": None,
    }  # fmt: skip


def test_every_experiment_is_resolved_as_with_imports():
    resolved = {}
    for path in sorted(folder().rglob("*.yaml")):
        tree = CommandLine(["--config", str(path)]).tree if path.parent.name not in ("tables", "tune") else {}
        if {"method", "model", "data"} <= tree.keys() and "augmentation" not in tree["data"]:  # torchvision is imported
            read, live = (resolved_with(tree, Trust(own=True), load) for load in (static.load, None))
            resolved[path.name] = read == live
    assert len(resolved) >= 30
    assert [name for name, same in resolved.items() if not same] == []
