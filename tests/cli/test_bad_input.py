"""Bad input: exit code 2, one line that names key, value and what is allowed, and nothing written."""

import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from fl_lightning.sealed import load_tensors, save_tensors

OWN_DATASET = """\
import torch

from fl_lightning.sealed import load_tensors, save_tensors

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset


class Own(Dataset):
    def __init__(self, nan: bool = False, label: int = 0) -> None:
        self.nan = nan
        self.label = label

    def arrays(self) -> Arrays:
        y = torch.arange(60) % 3
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) + y[:, None]
        if self.nan:
            x[7, 2] = float("nan")
        y[11] = self.label
        return Arrays(x, y, 60, ("a", "b", "c"))


class Broken(Dataset):
    def arrays(self) -> Arrays:
        return Arrays(torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64), 4, ("a",))


class NoDataset:
    pass
"""


def refused(place, *argv, env=None, config="exp.yaml"):
    """The one line that `fit` refuses with; checks the exit code and that nothing is left behind.

    A module of the user's own has a line before it.
    """
    before = place.files()
    code, _, err = place.call("fit", "--config", config, *argv, env=env)
    assert "Traceback" not in err
    assert code == 2, (code, err)
    assert err.endswith("\n")
    err = re.sub(r"^(fl-lightning: imports your own module \w+ for [\w.]+\n)*", "", err)
    assert err.count("\n") == 1, err
    assert len(err) <= 300
    assert place.files() == before
    return err.removeprefix("fl-lightning: error: ")


def put(place, key, value):
    """Set a dotted key of `exp.yaml`."""
    config = yaml.safe_load((place.path / "exp.yaml").read_text())
    node = config
    *parents, last = key.split(".")
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = value
    place.write("exp.yaml", config)


FAILURES = ["federation.failures:", "0.3", "[7]", "{3: [0, 4], 5-8: [2]}", "probability, schedule and clients by name"]

# (dotted key, value, what the line must hold)
NAMES = [
    ("method.class_path", "FedRap", ["method", "FedRap", "did you mean FedRep?", "FedAvg"]),
    ("model.class_path", "MLPP", ["model", "MLPP", "did you mean MLP?", "ResNet18"]),
    ("data.dataset", "Digit", ["data.dataset", "Digit", "did you mean Digits?", "MNIST"]),
    ("data.partition.class_path", "Dirichle", ["data.partition", "Dirichle", "did you mean Dirichlet?", "IID"]),
    ("federation.exchange", "Stern", ["federation.exchange", "Stern", "Star"]),
    ("optimizer.class_path", "SDG", ["optimizer", "SDG", "did you mean SGD?", "Adam"]),
    ("method.class_path", "nowhere.FedRep", ["method", "nowhere.FedRep"]),
    ("federation.roundz", 3, ["federation.roundz", "did you mean rounds?"]),
    ("federation.evaluate.recieved", True, ["federation.evaluate.recieved", "did you mean received?"]),
    ("federation.checkpoint.keeep", 1, ["federation.checkpoint.keeep", "did you mean keep?"]),
    ("data.batchsize", 3, ["data.batchsize", "did you mean batch_size?"]),
    ("data.partition.init_args.betta", 1, ["data.partition", "betta", "did you mean beta?"]),
    ("method.init_args.head_epoch", 1, ["method", "head_epoch", "did you mean head_epochs?"]),
    ("model.init_args.hiden", [8], ["model", "hiden", "did you mean hidden?"]),
    ("optimizer.init_args.learning", 1, ["optimizer", "learning", "lr"]),
    ("trainer.acelerator", "cpu", ["trainer.acelerator", "did you mean", "accelerator?"]),
    ("trainer.max_epochs", 3, ["trainer.max_epochs", "federation.local_epochs", "federation.rounds"]),
    ("trainer.logger", True, ["trainer.logger", "section logger"]),
    ("metod", {"class_path": "FedAvg"}, ["metod", "did you mean method?"]),
    ("method.init_args.extra_terms", [{"class_path": "PrototypeAlignmnt"}], ["did you mean PrototypeAlignment?"]),
    ("logger", {"class_path": "CSVLoger"}, ["logger", "CSVLoger", "did you mean CSVLogger?"]),
]

VALUES = [
    ("data.partition.init_args.beta", 0, ["data.partition.init_args.beta", "above 0", "got 0"]),
    ("data.partition.init_args.beta", -0.5, ["data.partition.init_args.beta", "above 0", "-0.5"]),
    ("data.partition.init_args.beta", "much", ["data.partition.init_args.beta", "float", "much"]),
    ("data.partition.init_args.min_samples", 500, ["data.partition.init_args.min_samples", "at most", "500"]),
    (
        "data.partition",
        {"class_path": "Dirichlet", "init_args": {"beta": 0.001, "min_samples": 290, "balance": False}},
        ["data.partition", "min_samples"],
    ),
    ("data.partition", {"class_path": "Shards", "init_args": {"shards": 11}}, ["shards", "at most 10", "11"]),
    (
        "data.partition",
        {"class_path": "Shards", "init_args": {"shards": 1000, "distinct": False}},
        ["shards", "1000", "at most 299"],
    ),
    (
        "data.partition",
        {"class_path": "ClassesPerClient", "init_args": {"classes": 11}},
        ["classes", "at most 10", "11"],
    ),
    (
        "data.partition",
        {"class_path": "NWayKShot", "init_args": {"n": 11, "k": 3}},
        ["data.partition.init_args.n", "10", "11"],
    ),
    ("data.num_clients", 0, ["data.num_clients", "at least 1", "0"]),
    ("data.num_clients", 5000, ["data", "5000"]),
    ("data.batch_size", 0, ["data.batch_size", "at least 1", "0"]),
    ("data.split", "houldout", ["data.split", "holdout", "matched", "global", "houldout"]),
    ("data.test_fraction", 1.0, ["data.test_fraction", "below 1", "1.0"]),
    ("federation.participation", 0, ["federation.participation", "(0, 1]", "0"]),
    ("federation.participation", 1.5, ["federation.participation", "(0, 1]", "1.5"]),
    ("federation.rounds", 0, ["federation.rounds", ">= 1", "0"]),
    ("federation.rounds", 2.5, ["federation.rounds", "int", "2.5"]),
    ("federation.local_epochs", 0, ["federation.local_epochs", "> 0", "0"]),
    ("federation.lr_decay", 0.0, ["federation.lr_decay", "(0, 1]", "0.0"]),
    ("federation.evaluate_every", 0, ["federation.evaluate_every", ">= 1", "0"]),
    ("federation.evaluate.batch_size", 0, ["federation.evaluate.batch_size", ">= 1", "0"]),
    ("federation.checkpoint.keep", 0, ["federation.checkpoint.keep", ">= 1", "0"]),
    ("federation.checkpoint.models", "some", ["federation.checkpoint.models", "auto", "some"]),
    ("federation.checkpoint", {"every": 0, "models": True}, ["federation.checkpoint.models", "nothing is saved"]),
    ("federation.pool", "tape", ["federation.pool", "memory", "disk", "tape"]),
    ("federation.failures", "often", [*FAILURES, "'often'"]),
    ("federation.failures", None, [*FAILURES, "None"]),
    ("federation.failures", ["a"], [*FAILURES, "['a']"]),
    ("federation.failures", {3: 0}, [*FAILURES, "{3: 0}"]),
    ("federation.failures", {3: [0], "clients": [1]}, [*FAILURES, "{3: [0], 'clients': [1]}"]),
    ("federation.failures", 1.5, ["federation.failures.probability", "[0, 1)", "1.5"]),
    ("federation.failures", [6], ["federation.failures.clients", "0 to 5", "6"]),
    ("federation.failures", [0, 1, 2, 3, 4, 5], ["federation.failures.clients", "at least one of the 6", "[0, 1, 2,"]),
    ("federation.failures", {"8-9": [0]}, ["federation.failures.schedule", "federation.rounds (3)", "8-9"]),
    ("federation.failures", {"probabilty": 0.3}, ["federation.failures.probabilty", "did you mean probability?"]),
    ("federation.newcomers", 2.5, ["federation.newcomers:", "how many", "clients and after", "2.5"]),
    ("federation.newcomers", 2, ["federation.newcomers.after", ">= 1", "0"]),
    ("method.init_args", {"head_epochs": -1}, ["method.init_args.head_epochs", ">= 0", "-1"]),
    ("model.init_args.hidden", [0], ["hidden", "0"]),
    ("optimizer.init_args.lr", -1.0, ["optimizer", "-1.0"]),
    ("trainer.accelerator", "gpu", ["trainer.accelerator", "no GPU", "cpu", "gpu"]),
    ("trainer.precision", "24", ["trainer", "24", "16"]),
    ("seed", "zero", ["seed", "int", "zero"]),
]


@pytest.mark.parametrize(("key", "value", "said"), NAMES, ids=[f"{key}={value}" for key, value, _ in NAMES])
def test_wrong_name_is_refused_with_the_nearest_one(workplace, key, value, said):
    put(workplace, key, value)
    line = refused(workplace)
    assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize(("key", "value", "said"), VALUES, ids=[f"{key}={value}" for key, value, _ in VALUES])
def test_value_that_is_not_allowed_is_refused(workplace, key, value, said):
    put(workplace, key, value)
    line = refused(workplace)
    assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--method", "FedRap"], ["method", "did you mean FedRep?"]),
        (["--federation.roundz=3"], ["federation.roundz", "did you mean rounds?"]),
        (["--federation.participation", "1.5"], ["federation.participation", "(0, 1]", "1.5"]),
        (["--method.head_epoch", "3"], ["method.head_epoch", "did you mean head_epochs?"]),
        (["--resume", "auto", "--config", "nowhere.yaml"], ["--config", "no such file", "nowhere.yaml"]),
        (["--federation.rounds"], ["federation.rounds"]),
        (["--federation.failures", "often"], [*FAILURES, "'often'"]),
        (["--federation.failures"], [*FAILURES, "''"]),
        (["--federation.failures={3: ["], [*FAILURES, "'{3: ['"]),
        (["--federation.failures", "2020-13-45"], [*FAILURES, "'2020-13-45'"]),
        (["--federation.failures", "-0.1"], ["federation.failures.probability", "[0, 1)", "-0.1"]),
        (["--federation.newcomers", "many"], ["federation.newcomers:", "how many", "clients and after", "'many'"]),
    ],
)
def test_wrong_option_is_refused(workplace, argv, said):
    line = refused(workplace, *argv)
    assert [part for part in said if part not in line] == [], line


def test_wrong_environment_variable_is_refused(workplace):
    line = refused(workplace, env={"FL_LIGHTNING_FIT__FEDERATION__LOCAL_EPOCHS": "many"})
    assert "federation.local_epochs" in line
    assert "many" in line
    line = refused(workplace, env={"FL_LIGHTNING_FIT__": "many"})
    assert "FL_LIGHTNING_FIT__: names no option; " in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ["--config", "no such file", "bad.yaml"]),
        ("method: [", ["--config", "bad.yaml", "not YAML"]),
        ("- 1\n- 2\n", ["--config", "bad.yaml", "sections", "method"]),
        ("", ["--config", "bad.yaml", "sections", "method"]),
        (b"\xff\xfe\x00\x01", ["--config", "bad.yaml", "not YAML"]),
        ("training:\n  rounds: 3\n", ["training", "no such section", "method", "federation"]),
        ("seed: 0\n", ["method"]),
    ],
    ids=["missing", "broken", "list", "empty", "binary", "section", "no-method"],
)
def test_file_that_is_no_configuration_is_refused(workplace, content, said):
    if content is not None:
        workplace.write("bad.yaml", content)
    line = refused(workplace, config="bad.yaml")
    assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize(
    "argv", [["fitt"], ["evaluate", "nowhere"], ["list", "method"], ["list"], ["list", "methods", "--bogus", "zzz"]]
)
def test_wrong_command_is_refused(workplace, argv):
    code, _, err = workplace.call(*argv)
    assert code == 2
    assert err.count("\n") == 1
    if argv == ["fitt"]:
        assert "did you mean fit?" in err
    if argv == ["list", "method"]:
        assert "did you mean methods?" in err
    if "--bogus" in argv:
        assert err.endswith("list: takes one word; methods is one, and then came, got '--bogus zzz'\n")


# --- data sets ----------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    axes = values.ndim
    return struct.pack(f">{axes + 1}I", 0x800 + axes, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(workplace):
    """Tiny idx files where MNIST's should be; returns their folder."""
    rng = np.random.default_rng(0)
    for prefix, size in (("train", 80), ("t10k", 20)):
        images = rng.integers(0, 256, (size, 28, 28))
        workplace.write(f"sets/MNIST/raw/{prefix}-images-idx3-ubyte", idx(images))
        workplace.write(f"sets/MNIST/raw/{prefix}-labels-idx1-ubyte", idx(np.arange(size) % 10))
    dataset = {"class_path": "MNIST", "init_args": {"root": "sets", "download": False}}
    partition = {"class_path": "IID"}
    workplace.change(data={"dataset": dataset, "partition": partition}, federation={"rounds": 1})
    return workplace.path / "sets" / "MNIST" / "raw"


def test_whole_idx_files_are_read(workplace, mnist):
    workplace.fit()


def test_data_set_that_is_not_there_is_refused_saying_where_it_looked(workplace):
    put(workplace, "data.dataset", {"class_path": "MNIST", "init_args": {"root": "sets", "download": False}})
    line = refused(workplace)
    assert [
        said for said in ("data.dataset", "sets/MNIST/raw/train-images", "`download`", "root") if said not in line
    ] == []


def test_data_set_that_cannot_be_downloaded_is_refused(workplace):
    put(workplace, "data.dataset", {"class_path": "MNIST", "init_args": {"root": "sets", "download": True}})
    unroutable = "http://127.0.0.1:9"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    line = refused(workplace, env={**dict.fromkeys(names, unroutable), "no_proxy": None, "NO_PROXY": None})
    assert [said for said in ("data.dataset", "sets/MNIST/raw", "download failed", "root") if said not in line] == []


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("train-images-idx3-ubyte", lambda content: content[:1000], "cut short"),
        ("train-images-idx3-ubyte", lambda content: content[:9], "cut short"),
        ("train-images-idx3-ubyte", lambda content: b"", "magic"),
        ("train-images-idx3-ubyte", lambda content: content + b"1", "too long"),
        ("t10k-labels-idx1-ubyte", lambda content: b"PNG " + content[4:], "magic number must be 2049"),
        ("t10k-labels-idx1-ubyte", lambda content: idx(np.full(20, 200)), "label 200"),
        ("t10k-labels-idx1-ubyte", lambda content: idx(np.zeros(19)), "20 images"),
    ],
    ids=["cut", "cut-header", "empty", "long", "foreign", "label", "sizes"],
)
def test_damaged_data_set_file_is_refused(workplace, mnist, name, damage, said):
    (mnist / name).write_bytes(damage((mnist / name).read_bytes()))
    line = refused(workplace)
    assert line.startswith("data.dataset: ")
    assert said in line


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"class_path": "own.Own", "init_args": {"nan": True}}, ["data.dataset", "sample 7", "nan", "finite"]),
        ({"class_path": "own.Own", "init_args": {"label": 3}}, ["data.dataset", "label 3", "sample 11", "0 to 2"]),
        ({"class_path": "own.Own", "init_args": {"label": -1}}, ["data.dataset", "label -1", "sample 11", "0 to 2"]),
        ({"class_path": "own.Own", "init_args": {"labell": 1}}, ["data.dataset", "labell"]),
        ({"class_path": "own.Broken"}, ["data.dataset", "4 samples", "5 labels"]),
        ({"class_path": "own.NoDataset"}, ["data.dataset", "own.NoDataset"]),
        ({"class_path": "own.Nobody"}, ["data.dataset", "own.Nobody"]),
    ],
    ids=["nan", "label", "negative-label", "key", "sizes", "foreign", "absent"],
)
def test_own_data_set_that_is_wrong_is_refused(workplace, dataset, said):
    workplace.write("own.py", OWN_DATASET)
    put(workplace, "data.dataset", dataset)
    line = refused(workplace)
    assert [part for part in said if part not in line] == [], line


# --- the run's folder ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def occupied(make_workplace):
    """A workplace with a finished run of one round in it."""
    place = make_workplace("occupied")
    place.change(federation={"rounds": 1})
    place.fit("--quiet")
    return place


def test_folder_of_the_same_run_is_refused(occupied):
    line = refused(occupied)
    assert [said for said in ("output", "runs/run", "--resume", "--overwrite") if said not in line] == []


def test_folder_of_another_run_is_refused(occupied):
    line = refused(occupied, "--seed", "1")
    assert [said for said in ("output", "runs/run", "--resume", "--overwrite") if said not in line] == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seed", "1"], ["seed", "0", "1"]),
        (["--data.partition.init_args.beta", "0.6"], ["data.partition.init_args.beta", "0.5", "0.6"]),
        (["--optimizer.init_args.lr=0.3"], ["optimizer.init_args.lr", "0.2", "0.3"]),
        (["--method", "FedAvg"], ["method"]),
        (["--trainer.precision", "bf16-mixed"], ["trainer.precision", "bf16-mixed"]),
    ],
)
def test_resuming_with_another_configuration_is_refused(occupied, argv, said):
    line = refused(occupied, "--resume", "auto", *argv)
    assert [part for part in ("--resume", "another configuration", *said) if part not in line] == [], line


def test_checkpoint_that_is_not_there_is_refused(occupied):
    line = refused(occupied, "--resume", "runs/run/checkpoints/round-0007.ckpt")
    assert "--resume" in line
    assert "round-0007.ckpt" in line


def test_resume_from_a_checkpoint_without_its_run_is_refused(occupied):
    line = refused(occupied, "--resume", "runs/run/checkpoints/round-0001.ckpt", "--name", "other")
    assert "--resume" in line
    assert "runs/other" in line


def test_resume_and_overwrite_together_are_refused(occupied):
    assert "--overwrite" in refused(occupied, "--resume", "auto", "--overwrite")


def test_bad_input_leaves_the_run_alone_that_would_have_been_overwritten(occupied):
    assert "federation.participation" in refused(occupied, "--overwrite", "--federation.participation", "2")


def test_what_a_fresh_folder_refuses_is_refused_where_a_run_is_replaced(occupied):
    """A schedule that begins after the last round: a run that is continued may have one, for it may end earlier."""
    late = ("--federation.rounds", "2", "--federation.failures", "{schedule: {'9': [0]}}")
    fresh = refused(occupied, *late, "--name", "fresh")
    assert "federation.failures.schedule" in fresh
    assert refused(occupied, *late, "--overwrite") == fresh


def test_folder_with_foreign_files_is_refused_even_with_overwrite(workplace):
    workplace.write("runs/run/thesis.tex", "years of work")
    for argv in ([], ["--overwrite"]):
        line = refused(workplace, *argv)
        assert "output" in line
        assert "runs/run" in line


def test_output_that_is_a_file_is_refused(workplace):
    workplace.write("runs/run", "a file")
    assert "runs/run" in refused(workplace)


def damage_cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("pattern", "damage", "said"),
    [
        ("round-0001.ckpt", damage_cut, "cut short"),
        ("round-0001.ckpt", lambda content: b"", "cut short"),
        ("round-0001.ckpt", lambda content: b"some other file", "not a checkpoint"),
        ("clients/r0001-w0.states", damage_cut, "cut short"),
        ("clients/r0001-w0.states", None, "r0001-w0.states"),
    ],
    ids=["cut", "empty", "foreign", "state-cut", "state-missing"],
)
def test_damaged_checkpoint_is_refused(occupied, workplace, pattern, damage, said):
    for name, content in occupied.files().items():
        if content is not None:
            workplace.write(name, content)
    file = workplace.run / "checkpoints" / pattern
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    line = refused(workplace, "--resume", "auto", "--federation.rounds", "2")
    assert "--resume" in line
    assert said in line


def test_checkpoint_of_another_configuration_is_refused(occupied, workplace):
    """The folder's config.yaml agrees; the checkpoint in it does not."""
    for name, content in occupied.files().items():
        if content is not None:
            workplace.write(name, content)
    file = workplace.run / "checkpoints" / "round-0001.ckpt"
    state = torch.load(file, weights_only=True)
    state["identity"]["seed"] = 5
    save_tensors(file, state)
    line = refused(workplace, "--resume", "auto")
    assert [said for said in ("--resume", "another configuration", "seed", "5") if said not in line] == []


def test_checkpoint_of_another_format_is_refused(occupied, workplace):
    for name, content in occupied.files().items():
        if content is not None:
            workplace.write(name, content)
    torch.save({"weights": torch.zeros(3)}, workplace.run / "checkpoints" / "round-0001.ckpt")
    assert "--resume" in refused(workplace, "--resume", "auto")


def test_bad_input_is_refused_by_the_real_command(workplace):
    """`python -m fl_lightning` as a user starts it, without a server that forks."""
    workplace.change(federation={"participation": 3})
    before = workplace.files()
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "exp.yaml"]
    done = subprocess.run(command, cwd=workplace.path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    line = "fl-lightning: error: federation.participation: must be in (0, 1], got 3\n"
    assert done.stderr in (line, line.replace("got 3", "got 3.0"))
    assert workplace.files() == before


@pytest.mark.parametrize("name", ["../../up", "a/b", "..", "a\\b", "x" * 201, "line\nbreak"])
def test_name_that_is_no_name_is_refused(workplace, name):
    line = refused(workplace, f"--name={name}")
    assert "name" in line
    assert len(line) <= 300


def test_folder_with_a_config_that_is_no_runs_is_never_cleared(workplace):
    workplace.write("runs/run/config.yaml", "mine: 1\n")
    workplace.write("runs/run/models/mine.pt", b"weights")
    assert "--overwrite" in refused(workplace, "--overwrite")


OTHERS = {
    "trainer.max_time": "00:01:00:00",
    "trainer.plugins": [{"class_path": "lightning.pytorch.plugins.DoublePrecision"}],
    "federation.callbacks": [],
}


@pytest.mark.parametrize("key", [*OTHERS, "data"])
def test_run_that_would_go_on_otherwise_is_refused(occupied, workplace, key):
    for name, content in occupied.files().items():
        if content is not None:
            workplace.write(name, content)
    file = workplace.run / "checkpoints" / "round-0001.ckpt"
    if key == "data":
        save_tensors(file, {**load_tensors(file, "--resume"), "data": "of other samples"})
        assert "the data are not those" in refused(workplace, "--resume", "auto", "--federation.rounds", "2")
    else:
        section, _, name = key.partition(".")
        workplace.change(**{section: {name: OTHERS[key]}})
        assert key in refused(workplace, "--resume", "auto", "--federation.rounds", "2")
