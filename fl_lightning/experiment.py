"""One experiment: what a configuration says, the run's folder, and what is done with both."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import platform
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fl_lightning.building import architectures, build, build_as
from fl_lightning.command_line import OPTIMIZER
from fl_lightning.configuration import Config, contents, identity, short_name
from fl_lightning.configured_loggers import build_loggers, keep_versions
from fl_lightning.core.client import ClientModule
from fl_lightning.core.method import Method
from fl_lightning.data.cache import streams
from fl_lightning.data.module import FederatedData
from fl_lightning.errors import TRACEBACK, ConfigError, place_of, renamed, require, shortened
from fl_lightning.federation.calendar import number_drawn
from fl_lightning.federation.loggers import Loggers
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.reexamination import Figure, reexamine
from fl_lightning.federation.remarks import remarks
from fl_lightning.federation.saving import take_up
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.sickness import ClientError, RoundError
from fl_lightning.federation.signals import STOP_SIGNALS, StopSignals, stop_at_once
from fl_lightning.federation.team import Team, is_main, plan, started_outside
from fl_lightning.federation.tether import be_interrupted, is_tethered
from fl_lightning.federation.threads import choose_threads
from fl_lightning.federation.trainers import for_reading
from fl_lightning.federation.workers import Workers, refused_together, require_one_folder, require_told_alike
from fl_lightning.files import WriteError, write_text
from fl_lightning.identity import CODE, in_common, own_files
from fl_lightning.metrics import build_metrics
from fl_lightning.models.split import SplitModel
from fl_lightning.own_sources import edited_since_import, own_sources
from fl_lightning.reading import dump_yaml
from fl_lightning.resuming import advice_on, check_name, continue_command
from fl_lightning.run_folder import RunFolder
from fl_lightning.sealed import read_json, write_json
from fl_lightning.sizes import check_memory
from fl_lightning.terminal import say
from fl_lightning.trust import import_name


def name_of(config: Config) -> str:
    """A run's name: its own, or that of its method, data set and seed."""
    usual = f"{short_name(config['method'])}-{short_name(config['data']['dataset'])}-{config['seed']}".lower()
    return str(config["name"] or usual)


class BuiltExperiment:
    """Everything that one configuration says, built.

    Args:
        config: the resolved configuration in plain containers; classes are ``{class_path, init_args}``.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.seed: int = config["seed"]
        self.method_name = short_name(config["method"])
        self.name = name_of(config)
        check_name(self.name)
        self.folder = Path(config["output"]) / self.name
        self.data = build_data(config["data"])
        nodes = config.get("metrics") or []
        self.loop = FederatedLoop(
            build_as(Federation, config["federation"], "federation"), partial(build_metrics, nodes) if nodes else None
        )
        flags = {key: value for key, value in (config["trainer"] or {}).items() if value is not None}
        self.trainer = {key: build(value, f"trainer.{key}") for key, value in flags.items()}
        own = own_sources(config)
        for module in edited_since_import(own)[:1]:
            rule = "was edited since this process imported it, which may go on with what it was; start a new one, or "
            raise ConfigError(module, f"{rule}importlib.reload it")
        sources = {f"{module}{CODE}": known for module, known in own.items()}
        self.identity = {**identity(config), **contents(config), **sources, **own_files(config)}
        self.architecture = architectures(config["model"], self.data.num_clients)
        self.signals = (signal.SIGINT,) if is_tethered() else STOP_SIGNALS
        """What asks the run to stop."""
        self.stopped_by = 0
        """The signal that stopped it; 0 for none."""
        self._kept_by_callbacks: Config = {}  # as a resumed run's checkpoint has it
        self.asked_by = 0
        """The signal that came while it ran; where it came in the last round, nothing was left to be stopped."""

    def setup(self, in_memory: bool = False, anew: bool = False, fits: bool = True) -> None:
        """Load the data, build clients and Trainer. Writes nothing into the run's folder.

        Args:
            in_memory: keep the loop out of the run's folder, too, when it runs, and so clients' states off the disk.
            anew: whether a run that the folder holds is replaced, not continued.
            fits: whether clients are fitted; otherwise nothing is said of what their steps could not be, and the CPU
                does where the run's GPU is not there.
        """
        versions = {f"version of {name}": ".".join(own.split(".")[:2]) for name, own in package_versions().items()}
        if started_outside() != (1, 1):
            versions["code of fl_lightning"] = package_code()
        workers = Workers.present()
        require_told_alike(workers, {**versions, **in_common(self.config), **self.identity})
        with refused_together(workers):
            self.data.setup(self.seed)
        if not fits:
            self.loop.settings = replace(self.loop.settings, cohort=None, graph=None, compile=False)
        if in_memory:
            self.loop.settings = replace(self.loop.settings, pool="memory")
        trainer = {"default_root_dir": str(self.folder), **(self.trainer if fits else for_reading(self.trainer))}
        self.loop.setup(
            self._make_method,
            self.data,
            self._make_optimizer,
            self.seed,
            trainer=trainer,
            architecture=self.architecture,
            folder=None if in_memory else self.folder,
            identity=self.identity,
            anew=anew,
        )
        if self.loop.settings.threads is None:
            choose_threads(self.loop.runner.modules, self.data.store, self.data.batch_size)

    def _say_whose_optimizer(self) -> None:
        """Say so where the section `optimizer` says something that a model's own optimizer overrules."""
        usual: Config = dict(OPTIMIZER)
        own: Config = self.config["optimizer"]
        is_usual = short_name(own) == short_name(usual) and own["init_args"].get("lr") == usual["init_args"]["lr"]
        brings = [module.own.has_optimizer for module in self.loop.runner.modules]
        if is_usual or not any(brings):
            return
        if all(brings):
            say("optimizer: not used, the model brings its own; model.optimizer: configured takes this one")
            return
        takes = "its init_args.optimizer: configured takes this one"
        for key in (f"model.{index}" for index, own in enumerate(brings) if own):
            say(f"optimizer: not used for {key}, which brings its own; {takes}")

    def _make_method(self, architecture: int) -> Method:
        spec = self.data.spec
        models = self.config["model"]
        node, key = (models[architecture], f"model.{architecture}") if isinstance(models, list) else (models, "model")
        cls = import_name(node["class_path"])
        given = {"input_shape": spec.input_shape, "num_classes": spec.num_classes}
        if "vocabulary_size" in inspect.signature(cls).parameters:
            require(spec.vocabulary_size > 0, key, f"{cls.__name__} reads tokens, but the data set has no vocabulary")
            given["vocabulary_size"] = spec.vocabulary_size

        def make() -> Method:
            model: SplitModel = build(node, key, **given)
            return build(self.config["method"], "method", model=model)

        check_memory(lambda: ClientModule(make(), None), [node, self.config["method"]], key)
        return make()

    def _make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return build(self.config["optimizer"], "optimizer", params=parameters)

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
        workers = self.loop.workers
        main = workers.is_main
        nodes = self.config["logger"] or ()
        try:
            with ExitStack() as held:
                with refused_together(workers):
                    loggers = build_loggers(nodes, self.folder, resume is not None) if main else Loggers()
                    check = held.enter_context(RunFolder(self.folder).held()) if main else None
                self._prepare(resume, overwrite, loggers, check)
                with nullcontext() if check is None else self._tidying(check):
                    return self._run(callbacks)
        except WriteError as error:
            if self.loop.participants:
                raise
            raise ConfigError("output", str(error)) from error  # before the first round

    def check(self, resume: str | None, overwrite: bool) -> None:
        """Set up, after a look at the folder. Writes nothing.

        Raises:
            ConfigError: for anything in the configuration or the folder that would stop the run.
        """
        with refused_together(Workers.present()):
            if is_main():
                RunFolder(self.folder).claim(resume, overwrite, self.identity)
        self.setup(anew=overwrite)

    def team(self) -> Team:
        """The processes of the run."""
        settings = self.loop.settings
        in_turn = settings.exchange is not None and settings.exchange.in_turn
        drawn = number_drawn(settings.participation, self.data.num_clients)
        participants = drawn if settings.selection is None else self.data.num_clients  # a rule may choose more
        devices, samples = self.trainer.get("devices"), self.data.batch_size
        rule = f"must be at most data.batch_size ({samples}), over which they share a mini-batch"
        require(not isinstance(devices, int) or devices <= samples, "trainer.devices", rule, devices)
        return plan(settings.workers, settings.threads, participants, self.trainer, in_turn)

    def _prepare(self, resume: str | None, overwrite: bool, loggers: Loggers, check: Callable[[], None] | None) -> None:
        """Take up what a resumed run goes on from, clear what one that is begun anew replaces; the folder is held."""
        folder, workers = RunFolder(self.folder), self.loop.workers
        dump_yaml(self.config)  # what cannot be written down deletes nothing
        chosen = None
        with refused_together(workers):
            if workers.is_main:
                folder.claim(resume, overwrite, self.identity)  # again: another may have been here
                chosen = folder.choose(resume)
        if workers.is_main:
            self.recorder = Recorder(self.folder, self.about(), loggers, check)
            self.loop.callbacks.append(self.recorder)
            if self.loop.checkpoints is not None and check is not None:
                self.loop.checkpoints.require_ours = check
        require_one_folder(workers, self.folder)
        chosen = workers.main_says(chosen)
        if chosen is not None:
            with refused_together(workers):
                state = folder.checkpoints.load(chosen.path)
            self.loop.load_state_dict(state)
            self._kept_by_callbacks = state["callbacks"]
            self.loop.agreement.reason = "" if folder.is_over(chosen) else state.get("ended", "")
            workers.everyone_says(None)  # all have read it
        with refused_together(workers):
            if workers.is_main:
                if chosen is not None or not overwrite:
                    folder.leave_only(chosen, self.loop.settings.checkpoint, self.loop.calendar.participants)
                folder.clean(overwrite)
                self._write_down(loggers)
                self._say_whose_optimizer()

    @contextmanager
    def _tidying(self, check: Callable[[], None]) -> Iterator[None]:
        """Let nothing stay of clients' states that are not saved; after an error, others may still read theirs."""
        folder, policy = RunFolder(self.folder), self.loop.settings.checkpoint
        try:
            yield
        except BaseException:
            with suppress(OSError):  # the error is what counts
                if self.loop.workers.size == 1:
                    check()
                    folder.leave_saved(policy)
            raise
        check()
        folder.leave_saved(policy)

    def _write_down(self, loggers: Loggers) -> None:
        """What a run is, in its folder."""
        config, done = self.config, self.loop.round
        if done > config["federation"]["rounds"]:
            say(f"federation.rounds: the run has {done} rounds already, and config.yaml goes on saying so")
            config = {**config, "federation": {**config["federation"], "rounds": done}}
        write_text(self.folder / "config.yaml", dump_yaml(config))
        write_json(self.folder / "partition.json", self.data.partition_record())
        loggers.reserve()
        keep_versions(config["logger"] or (), loggers, self.folder)
        loggers.log_hyperparams(self.config)

    @property
    def advice(self) -> Callable[[], str]:
        """Says what to do when the run was broken off."""
        return partial(advice_on, self.folder, self.loop.settings.checkpoint.saves)

    def said_of(self, error: RoundError) -> str:
        """The line on what has ended the run; a long reason loses its middle, the command that goes on does not."""
        last = self._last_good(error)
        return f"fl-lightning: error: {shortened(str(error), max(170, 276 - len(last)))}; {last}"

    def _last_good(self, error: RoundError) -> str:
        """Where a run goes on that a sick client or server, or a mistake in somebody's own file, has ended."""
        checkpoints = self.loop.checkpoints
        kept = checkpoints.all() if checkpoints is not None else []
        hint = ""
        if error.__cause__ is not None and place_of(error.__cause__):
            hint = f" ({TRACEBACK}=1 shows the error as it was raised)"
        elif kept and isinstance(error, ClientError) and self.loop.settings.on_client_error == "stop":
            hint = " (--federation.on_client_error skip leaves sick clients out)"
        if not kept:
            return f"no round was saved{hint}"
        return f"last good checkpoint: {kept[-1]}; {continue_command(self.folder)} continues there{hint}"

    def _run(self, callbacks: Callable[..., Any] | None) -> Config | None:
        self.loop.advice = self.advice
        if not self.loop.workers.is_main:
            self._follow()
            return None
        given = list(callbacks()) if callbacks is not None else []
        self.loop.callbacks += given
        take_up(self.loop, self._kept_by_callbacks, given)
        for remark in remarks(self.loop):
            say(f"fl-lightning: note: {remark}")
        with self.recorder:
            with stop_on_signals(self.loop, self.signals) as stopping:
                final = self.loop.run()
                self.asked_by = stopping.first
                if final is None:
                    self.recorder.stop(self.loop)
                    self.stopped_by = stopping.first
            be_interrupted()
        return read_json(self.folder / "summary.json", "output")

    def _follow(self) -> None:
        """What a worker does that is not the main one; signals reach it only where torchrun or SLURM send them."""
        with stop_on_signals(self.loop, self.signals) if started_outside() != (1, 1) else nullcontext():
            self.loop.run()

    def about(self) -> Config:
        """What `summary.json` says of the run beside its numbers."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "method": self.method_name,
            "seed": self.seed,
            "evaluate_on": self.data.evaluate_on,
            "versions": {"python": platform.python_version(), **package_versions()},
            "git_commit": git_commit(),
        }

    def evaluate(self, checkpoint: str = "auto") -> list[Figure]:
        """Compute the run's accuracies again from its folder; `federation.reexamination` says which.

        Args:
            checkpoint: which checkpoint; ``auto`` takes the newest.

        Raises:
            ConfigError: if it is none, or of another run or other data.
        """
        self.setup(fits=False)
        with renamed("--resume", "--checkpoint"):
            return reexamine(self.loop, self.folder, checkpoint)


def build_data(section: Mapping[str, Any]) -> FederatedData:
    """The data of a federation, as a configuration's section `data` says; not loaded yet."""
    data = dict(section)
    described = {"augmentation": data.pop("augmentation", None)}  # builds what its descriptions say by itself
    with streams():  # a class of the user's own may draw its samples when it is made
        built: FederatedData = build_as(FederatedData, data, "data", **described)
    return built


def package_versions() -> dict[str, str]:
    """Those of what computes a run's numbers."""
    own = importlib.import_module("fl_lightning").__version__
    return {"torch": torch.__version__, "lightning": L.__version__, "fl_lightning": own}


def package_code() -> str:
    """A digest of this package's files: checkouts on two machines may have one version, and not the same code."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from; None of one that was installed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # what lies above an installed package is somebody else's
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def stop_on_signals(loop: FederatedLoop, numbers: tuple[int, ...]) -> StopSignals:
    """The first signal ends the run after the present round is saved; the second ends it at once."""

    def ask(number: int) -> None:
        loop.stop(number)
        done = "saved" if loop.checkpoints is not None else "done"
        settled = loop.agreement.settled  # a round that is trained may have its figures written still
        round = min((loop.round if settled is None else settled) + 1, loop.settings.rounds)
        when = f"once round {round} is {done}" if loop.participants else f"before round {round}"
        say(f"stopping {when}; again to stop at once")

    return StopSignals(ask, stop_at_once, numbers)
