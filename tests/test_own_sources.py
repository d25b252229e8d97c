"""Which files of code a configuration rests on: one's own, those that they import, and no installed one."""

import pytest

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
