"""An experiment from Python: what ``fl-lightning fit`` does, in this process, without its exit codes."""

from __future__ import annotations

import atexit
import multiprocessing.context
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from fl_lightning.configuration import Config
from fl_lightning.data.module import FederatedData
from fl_lightning.errors import ConfigError, require, shortened
from fl_lightning.experiment import BuiltExperiment, name_of
from fl_lightning.federation import launch
from fl_lightning.federation.callbacks import FederationCallback, check_hooks
from fl_lightning.federation.sickness import RoundError
from fl_lightning.federation.signals import StoppedAtOnce, exit_code
from fl_lightning.federation.team import Team, is_main
from fl_lightning.files import WriteError, expanded, write_atomically
from fl_lightning.overrides import Source, said
from fl_lightning.parser import resolve
from fl_lightning.report.live import RoundProgress
from fl_lightning.report.plain import PlainConsole
from fl_lightning.resuming import run_said_by
from fl_lightning.run import Run
from fl_lightning.terminal import OutlivedStream, say
from fl_lightning.trust import Trust
from fl_lightning.undisturbed import undisturbed


class Experiment:
    """A configuration that can be run, again and again, many in one process.

    It is checked at once, as the command line does it, and holds nothing heavy: data, clients and Trainer are made for
    a fit and are gone after it.

    ```python
    Experiment("quickstart", method="FedProx", method__mu=0.1, federation__rounds=3)
    Experiment({"method": "FedAvg", "model": "MLP", "data": {"dataset": "Digits", "partition": "IID"}})
    ```

    Args:
        sources: YAML files, names of ours (``quickstart``), or mappings that hold what such a file would: sections, or
            dotted keys. Later ones win. Short names and short forms are those of the command line; a class may stand
            for its path.
        overrides: keys of the configuration by keyword, two underscores for a dot: ``federation__rounds=3`` is
            ``--federation.rounds 3``. They win over all sources, in any order.

    Raises:
        ConfigError: for what is wrong with it, in the command line's one line.
    """

    def __init__(self, *sources: Source, **overrides: Any) -> None:
        self._given = said(sources, overrides)
        self._trust = Trust(own=True)
        with self._given.speaking():
            self.config: Config = resolve(self._given.tree, self._trust)
            """The resolved configuration, in plain containers; what is changed in it is checked by the next `fit`."""
            BuiltExperiment(self.config)
        self._sources = *sources, overrides
        self._place = self.config["output"], self.config["name"]

    @property
    def name(self) -> str:
        """The run's; change it in `config`."""
        return name_of(self.config)

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        return expanded(self.config["output"]) / self.name

    @property
    def seed(self) -> int:
        """The run's; change it in `config`, or make another `Experiment(…, seed=1)`."""
        return int(self.config["seed"])

    def _built(self) -> BuiltExperiment:
        return BuiltExperiment(resolve(self.config, self._trust))

    @classmethod
    def from_yaml(cls, *sources: Source, **overrides: Any) -> Self:
        """An experiment from files, or the names of ours, and overrides; what `Experiment` itself takes."""
        return cls(*sources, **overrides)

    def __repr__(self) -> str:
        return f"Experiment({self.name!r}, folder={str(self.folder)!r})"

    def data(self) -> FederatedData:
        """The data, loaded and shared out: who holds what before anything is trained."""
        with undisturbed(), self._given.speaking():
            built = self._built()
            built.data.setup(built.seed)
            return built.data

    def fit(
        self,
        resume: str | Path | None = None,
        overwrite: bool = False,
        verbose: bool = False,
        callbacks: FederationCallback | Iterable[FederationCallback] = (),
    ) -> Run:
        """Run the federation, in `folder`; signals, random streams, threads and warnings are as before afterwards.

        Ctrl-C (a notebook's interrupt) stops the run once the present round is saved, a second one at once.

        Args:
            resume: ``auto`` goes on with the run that the folder holds, or a checkpoint of it; None starts anew. Of an
                experiment that is a run's own ``config.yaml`` the folder is where that run lies now.
            overwrite: replace the run that the folder holds.
            verbose: show rounds as they are done.
            callbacks: one or several, told of every round, beside those of the configuration. Where the run has
                processes of its own, copies are told in the main one, and their attributes come back to these.

        Raises:
            ConfigError: for anything that would stop the run, before it starts.
            KeyboardInterrupt: after Ctrl-C, in the last round, too; the folder holds the rounds that were done, for
                ``resume="auto"``.
            RoundError: if a client or the server fell sick (`federation.on_client_error`).
            WriteError: if the folder cannot be written any more.
            RuntimeError: if one of several processes was lost; its error is on stderr.
        """
        again = None if resume is None else str(resume)
        if again is not None:
            self._go_where_it_lies()
        own = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        for callback in own:
            require(isinstance(callback, FederationCallback), "callbacks", "must be FederationCallbacks", callback)
        check_hooks(own, "callbacks")
        with undisturbed(), self._given.speaking():
            built = self._built()
            team = built.team()
            if team.size == 1 or team.outside:
                self._fit_here(built, team, again, overwrite, verbose, own)
            else:
                self._fit_in(team, built, again, overwrite, verbose, own)
        return Run(built.folder, self._trust)

    def _go_where_it_lies(self) -> None:
        """Take output and name from where a run lies now whose own configuration this is, as the command line does."""
        if (self.config["output"], self.config["name"]) == self._place:  # not changed by hand
            folder = run_said_by(self._sources)
            if folder is not None:
                self.config["output"], self.config["name"] = str(folder.parent), folder.name

    def _fit_here(
        self,
        built: BuiltExperiment,
        team: Team,
        resume: str | None,
        overwrite: bool,
        verbose: bool,
        callbacks: Sequence[FederationCallback],
    ) -> None:
        """The fit in this process, which torchrun or SLURM may have started beside others."""
        if team.outside:
            launch.join(team)
        launch.use_threads(team)
        built.signals = (signal.SIGINT,)
        try:
            with _showing(verbose, callbacks) as shown:
                built.fit(resume, overwrite, callbacks=lambda: shown)
        except StoppedAtOnce as stopped:
            raise KeyboardInterrupt(f"stopped at once; {built.advice()}") from stopped
        if team.outside:
            atexit.register(launch.leave)  # not yet: the script may fit once more
        if built.stopped_by:
            raise KeyboardInterrupt(f"stopped after round {built.loop.round}; {built.advice()}")
        if built.asked_by:
            raise KeyboardInterrupt(f"in the last round; the run is whole, in {built.folder}")

    def _fit_in(
        self,
        team: Team,
        built: BuiltExperiment,
        resume: str | None,
        overwrite: bool,
        verbose: bool,
        callbacks: Sequence[FederationCallback],
    ) -> None:
        """The fit in several processes that are started here."""
        if launch.best_start_method(team) == "spawn":
            _require_sent(callbacks)
        built.check(resume, overwrite)  # here, so that a mistake is answered by this process
        torch.set_num_threads(1)  # a forked process cannot use the threads of the one that it came from
        with TemporaryDirectory() as folder:
            told = Path(folder, "callbacks")
            arguments = built.config, resume, overwrite, verbose, tuple(callbacks), told
            code = launch.launch(_work, team, *arguments, advice=built.advice)
            _take_back(callbacks, told)
        if code == exit_code(signal.SIGINT):
            raise KeyboardInterrupt(f"stopped; {built.advice()}")
        if code == 2:
            raise ConfigError("federation.workers", "a worker met bad input; it has said on stderr which")
        if code:
            raise RuntimeError(f"the run ended with exit code {code}; {built.advice()}")


@contextmanager
def _showing(verbose: bool, callbacks: Sequence[FederationCallback]) -> Iterator[list[Any]]:
    """The callbacks of a fit, a display among them if so asked."""
    if not verbose:
        yield list(callbacks)
        return
    there = None if sys.stdout is None else OutlivedStream(sys.stdout)
    with RoundProgress(PlainConsole(file=there)) as display:
        yield [display, *callbacks]


def _require_sent(callbacks: Sequence[FederationCallback]) -> None:
    """Refuse callbacks that spawned processes cannot be sent: they find classes by name, and know no notebook's cells.

    Raises:
        ConfigError: if one cannot be pickled, or is of a class of a cell.
    """
    alone = "federation.workers=1 takes any"
    for callback in callbacks:
        kind = type(callback).__name__
        try:
            pickled = _pickled_for_a_process(callback)
        except Exception as error:  # whatever a user's object raises
            rule = f"must be what pickle takes, for workers are spawned here ({shortened(str(error), 100)}); {alone}"
            raise ConfigError("callbacks", rule, kind) from error
        in_cell = b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__")
        rule = f"must be of a module, not of a notebook's cell, for workers are spawned here; {alone}"
        require(not in_cell, "callbacks", rule, kind)


def _pickled_for_a_process(callback: FederationCallback) -> bytes:
    """A callback as a starting process is sent it: queues and locks of `multiprocessing` go to such alone."""
    multiprocessing.context.set_spawning_popen(_Begun)  # type: ignore[arg-type]
    try:
        return pickle.dumps(callback)
    finally:
        multiprocessing.context.set_spawning_popen(None)


class _Begun:
    """Stands for that process: it is given numbers of open files, of which it makes nothing."""

    DupFd = duplicate_for_child = staticmethod(int)


def _work(
    config: Config,
    resume: str | None,
    overwrite: bool,
    verbose: bool,
    callbacks: Sequence[FederationCallback],
    told: Path,
) -> int:
    """The fit in one of several processes; returns an exit code."""
    built = BuiltExperiment(config)
    try:
        with _showing(verbose and is_main(), callbacks) as shown, _handing_over(callbacks, told):
            built.fit(resume, overwrite, callbacks=lambda: shown)
    except StoppedAtOnce as stopped:
        return exit_code(stopped.number)
    except RoundError as error:  # every process knows it
        if built.loop.workers.is_main:
            say(built.said_of(error))
        return 1
    except WriteError as error:
        say(f"fl-lightning: error: {error}; {' '.join(built.advice().split())}")
        return launch.end_all()
    return exit_code(built.asked_by) if built.asked_by else 0


@contextmanager
def _handing_over(callbacks: Sequence[FederationCallback], told: Path) -> Iterator[None]:
    """Write the attributes that callbacks end with into a file, in the one process where they are told of anything."""
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            seen = pickle.dumps([_attributes(callback) for callback in callbacks])
            try:
                write_atomically(told, lambda file: file.write(seen), sync=False)
            except WriteError as error:  # what the run wrote into its own folder is whole
                say(f"callbacks: what they have seen stays in the run's own process ({error})")


def _attributes(callback: FederationCallback) -> bytes:
    """A callback's attributes, pickled; nothing, and one line, where they cannot be."""
    try:
        return pickle.dumps(vars(callback))
    except Exception as error:  # whatever a user's object raises
        said = f"{type(callback).__name__}: what it has seen stays in the run's own process"
        say(f"callbacks: {said}, for an attribute cannot be pickled ({error})")
        return b""


def _take_back(callbacks: Sequence[FederationCallback], told: Path) -> None:
    """Give callbacks the attributes that their copies ended with; a process that was killed has written none."""
    if told.exists():
        for callback, attributes in zip(callbacks, pickle.loads(told.read_bytes()), strict=True):
            if attributes:
                callback.__dict__ = pickle.loads(attributes)
