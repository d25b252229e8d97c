"""How far a table is: each cell's rounds, and the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid

from fl_lightning.table.cells import Cell
from fl_lightning.table.running import Crew, Job

SIGNS = {
    "waiting": "·",
    "running": "▸",
    "elsewhere": "▹",
    "finished": "✓",
    "stopped": "‖",
    "failed": "✗",
    "pruned": "-",
}
QUIET = 60.0  # seconds between two lines in a file


class Pace:
    """Seconds a round, from what cells have done.

    Args:
        cells: all of a table, whether they run in this process or not.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._seconds: dict[tuple[str, str, int], float] = {}
        for cell in cells:
            self.look(cell)

    def look(self, cell: Cell) -> int:
        """Take up what a cell has done; returns its rounds."""
        known = [row["seconds"] for row in cell.rows() if isinstance(row.get("seconds"), (int, float))]
        if known:
            self._seconds[cell.row.name, cell.column.name, cell.seed] = math.fsum(known) / len(known)
        return len(known)

    def seconds(self, cell: Cell) -> float | None:
        """Of a cell's round: its own, else another seed's, else the mean of its column's, else of all."""
        own = {place: value for place, value in self._seconds.items() if place[1] == cell.column.name}
        row = [value for place, value in own.items() if place[0] == cell.row.name]
        exact = self._seconds.get((cell.row.name, cell.column.name, cell.seed))
        for known in ([] if exact is None else [exact], row, list(own.values()), list(self._seconds.values())):
            if known:
                return math.fsum(known) / len(known)
        return None


class Progress:
    """Shows a table that runs: a live grid on a terminal, a line whenever a cell ends anywhere else.

    Args:
        console: where.
        cells: all of the table.
        pace: what is known of other cells' rounds; these are taken up in it.
        titles: what runs are called, by their names, where it is not as a table calls its cells.
        said: what is said of the seconds that are left of the cells, None where nothing is known.
    """

    def __init__(
        self,
        console: Console,
        cells: Sequence[Cell],
        pace: Pace | None = None,
        titles: Mapping[str, str] | None = None,
        said: Callable[[float | None], str] = lambda seconds: f"{duration(seconds)} left",
    ) -> None:
        self.console = console
        self.pace = pace or Pace(())
        for cell in cells:
            self.pace.look(cell)
        self._titles = titles or {}
        self._said = said
        self._states: dict[str, str] = {}
        self._looked = self._written = -math.inf
        self._rounds: dict[str, int] = {}
        draws = console.is_terminal and console.is_interactive
        self.live = Live(console=console, auto_refresh=False) if draws else None

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, crew: Crew) -> None:
        """Draw what has changed."""
        changed = [job for job in crew.jobs if self._states.get(job.cell.name) != job.state]
        now = time.monotonic()
        if not changed and now - self._looked < 1:
            return
        self._looked = now
        for job in {id(job): job for job in (*changed, *crew.running, *crew.elsewhere)}.values():
            self._rounds[job.cell.name] = self.pace.look(job.cell)
        self._states = {job.cell.name: job.state for job in crew.jobs}
        if self.live is not None:
            self.live.update(self._grid(crew), refresh=True)
            for job in changed:
                if job.state == "failed":  # of which the grid has but a sign
                    self._write(self._ended(job))
            return
        ended = [job for job in changed if job.state in ("finished", "failed", "stopped", "pruned")]
        for job in ended:
            if self._written > -math.inf or job.state == "failed":  # others have ended at an earlier start
                self._write(f"{self._ended(job)}; {self.line(crew)}")
        if not ended and now - self._written >= QUIET:
            self._written = now
            self._write(self.line(crew))

    def line(self, crew: Crew) -> str:
        """Cells that are done, and the time left."""
        done = sum(job.state == "finished" for job in crew.jobs)
        others = f", {len(crew.elsewhere)} elsewhere" if crew.elsewhere else ""
        return (
            f"{done} of {len(crew.jobs)} runs finished, {len(crew.running)} running{others}, "
            f"{self._said(self.left(crew))}"
        )

    def _ended(self, job: Job) -> str:
        """What became of a run, and why."""
        said = f" ({job.said})" if job.said else ""
        return f"{SIGNS[job.state]} {self._titles.get(job.cell.name, job.cell.title)}: {job.state}{said}"

    def left(self, crew: Crew) -> float | None:
        """Seconds to the end, with as many at once as now, here and elsewhere; None where nothing is known."""
        total, unknown = 0.0, False
        for job in crew.jobs:
            if job.state in ("waiting", "running", "elsewhere"):
                seconds = self.pace.seconds(job.cell)
                unknown |= seconds is None
                total += (seconds or 0.0) * (job.cell.rounds - self._rounds.get(job.cell.name, 0))
        at_once = min(crew.at_once + len(crew.elsewhere), len(crew.waiting) + len(crew.running))
        return None if unknown else total / max(1, at_once)

    def _grid(self, crew: Crew) -> Grid:
        columns = list(dict.fromkeys(job.cell.column.name for job in crew.jobs))
        grid = Grid("", *columns, caption=self.line(crew))
        for row in dict.fromkeys(job.cell.row.name for job in crew.jobs):
            own = [[j for j in crew.jobs if (j.cell.row.name, j.cell.column.name) == (row, c)] for c in columns]
            grid.add_row(row, *(" ".join(map(self._sign, jobs)) for jobs in own))
        return grid

    def _sign(self, job: Job) -> str:
        if job.state not in ("running", "elsewhere"):
            return SIGNS[job.state]
        return f"{self._rounds.get(job.cell.name, 0)}/{job.cell.rounds}"

    def _write(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def duration(seconds: float | None) -> str:
    """``2 h 5 min``; ``an unknown time`` of None."""
    if seconds is None:
        return "an unknown time"
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def forecast(
    console: Console, named: Sequence[tuple[str, Cell]], jobs: int, together: int = 0, pruned: bool = False
) -> None:
    """Say how far each run is, and how long the rest will take.

    Args:
        console: where.
        named: runs, and what they are called.
        jobs: runs at once.
        together: how many begin together, others once all of these have ended; 0 if each begins where one has ended.
        pruned: whether runs may be ended early, so that it will take no longer than is said.
    """
    cells = [cell for _, cell in named]
    pace, total, unknown = Pace(cells), 0.0, 0
    for title, cell in named:
        done, seconds = len(cell.rows()), pace.seconds(cell)
        state = "finished" if cell.finished else f"{done} of {cell.rounds} rounds"
        left = 0.0 if cell.finished or seconds is None else seconds * (cell.rounds - done)
        unknown += not cell.finished and seconds is None
        total += left
        rest = "" if cell.finished or seconds is None else f", {duration(left)} left"
        console.print(f"{title}: {state}{rest}", highlight=False, soft_wrap=True)
    begun, todo = len(cells) - unknown, [cell for cell in cells if not cell.finished]
    together = min(together or len(todo), len(todo))
    jobs = min(jobs, together)
    at_once = f" with {jobs} at once" if jobs > 1 else ""
    if not todo:
        said = "all are finished"
    elif not total:
        said = f"{len(todo)} to do; how long is known once one of them has done a round"
    else:
        more = f" for {begun} of them; of the other {unknown} no round is known yet" if unknown else ""
        most = "at most " if pruned else ""
        said = f"{len(todo)} to do, {most}{duration(total / side_by_side(together, jobs))} left{at_once}{more}"
    console.print(f"{len(cells)} runs: {said}", highlight=False)


def side_by_side(together: int, jobs: int) -> float:
    """How many of the runs that begin together there are at a time, on average: 1.5 of three with two at once."""
    return together / math.ceil(together / jobs)
