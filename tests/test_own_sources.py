"""Which files of code a configuration rests on: one's own, those that they import, and no installed one."""

import importlib
import itertools
import os
import sys
import time
from importlib.util import MAGIC_NUMBER, spec_from_file_location
from pathlib import Path

import pytest

from fl_lightning import own_sources as own_sources_module
from fl_lightning.identity import own_files
from fl_lightning.own_sources import edited_since_import, is_same, own_sources

CONFIG = {
    "method": {"class_path": "mine.Mine", "init_args": {"extra_terms": [{"class_path": "pack.terms.Pull"}]}},
    "model": {"class_path": "fl_lightning.models.mlp.MLP", "init_args": {}},
    "optimizer": {"class_path": "torch.optim.SGD"},
    "logger": [{"class_path": "logs.Mine"}],
    "federation": {"callbacks": [{"class_path": "watch.Mine"}]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    files = {
        "mine.py": "import torch\nfrom helper import pull\n",
        "helper.py": "",
        "logs.py": "",
        "watch.py": "",
        "pack/__init__.py": "",
        "pack/terms.py": "from .parts import one\nfrom . import other\n",
        "pack/parts.py": "",
        "pack/other.py": "import mine\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_own_modules_and_what_they_import_are_found(folder):
    assert list(own_sources(CONFIG)) == ["helper", "mine", "pack", "pack.other", "pack.parts", "pack.terms"]


@pytest.mark.parametrize(("name", "changes"), [("mine.py", True), ("pack/parts.py", True), ("watch.py", False)])
def test_an_edited_file_is_another(name, changes, folder):
    before = own_sources(CONFIG)
    (folder / name).write_text("x = 1\n")
    assert (own_sources(CONFIG) != before) is changes


def test_nothing_is_found_of_what_is_installed_or_not_there(folder):
    assert own_sources({"model": {"class_path": "torch.nn.Linear"}, "method": {"class_path": "nowhere.Mine"}}) == {}


def test_nothing_is_found_of_what_the_user_or_the_system_has_installed(folder, monkeypatch):
    installed = folder / "usr/lib/python3/dist-packages"
    installed.mkdir(parents=True)
    (installed / "theirs.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    assert own_sources({"model": {"class_path": "theirs.Net"}}) == {}


@pytest.mark.parametrize(
    ("class_path", "edited"),
    [
        ("pack.terms.Pull", "pack/__init__.py"),  # which is run before its modules are
        ("both.Net", "both/__init__.py"),  # a package goes before a module of its name
        ("first.Net", "before/first.py"),
        ("editable.net.Net", "elsewhere/net.py"),
    ],
)
def test_the_file_is_the_one_that_an_import_would_take(class_path, edited, folder, monkeypatch):
    class Hook:  # as pip leaves one behind for an editable installation
        @staticmethod
        def find_spec(name, path=None, target=None):
            places = [str(folder / "elsewhere")]
            home = spec_from_file_location(name, f"{places[0]}/__init__.py", submodule_search_locations=places)
            return home if name == "editable" else None

    for name in ("both.py", "both/__init__.py", "first.py", "before/first.py", "elsewhere/net.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    monkeypatch.setattr(sys, "path", [str(folder / "before"), str(folder), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    before = own_sources({"method": {"class_path": class_path}})
    (folder / edited).write_text("x = 1\n")
    assert own_sources({"method": {"class_path": class_path}}) != before


def test_files_that_ones_own_classes_are_given_are_known_and_what_is_written_is_not(folder):
    def known():
        term = {"class_path": "mine.Pull", "init_args": {"table": str(folder / "table.json"), "kind": "mean"}}
        start = {"class_path": "Wrapped", "init_args": {"weights": str(folder / "start.pt")}}
        watch = {"class_path": "watch.Mine", "init_args": {"log": str(folder / "table.json")}}
        method = {"class_path": "mine.Mine", "init_args": {"extra_terms": [term]}}
        return own_files({"method": method, "model": start, "federation": {"callbacks": [watch]}})

    assert known() == {}
    (folder / "start.pt").write_text("")  # weights are compared by themselves
    (folder / "table.json").write_text("[1]")
    (key, one), *others = known().items()
    assert (key, others) == ("method.init_args.extra_terms.0.init_args.table (code)", [])
    (folder / "table.json").write_text("[1, 2]")
    assert known() != {key: one}


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A module that is imported, and what edits its file."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "live_one.py"
    seconds = itertools.count(1000)

    def edit(text):
        file.write_text(text)
        os.utime(file, (0, next(seconds)))  # Python takes what was saved within one second for the same

    edit("class Mine:\n    rate = 1.0\n")
    yield importlib.import_module("live_one"), edit
    del sys.modules["live_one"]


def edited():
    return edited_since_import(own_sources({"method": {"class_path": "live_one.Mine"}}))


@pytest.mark.parametrize("looked", [False, True])
def test_what_was_edited_since_its_import_is_found(looked, live):
    """At the first look, too: it was taken for what had been imported."""
    module, edit = live
    if looked:
        assert edited() == []
    edit("class Mine:\n    rate = 100.0\n")
    assert (edited(), edited()) == (["live_one"], ["live_one"])
    importlib.reload(module)
    assert edited() == []
    edit("class Mine:\n    rate = 2.0\n")
    assert edited() == ["live_one"]


def test_what_was_saved_once_more_as_it_was_is_no_edit(live):
    live[1]("class Mine:\n    rate = 1.0\n")
    assert edited() == []


@pytest.mark.parametrize("copy", [None, b"", b"\0" * 40, MAGIC_NUMBER + b"\0" * 12 + b"damaged"])
def test_where_python_keeps_no_whole_copy_the_file_is_what_was_imported(copy, live):
    module, edit = live
    path = Path(module.__cached__)
    path.unlink() if copy is None else path.write_bytes(copy)
    edit("class Mine:\n    rate = 100.0\n")
    assert edited() == []


def test_a_file_that_nobody_touched_in_this_process_s_time_is_what_was_imported(live, monkeypatch):
    """Python's copy may be older: where it cannot write one."""
    live[1]("class Mine:\n    rate = 100.0\n")
    monkeypatch.setattr(own_sources_module, "LOADED", time.time() + 60)
    assert edited() == []


def test_functions_that_are_made_anew_are_no_edit(live):
    """By a decorator, as typeguard's, or a profiler."""
    module, edit = live
    edit("class Mine:\n    def losses(self): return 1\n")
    importlib.reload(module)
    module.Mine.losses.__code__ = compile("def losses(self): return check(1)", module.__file__, "exec").co_consts[0]
    assert edited() == []


SAME = """import enum
import functools

def times(number):
    def wrap(function):
        @functools.wraps(function)
        def inner(*args):
            return number * function(*args)
        return inner
    return wrap

class Mine:
    rate = 1.0
    Colour = enum.Enum("Colour", ["red"], module=__name__, qualname="Mine.Colour")
    red = Colour.red
    made, hidden, kind, by_name = object(), (32, [64]), int, {"a": lambda: 1}

    def losses(self, mu=0.1, *, nu=0.2):
        return super().__str__(), {"x": 1.0}

    @functools.lru_cache
    def kept(self):
        return 11

    @property
    def half(self):
        return self.rate / 2

    @half.setter
    def half(self, value):
        self.rate = 2 * value

    @functools.cached_property
    def third(self):
        return self.rate / 3

    @staticmethod
    @times(5)
    def still():
        return 7

    part = functools.partialmethod(losses, 0.4)
"""
OTHER = [
    ("1.0\n", "1\n"), ("(32", "(33"), ("[64", "[65"), (", int", ", float"), ("lambda: 1", "lambda: 2"),
    ("mu=0.1", "mu=0.3"), ("nu=0.2", "nu=0.3"), ('"x": 1.0', '"x": 1'), ("11", "12"), ("/ 2", "/ 4"),
    ("2 * value", "3 * value"), ("/ 3", "/ 6"), ("times(5)", "times(6)"), ("return 7", "return 8"), ("0.4", "0.5"),
    (":\n    rate", ":\n    pace"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), OTHER)
def test_classes_are_the_same_that_do_the_same(old, new, live):
    module, edit = live
    edit(SAME)
    importlib.reload(module)
    before = module.Mine
    importlib.reload(module)
    assert (before is module.Mine, is_same(before, module.Mine)) == (False, True)
    assert SAME.count(old) == 1
    edit(SAME.replace(old, new))
    importlib.reload(module)
    assert not is_same(before, module.Mine)
    assert not is_same(before, type("Mine", (before,), {}))


def test_where_python_writes_no_copy_an_older_one_tells_nothing(live, monkeypatch):
    """No reload helped."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    live[1]("class Mine:\n    rate = 100.0\n")
    assert edited() == []
