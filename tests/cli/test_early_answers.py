"""Mistakes, help, lists and `--print_config` are answered without importing torch or lightning, in the same words."""

import json
import subprocess
import sys

import pytest
import yaml

from cli.test_bad_input import NAMES, VALUES
from fl_lightning import cli
from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.parser import resolve
from fl_lightning.precheck import check_names
from fl_lightning.shipped import folder
from fl_lightning.trust import Trust

SCRIPT = """\
import contextlib, io, json, os, sys
from fl_lightning import cli

with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):  # what all of them read is read once
    cli.main(["fit", "--config", "quickstart", "--print_config"])
for line in sys.stdin.readlines():
    if os.fork():  # each in a process of its own
        os.wait()
        continue
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(json.loads(line))
        except SystemExit as error:
            code = error.code
    heavy = sorted({"torch", "lightning", "torchvision", "jsonargparse"} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]), flush=True)
    os._exit(0)
"""
LATE = (
    "min_samples", "shards", "classes", "init_args.n=", "num_clients", "data.partition={", "accelerator",
    "precision=24", "nowhere", "failures=[6]", "failures=[0, 1", "failures={'8-9'",
)  # fmt: skip
"""What the data set, a GPU, the clients' number or a module of the user's own tells."""
ANSWERED = [
    ["--help"],
    ["list", "methods"],
    ["fit", "--help"],
    ["fit", "--method.help", "FedRep"],
    ["fit", "--trainer.callbacks.help", "EarlyStopping"],
    ["fit", "--config", "quickstart", "--print_config"],
    ["fit", "--config", "quickstart", "--logger", "CSVLogger", "--trainer.callbacks", "EarlyStoping"],
    ["table", "--help"],
    ["table", "tables/quickstart", "--dry-run", "--seeds", "0"],
    ["table", "tables/quickstart", "--print-commands", "--seeds", "0"],
    ["table", "tables/quickstart", "--only", "FedAvgg"],
    ["tune", "--help"],
    ["report", "--help"],
]
MORE = [
    ("optimizer.init_args.lr", "fast"),
    ("trainer.max_steps", 0),
    ("trainer.precision", []),
    ("trainer.callbacks", [{"class_path": "EarlyStopping", "init_args": {"patience": "long"}}]),
    ("federation.wire", [{"class_path": "TopK", "init_args": {"share": 2.0}}]),
    ("method", {"class_path": "FedProx", "init_args": {"mu": -1.0}}),
    ("method", {"class_path": "MOON", "init_args": {"temperature": 0.0}}),
    ("method", {"class_path": "FedDistill", "init_args": {"averages": "none"}}),
    ("method", {"class_path": "DRDFL", "init_args": {"latents": {"personal_size": 0}}}),
    (
        "method",
        {
            "class_path": "FedAvg",
            "init_args": {"extra_terms": [{"class_path": "Proximal", "init_args": {"weight": -1.0}}]},
        },
    ),
]
BASE = {
    "method": {"class_path": "FedRep"},
    "model": {"class_path": "MLP", "init_args": {"hidden": [8]}},
    "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.2}},
    "data": {"dataset": "Digits", "partition": {"class_path": "Dirichlet", "init_args": {"beta": 0.5}}},
    "federation": {"rounds": 3},
    "trainer": {"accelerator": "cpu"},
}  # fmt: skip
MISTAKES = [(key, value) for key, value, _ in [*NAMES, *VALUES] if not any(late in f"{key}={value}" for late in LATE)]
MISTAKES += MORE


def with_value(key, value):
    config = json.loads(json.dumps(BASE))
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node[name] = node[name] if isinstance(node.get(name), dict) else {}
        node = node[name]
    node[last] = value
    return config


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process without torch says: commands of `ANSWERED` by their words, mistakes by their number."""
    place = tmp_path_factory.mktemp("early")
    for number, (key, value) in enumerate(MISTAKES):
        (place / f"{number}.yaml").write_text(yaml.safe_dump(with_value(key, value)))
    commands = [*ANSWERED, *(["fit", "--config", f"{number}.yaml"] for number in range(len(MISTAKES)))]
    lines = "".join(f"{json.dumps(words)}\n" for words in commands)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=lines, cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(map(" ".join, commands), map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("words", ANSWERED, ids=" ".join)
def test_question_is_answered_without_torch(answers, words):
    code, out, err, heavy = answers[" ".join(words)]
    assert heavy == []
    assert (code, bool(out), bool(err)) in ((0, True, False), (2, False, True))


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[f"{key}={value}" for key, value in MISTAKES])
def test_mistake_is_answered_without_torch_in_the_words_of_the_real_class(answers, number, tmp_path, monkeypatch):
    code, _, err, heavy = answers[f"fit --config {number}.yaml"]
    assert (code, heavy) == (2, []), err
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(with_value(*MISTAKES[number])))
    with pytest.raises(ConfigError) as raised:  # noqa: PT012 - whichever of them refuses
        given = CommandLine(["--config", f"{number}.yaml"])
        check_names(given)
        with given.speaking():
            BuiltExperiment(resolve(given.tree, Trust(own=True))).setup()
    assert err == f"fl-lightning: error: {raised.value}\n"


def test_resolved_configuration_is_the_same_without_torch(answers):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder())
        live = resolve(CommandLine(["--config", "quickstart"]).tree, Trust())
    assert yaml.safe_load(answers["fit --config quickstart --print_config"][1]) == live


def test_help_is_the_same_without_torch(answers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["fit", "--method.help", "FedRep"])
    assert " ".join(capsys.readouterr().out.split()) == " ".join(answers["fit --method.help FedRep"][1].split())


def test_home_is_filled_in_where_runs_go(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve({**BASE, "output": "~/runs"}, Trust())["output"] == "/home/me/runs"
    assert resolve({**BASE, "output": "runs/~"}, Trust())["output"] == "runs/~"


def test_command_in_a_folder_that_was_deleted_says_so(tmp_path):
    script = "import os; from fl_lightning.__main__ import run; os.rmdir(os.getcwd()); run()"
    command = [sys.executable, "-c", script, "list", "methods"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("fl-lightning: error: working directory: cannot be used (No such file or directory)")
