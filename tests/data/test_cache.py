import importlib
import os
import shutil
import signal
import sys
import time
import warnings
from enum import Enum
from pathlib import Path

import pytest
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.cache import default_cache_dir, load
from fl_lightning.data.dataset import Dataset, default_data_dir
from fl_lightning.data.own_files import CSVTable
from fl_lightning.data.sample import Sample
from fl_lightning.errors import ConfigError
from fl_lightning.identity import data_files, last_change


class Kind(Enum):
    DRY = "dry"


class Counted(Dataset):
    """Counts how often it is decoded."""

    decoded = 0

    def __init__(self, fill=1.0, path=None):
        self.fill = fill
        self.path = path

    def sources(self):
        return [] if self.path is None else [self.path]

    def arrays(self):
        Counted.decoded += 1
        x = torch.full((3, 2), self.fill)
        return Arrays(x, torch.tensor([0, 1, 1]), 2, ("a", "b"), vocabulary_size=0)


@pytest.fixture(autouse=True)
def _reset():
    Counted.decoded = 0


def files(folder):
    return sorted(folder.iterdir())


def test_second_load_reads_the_cache_and_gives_the_same(tmp_path):
    first, second = load(Counted(), tmp_path), load(Counted(), tmp_path)
    assert Counted.decoded == 1
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.y, second.y)
    assert (second.num_train, second.classes, second.mean, second.std) == (2, ("a", "b"), (), ())
    assert second.spec == first.spec
    assert len(files(tmp_path)) == 1


def test_what_a_sample_is_drawn_from_is_kept_in_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_CACHE", str(tmp_path / "usual"))
    for _ in range(2):
        load(Sample(Counted(), 2), tmp_path / "own")
    assert Counted.decoded == 1
    assert len(files(tmp_path / "own")) == 1
    assert not (tmp_path / "usual").exists()


def test_other_arguments_are_decoded_anew(tmp_path):
    load(Counted(1.0), tmp_path)
    assert load(Counted(2.0), tmp_path).x[0, 0] == 2.0
    assert Counted.decoded == 2


def test_changed_source_is_decoded_anew(tmp_path):
    source = tmp_path / "source"
    source.write_text("a")
    for _ in range(2):
        load(Counted(path=source), tmp_path / "cache")
    assert Counted.decoded == 1
    os.utime(source, (1, 1))
    load(Counted(path=source), tmp_path / "cache")
    assert Counted.decoded == 2


def test_changed_file_in_a_folder_is_decoded_anew(tmp_path):
    """The folder's own time does not change with what is in its files."""
    folder = tmp_path / "readings"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "a.bin").write_text("a")
    for _ in range(2):
        load(Counted(path=folder), tmp_path / "cache")
    assert Counted.decoded == 1
    time_before = os.stat(folder).st_mtime_ns
    (folder / "inside" / "a.bin").write_text("other")
    assert os.stat(folder).st_mtime_ns == time_before
    load(Counted(path=folder), tmp_path / "cache")
    assert Counted.decoded == 2


@pytest.mark.skipif(os.name == "nt", reason="a system whose ctime is the time of creation")
@pytest.mark.parametrize("how", [os.replace, shutil.copy2])
def test_file_that_takes_anothers_place_with_its_size_and_mtime_is_decoded_anew(tmp_path, how):
    """As after mv, cp -p, rsync -t and tar: what had been in the old file was trained on."""
    table, other = tmp_path / "t.csv", tmp_path / "other.csv"
    for value, path in enumerate((table, other)):
        path.write_text(f"x,y\n{value},0\n5,1\n")
        os.utime(path, (1, 1))
    dataset = CSVTable(str(table), "y", normalize="none")
    assert load(dataset, tmp_path / "cache").x.tolist() == [[0], [5]]
    before = _digest_of(table)
    time.sleep(0.02)  # a file system's clock goes in steps of some milliseconds
    how(other, table)
    assert (table.stat().st_size, table.stat().st_mtime) == (12, 1)
    assert load(dataset, tmp_path / "cache").x.tolist() == [[1], [5]]
    assert _digest_of(table) != before


def _digest_of(path):
    """What a run's configuration keeps of its files, to tell runs on other data apart."""
    dataset = {"class_path": "CSVTable", "init_args": {"path": str(path)}}
    return data_files({"data": {"dataset": dataset}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("readings.bin", "must return a list of files, or None, got 'str'"),
        (Path("readings.bin"), "must return a list of files, or None, got '.*Path'"),
        ([3.5], "raises TypeError: .*"),
    ],
)
def test_sources_are_a_list_of_files(tmp_path, monkeypatch, given, said):
    """Of a text every letter was a file, which is absent, so that the samples of a file that changed stayed."""
    monkeypatch.setattr(Counted, "sources", lambda self: given)
    with pytest.raises(ConfigError, match=rf"^data\.dataset: Counted\.sources\(\) {said}$"):
        load(Counted(), tmp_path)


def test_file_of_one_name_in_another_folder_is_another_source(tmp_path, monkeypatch):
    for fill, place in enumerate(("a", "b")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "t.csv").write_text(f"x,y\n{fill},0\n5,1\n")
        os.utime(tmp_path / place / "t.csv", (1, 1))
        monkeypatch.chdir(tmp_path / place)
        assert load(CSVTable("t.csv", "y", normalize="none"), tmp_path / "cache").x.tolist() == [[fill], [5]]


def test_source_that_arrives_while_decoding_is_a_hit_next_time(tmp_path):
    class Downloads(Counted):
        def arrays(self):
            self.path.write_text("downloaded")
            return super().arrays()

    for _ in range(2):
        load(Downloads(path=tmp_path / "source"), tmp_path / "cache")
    assert Counted.decoded == 1


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_cache_file_cut_short_is_made_again(tmp_path, keep):
    load(Counted(), tmp_path)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert load(Counted(), tmp_path).x[0, 0] == 1.0
    assert Counted.decoded == 2
    assert load(Counted(), tmp_path).x[0, 0] == 1.0
    assert Counted.decoded == 2


def test_cache_file_of_other_content_is_made_again(tmp_path):
    load(Counted(), tmp_path)
    (path,) = files(tmp_path)
    torch.save({"x": torch.zeros(3)}, path)
    load(Counted(), tmp_path)
    assert Counted.decoded == 2


def test_arguments_without_a_stable_text_are_never_cached(tmp_path):
    for _ in range(2):
        load(Counted(path=None, fill=torch.tensor(1.0).item()), tmp_path)
    assert Counted.decoded == 1
    dataset = Counted()
    dataset._secret = torch.zeros(1)
    load(dataset, tmp_path)
    load(dataset, tmp_path)
    assert Counted.decoded == 3


def test_edited_class_of_the_users_own_is_decoded_anew(tmp_path, monkeypatch):
    code = (
        "import torch\nfrom fl_lightning.data.dataset import Dataset\nfrom fl_lightning.data.arrays import Arrays\n"
        "class Mine(Dataset):\n    def sources(self):\n        return []\n    def arrays(self):\n"
        "        return Arrays(torch.full((1, 1), {}), torch.tensor([0]), 1, ('a',))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for value in (1.0, 2.0):
        (tmp_path / "mine.py").write_text(code.format(value))
        sys.modules.pop("mine", None)
        assert load(__import__("mine").Mine(), tmp_path / "cache").x.item() == value
    # A class that inherits from it in another module changes with it.
    (tmp_path / "derived.py").write_text("from mine import Mine\nclass Derived(Mine):\n    pass\n")
    for value in (3.0, 4.0):
        (tmp_path / "mine.py").write_text(code.format(value))
        for name in ("mine", "derived"):
            sys.modules.pop(name, None)
        assert load(__import__("derived").Derived(), tmp_path / "cache").x.item() == value
        assert len(files(tmp_path / "cache")) == value


def test_edited_module_that_a_class_of_the_users_own_imports_is_decoded_anew(tmp_path, monkeypatch):
    (tmp_path / "waves.py").write_text(
        "import torch\nfrom cleaning import clean\nfrom fl_lightning.data.dataset import Dataset\n"
        "from fl_lightning.data.arrays import Arrays\n"
        "class Waves(Dataset):\n    def sources(self):\n        return []\n    def arrays(self):\n"
        "        return Arrays(clean(torch.ones(1, 1)), torch.tensor([0]), 1, ('a',))\n"
    )
    (tmp_path / "cleaning.py").write_text("from factors import FACTOR\ndef clean(x):\n    return FACTOR * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for value in (1.0, 2.0, 2.0):
        (tmp_path / "factors.py").write_text(f"FACTOR = {value}\n")
        for name in ("waves", "cleaning", "factors"):
            sys.modules.pop(name, None)
        assert load(__import__("waves").Waves(), tmp_path / "cache").x.item() == value
    assert len(files(tmp_path / "cache")) == 2


def test_data_set_of_an_enumerations_member_and_of_names_in_a_set_is_cached(tmp_path):
    def made(*names):
        own = Counted()
        own.kind, own.names = Kind.DRY, set(names)
        return own

    for names in (("wet", "dry", "hot"), ("hot", "dry", "wet"), ("dry",)):
        load(made(*names), tmp_path)
    assert len(files(tmp_path)) == 2


def test_data_set_that_does_not_say_what_it_reads_never_loads_old_samples(tmp_path, monkeypatch):
    code = (
        "import pathlib, torch\nfrom fl_lightning.data.dataset import Dataset\n"
        "from fl_lightning.data.arrays import Arrays\n"
        "class Silent(Dataset):\n    def arrays(self):\n"
        "        value = float(pathlib.Path('samples.txt').read_text())\n"
        "        return Arrays(torch.full((1, 1), value), torch.tensor([0]), 1, ('a',))\n"
    )
    (tmp_path / "silent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for value in (1.0, 2.0):
        (tmp_path / "samples.txt").write_text(str(value))
        assert load(__import__("silent").Silent(), tmp_path / "cache").x.item() == value


def test_nothing_invalid_is_cached(tmp_path):
    with pytest.raises(ConfigError, match="Counted: sample 0 holds nan"):
        load(Counted(float("nan")), tmp_path)
    assert files(tmp_path) == []


def test_an_own_data_set_that_raises_or_returns_something_else_is_one_line(tmp_path, monkeypatch):
    def missing(self):
        raise FileNotFoundError("no readings.bin")

    monkeypatch.setattr(Counted, "arrays", missing)
    said = r"^data\.dataset: Counted\.arrays\(\) raises FileNotFoundError: no readings\.bin \(test_cache\.py:\d+\)$"
    with pytest.raises(ConfigError, match=said):
        load(Counted(), tmp_path)
    monkeypatch.setattr(Counted, "arrays", lambda self: (torch.zeros(3, 2), torch.zeros(3)))
    said = r"^data\.dataset: Counted\.arrays\(\) must return one .*Arrays.*, got 'tuple'$"
    with pytest.raises(ConfigError, match=said):
        load(Counted(), tmp_path)


def test_cache_that_cannot_be_written_is_a_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="not cached"):
        assert len(load(Counted(), blocked / "cache").y) == 3


@pytest.mark.parametrize("folder", ["x" * 300, "closed"])
def test_cache_that_cannot_be_entered_is_a_warning(tmp_path, folder):
    """It ended the command: somebody else's folder, or a name that is too long."""
    (tmp_path / "closed").mkdir(mode=0)
    if folder == "closed" and os.access(tmp_path / folder, os.X_OK):
        pytest.skip("whoever may enter all folders")
    with pytest.warns(UserWarning, match=r"^The decoded data set is not cached: .*(too long|ermission)"):
        assert len(load(Counted(), tmp_path / folder).y) == 3


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        load(Counted(), tmp_path)
    assert files(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_in_the_middle_of_a_write(tmp_path, moment):
    """The next one's file is whole; what the dead one has left is swept once nothing can be at work there any more."""
    other = os.fork()
    if other == 0:
        setattr(os, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        load(Counted(), tmp_path)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == -signal.SIGKILL
    whole = load(Counted(), tmp_path)
    [left] = [path for path in files(tmp_path) if path.suffix == ".tmp"]
    assert torch.equal(load(Counted(), tmp_path).x, whole.x)
    for age in (-3600, 3600):  # the clock may have been set back since
        assert left.exists()
        os.utime(left, (time.time() - age,) * 2)
        load(Counted(float(age)), tmp_path)
        assert not left.exists()
        left.touch()
    assert Counted.decoded == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_who_writes_last_replaces_a_whole_file_by_a_whole_one(tmp_path):
    ready, go = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        replace = os.replace

        def slow(*names):
            os.write(ready[1], b".")
            os.read(go[0], 1)
            replace(*names)

        os.replace = slow
        load(Counted(), tmp_path)
        os._exit(0)
    os.read(ready[0], 1)
    first = load(Counted(), tmp_path)
    os.write(go[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    second = load(Counted(), tmp_path)
    assert (second.digest, Counted.decoded) == (first.digest, 1)
    assert torch.equal(second.x, first.x)
    assert [path.suffix for path in files(tmp_path)] == [".pt"]
    for descriptor in (*ready, *go):
        os.close(descriptor)


def test_cached_view_takes_only_its_own_rows(tmp_path):
    class View(Counted):
        def arrays(self):
            big = torch.zeros(100_000, 2)
            return Arrays(big[:3], torch.tensor([0, 1, 1]), 2, ("a", "b"))

    load(View(), tmp_path)
    assert files(tmp_path)[0].stat().st_size < 10_000


def test_folders_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(tmp_path / "d"))
    assert default_cache_dir() == tmp_path / "c"
    assert default_data_dir() == tmp_path / "d"
    with warnings.catch_warnings():
        load(Counted())
    assert len(files(tmp_path / "c")) == 1
    for name in ("FL_LIGHTNING_CACHE", "FL_LIGHTNING_DATA"):
        monkeypatch.delenv(name)
    assert default_cache_dir().parts[-3:] == (".cache", "fl-lightning", "arrays")
    assert default_data_dir().parts[-3:] == (".cache", "fl-lightning", "datasets")


def test_a_class_whose_file_was_edited_since_its_import_is_not_cached(tmp_path, monkeypatch, capsys):
    """What it was decoded to under the new file's name, for good."""
    code = (
        "import torch\nfrom fl_lightning.data.dataset import Dataset\nfrom fl_lightning.data.arrays import Arrays\n"
        "class Shifted(Dataset):\n    def sources(self):\n        return []\n    def arrays(self):\n"
        "        return Arrays(torch.full((1, 1), {}), torch.tensor([0]), 1, ('a',))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "shifted.py").write_text(code.format(1.0))
    module = __import__("shifted")
    assert load(module.Shifted(), tmp_path / "cache").x.item() == 1.0
    (tmp_path / "shifted.py").write_text(code.format(2.0))
    assert load(module.Shifted(), tmp_path / "cache").x.item() == 1.0  # the process has no other
    assert len(files(tmp_path / "cache")) == 1
    assert load(importlib.reload(module).Shifted(), tmp_path / "cache").x.item() == 2.0
    assert len(files(tmp_path / "cache")) == 2


def test_what_comes_while_others_are_read_is_in_no_cache(tmp_path, capsys):
    """A part of the data stood for the whole, in all later runs."""

    class Meanwhile(Counted):
        def sources(self):
            return sorted(tmp_path.glob("*.txt"))

        def arrays(self):
            (tmp_path / f"{len(self.sources())}.txt").write_text("more")
            return super().arrays()

    (tmp_path / "first.txt").write_text("one")
    Meanwhile.__module__ = "fl_lightning.data.made_up"
    load(Meanwhile(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or files(tmp_path / "cache") == []
    assert "1.txt came or changed while it was read; what was read is not cached" in capsys.readouterr().err


def test_what_goes_while_others_are_read_is_in_no_cache(tmp_path, capsys):
    """It stayed in all later runs, under the key of those that were left."""

    class Meanwhile(Counted):
        def sources(self):
            return sorted(tmp_path.glob("*.txt"))

        def arrays(self):
            (tmp_path / "first.txt").unlink()
            return super().arrays()

    for name in ("first.txt", "second.txt"):
        (tmp_path / name).write_text("one")
    Meanwhile.__module__ = "fl_lightning.data.made_up"
    load(Meanwhile(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or files(tmp_path / "cache") == []
    assert "first.txt went while it was read; what was read is not cached" in capsys.readouterr().err


def test_a_folder_behind_a_link_is_looked_into(tmp_path):
    """What changed in it changed nothing: the cache went on giving what it had."""

    class Linked(Counted):
        def sources(self):
            return [tmp_path / "root"]

    Linked.__module__ = "fl_lightning.data.made_up"
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, tmp_path / "root"):
        folder.mkdir()
    (tmp_path / "root" / "class").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(tmp_path / "root")
    (elsewhere / "one.txt").write_text("one")
    before = last_change(str(tmp_path / "root"))
    for _ in range(2):
        load(Linked(), tmp_path / "cache")
    assert len(files(tmp_path / "cache")) == 1
    (elsewhere / "two.txt").write_text("two")
    os.utime(elsewhere / "two.txt", (before + 9, before + 9))
    load(Linked(), tmp_path / "cache")
    assert len(files(tmp_path / "cache")) == 2
    assert last_change(str(tmp_path / "root")) == before + 9
