"""One experiment: what a configuration says, the run's folder, and what is done with both."""

from __future__ import annotations

import importlib
import inspect
import json
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.loggers import Logger

from fl_lightning.building import architectures, build, build_as
from fl_lightning.configuration import Config, identity, read_config, short_name
from fl_lightning.core.method import Method
from fl_lightning.data.module import FederatedData
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.files import write_text
from fl_lightning.federation.launch import Team, is_main, plan, started_outside
from fl_lightning.federation.loop import FederatedLoop, check_identity
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.reexamination import Figure, reexamine
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.signals import STOP_SIGNALS, StopSignals, stop_at_once
from fl_lightning.federation.tether import is_tethered
from fl_lightning.models.split import SplitModel
from fl_lightning.terminal import say
from fl_lightning.trust import import_name

_OWN_FILES = (
    "config.yaml",
    "partition.json",
    "metrics.csv",
    "clients.csv",
    "topology.csv",
    "summary.json",
    "curves.png",
    "partition.png",
    "wandb.json",
)
_OWN_FOLDERS = ("checkpoints", "models", "wandb")
_LOCK = ".lock"


class Experiment:
    """Everything that one configuration says, built.

    Args:
        config: the resolved configuration in plain containers; classes are ``{class_path, init_args}``.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.seed: int = config["seed"]
        self.method_name = short_name(config["method"])
        self.name: str = (
            config["name"] or f"{self.method_name}-{short_name(config['data']['dataset'])}-{self.seed}".lower()
        )
        self.folder = Path(config["output"]) / self.name
        data = dict(config["data"])
        described = {"augmentation": data.pop("augmentation", None)}  # builds what its descriptions say by itself
        self.data: FederatedData = build_as(FederatedData, data, "data", **described)
        self.loop = FederatedLoop(build_as(Federation, config["federation"], "federation"))
        flags = {key: value for key, value in (config["trainer"] or {}).items() if value is not None}
        self.trainer = {key: build(value, f"trainer.{key}") for key, value in flags.items()}
        self.identity = identity(config)
        self.architecture = architectures(config["model"], self.data.num_clients)

    def setup(self, in_memory: bool = False) -> None:
        """Load the data, build clients and Trainer. Writes nothing into the run's folder.

        Args:
            in_memory: keep the loop out of the run's folder, too, when it runs.
        """
        self.data.setup(self.seed)
        trainer = {"default_root_dir": str(self.folder), **self.trainer}
        self.loop.setup(
            self._make_method,
            self.data,
            self._make_optimizer,
            self.seed,
            trainer=trainer,
            architecture=self.architecture,
            folder=None if in_memory else self.folder,
            identity=self.identity,
        )

    def _make_method(self, architecture: int) -> Method:
        spec = self.data.spec
        models = self.config["model"]
        node, key = (models[architecture], f"model.{architecture}") if isinstance(models, list) else (models, "model")
        cls = import_name(node["class_path"])
        given = {"input_shape": spec.input_shape, "num_classes": spec.num_classes}
        if "vocabulary_size" in inspect.signature(cls).parameters:
            require(spec.vocabulary_size > 0, key, f"{cls.__name__} reads tokens, but the data set has no vocabulary")
            given["vocabulary_size"] = spec.vocabulary_size
        model: SplitModel = build(node, key, **given)
        return build(self.config["method"], "method", model=model)

    def _make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return build(self.config["optimizer"], "optimizer", params=parameters)

    # --- the run's folder -------------------------------------------------------------------------------------------

    def claim_folder(self, resume: str | None, overwrite: bool) -> Path | None:
        """Decide whether the run may use its folder, and from which checkpoint it goes on. Writes nothing.

        Raises:
            ConfigError: if the folder holds another run, something else, or no checkpoint where one was named.
        """
        where = f"{self.folder}"
        existing = self.folder / "config.yaml"
        if not existing.is_file():
            occupied = self.folder.exists() and (not self.folder.is_dir() or _holds_files(self.folder))
            require(not occupied, "output", f"{where} exists and is no run's folder; choose another --output or --name")
            require(resume in (None, "auto"), "--resume", f"there is no run in {where}")
            return None
        if overwrite:
            require(resume is None, "--overwrite", "cannot be given together with --resume")
            return None
        if resume is None:
            raise ConfigError("output", f"{where} holds a run; continue it with --resume auto, or say --overwrite")
        check_identity(identity(read_config(existing)), self.identity)
        path = Checkpoints(self.folder / "checkpoints").find(resume)
        inside = path is None or (self.folder / "checkpoints").resolve() == path.resolve().parent
        require(inside, "--resume", f"{path} belongs to another run than {where}; give its --output and --name")
        return path

    def clear_folder(self) -> None:
        """Delete what an earlier run left; nothing that is not a run's own."""
        for name in _OWN_FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in _OWN_FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    # --- what is done with it ---------------------------------------------------------------------------------------

    def fit(
        self, resume: str | None = None, overwrite: bool = False, callbacks: Callable[..., Any] | None = None
    ) -> Config | None:
        """Run the federation and return its summary; None from a worker that is not the main one.

        Args:
            resume: ``auto``, a checkpoint or a run's folder, None to start anew.
            overwrite: replace the run that the folder holds.
            callbacks: called without arguments once all is set up; returns a list of callbacks for the loop.
        """
        self.check(resume, overwrite)
        main = self.loop.workers.is_main
        loggers = self._loggers() if main else []
        with self._held() if main else nullcontext():
            checkpoint = self.claim_folder(resume, overwrite) if main else None  # again: another may have been here
            checkpoint = self.loop.workers.main_says(checkpoint)
            seen = (self.folder / _LOCK).exists()
            require(seen, "output", f"{self.folder} must lie in a folder that all machines of the run see")
            if checkpoint is not None:
                self._continue_from(checkpoint)
            if main:
                self._clean(overwrite)
            return self._run(loggers, callbacks)

    def check(self, resume: str | None, overwrite: bool) -> None:
        """Set up, after a look at the folder. Writes nothing.

        Raises:
            ConfigError: for anything in the configuration or the folder that would stop the run.
        """
        if is_main():
            self.claim_folder(resume, overwrite)
        self.setup()

    def team(self) -> Team:
        """The processes of the run."""
        settings = self.loop.settings
        in_turn = settings.exchange is not None and settings.exchange.in_turn
        participants = max(1, int(settings.participation * self.data.num_clients))
        return plan(settings.workers, settings.threads, participants, self.trainer, in_turn)

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_process(self.folder):
            yield

    def _clean(self, overwrite: bool) -> None:
        for left_over in self.folder.rglob(".*.tmp"):
            if re.fullmatch(r"\..+\.\d+\.tmp", left_over.name):  # of a kill in the middle of a write
                left_over.unlink()
        if overwrite:
            self.clear_folder()

    def _continue_from(self, checkpoint: Path) -> None:
        checkpoints = self.loop.checkpoints or Checkpoints(self.folder / "checkpoints")
        self.loop.load_state_dict(checkpoints.load(checkpoint))
        self.loop.workers.main_says(None)  # all have read it
        if self.loop.checkpoints is not None and self.loop.workers.is_main:
            checkpoints.prune(self.loop.settings.checkpoint.keep)

    @property
    def advice(self) -> str:
        """What to do when a run was broken off."""
        if not self.loop.settings.checkpoint.saves:
            return "nothing was saved (federation.checkpoint.every is 0)"
        return (
            "the rounds before are saved; continue with\n"
            f"  fl-lightning fit --config {self.folder}/config.yaml --resume auto"
        )

    def _run(self, loggers: list[Logger], callbacks: Callable[..., Any] | None) -> Config | None:
        self.loop.advice = self.advice
        if not self.loop.workers.is_main:
            self._follow()
            return None
        write_text(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        write_text(self.folder / "partition.json", json.dumps(self.data.partition_record()) + "\n")
        for logger in loggers:
            logger.log_hyperparams(self.config)
        recorder = Recorder(self.folder, self.about(), loggers)
        self.loop.callbacks += [recorder, *(callbacks() if callbacks is not None else ())]
        with recorder, stop_on_signals(self.loop):
            if self.loop.run() is None:
                recorder.stop(self.loop)
        return json.loads((self.folder / "summary.json").read_text())

    def _follow(self) -> None:
        """What a worker does that is not the main one; signals reach it only where torchrun or SLURM send them."""
        with stop_on_signals(self.loop) if started_outside() != (1, 1) else nullcontext():
            self.loop.run()

    def _loggers(self) -> list[Logger]:
        loggers = []
        for index, node in enumerate(self.config["logger"] or ()):
            takes_folder = "save_dir" in inspect.signature(import_name(node["class_path"])).parameters
            folder = {"save_dir": str(self.folder)} if takes_folder else {}
            loggers.append(build({**node, "init_args": {**folder, **(node.get("init_args") or {})}}, f"logger.{index}"))
        return loggers

    def about(self) -> Config:
        """What `summary.json` says of the run beside its numbers."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "method": self.method_name,
            "seed": self.seed,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "lightning": L.__version__,
                "fl_lightning": importlib.import_module("fl_lightning").__version__,
            },
            "git_commit": git_commit(),
        }

    def evaluate(self, checkpoint: str = "auto") -> list[Figure]:
        """Compute the run's accuracies again from its folder; `federation.reexamination` says which.

        Args:
            checkpoint: which checkpoint; ``auto`` takes the newest.
        """
        self.setup()
        return reexamine(self.loop, self.folder, checkpoint)


def git_commit() -> str | None:
    """The commit of the working directory, where there is one."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _holds_files(folder: Path) -> bool:
    """Whether somebody's files are there; a lock or a temporary file of a killed run is nobody's."""
    return any(not path.name.startswith(".") for path in folder.iterdir())


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold a run's folder, so that no second process writes into it; the system lets go when this one ends.

    Raises:
        ConfigError: if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError("output", f"another process is running in {folder}") from error
        yield


def stop_on_signals(loop: FederatedLoop) -> StopSignals:
    """The first signal ends the run after the present round is saved; the second ends it at once."""

    def ask(number: int) -> None:
        loop.stop(number)
        done = "saved" if loop.checkpoints is not None else "done"
        say(f"stopping once round {loop.round + 1} is {done}; again to stop at once")

    return StopSignals(ask, stop_at_once, (signal.SIGINT,) if is_tethered() else STOP_SIGNALS)
