"""What a run shows in the terminal while it goes on: the present round as a live line, and a line a round."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fl_lightning.report.columns import SECONDS
from fl_lightning.report.numerals import clock, is_number, loss_text, percent
from fl_lightning.report.plain import PlainConsole

FIGURES = {"Local-T": "Local-T", "Local-T_received": "received", "Global-T": "Global-T", "Server-T": "Server-T"}
"""Accuracies shown while a run goes on: column -> label."""
BAR = 20  # characters
LONG = 15.0  # seconds of a first round of which nothing was seen


class RoundProgress:
    """Shows a running federation: on a terminal the present round as a live line, anywhere else one line a round.

    Has the hooks of a federation callback. Use it as a context manager around the run (or call `close`), so that an
    exception or Ctrl-C leaves the terminal in order.

    Args:
        console: where to write; None writes to the standard output.
        interval: seconds between two plain lines, at least; the first and the last round are always written. 0 writes
            every round. A terminal ignores it.
        verbose: write a line for every client, too.
    """

    known: dict[str, float]

    def __init__(self, console: Console | None = None, interval: float = 0.0, verbose: bool = False) -> None:
        self.console = PlainConsole() if console is None else console
        self.interval = interval
        self.verbose = verbose
        self.live = self.console.is_terminal and self.console.is_interactive
        self._loop: Any = None
        self._display: Live | None = None
        self._reset(0)

    def __enter__(self) -> RoundProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing and give the cursor back; more than one call does no harm."""
        display, self._display = self._display, None
        if display is not None:
            display.stop()

    def on_run_start(self, loop: Any) -> None:
        """Start the clock; a resumed run starts at `loop.round`."""
        self.close()
        self._loop = loop
        self._reset(loop.round)
        if self.verbose:
            self._print(_setting(loop))
        if self.live:
            self._display = Live(
                console=self.console, refresh_per_second=4, transient=True, get_renderable=lambda: self.present()
            )
            self._display.start()

    def on_round_start(self, loop: Any, round: int, participants: Sequence[int]) -> None:
        """A round begins with none of its clients done."""
        self._fitted, self._participants = 0, len(participants)
        self._scores.clear()

    def on_client_fit_end(self, loop: Any, report: Any) -> None:
        """One more client of the round is done."""
        self._fitted += 1
        self._mark = time.monotonic()
        score = getattr(report, "scores", {}).get("Local-T", math.nan)
        self._scores += [] if math.isnan(score) else [float(score)]
        if self.verbose:
            self._print(self._client_line(report))
        elif not self.live:
            self._warn_of_length()

    def on_round_end(self, loop: Any, row: Mapping[str, Any]) -> None:
        """A round is done: its figures are the current ones."""
        self._round = row["round"]
        self._done += 1
        self._fitted = self._participants = 0
        self._mark = time.monotonic()
        self.known |= {name: row[name] for name in FIGURES if is_number(row.get(name))}
        if self.live and self._display is not None:
            self._print(self.line(row, self.console.width))
        elif not self.live and self._is_due():
            self._written = time.monotonic()
            self._print(self.line(row))
        if self.verbose:
            self._print(_parts(row))

    def on_run_end(self, loop: Any, summary: Mapping[str, Any]) -> None:
        """All rounds are done: the lines stay as they are."""
        self.close()

    # --- the present state, which the live line shows ---------------------------------------------------------------

    def _reset(self, round: int) -> None:
        self._start = self._mark = time.monotonic()
        self._round = self._first = round
        self._done = self._fitted = self._participants = 0
        self._written = -math.inf
        self._scores: list[float] = []
        self._warned = False
        self.known = {}

    @property
    def fitted(self) -> int:
        """Clients of the present round that are done, as far as their workers have told."""
        ward = getattr(self._loop, "ward", None)
        others = 0 if ward is None or ward.watch is None else ward.watch.others_done(self._round + 1)
        return max(0, min(self._participants, max(self._fitted, self._fitted + others)))

    @property
    def progress(self) -> float:
        """Rounds that are done, the present one in parts."""
        return self._round + (self.fitted / self._participants if self._participants else 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began its first round."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float | None:
        """Seconds left, from what this process has done so far; None before its first client is done."""
        done = self.progress - self._first
        remaining = self._loop.settings.rounds - self.progress
        if remaining <= 0:
            return 0.0
        if done <= 0:
            return None
        return max(0.0, (self._mark - self._start) / done * remaining - (time.monotonic() - self._mark))

    @property
    def is_stopping(self) -> bool:
        """Whether somebody asked the loop to stop before its last round."""
        return bool(getattr(self._loop, "stopping", False)) and self._round < self._loop.settings.rounds

    def present(self) -> Text:
        """The present round in one line, as much of it as the terminal is wide: clients done, Local-T, time left."""
        rounds, fitted = self._loop.settings.rounds, self.fitted
        number = f"{min(self._round + 1, rounds)}/{rounds}"
        of = str(self._participants)
        count = f"{fitted:>{len(of)}}/{of}" if self._participants else ""
        state = f"{count} clients" if count else "last evaluation" if self._round >= rounds else "begins"
        local = sum(self._scores) / len(self._scores) if self._scores else self.known.get("Local-T")
        local_t = [] if local is None else [f"Local-T {percent(local)} %"]
        left = "stopping after this round" if self.is_stopping else f"left {clock(self.left)}"
        short = [number, *([count] if count else []), *local_t, left.replace(" after this round", "")]
        texts = [
            "  ".join([f"round {number}", *bar, state, *local_t, *times, left])
            for bar, times in (([self._bar(fitted)], [clock(self.elapsed)]), ([self._bar(fitted)], []), ([], []))
        ]
        shortest = [
            number,
            *([count] if count else []),
            *(each.removeprefix("Local-T ") for each in local_t),
            short[-1],
        ]
        fitting = [text for text in [*texts, "  ".join(short), "  ".join(shortest)] if len(text) < self.console.width]
        text = fitting[0] if fitting else f"{number}  {count}"
        return Text(text, style="yellow" if self.is_stopping else "cyan", no_wrap=True, overflow="crop")

    def _bar(self, fitted: int) -> str:
        full, empty = ("━", "╌") if self.console.encoding.startswith("utf") else ("#", "-")
        done = round(BAR * fitted / self._participants) if self._participants else BAR
        return full * done + empty * (BAR - done)

    def line(self, row: Mapping[str, Any], width: int | None = None) -> str:
        """One round as plain text; what the row does not have is left out, and what is beyond `width`."""
        rounds = str(self._loop.settings.rounds)
        known = {name: row[name] for name in FIGURES if is_number(row.get(name))}
        parts = [f"round  {row['round']:>{len(rounds)}}/{rounds}"]
        parts += [f"{label} {percent(known[name])} %" for name, label in _labels(known).items()]
        if row.get("loss") is not None:
            parts.append(f"loss {loss_text(row['loss'])}")
        if row.get("seconds") is not None:
            parts.append(f"{row['seconds']:.2f} s")
        parts.append(f"left {clock(self.left)}")
        while width is not None and len(parts) > 2 and len("  ".join(parts)) > width:
            del parts[2]
        return "  ".join(parts)

    def _client_line(self, report: Any) -> str:
        score, loss = report.scores.get("Local-T"), report.losses.get("loss")
        parts = [f"  client {report.client}"]
        parts += [f"Local-T {percent(score)} %"] if is_number(score) else []
        parts += [f"loss {loss_text(loss)}"] if loss is not None else []
        return "  ".join([*parts, f"{report.num_steps} steps", f"{report.seconds:.2f} s"])

    def _warn_of_length(self) -> None:
        """Say once, within a first round that takes long, how long all will take: nothing else is seen of it."""
        if self._done == 0 and not self._warned and self.elapsed >= LONG and self.fitted < self._participants:
            self._warned = True
            rounds, all_of_it = self._loop.settings.rounds, self.elapsed + (self.left or 0.0)
            said = f"{self.fitted} of {self._participants} clients after {self.elapsed:.0f} s"
            number = f"round  {self._round + 1:>{len(str(rounds))}}/{rounds}"
            self._print(f"{number}  {said}; the run takes about {clock(all_of_it)}")

    def _is_due(self) -> bool:
        ends = self._done == 1 or self._round >= self._loop.settings.rounds or self.is_stopping
        return ends or time.monotonic() - self._written >= self.interval

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
        self.console.file.flush()


def _setting(loop: Any) -> str:
    """What runs where, in two lines."""
    data, runner = loop.data, loop.runner
    sizes = [sum(each.numel() for each in module.method.model.parameters()) for module in runner.modules]
    samples = f"{len(data.arrays.y)} samples of {type(data.dataset).__name__}, {len(data.arrays.classes)} classes"
    workers = f"{loop.workers.size} worker{'s' * (loop.workers.size != 1)}"
    clients = f"{loop.num_clients} clients by {type(data.partition).__name__}"
    models = ", ".join(f"{size}" for size in sizes)
    return (
        f"{samples}; {clients}, {int(loop.num_train.sum())} for training\n"
        f"{type(runner.modules[0].method).__name__}, model of {models} parameters; {type(loop.exchange).__name__}; "
        f"{runner.device}, {runner.trainer.precision}, {workers}"
    )


def _parts(row: Mapping[str, Any]) -> str:
    """Where a round's seconds went."""
    parts = {name.removeprefix(f"{SECONDS}_"): value for name, value in row.items() if name.startswith(f"{SECONDS}_")}
    return "  " + "  ".join(f"{name} {value:.2f} s" for name, value in parts.items())


def _labels(known: Mapping[str, float]) -> dict[str, str]:
    """Labels of the accuracies that are known; ``received`` is short only where Local-T stands before it."""
    labels = {name: label for name, label in FIGURES.items() if name in known}
    if "Local-T" not in labels and "Local-T_received" in labels:
        labels["Local-T_received"] = "Local-T_received"
    return labels
