"""Running a table's cells: several at once, each in a process of its own, going on where they stopped.

Several tables may run the same cells, in terminals or on machines that share the folder: each takes what none holds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from textwrap import shorten
from typing import Any

from fl_lightning.federation.signals import (
    HANDED_ON,
    StopSignals,
    exit_code,
    hand_on,
    hear,
    held_back,
    pausing,
    stand_apart,
)
from fl_lightning.files import WriteError, make_folder, remove_abandoned, separate, writing
from fl_lightning.resuming import HELD, is_held
from fl_lightning.table.cells import Cell

TICK = 0.2  # seconds between two looks at the processes
PATIENCE = 2.0  # seconds between two looks at a cell that somebody else runs
REFUSED = 2  # with what a run ends whose configuration is refused, or whose folder another process holds

Command = Callable[[Sequence[str]], None]


@dataclass
class Job:
    """A cell that is run.

    Args:
        cell: the cell.
        process: its own; None before it starts.
        state: ``waiting``, ``running``, ``elsewhere`` (another process runs it), ``finished``, ``stopped``, ``failed``
            or ``pruned``.
        said: the last line that a failed run wrote.
    """

    cell: Cell
    process: BaseProcess | None = None
    state: str = "waiting"
    said: str = ""
    pruned: bool = False
    """Whether it was asked to end early."""
    code: int | None = None
    """With what its process ended."""
    looked: float = -math.inf
    """When it was last seen to be run elsewhere."""
    logged: int = 0
    """Bytes of its log that earlier starts wrote."""


class Crew:
    """Runs cells, so many at once, on the machine's cores; one that another process runs is waited for.

    Args:
        cells: what there is to do; a cell that is finished already is not run again.
        logs: folder of what the runs write to the terminal.
        jobs: how many run at once; the cores are shared out among them.
        command: runs a command line in the present process, and ends it.
        told: called whenever a cell changes its state, and now and then.
    """

    def __init__(
        self, cells: Sequence[Cell], logs: Path, jobs: int, command: Command, told: Callable[[Crew], None]
    ) -> None:
        from fl_lightning.federation.team import share  # here: help, mistakes and forecasts do not wait for torch

        self.jobs = [Job(cell) for cell in distinct(cells)]
        self.logs = logs
        self.at_once = jobs
        self.threads = share(jobs)
        self.stopping = False
        self._command = command
        self._told = told

    def run(self) -> int:
        """Run them all.

        Returns:
            0 if all are finished, 1 if some failed, 128 + the signal's number if a signal stopped the table.
        """
        make_folder(self.logs)
        remove_abandoned(self.logs.parent)
        for job in self.jobs:
            job.state = "finished" if job.cell.finished else "waiting"
        with StopSignals(self._ask, self._end) as signals, pausing(self._at_work):
            while self.running or (self.waiting and not self.stopping):
                self._start_some()
                time.sleep(TICK)
                self._look()
        self._told(self)
        return exit_code(signals.first) if self.stopping else int(any(job.state == "failed" for job in self.jobs))

    def _ask(self, number: int) -> None:
        """Let every run save its present round and end; begin no other."""
        self.stopping = True
        hand_on(signal.SIGTERM, self._at_work())

    def _at_work(self) -> list[BaseProcess]:
        return [job.process for job in self.running if job.process is not None]

    def _end(self, number: int) -> None:
        for job in self.running:
            assert job.process is not None
            job.process.kill()

    def prune(self, job: Job) -> None:
        """End a run that is not worth going on with, or that has not begun; its last round is saved."""
        if job.state == "waiting":
            job.state = "pruned"
        elif job.process is not None and job.state == "running" and not job.pruned:
            job.pruned = True
            job.process.terminate()

    @property
    def running(self) -> list[Job]:
        """Those at work."""
        return [job for job in self.jobs if job.state == "running"]

    @property
    def waiting(self) -> list[Job]:
        """Those that have not begun in this process."""
        return [job for job in self.jobs if job.state in ("waiting", "elsewhere")]

    @property
    def elsewhere(self) -> list[Job]:
        """Those of them that another process runs."""
        return [job for job in self.jobs if job.state == "elsewhere"]

    def _start_some(self) -> None:
        now = time.monotonic()
        for job in self.waiting:
            if self.stopping or len(self.running) >= self.at_once:
                return
            if now - job.looked < PATIENCE:
                continue
            if is_held(job.cell.folder):
                job.state, job.looked = "elsewhere", now
            elif job.cell.finished:
                job.state = "finished"
            elif edited := job.cell.edited_files():  # its figures would stand below the name of the files as they were
                job.state = "failed"
                job.said = f"{', '.join(edited)}: the file was edited after the start; start again to take it as it is"
            else:
                self._start(job)
            self._told(self)

    def _start(self, job: Job) -> None:
        log = self.logs / f"{job.cell.name}.log"
        try:
            make_folder(self.logs)  # it may have gone
            separate(log)
            with writing(log):
                log.open("ab").close()
        except WriteError as error:
            job.state, job.said = "failed", str(error)
            return
        job.logged = log.stat().st_size
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if _may_fork() and "fork" in methods else "spawn")
        job.process = context.Process(
            target=run_cell, args=(os.getpid(), self._command, job.cell.words, str(log), self.threads)
        )
        with held_back():
            try:
                job.process.start()
                job.state = "running"
            except OSError as error:  # no more processes, no memory for one
                job.process, job.state = None, "failed"
                job.said = f"its process cannot be started ({error.strerror or error})"
        if self.stopping and job.process is not None:  # a signal came just before
            job.process.terminate()

    def _look(self) -> None:
        for job in self.running:
            assert job.process is not None
            if job.process.is_alive():
                continue
            code = job.code = job.process.exitcode
            others = "stopped" if self.stopping else "pruned" if job.pruned else "failed"
            said = _last_line(self.logs / f"{job.cell.name}.log", job.logged)
            if code == REFUSED and HELD in said:  # another process was faster, and may have ended since
                others, job.looked = "elsewhere", time.monotonic()
            job.state = "finished" if job.cell.finished else others
            if job.state == "failed":
                job.said = _why(code, said)
            job.process.close()  # last, for a signal may ask all that are said to be running to end
        self._told(self)


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Each run once, though it may stand in two columns."""
    first: dict[Path, Cell] = {}
    for cell in cells:
        first.setdefault(cell.folder, cell)
    return list(first.values())


def _may_fork() -> bool:
    """Whether a forked process can go on: not from one that has used a GPU."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_initialized()


def run_cell(starter: int, command: Command, words: Sequence[str], log: str, threads: int) -> None:
    """One run in a process of its own; what it writes goes into a file.

    Args:
        starter: process id of the table's, with which it ends.
        command: runs it.
        words: the command line.
        log: the file, which is added to.
        threads: of the run on the CPU, where its configuration does not say.
    """
    from fl_lightning.federation.team import stand_alone
    from fl_lightning.federation.tether import end_with

    end_with(starter)
    stand_alone()
    stand_apart()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_DFL)
    hear()
    import torch

    torch.set_num_threads(threads)
    command(words)


def _why(code: int | None, said: str) -> str:
    """Why a run has failed, where its last line may be of a round that went well.

    Args:
        code: with what its process ended; below 0 for a signal that it could not answer.
        said: its last line.
    """
    number = -code if code is not None and code < 0 else (code or 0) - 128
    if number not in set(signal.Signals):
        return said or f"ended with exit code {code} and wrote nothing, as where the disk is full"
    name = signal.Signals(number).name
    if code == exit_code(number):  # it has saved its round, and its last line is how to go on
        return f"stopped by {name}"
    often = ", as the system does where memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{often}" + (f"; its last line: {said}" if said else "")


def _last_line(log: Path, start: int) -> str:
    """Why a run ended, as it wrote it behind the first `start` bytes of its log."""
    try:
        written = log.read_bytes()[start:].decode(errors="replace")
        lines = [line for line in written.splitlines() if line.strip()]
    except OSError:
        return ""
    said = next((line for line in reversed(lines) if "error:" in line), lines[-1] if lines else "")
    return shorten(said.removeprefix("fl-lightning: error: "), 300, placeholder=" …")
