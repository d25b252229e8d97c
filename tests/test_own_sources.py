"""Which files of code a configuration rests on: one's own, those that they import, and no installed one."""

import sys
from importlib.util import spec_from_file_location

import pytest

from fl_lightning.identity import own_files
from fl_lightning.own_sources import own_sources

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
