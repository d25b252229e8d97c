"""What a search writes: `trials.csv`, `tune.md`, and an overlay a method with what was chosen."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fl_lightning.command_line import said_around, variables
from fl_lightning.files import one_at_a_time, remove, write_text
from fl_lightning.reading import dump_yaml
from fl_lightning.report.escaping import in_markdown, in_spreadsheet
from fl_lightning.report.series import short_keys
from fl_lightning.table.figures import left_out
from fl_lightning.table.overlays import classes_first, laid_over, spelled_out, whole_list
from fl_lightning.table.quantity import decimals
from fl_lightning.tune.space import Contender, Point, Search, grid_size
from fl_lightning.tune.trials import Trial
from fl_lightning.tune.written import (
    HEAD,
    Written,
    as_chosen,
    is_name,
    of_settings,
    runs_of,
    with_those_before,
    written_before,
)

RUNS = slice(5, 6)  # of a row of `trials.csv`, of which somebody may have taken columns away
LOCK = ".lock"
"""The file by which processes that write at once wait for each other."""


class Record:
    """What is known of a search's trials, in its folder.

    Args:
        search: what the file says.
        folder: the search's.
        overrides: options of a configuration, over everything but a trial's choice.
        read_by: what the files hold that a method's runs read, as first digits of their sums; none of what is shipped.
    """

    def __init__(
        self,
        search: Search,
        folder: Path,
        overrides: Sequence[str],
        read_by: Callable[[Contender], Mapping[str, str]] = lambda contender: {},
    ) -> None:
        self._read_by = functools.cache(lambda name: read_by(next(c for c in search.contenders if c.name == name)))
        self.search = search
        self.folder = folder
        self.overrides = overrides
        self.unfinished: set[str] = set()
        """The methods whose search goes on, or was stopped."""
        self._sizes: dict[str, int] = {}
        self._before: tuple[dict[str, list[list[str]]], dict[str, list[str]]] | None = None

    def begin(self) -> None:
        """Look once at what an earlier start has written: what this one writes on its way goes over it."""
        self._before = written_before(self.folder)

    def pruned_before(self, contender: Contender) -> set[str]:
        """The runs of each trial that an earlier start of the same search has pruned."""
        rows, _ = self._before or written_before(self.folder)
        return {row.runs for row in self._of_before(contender, rows) if row.state == "pruned"}

    def ended_before(self, contender: Contender, begun: int) -> int:
        """How many trials an earlier start of the same search has ended of those behind the first `begun` ones."""
        rows, _ = self._before or ({}, {})
        ended = (row for row in self._of_before(contender, rows) if row.state in ("complete", "pruned"))
        return sum(int(row.trial) >= begun for row in ended)

    def _known(self, found: Mapping[str, Sequence[Trial]]) -> tuple[dict[str, list[list[str]]], dict[str, list[str]]]:
        """What the files say now, and of the methods that are searched here what this start found in them besides.

        Another process may search for others meanwhile, or for the same.
        """
        rows_now, lines_now = written_before(self.folder)
        rows, lines = self._before or ({}, {})
        merged = {**rows, **rows_now}
        for name in (in_spreadsheet(name) for name, trials in found.items() if trials):
            known = [row[RUNS] for row in rows_now.get(name, [])]
            merged[name] = [*rows_now.get(name, []), *(row for row in rows.get(name, []) if row[RUNS] not in known)]
        return merged, {**lines, **lines_now}

    def _of_before(self, contender: Contender, rows: Mapping[str, list[list[str]]]) -> list[Written]:
        return of_settings(rows.get(in_spreadsheet(contender.name), []), self._settings(contender))

    def write(self, found: dict[str, list[Trial]]) -> str:
        """Write `trials.csv`, `tune.md` and an overlay a method, none where every trial failed; returns the table.

        Another process that searches for other methods reads and writes the same files: before it, or after.
        """
        with one_at_a_time(self.folder / LOCK):
            return self._write(found)

    def _write(self, found: dict[str, list[Trial]]) -> str:
        rows_before, lines_before = self._known(found)
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([*HEAD[:3], str(self.search.monitor), *HEAD[3:]])
        lines = [
            f"# {in_markdown(self.search.title)}",
            "",
            self._explained(),
            "",
            "| | trials | best | choice |",
            "|---|---|---|---|",
        ]
        for contender in self.search.contenders:
            trials = found.get(contender.name, [])
            settings = self._settings(contender)
            if not trials:  # not searched now, or not reached
                known = rows_before.get(in_spreadsheet(contender.name), [])
                if known and len(of_settings(known, settings)) == len(known):
                    writer.writerows(known)
                    lines += lines_before.get(in_markdown(contender.name), [])
                elif known:
                    lines.append(f"| {in_markdown(contender.name)} | – | – | searched with other settings before |")
                continue
            earlier, goes_on = self._of_before(contender, rows_before), contender.name in self.unfinished
            rows = with_those_before([self._row(contender, trial) for trial in trials], earlier, goes_on)
            writer.writerows(rows)
            lines.append(f"| {in_markdown(contender.name)} | {self._chosen(contender, trials, rows)} |")
        write_text(self.folder / "trials.csv", buffer.getvalue())
        write_text(self.folder / "tune.md", "\n".join(lines) + "\n")
        return "\n".join(lines)

    def _row(self, contender: Contender, trial: Trial) -> Written:
        value = "" if trial.value is None else repr(trial.value)
        named = in_spreadsheet(contender.name), in_spreadsheet(said_of(trial.point))
        own = str(trial.number), trial.state, value, named[1], runs_of(trial), self._settings(contender)
        return Written(named[0], *own)

    def _chosen(self, contender: Contender, trials: Sequence[Trial], rows: Sequence[Written]) -> str:
        """How many trials there are, the best figure and its point, as a row of `tune.md`; writes the overlay."""
        ended, overlay = self._how_many(contender, rows), self.folder / contender.file
        sign = 1 if self.search.maximise else -1
        row = max(
            (row for row in rows if row.value), key=lambda row: (sign * float(row.value), -int(row.trial)), default=None
        )
        if row is None and all(row.state == "failed" for row in rows) and contender.name not in self.unfinished:
            remove(overlay)  # an earlier search's, of other settings
            return f"{ended} | – | every trial failed"
        if row is None:
            there = f"; {contender.file} is of an earlier search" if overlay.exists() else ""
            return f"{ended} | – | no trial is complete{there}"
        best = next((trial for trial in trials if runs_of(trial) == row.runs and trial.value is not None), None)
        said = row.choice  # of an earlier start, which has written the overlay
        if best is not None:
            self._write_overlay(contender, best, ended)
            said = "; ".join([said_of(best.point), *left_out(best.cells)])
        value = self.search.monitor.usual_scale * float(row.value)
        return f"{ended} | {value:{decimals(value)}} | {in_markdown(said)}"

    def _how_many(self, contender: Contender, rows: Sequence[Written]) -> str:
        """How many trials have ended; of how many, where the search was stopped."""
        ended, budget = sum(row.state != "stopped" for row in rows), self.budget(contender)
        whole = ended == budget or (ended == len(rows) and contender.name not in self.unfinished)
        return f"{ended}" if whole else f"{ended} of {budget}, stopped"

    def budget(self, contender: Contender) -> int:
        """How many trials a method has."""
        search = self.search
        if search.kind != "grid":
            return search.trials
        if contender.name not in self._sizes:
            self._sizes[contender.name] = grid_size(contender, search.trials)
        return self._sizes[contender.name]

    def _explained(self) -> str:
        search, unit = self.search, " in percent" if self.search.monitor.is_share else ""
        seeds = ", ".join(map(str, search.seeds))
        return (
            f"{search.trials} trials a method ({search.kind}){self._fewer()}, seeds {seeds}; {search.monitor}{unit}, "
            f"on validation parts alone: the test parts were laid aside.{self._laid_over()}"
        )

    def _laid_over(self) -> str:
        """What the command line has changed in every run."""
        said = f" Every run was started with {shlex.join(self.overrides)}." if self.overrides else ""
        around = said_around()
        return f"{said} {around}" if around else said

    def _settings(self, contender: Contender) -> str:
        """What a method's trials rest on, but for their choices, as a few digits; others are not compared."""
        search = self.search
        layers = [*search.base.layers(), *contender.overlay.layers()]
        known = search.seeds, search.trials, search.kind, search.validation, self.overrides, layers, contender.space
        usual = search.maximise != search.monitor.less_is_better and search.pruning == (search.kind == "optuna")
        said = () if usual else (search.maximise, search.pruning)  # what is usual was once not written down
        held = self._read_by(contender.name)
        said = (*said, sorted(held.items())) if held else said
        return hashlib.sha256(repr((known, str(search.monitor), *said, *variables())).encode()).hexdigest()[:10]

    def _fewer(self) -> str:
        """Which methods' grids are smaller than the budget."""
        sizes = {own.name: self.budget(own) for own in self.search.contenders}
        said = [f"{in_markdown(name)} {size}" for name, size in sizes.items() if size < self.search.trials]
        return f", or all points of a grid that has fewer ({', '.join(said)})" if said else ""

    def _write_overlay(self, contender: Contender, best: Trial, ended: str) -> None:
        path = self.folder / contender.file
        head = f"# Chosen for {contender.name} by a search on validation parts: {self.search.title}.\n"
        head += "" if ended.isdigit() else f"# So far: {ended}.\n"
        head += f"# {' '.join(beside.split())}\n" if (beside := self._laid_over()) else ""
        config = best.cells[0].config
        whole = config["method"]["class_path"]
        method = whole.rpartition(".")[2] if whole.startswith("fl_lightning.") else whole
        layers = [*contender.overlay.layers(), *classes_first(best.point.items())]
        own = (whole_list(spelled_out(key, config), value, config) for key, value in layers)
        node = laid_over([("method", method), *own])
        node = as_chosen(node, config, [*self.search.base.words(), *self.overrides])
        alone = {name: own["class_path"] for name, own in node.items() if is_name(own)}
        write_text(path, head + dump_yaml({**node, **alone}))


def said_of(point: Point) -> str:
    """A point's settings by short names, as one reads them, in one line."""
    return ", ".join(f"{short} {' '.join(str(point[key]).split())}" for key, short in short_keys(point).items())
