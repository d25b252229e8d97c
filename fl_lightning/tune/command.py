"""``fl-lightning tune``: search hyperparameters on validation parts, and write what was chosen as overlays."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from fl_lightning.command_line import SECTIONS, as_shell_says, bare
from fl_lightning.errors import ConfigError, chosen_names, refuse, require, suggest
from fl_lightning.federation.signals import StopSignals, exit_code
from fl_lightning.files import expanded
from fl_lightning.parser import one_line_parser
from fl_lightning.report.plain import PlainConsole
from fl_lightning.report.record import watched_by
from fl_lightning.table.cells import Cell, cell_of
from fl_lightning.table.definition import Column, Row
from fl_lightning.table.figures import figure_of, trained_nobody
from fl_lightning.table.lacking import lists_validation, why_lacking
from fl_lightning.table.overlays import Overlay, classes_first, option, spelled_out, split_options
from fl_lightning.table.progress import Pace, Progress, duration, forecast, side_by_side
from fl_lightning.table.quantity import ran_away
from fl_lightning.table.results import claim
from fl_lightning.table.running import REFUSED, Command, Crew, Job
from fl_lightning.terminal import say
from fl_lightning.tune.record import Record, said_of
from fl_lightning.tune.space import Contender, Point, Search, read_search
from fl_lightning.tune.trials import Grid, Median, Optuna, Sampler, Trial
from fl_lightning.tune.written import runs_of

DESCRIPTION = (
    "Search hyperparameters on the clients' validation parts; test parts are laid aside. Every method has the same "
    "number of trials, each an ordinary run; what is finished is not run again. What was chosen is written as "
    "overlays. Options of a configuration (--data.dataset.root DIR) are laid over every run."
)
COLUMN = Column("validation", Overlay(), {})
LOOKS = 10  # points at most that are resolved to find one that is not refused
_MADE = ("method", "model", "optimizer")
"""Sections whose classes are made of each other, and so may refuse what another section chooses."""


class Tuning:
    """A search that runs.

    Args:
        search: what the file says.
        output: folder of runs.
        jobs: runs at once.
        command: runs a command line in the present process, and ends it.
        console: where its progress is shown.
        overrides: options of a configuration, over everything but a trial's choice.
        only: names of the methods to be searched; none are all.
    """

    def __init__(
        self,
        search: Search,
        output: Path,
        jobs: int,
        command: Command,
        console: Console,
        overrides: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> None:
        self.search, self.overrides, self.cells = search, tuple(overrides), output / "cells"
        self.search = search = replace(search, contenders=tuple(map(self._typed, search.contenders)))
        self.contenders = [own for own in search.contenders if own.name in (only or (own.name,))]
        for contender in self.contenders:
            _require_free(self.overrides, contender)
        self.folder = output / "tunes" / search.name
        self.record = Record(search, self.folder, self.overrides, self._read_by)
        self.jobs = jobs
        self.console = console
        self.refusal = ""
        """What was refused of a value that no trial varies, so that every other one would end like it."""
        self._signals = StopSignals(lambda number: None, lambda number: None)
        """Those that come between two runs, which answer themselves."""
        self._command = command
        self._pace = Pace(())
        self._begun: dict[str, list[Trial]] = {}
        """The trials of each method so far."""
        self._typical: dict[str, Cell] = {}
        """A run of each method, by which the time is told that those take which have not begun."""

    def cells_at(self, contender: Contender, point: Point) -> list[Cell]:
        """The runs of a point, one a seed: on validation parts, whatever the base says."""
        words = [*self.search.base.words(), *contender.overlay.words(), *self.overrides]
        words += [option(key, value) for key, value in classes_first(point.items())]
        row = Row(contender.name, contender.overlay)
        plain = cell_of(row, COLUMN, words, self.search.seeds[0], self.cells)
        data = plain.config["data"]
        if not lists_validation(data):
            words.append(f"--data.validation_fraction={data.get('validation_fraction') or self.search.validation}")
        words.append("--data.evaluate_on=validation")
        why = why_lacking(self.search.monitor, plain.config)
        require(not why, "monitor", f"is no figure of {contender.name}: {why}", str(self.search.monitor))
        return [cell_of(row, COLUMN, words, seed, self.cells) for seed in self.search.seeds]

    def grid(self) -> Iterator[tuple[str, Cell]]:
        """The runs of a search that is a grid, and what they are called."""
        for contender in self.contenders:
            self._first_cells(contender)
            sampler, pruned = Grid(self.search, contender), self.record.pruned_before(contender)
            while (asked := sampler.ask()) is not None:
                trial = self._trial(contender, 0, *asked)
                for cell in () if runs_of(trial) in pruned else trial.cells:
                    yield _title(trial, cell), cell

    def run(self) -> tuple[int, dict[str, list[Trial]]]:
        """All methods' trials.

        Returns:
            An exit code, and the trials of each method; after a `refusal` those that there are.
        """
        for contender in self.contenders:  # a wrong key is found before anything runs
            self._typical[contender.name] = self._first_cells(contender)[0]
        claim(self.folder, self.search.path)
        self.record.begin()
        found: dict[str, list[Trial]] = {}
        self._begun = found
        code = 0
        with self._signals:
            for contender in self.contenders:
                with closing(self._sampler(contender)) as sampler:
                    stopped = self._searched(contender, sampler, found)
                code = max(code, stopped)
                if stopped > 1 or self.refusal:
                    break
        return code, found

    def _searched(self, contender: Contender, sampler: Sampler, found: dict[str, list[Trial]]) -> int:
        """One method's trials, into `found`; returns an exit code."""
        median = Median(self.search)
        trials = found[contender.name] = []
        code, before = 0, self.record.pruned_before(contender)
        self.record.unfinished.add(contender.name)
        while batch := self._batch(sampler, contender, len(trials)):
            trials += batch
            for trial in batch:
                pruned = trial.point in sampler.pruned or runs_of(trial) in before
                if pruned and not (trial.cells and all(cell.finished for cell in trial.cells)):
                    trial.state = "pruned"  # by an earlier start, which is not judged anew
                    for cell in trial.cells:
                        median.look(cell)
            left = [trial for trial in batch if trial.state == "running"]
            code = max(code, int(any(trial.state == "failed" for trial in batch)))
            crew_code = self._run_batch(left, median) if left else 0
            before |= {runs_of(trial) for trial in left if trial.state == "pruned"}
            for trial in takewhile(lambda trial: trial.state != "stopped", batch):
                sampler.tell(trial)  # in their order: those behind one that was stopped are told when that has ended
            code = max(code, crew_code, exit_code(self._signals.first) if self._signals.first else 0)
            if code > 1 or self.refusal:
                return code
            self.record.write(found)  # a search that is killed has told what it knew, what was pruned above all
        self.record.unfinished.discard(contender.name)
        nothing = all(trial.state == "failed" for trial in trials)  # though every run may have come to its end
        return max(code, int(nothing))

    def _sampler(self, contender: Contender) -> Sampler:
        if self.search.kind == "grid":
            return Grid(self.search, contender)
        return Optuna(self.search, contender, self.folder, [cell.name for cell in self._first_cells(contender)])

    def _first_cells(self, contender: Contender) -> list[Cell]:
        """The runs of a point, by which a wrong key is found: the first that is not refused for its choice.

        The ends of all ranges come first, what lies between them behind: an argument may take neither of its ends.
        """
        axes = {key: own.points(3) for key, own in contender.space.items()}
        between = range(1, min(LOOKS, max(map(len, axes.values())) - 1))
        refused: list[ConfigError] = []
        for place in (0, -1, *between):
            point = {key: points[place % len(points)] for key, points in axes.items()}
            try:
                return self.cells_at(contender, point)
            except ConfigError as error:
                if not _of_choice(str(error), point):
                    raise
                refused.append(error)
        raise refused[0]

    def _typed(self, contender: Contender) -> Contender:
        """A method whose ranges of whole numbers are of arguments that are whole numbers."""
        guessed = [key for key, own in contender.space.items() if own.guessed]
        try:
            config = self._first_cells(contender)[0].config if guessed else {}
        except ConfigError:  # which is said when it runs
            return contender
        space = dict(contender.space)
        for key in guessed:
            if type(_at(config, spelled_out(key, config))) is float:
                space[key] = replace(space[key], whole=False)
        return replace(contender, space=space)

    def _read_by(self, contender: Contender) -> Mapping[str, str]:
        """What a method's runs read from files of one's own."""
        try:
            return self._first_cells(contender)[0].read
        except ConfigError:
            return {}

    def _batch(self, sampler: Sampler, contender: Contender, number: int) -> list[Trial]:
        """As many points as can run at once."""
        batch: list[Trial] = []
        while len(batch) < self.together // len(self.search.seeds) and (asked := sampler.ask()) is not None:
            batch.append(self._trial(contender, number + len(batch), *asked))
        return batch

    def _trial(self, contender: Contender, number: int, point: Point, handle: Any) -> Trial:
        """A point to be tried; one that is refused for what it chooses has failed."""
        try:
            return Trial(number, point, self.cells_at(contender, point), handle=handle)
        except ConfigError as error:
            if not _of_choice(str(error), point):
                raise
            say(f"fl-lightning: {contender.name}, {said_of(point)}: {error}")
            return Trial(number, point, state="failed", handle=handle)

    def _run_batch(self, batch: Sequence[Trial], median: Median) -> int:
        cells = [cell for trial in batch for cell in trial.cells]
        self._announce(batch)
        titles, to_come = {cell.name: _title(trial, cell) for trial in batch for cell in trial.cells}, self._to_come()
        with Progress(self.console, cells, self._pace, titles, lambda left: self._said_of(left, to_come)) as progress:

            def told(crew: Crew) -> None:
                progress(crew)
                if self.search.pruning:
                    median.cull(crew, batch)

            crew = Crew(cells, self.folder / "logs", self.jobs, self._command, told)
            code = crew.run()
        states = {job.cell.name: job.state for job in crew.jobs}
        for cell in cells:
            median.look(cell)
        for trial in batch:
            self._judge(trial, [states[cell.name] for cell in trial.cells])
        for job in crew.jobs:
            if job.state in ("finished", "pruned") and job.process is not None:  # others stay as they are
                job.cell.keep_results()
        self.refusal = self._of_all(batch, crew.jobs)
        for trial in () if self.refusal else batch:
            if trial.state == "failed" and "failed" not in {states[cell.name] for cell in trial.cells}:
                why = "no client came to the end of a fit" if any(map(trained_nobody, trial.cells)) else "no number"
                said = f"{trial.cells[0].row.name}, {said_of(trial.point)}: failed: {self.search.monitor}: {why}"
                self.console.print(said, highlight=False, soft_wrap=True)
        return 0 if code == 1 and all(state != "failed" for state in states.values()) else code

    def _of_all(self, batch: Sequence[Trial], jobs: Sequence[Job]) -> str:
        """What was refused, or is missing, of every point of a method, as far as one can tell; empty where nothing is.

        What another point came through is of this one alone, and so may be what a class refuses without a key.
        """
        name = batch[0].cells[0].row.name
        ended = {own: {trial.state for trial in trials} for own, trials in {name: batch, **self._begun}.items()}
        through = not ended[name].isdisjoint({"complete", "pruned"})
        varied = {key for trial in batch for key in trial.point}
        refused = (job.said for job in jobs if job.state == "failed" and job.code == REFUSED)
        said = next((said for said in refused if _is_of_all(said, varied, through)), "")
        ran = [job.cell for job in jobs if job.cell.finished]
        if said or through or not any(map(self._lacks_monitor, ran)):
            return said
        who = f" of {name}" if any("complete" in states for states in ended.values()) else ""
        return f"monitor: no run{who} has it, or its validation parts are empty, got {str(self.search.monitor)!r}"

    def _announce(self, batch: Sequence[Trial]) -> None:
        """Say which points are tried, of how many: what follows counts their runs."""
        budgets = {contender.name: self.record.budget(contender) for contender in self.contenders}
        for trial in batch:
            if not all(cell.finished for cell in trial.cells):
                name = trial.cells[0].row.name
                said = f"{name}, trial {trial.number + 1} of {budgets[name]}: {said_of(trial.point)}"
                self.console.print(said, highlight=False, soft_wrap=True)

    def _to_come(self) -> list[tuple[Cell, int]]:
        """A run of each method, and how many more no batch has begun, nor an earlier start has ended."""
        found = []
        for contender in self.contenders:
            begun = len(self._begun.get(contender.name, ()))
            left = self.record.budget(contender) - begun - self.record.ended_before(contender, begun)
            found.append((self._typical[contender.name], max(0, left) * len(self.search.seeds)))
        return found

    def _said_of(self, left: float | None, to_come: Sequence[tuple[Cell, int]]) -> str:
        """The time that the search takes yet: the seconds of the runs at work, and of those that are to come."""
        times = [(self._pace.seconds(cell), cell.rounds * count) for cell, count in to_come if count]
        if left is None or any(seconds is None for seconds, _ in times):
            return f"{duration(None)} left of the search"
        rest = math.fsum((seconds or 0.0) * rounds for seconds, rounds in times)
        most = "at most " if self.search.pruning else ""
        return f"{most}{duration(left + rest / side_by_side(self.together, self.jobs))} left of the search"

    @property
    def together(self) -> int:
        """How many runs begin together: those of as many points as can run at once."""
        seeds = len(self.search.seeds)
        return max(1, self.jobs // seeds) * seeds

    def _lacks_monitor(self, cell: Cell) -> bool:
        """Whether a run has nothing to be judged by, and no other one will.

        A figure that ran away, and that no client came through its fit, is of the run's point.
        """
        rows = cell.rows()
        own = ran_away(self.search.monitor, rows, watched_by(cell.config, rows)) or trained_nobody(cell)
        return figure_of(cell, self.search.monitor) is None and not own

    def _judge(self, trial: Trial, states: Sequence[str]) -> None:
        values = [None if trained_nobody(cell) else figure_of(cell, self.search.monitor) for cell in trial.cells]
        if all(state == "finished" for state in states) and all(value is not None for value in values):
            trial.state, trial.value = "complete", math.fsum(v for v in values if v is not None) / len(values)
        else:
            trial.state = _end_of(states)


def _at(config: Mapping[str, Any], key: str) -> Any:
    """What stands under a dotted key; None where nothing does."""
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _require_free(overrides: Sequence[str], contender: Contender) -> None:
    """Refuse options that would be said of every run and heeded in none.

    Raises:
        ConfigError: naming one of a key that the search sets by itself.
    """
    varied = set(map(bare, contender.space))
    for word in overrides:
        key = bare(word.removeprefix("--").partition("=")[0].rstrip("+")) if word.startswith("--") else ""
        rule = "is what the search varies: change its space" if key in varied else "is validation in every search"
        require(key not in varied and key != "data.evaluate_on", f"--{key}", f"{rule}, and leave it out")


def _end_of(states: Sequence[str]) -> str:
    """What became of a point without a value, by what became of its runs."""
    if "failed" in states:
        return "failed"
    if not set(states) <= {"finished", "pruned"}:  # some were asked to end, or never began
        return "stopped"
    return "pruned" if "pruned" in states else "failed"  # finished, and no number came of it


def _title(trial: Trial, cell: Cell) -> str:
    """What a trial's run is called, for people."""
    return f"{cell.row.name}, {said_of(trial.point)}, seed {cell.seed}"


def _is_of_all(line: str, keys: Collection[str], through: bool) -> bool:
    """Whether a run was refused for what no trial varies, so that every other one would be; a full disk is that, too.

    What an earlier start left in its folder, a damaged checkpoint, is of the run alone.

    Args:
        line: why it was refused.
        keys: what the trials vary.
        through: whether another point of the method was not refused.
    """
    key = line.partition(": ")[0]
    section = key.partition(".")[0]
    configured = section in SECTIONS and section != "output"
    own = key == "--resume" or (configured and (through or key in _MADE))
    return not own and not _of_choice(line, keys)


def _speaks_of(line: str, keys: Iterable[str]) -> bool:
    """Whether a message names one of the keys, with or without ``init_args``."""
    plain = line.replace(".init_args", "")
    return any(re.search(rf"(?<![\w.]){re.escape(key.replace('.init_args', ''))}(?!\w)", plain) for key in keys)


def _of_choice(line: str, keys: Iterable[str]) -> bool:
    """Whether what is refused before any run is of a choice: it names a key, or a class of which one is an argument.

    Constructors refuse arguments together (``optimizer: SGD: Nesterov momentum requires a momentum``).
    """
    parts = [key.replace(".init_args", "").split(".") for key in keys]
    above = {".".join(names[:count]) for names in parts for count in range(1, len(names))}
    return _speaks_of(line, keys) or any(re.search(rf"(?<![\w.]){re.escape(name)}: ", line) for name in above)


def tune(argv: Sequence[str], command: Command) -> int:
    """The command.

    Args:
        argv: what follows ``tune``.
        command: runs one run's command line, in a process of its own.

    Returns:
        0 if every run has ended, 1 if some failed, or all trials of a method, 128 + a signal's number.
    """
    parser = one_line_parser("tune", description=DESCRIPTION)
    parser.add_argument("file", type=str, help="the search's YAML file, e.g. experiments/tunes/quickstart.yaml")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; the cores are shared out among them")
    parser.add_argument("--only", help="methods (rows of the file), separated by commas")
    parser.add_argument("--output", type=str, default="runs", help="folder of runs")
    parser.add_argument("--print-commands", action="store_true", help="print one command a run of a grid, and run none")
    parser.add_argument("--dry-run", action="store_true", help="say what there is to do of a grid, and how long")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    own, overrides = split_options(argv, "a search's file names them")
    options = parser.parse_args(own)
    require(options.jobs >= 1, "--jobs", "must be >= 1", options.jobs)
    search = read_search(Path(options.file))
    known = [contender.name for contender in search.contenders]
    only = chosen_names("--only", options.only, known)
    for name in only:
        require(name in known, "--only", f"the search has none of that name; {suggest(name, known)}", name)
    console = PlainConsole(quiet=options.quiet)
    tuning = Tuning(search, expanded(options.output), options.jobs, command, console, overrides, only)
    for asked, name in ((options.print_commands, "--print-commands"), (options.dry_run, "--dry-run")):
        kind = search.kind
        require(not asked or kind == "grid", name, "needs search: grid; Optuna chooses as it goes", kind)
    if options.print_commands:
        for _, cell in tuning.grid():
            print(as_shell_says(cell.words))
        return 0
    if options.dry_run:
        forecast(console, list(tuning.grid()), options.jobs, tuning.together, search.pruning)
        return 0
    code, found = tuning.run()
    if tuning.refusal:  # what an earlier search has written stays
        refuse(tuning.refusal)
    table = tuning.record.write(found)
    console.print(table, highlight=False, soft_wrap=True)
    console.print(f"written to {tuning.folder}", soft_wrap=True, highlight=False)
    return code
