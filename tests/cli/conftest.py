"""A small experiment on Digits, and ways to run the command line on it as a user would."""

import os
from pathlib import Path

import pytest
import yaml

from cli.forked import Running, start_server
from cli.run_files import read_run

collect_ignore = ["warm.py"]  # for the fork server only

BASE = """\
seed: 0
name: run
output: runs
method:
  class_path: FedRep
model:
  class_path: MLP
  init_args:
    hidden: [16, 8]
optimizer:
  class_path: SGD
  init_args:
    lr: 0.2
data:
  dataset: Digits
  partition:
    class_path: Dirichlet
    init_args:
      beta: 0.5
      min_samples: 20
  num_clients: 6
  batch_size: 64
federation:
  rounds: 3
trainer:
  accelerator: cpu
"""


class Workplace:
    """A working directory with `exp.yaml` in it."""

    def __init__(self, path: Path, environment: dict) -> None:
        self.path = path
        self.environment = environment
        self.draws = True
        self.haste = 1
        self.name = path.name
        path.mkdir(parents=True, exist_ok=True)
        self.write("exp.yaml", BASE)

    @property
    def run(self) -> Path:
        """The folder of the run that `exp.yaml` makes."""
        return self.path / "runs" / "run"

    def write(self, name, content) -> Path:
        """A file in the working directory: text, bytes or something to be written as YAML."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path

    def change(self, **sections) -> None:
        """Put other values into `exp.yaml`, section by section; a mapping is merged into what is there."""
        config = yaml.safe_load((self.path / "exp.yaml").read_text())
        self.write("exp.yaml", merged(config, sections))

    def start(self, *argv, env=None, die_at=None, out="out", terminal=None, fatal=None, torchrun=0) -> Running:
        """Start a command; `out` tells the output of several that run at once apart."""
        environment = {**self.environment, **(env or {})}
        output = self.path.parent / f"{self.name}.{out}"
        return Running(argv, self.path, environment, output, die_at, self.draws, self.haste, terminal, fatal, torchrun)

    def call(self, *argv, env=None, die_at=None, fatal=None):
        """Run a command to its end; returns (exit code, stdout, stderr)."""
        return self.start(*argv, env=env, die_at=die_at, fatal=fatal).result()

    def fit(self, *argv, env=None, config="exp.yaml"):
        """Run `fit --config exp.yaml` with these options on top; it must succeed. Returns stdout."""
        code, out, err = self.call("fit", "--config", config, *argv, env=env)
        assert code == 0, err
        return out

    def files(self) -> dict[str, bytes | None]:
        """Every file and folder there is, with its content."""
        found = sorted(self.path.rglob("*"))
        return {str(path.relative_to(self.path)): path.read_bytes() if path.is_file() else None for path in found}


def merged(base, changes):
    if not isinstance(base, dict) or not isinstance(changes, dict) or "class_path" in changes:
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of every process: one cache for all, no data sets of the user's, no GPU, no terminal."""
    start_server()
    settings = {name: None for name in os.environ if name.startswith("FL_LIGHTNING_")}
    return settings | {
        "FL_LIGHTNING_CACHE": str(tmp_path_factory.mktemp("cli-cache")),
        "FL_LIGHTNING_DATA": str(tmp_path_factory.mktemp("cli-data")),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "FORCE_COLOR": None,
    }


@pytest.fixture
def workplace(tmp_path, environment) -> Workplace:
    return Workplace(tmp_path / "work", environment)


@pytest.fixture(scope="session")
def make_workplace(tmp_path_factory, environment):
    return lambda name: Workplace(tmp_path_factory.mktemp(name) / "work", environment)


@pytest.fixture(scope="session")
def finished(make_workplace):
    """A finished run of `exp.yaml`, for tests that only look at it; `finished.out` is what it printed."""
    place = make_workplace("finished")
    place.out = place.fit()
    return place


@pytest.fixture(scope="session")
def assert_same_run():
    """Two runs' folders hold the same numbers and, bit for bit, the same weights."""

    def check(a: Path, b: Path) -> None:
        left, right = read_run(a), read_run(b)
        assert left["metrics.csv"] == right["metrics.csv"]
        assert left["clients.csv"] == right["clients.csv"]
        assert left["checkpoint"][0] == right["checkpoint"][0]
        assert left["checkpoint"][1] == right["checkpoint"][1]
        assert left["clients"] == right["clients"]
        assert left["models"] == right["models"]

    return check
