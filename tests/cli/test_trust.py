"""Which classes a configuration may name, and what is imported and called for it."""

import importlib.machinery
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from cli.test_bad_input import put, refused
from fl_lightning.errors import ConfigError
from fl_lightning.parser import resolve
from fl_lightning.trust import Trust, import_name

EVIL = """\
open("mark", "w").close()

from torch.optim import SGD


def touch(**given):
    open("mark", "w").close()


class Payload(SGD):
    pass
"""
SYSTEM = {"class_path": "os.system", "init_args": {"command": "touch mark"}}
OWN = {"class_path": "evil.Payload"}
NAMED = {
    "method": {"class_path": "FedAvg"},
    "model": {"class_path": "MLP"},
    "data": {"dataset": {"class_path": "Digits"}, "partition": {"class_path": "IID"}},
}
CLASSES = (
    "method", "model", "optimizer", "data.dataset", "data.partition", "data.augmentation", "federation.exchange",
    "federation.server_optimizer", "federation.aggregator", "federation.wire", "federation.callbacks",
    "trainer.callbacks", "trainer.profiler", "trainer.plugins", "trainer.strategy", "trainer.accelerator", "logger",
)  # fmt: skip
LISTS = ("data.augmentation", "federation.wire", "federation.callbacks")
FOREIGN = (
    "os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "pathlib.Path", "shutil.rmtree", "torch.load",
    "torch.hub.load", "lightning.fabric.utilities.cloud_io._load", "fl_lightning.cli.main",
    "fl_lightning.__main__.run",
    "torch.os.system", "os", "../../x", "x" * 5000, "a..b", "",
)  # fmt: skip
DATA = [
    ("logger", {"class_path": "TensorBoardLogger", "dict_kwargs": {"x": SYSTEM}}, "logger.dict_kwargs.x.class_path"),
    ("logger", {"class_path": "CSVLogger", "init_args": {"name": SYSTEM}}, "logger.init_args.name"),
    (
        "logger",
        {"class_path": "wandb", "init_args": {"labels": {"tags": [SYSTEM]}}},
        "logger.init_args.labels.tags.0",
    ),
    (
        "trainer.callbacks",
        [{"class_path": "LambdaCallback", "init_args": {"on_train_start": SYSTEM}}],
        "trainer.callbacks.0.init_args.on_train_start",
    ),
    (
        "trainer.callbacks",
        [{"class_path": "LambdaCallback", "init_args": {"on_train_start": "os.getcwd"}}],
        "trainer.callbacks.0.init_args.on_train_start",
    ),
    ("optimizer.init_args.lr", SYSTEM, "optimizer.init_args.lr"),
    ("optimizer.init_args.lr", OWN, "optimizer.init_args.lr"),  # a float or a tensor, and no class
    ("data.partition.init_args.beta", SYSTEM, "data.partition.init_args.beta"),
    ("data.cache", SYSTEM, "data.cache"),
    (
        "data.augmentation",
        [{"class_path": "RandomCrop", "init_args": {"size": SYSTEM}}],
        "data.augmentation.0.init_args.size.class_path",
    ),
]


@pytest.fixture
def trap(workplace):
    """A working directory with a module that leaves a mark wherever it is imported."""
    workplace.write("evil.py", EVIL)
    return workplace


def message(tree, trust):
    with pytest.raises(ConfigError) as error:
        resolve(tree, trust)
    assert len(str(error.value)) <= 270
    return str(error.value)


def with_class(key, node):
    tree = {**NAMED, "federation": {}, "trainer": {}, "data": {**NAMED["data"]}}
    section, _, name = key.partition(".")
    if name:
        tree[section] = {**tree[section], name: [node] if key in LISTS else node}
    else:
        tree[section] = node
    return tree


@pytest.mark.parametrize("key", CLASSES)
def test_nothing_foreign_is_called_or_imported_where_a_class_is_expected(key, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in FOREIGN:
        node = {"class_path": name, "init_args": {"command": "touch mark"}}
        said = message(with_class(key, node), Trust(own=True))
        assert said.startswith(key), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", CLASSES)
def test_nothing_of_the_users_own_is_imported_for_a_run_that_is_read(key, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    said = message(with_class(key, OWN), Trust())
    assert said.startswith(key)
    assert 'if you trust its code, say --trust evil (in Python trust="evil")' in said
    assert not (tmp_path / "mark").exists()


def test_from_python_one_package_may_be_a_text():
    assert Trust.of("mine") == Trust.of(["mine"]) == Trust.of(Trust(("mine",)))


def test_whoever_reads_a_run_may_trust_a_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_alone.py").write_text("from torch.optim import SGD\n\n\nclass Mine(SGD):\n    pass\n")
    tree = with_class("optimizer", {"class_path": "mine_alone.Mine"})
    assert "--trust mine_alone" in message(tree, Trust(("mine",)))
    assert resolve(tree, Trust(("mine_alone",)))["optimizer"]["class_path"] == "mine_alone.Mine"


def test_who_trusts_one_package_imports_no_other_of_the_folder_that_one_is_in(monkeypatch, tmp_path):
    """A file that is called like a library would run as soon as that is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_beside.py").write_text("from torch.optim import SGD\n\n\nclass Mine(SGD):\n    pass\n")
    (tmp_path / "opacus.py").write_text(EVIL)
    resolve(with_class("optimizer", {"class_path": "mine_beside.Mine"}), Trust(("mine_beside",)))
    found = importlib.machinery.PathFinder.find_spec("opacus")
    assert tmp_path not in Path(found.origin).parents


def test_who_has_left_out_a_method_hears_which(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    start = "from fl_lightning.federation.peers import Peers\n\n\nclass Mine(Peers):\n"
    (tmp_path / "mine_unfinished.py").write_text(f"{start}    def connect(self, round, live):\n        return {{}}\n")
    said = message(with_class("federation.exchange", {"class_path": "mine_unfinished.Mine"}), Trust(own=True))
    rule = "Mine is only a base of others: it does not define sponsors() (choose from DirectedGraph, RandomPeers, "
    assert said.startswith(f"federation.exchange: {rule}")


@pytest.mark.parametrize(("key", "value", "named"), DATA, ids=[named for *_, named in DATA])
def test_class_where_none_is_expected_is_refused_by_its_whole_key(trap, key, value, named):
    put(trap, key, value)
    assert refused(trap).startswith(f"{named}: ")


def test_own_module_is_named_before_it_is_imported(trap):
    put(trap, "optimizer.class_path", "evil.Payload")
    code, out, err = trap.call("fit", "--config", "exp.yaml", "--print_config")
    assert code == 0
    assert err == "fl-lightning: imports your own module evil for optimizer\n"
    assert yaml.safe_load(out)["optimizer"]["class_path"] == "evil.Payload"
    assert (trap.path / "mark").exists()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("data.dataset", SYSTEM, "data.dataset"),
        ("trainer.profiler", SYSTEM, "trainer.profiler"),
        ("data.partition.init_args.beta", SYSTEM, "data.partition.init_args.beta"),
        ("optimizer.class_path", "evil.Payload", "optimizer"),
        ("federation.rounds", "many", "federation.rounds"),
        ("logger", [{**SYSTEM}], "logger.0"),
    ],
)
def test_evaluate_checks_what_a_runs_folder_holds(finished, trap, key, value, named):
    shutil.copytree(finished.run, trap.run)
    file = trap.run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    *above, last = key.split(".")
    node = config
    for name in above:
        node = node[name]
    node[last] = value
    file.write_text(yaml.safe_dump(config))
    before = trap.files()
    code, _, err = trap.call("evaluate", "runs/run")
    assert code == 2
    assert err.startswith(f"fl-lightning: error: {named}: ")
    assert err.count("\n") == 1
    assert trap.files() == before


def test_a_module_that_ends_the_program_is_said(tmp_path, monkeypatch):
    """The command ended without a word, with the code that the module gave."""
    (tmp_path / "a_script_of_mine.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^method: cannot import a_script_of_mine\.Net: SystemExit: 3$"):
        import_name("a_script_of_mine.Net", "method")
