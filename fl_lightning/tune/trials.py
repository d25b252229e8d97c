"""Which point comes next, and what became of those before: a grid, or Optuna's samplers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.files import WriteError, make_folder, separate, writing
from fl_lightning.table.cells import Cell
from fl_lightning.table.running import Crew
from fl_lightning.tune.space import Contender, Point, Search, grid

LEAST = 3  # runs at the same round that there must be before one is called worse than their median
WARM_UP = 0.2  # share of the rounds in which nothing is pruned


@dataclass
class Trial:
    """One point of a method.

    Args:
        number: from 0.
        point: what it chooses.
        cells: its runs, one a seed.
        value: the mean of the monitored figure; None while it is not known, or of a run that failed.
        state: ``running``, ``complete``, ``pruned``, ``stopped`` (by a signal) or ``failed``; the last at once, without
            runs, where its choice is refused.
        handle: the sampler's own.
    """

    number: int
    point: Point
    cells: list[Cell] = field(default_factory=list)
    value: float | None = None
    state: str = "running"
    handle: Any = None


class Sampler(ABC):
    """Gives a method's points, one after another, and learns what they are worth."""

    pruned: Sequence[Point] = ()
    """Those of which it knows that an earlier start pruned them."""

    @abstractmethod
    def ask(self) -> tuple[Point, Any] | None:
        """The next point, and a handle for `tell`; None after the last."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """What became of a point."""

    def close(self) -> None:
        """Let other processes search."""
        return


class Grid(Sampler):
    """The points of a grid; what is finished is found again by its runs."""

    def __init__(self, search: Search, contender: Contender) -> None:
        self._left = list(grid(contender, search.trials))

    def ask(self) -> tuple[Point, Any] | None:
        """The next of them."""
        return (self._left.pop(0), None) if self._left else None

    def tell(self, trial: Trial) -> None:
        """A grid learns nothing."""


_INSTEAD_OF = "instead of"
"""What a trial's attribute is called that names the one that was broken off, whose point it takes up."""


class Optuna(Sampler):
    """Optuna's tree-structured Parzen estimator; kept in a journal beside the results.

    Each trial's draws are from the search's first seed and its place, so that a search that was stopped goes on with
    the points that it would have come to. A point whose search was killed is asked for again, and its runs go on where
    they stopped; what failed counts, is tried again, and gives way to what comes of it then, as does what was pruned
    where it is run to its end. A search that asks something else (another figure, space, base or seed) learns nothing
    from what the journal says of others.

    Args:
        search: the search.
        contender: the method.
        folder: of the journals.
        runs: names of the runs of one point, which say what all runs have in common.

    Raises:
        ConfigError: if Optuna is not installed, the journal is damaged, or another process searches with it.
        WriteError: if the journal cannot be written; so do `ask` and `tell`.
    """

    def __init__(self, search: Search, contender: Contender, folder: Path, runs: Sequence[str] = ()) -> None:
        with importing("optuna", "search", "optuna needs the package: pip install optuna", "optuna"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._trials, self._asked, self._seed = search.trials, 0, search.seeds[0]
        self._space = {key: self._distribution(own) for key, own in contender.space.items()}
        make_folder(folder)
        path = self._path = folder / f"{contender.name}.journal"
        self._journal = self._held(path)
        try:
            with writing(path):
                self._open(path, search, _study_of(search, contender, runs))
        except WriteError:  # it is as good as it was
            self.close()
            raise
        except Exception as error:  # a damaged journal raises a dozen types
            said = " ".join(f"{type(error).__name__} {error}".split())[:90]
            self.close()
            rule = f"{path} cannot be gone on with ({said}); move it away to begin anew, finished runs are kept"
            raise ConfigError("search", rule) from error

    @staticmethod
    def _held(path: Path) -> Any:
        """A journal, open and locked: another process would end the trials that this one begins."""
        from fl_lightning.run_folder import lock

        require(path.is_file() or not os.path.lexists(path), "search", f"{path} is no file")
        with writing(path):
            file = path.open("ab")
        try:
            lock(file, path, "search")
        except ConfigError:
            file.close()
            raise
        if os.fstat(file.fileno()).st_nlink > 1:  # a search's folder was copied by hard links
            file.close()
            separate(path)
            return Optuna._held(path)
        with writing(path):
            _end_line(file, path.read_bytes())
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)  # of a search that was killed as it wrote
        return file

    def _open(self, path: Path, search: Search, name: str) -> None:
        """Take up what a journal says, or begin one."""
        optuna = self._optuna
        backend = optuna.storages.journal.JournalFileBackend(str(path.absolute()))
        self._study = optuna.create_study(
            study_name=name,
            storage=optuna.storages.JournalStorage(backend),
            direction="maximize" if search.maximise else "minimize",
            load_if_exists=True,
        )
        state = optuna.trial.TrialState
        every = self._study.get_trials(deepcopy=False)
        broken_off = {trial.user_attrs.get(_INSTEAD_OF) for trial in every}
        places: dict[int, int] = {}  # of the first of those that stand for each other
        for trial in every:
            places[trial.number] = places.get(trial.user_attrs.get(_INSTEAD_OF), trial.number)

        def known(trial: Any) -> bool:
            whole = trial.state != state.FAIL or trial.params.keys() == self._space.keys()
            return whole and trial.state.is_finished() and trial.number not in broken_off

        self._known = sorted(filter(known, every), key=lambda trial: places[trial.number])
        pruned = [trial for trial in self._known if trial.state == state.PRUNED and search.pruning]
        self.pruned = [self._point(trial.params) for trial in pruned]
        for trial in self._known:
            whole = trial.params.keys() == self._space.keys()
            require(whole, "search", f"trial {trial.number} chose {', '.join(trial.params) or 'nothing'}")
            self._point(trial.params)
        for trial in self._study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            self._study.tell(trial.number, state=state.FAIL)
            self._study.enqueue_trial(trial.params, user_attrs={_INSTEAD_OF: trial.number}, skip_if_exists=False)

    def _distribution(self, own: Any) -> Any:
        kinds = self._optuna.distributions
        if own.values:
            return kinds.CategoricalDistribution([json.dumps(value) for value in own.values])
        if own.whole:
            return kinds.IntDistribution(int(own.low), int(own.high), log=own.log)
        return kinds.FloatDistribution(own.low, own.high, log=own.log)

    def ask(self) -> tuple[Point, Any] | None:
        """Those of an earlier start first, then new ones."""
        if self._asked == self._trials:
            return None
        self._asked += 1
        if self._known:
            known = self._known.pop(0)
            complete = known.state == self._optuna.trial.TrialState.COMPLETE
            return self._point(known.params), None if complete else known
        from fl_lightning.seeding import derive_seed  # it imports torch, which `tune --help` does without

        seed = derive_seed(self._seed, "search", self._asked) % 2**32
        with warnings.catch_warnings():  # Optuna 4 says of `constant_liar` that it is experimental
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        with writing(self._path):
            trial = self._study.ask(self._space)
        return self._point(trial.params), trial

    @staticmethod
    def _point(params: Point) -> Point:
        return {key: json.loads(value) if isinstance(value, str) else value for key, value in params.items()}

    def tell(self, trial: Trial) -> None:
        """Its value, or that it was pruned or failed."""
        if trial.handle is None or trial.state == "stopped":  # which is asked for again, like one that was killed
            return
        with writing(self._path):
            self._tell(trial, trial.handle)

    def _tell(self, trial: Trial, before: Any) -> None:
        optuna = self._optuna
        states = {"complete": optuna.trial.TrialState.COMPLETE, "pruned": optuna.trial.TrialState.PRUNED}
        state = states.get(trial.state, optuna.trial.TrialState.FAIL)
        if not isinstance(before, optuna.trial.FrozenTrial):
            self._study.tell(before, trial.value if trial.state == "complete" else None, state=state)
        elif trial.state in states and state != before.state:  # of an earlier start, which Optuna does not take back
            again = optuna.trial.create_trial(
                state=state,
                value=trial.value,
                params=before.params,
                distributions=before.distributions,
                user_attrs={_INSTEAD_OF: before.number},
            )
            self._study.add_trial(again)

    def close(self) -> None:
        """Let the journal go."""
        self._journal.close()


def _end_line(file: BinaryIO, there: bytes) -> None:
    """End the last line of a journal, which Optuna would go on with in its middle: what a kill has cut off goes.

    Args:
        file: the journal, open for appending.
        there: what is in it.
    """
    start = there.rfind(b"\n") + 1
    last = there[start:]
    if not last.startswith(b"{"):  # whole, or no journal at all
        return
    try:
        json.loads(last)
    except ValueError:
        file.truncate(start)
    else:
        file.write(b"\n")
        file.flush()


def _study_of(search: Search, contender: Contender, runs: Sequence[str]) -> str:
    """A study's name in a journal: the method's, and a hash of all that makes the values of its trials comparable."""
    asked = [str(search.monitor), search.maximise, repr(sorted(contender.space.items())), *runs]
    return f"{contender.name}-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:10]}"


class Median:
    """Ends runs that lie below the median of the method's other points at the same round, as Google Vizier does.

    Runs are compared with those of the same seed, which have the same clients; a point of which one run is ended is not
    gone on with. Nothing is ended in the first fifth of the rounds, nor before three other points have come that far.

    Args:
        search: the search.
    """

    def __init__(self, search: Search) -> None:
        self._column = search.monitor.column
        self._sign = 1 if search.maximise else -1
        self._reached: dict[int, dict[str, dict[int, float]]] = {seed: {} for seed in search.seeds}
        self._whole: set[str] = set()

    def cull(self, crew: Crew, trials: Sequence[Trial]) -> None:
        """End what is not worth going on with.

        Args:
            crew: at work on the runs of some points.
            trials: the points.
        """
        for job in crew.jobs:
            if job.state == "finished" and job.cell.name not in self._whole:
                self.look(job.cell)
                self._whole.add(job.cell.name)
        lagging = {job.cell.name for job in crew.running if self.worse(job.cell)}
        own = [{cell.name for cell in trial.cells} for trial in trials]
        ended = {name for names in own if names & lagging for name in names}
        for job in crew.jobs:
            if job.cell.name in ended:
                crew.prune(job)

    def worse(self, cell: Cell) -> bool:
        """Whether a run that goes on is worse than the median of the others at its last round."""
        self.look(cell)
        every = self._reached[cell.seed]
        own = every[cell.name]
        if not own or max(own) < WARM_UP * cell.rounds:
            return False
        round = max(own)
        best = max(self._sign * value for value in own.values())
        others: Sequence[float] = [
            float(np.mean([value for at, value in known.items() if at <= round]))
            for name, known in every.items()
            if name != cell.name and round in known
        ]
        return len(others) >= LEAST and best < float(np.median([self._sign * value for value in others]))

    def look(self, cell: Cell) -> None:
        """Take up what a run has reached so far."""
        rows = {row["round"]: row.get(self._column) for row in cell.rows()}
        numbers = {at: value for at, value in rows.items() if isinstance(value, (int, float))}
        self._reached[cell.seed][cell.name] = {at: value for at, value in numbers.items() if math.isfinite(value)}
