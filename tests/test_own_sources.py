"""Which files of code a configuration rests on: one's own, those that they import, and no installed one."""

import importlib
import os
import sys
import time
from importlib.util import spec_from_file_location

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


LIVE = """import functools
from dataclasses import dataclass

RATE = 1.0
scale = lambda x: x * RATE

def twice(function):
    @functools.wraps(function)
    def inner(*args):
        return [function(*args) for _ in range(2)]
    return inner

@dataclass
class Mine:
    rate: float = RATE
    shared = ("model", 1, frozenset({"a", "b"}))
    __static_attributes__ = ("rate", "one")

    def losses(self):
        return {"x": 1.0}

    @twice
    def steps(self):
        return [one + 1 for one in range(3)]

    @staticmethod
    def still():
        return 3

    @property
    def half(self):
        return self.rate / 2

    @functools.cached_property
    def third(self):
        return (lambda: self.rate / 3)()
"""


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A module that is imported, and a function that edits its file."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "live_one.py"
    file.write_text(LIVE)

    def edit(old, new):
        assert old in LIVE
        file.write_text(LIVE.replace(old, new))
        os.utime(file, (0, 0))  # Python takes what was saved within one second for the same

    yield importlib.import_module("live_one"), edit
    del sys.modules["live_one"]


def edited():
    return edited_since_import(own_sources({"method": {"class_path": "live_one.Mine"}}))


CHANGES = [
    ('{"x": 1.0}', '{"x": 100.0}'),
    ('{"x": 1.0}', '{"x": 1}'),
    ("one + 1", "one + 2"),
    ("range(2)", "range(3)"),
    ("return 3", "return 4"),
    ("self.rate / 2", "self.rate / 4"),
    ("self.rate / 3", "self.rate / 6"),
    ("x * RATE", "x + RATE"),
]
BESIDE_FUNCTIONS = [
    ("RATE = 1.0", "RATE = 2.0"),
    ('"b"})', '"c"})'),
    ("    def losses", "    def other(self):\n        return 1\n\n    def losses"),
    ("class Mine", "class Yours"),
]


@pytest.mark.parametrize(("old", "new"), [*CHANGES, *BESIDE_FUNCTIONS, ("class Mine:", "class Mine")])
@pytest.mark.parametrize("looked", [False, True])
def test_what_was_edited_since_its_import_is_found(looked, old, new, live):
    """At the first look, too: it was taken for what had been imported."""
    if looked:
        assert edited() == []
    live[1](old, new)
    assert (edited(), edited()) == (["live_one"], ["live_one"])
    live[1]("RATE", "RATE")
    assert edited() == []


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_where_python_keeps_nothing_functions_still_tell(old, new, live, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    live[1](old, new)
    assert edited() == ["live_one"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("self.rate / 3)()", "self.rate / 3)()  # a third"), ('("rate", "one")', '("one", "rate")')],
)
def test_what_does_nothing_is_no_edit(old, new, live):
    """Comments, and the order in which Python notes the attributes that a class's functions set."""
    live[1](old, new)
    assert edited() == []


def test_a_reload_begins_anew_and_leaves_what_is_gone(live):
    module, edit = live
    edit("class Mine", "class Yours")
    importlib.reload(module)
    assert edited() == []


def test_functions_that_were_changed_in_place_are_the_file_s(live):
    """As IPython's autoreload does it; a fit was refused, with a false reason."""
    module, edit = live
    assert edited() == []
    edit('{"x": 1.0}', '{"x": 100.0}')
    new = {}
    exec('class Other:\n    def losses(self): return {"x": 100.0}', new)
    old = module.Mine
    new["Other"].losses.__code__ = new["Other"].losses.__code__.replace(co_filename=module.__file__)
    module.Mine.losses.__code__ = new["Other"].losses.__code__
    assert edited() == []
    importlib.reload(module)
    assert edited() == []
    assert (is_same(old, module.Mine), old is module.Mine) == (True, False)


def test_functions_that_a_decorator_makes_anew_of_the_file_are_no_edit(live, monkeypatch):
    """As typeguard's does: where nobody has touched the file since the process began."""
    module, edit = live
    code = compile('def losses(self): return {"x": check(1.0)}', module.__file__, "exec").co_consts[0]
    module.Mine.losses.__code__ = code
    assert edited() == ["live_one"]
    monkeypatch.setattr(own_sources_module, "LOADED", time.time() + 60)
    assert edited() == []
    edit("RATE = 1.0", "RATE = 2.0")
    assert edited() == ["live_one"]
