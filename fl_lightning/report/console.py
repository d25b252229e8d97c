"""What a run shows in the terminal: its progress while it runs, a table of figures at its end."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fl_lightning.report.columns import SPREADS, is_measure, measure_of

FIGURES = {"Local-T": "Local-T", "Local-T_received": "received", "Global-T": "Global-T", "Server-T": "Server-T"}
"""Accuracies shown while a run goes on: column -> label."""
HEADLINES = (
    "Local-T", "Local-T_received", "Global-T", "Global-T_received", "Server-T",
    "Local-V", "Local-V_received", "Server-V",
)  # fmt: skip
"""Accuracies of the table at a run's end, in its order; named inferences follow the headline that they belong to."""
PLAIN_WIDTH = 100
WIDE, WIDEST = 78, 92
"""Characters that all columns of the accuracies, and of what was communicated, need."""
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
        self.console = Console() if console is None else console
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
        self.known |= {name: row[name] for name in FIGURES if _is_number(row.get(name))}
        if self.live and self._display is not None:
            self._print(self.line(row, self.console.width))
        elif not self.live and self._is_due():
            self._written = time.monotonic()
            self._print(self.line(row))

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
        watch = getattr(self._loop, "watch", None)
        others = 0 if watch is None else watch.others_done(self._round + 1)
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
        known = {name: row[name] for name in FIGURES if _is_number(row.get(name))}
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
        parts += [f"Local-T {percent(score)} %"] if _is_number(score) else []
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
        f"{samples}; {clients}, {sum(loop.num_train)} for training\n"
        f"{type(runner.modules[0].method).__name__}, model of {models} parameters; {type(loop.exchange).__name__}; "
        f"{runner.device}, {runner.trainer.precision}, {workers}"
    )


# --- the end of a run -----------------------------------------------------------------------------------------------


def summary_table(summary: Mapping[str, Any], width: int = PLAIN_WIDTH) -> Table:
    """The accuracies of a run: last, mean of the last ten and best rounds, worst client, after one more receive.

    Args:
        summary: a run's ``summary.json``.
        width: characters in a line; where all columns do not fit, the last and the best round stay.

    Returns:
        A table with one row for each accuracy that the run has, in percent; ``±`` is the spread over clients.
    """
    last, best = summary.get("last", {}), summary.get("best", {})
    mean, final = summary.get("mean_last_10", {}), summary.get("final_received", {})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = _title(summary), "left", "bold"
    table.add_column("accuracy, %", overflow="fold")
    rounds = f" mean of\n last {min(10, summary['rounds'])}"
    headers = [" last", rounds, " best\n (round)", "worst\nclient", " final\n received"]
    shown = [0, 1, 2, 3, *([4] if final else [])] if width >= WIDE else [0, 2]
    for index in shown:
        table.add_column(headers[index], no_wrap=True)
    for name in accuracy_columns([*last, *mean, *best, *final]):
        cells = [_with_spread(last, name), _with_spread(mean, name), _best(best.get(name))]
        cells += [f"{percent(last.get(f'{name}_min')):>5}", _with_spread(final, name)]
        table.add_row(Text(name), *(Text(cells[index]) for index in shown))
    return table


def print_summary(summary: Mapping[str, Any], console: Console, places: Sequence[tuple[str, str]] = ()) -> None:
    """Print what a run reached, what it communicated, how long it took and where to look.

    Args:
        summary: a run's ``summary.json``.
        console: where to print; 100 columns are enough for it.
        places: more places to look at: what and where.
    """
    width, console.width = console.width, console.width if console.is_terminal else PLAIN_WIDTH
    try:
        _print_summary(summary, console, places)
    finally:
        console.width = width
    console.file.flush()


def _print_summary(summary: Mapping[str, Any], console: Console, places: Sequence[tuple[str, str]]) -> None:
    final = summary.get("final_received")
    untested = summary.get("clients_without_test") or []
    split = "validation" if summary.get("evaluate_on") == "validation" else "test"
    chosen = summary.get("best_by")
    honest = f'"best" is the round in which {chosen} is best: chosen on the validation parts, reported on all.'
    flatters = f'"best" is chosen on the {split} split, so it flatters.'
    notes = [f"{honest if chosen else flatters} ± is the spread over clients."]
    notes += ["All figures are on validation parts; the test parts were laid aside."] if split == "validation" else []
    final_note = "; final received: after one more receive, without a fit." if final else "."
    notes.append(f"Worst client: in the last round{final_note}")
    notes += [_untested_line(untested)] if untested else []
    notes += [*fairness_lines(summary), *_undefined_lines(summary)]
    console.print()
    if summary.get("stopped"):
        console.print(Text(f"Ended after round {summary['rounds']}: {summary['stopped']}"), soft_wrap=True)
        console.print()
    console.print(summary_table(summary, console.width))
    console.print()
    if measured := measures_table(summary):
        console.print(measured)
        console.print()
    for note in notes:
        console.print(Text(note, style="dim"))
    console.print()
    console.print(_communication_table(summary, console.width))
    console.print()
    console.print(Text(f"took    {duration(summary['seconds'])}"))
    command = f"fl-lightning report {shlex.quote(summary['folder'])}"
    for what, where in [("folder", summary["folder"]), ("report", command), *places]:
        console.print(Text(f"{what:7} {where}"), soft_wrap=True)


def _title(summary: Mapping[str, Any]) -> Text:
    rounds, clients = summary["rounds"], summary["clients"]
    counts = f"{rounds} round{'s' * (rounds != 1)}, {clients} client{'s' * (clients != 1)}"
    return Text(f"{summary['name']}: {summary['method']}, {counts}")


def accuracy_columns(names: Iterable[str]) -> list[str]:
    """The accuracies among a summary's columns, without the columns of their spread, each headline with its inferences.

    >>> accuracy_columns(["Server-T", "Local-T", "Local-T_std", "Local-T/prototype", "Local-T/prototype_min", "loss"])
    ['Local-T', 'Local-T/prototype', 'Server-T']
    """
    there = dict.fromkeys(names)
    own = [name for name in there if not any(name.endswith(s) and name.removesuffix(s) in there for s in SPREADS)]
    return [name for headline in HEADLINES for name in own if name == headline or name.startswith(f"{headline}/")]


def measures_table(summary: Mapping[str, Any]) -> Table | None:
    """Measures beside accuracy in the last evaluated round; None where there are none.

    Args:
        summary: a run's ``summary.json``.
    """
    last = summary.get("last", {})
    names = list(dict.fromkeys(measure_of(name) for name in last if is_measure(name)))
    figures = [figure for figure in HEADLINES if any(f"{name}/{figure}" in last for name in names)]
    if not names or not figures:
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("measure, last", overflow="fold")
    for figure in figures:
        table.add_column(figure.replace("_", "\n"), justify="right", no_wrap=True)
    for name in names:
        table.add_row(name, *(measure_text(last.get(f"{name}/{figure}")) for figure in figures))
    return table


def fairness_lines(summary: Mapping[str, Any]) -> list[str]:
    """How evenly accuracy is shared out among clients in the last evaluated round."""
    last, lines = summary.get("last", {}), []
    for name in ("Local-T", "Local-T_received"):
        if not _is_number(last.get(f"{name}_gini")):
            continue
        worst = f"worst tenth {percent(last.get(f'{name}_worst10'))}"
        said = f"{worst}, Gini {last[f'{name}_gini']:.3f}, Jain {last[f'{name}_jain']:.3f}"
        share = last.get(f"{name}_hurt")
        hurt = f", {percent(share)} % of clients below what they reach alone" if _is_number(share) else ""
        lines.append(f"{name} over clients: {said}{hurt}.")
    return lines


def _undefined_lines(summary: Mapping[str, Any]) -> list[str]:
    last = summary.get("last", {})
    found = {
        name.removesuffix("_undefined"): int(count)
        for name, count in last.items()
        if name.endswith("_undefined") and is_measure(name) and count
    }
    return [f"{name} is not defined for {count} of the clients, and left out there." for name, count in found.items()]


def measure_text(value: float | None) -> str:
    """A measure with four digits; ``-`` if there is none.

    >>> measure_text(0.93141), measure_text(None)
    ('0.9314', '-')
    """
    return f"{value:.4g}" if value is not None and _is_number(value) else "-"


def _with_spread(values: Mapping[str, Any], name: str) -> str:
    value, std = values.get(name), values.get(f"{name}_std")
    spread = f" ± {percent(std):>4}" if _is_number(value) and _is_number(std) else ""
    return f"{percent(value):>5}{spread}"


def _best(best: Mapping[str, Any] | None) -> str:
    return f"{percent(best['value']):>5} ({best['round']})" if best and _is_number(best.get("value")) else "    -"


def _untested_line(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:10])) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
    one = len(clients) == 1
    return f"Left out of all means, for want of test samples: client{'' if one else 's'} {shown}."


def print_list(entries: Iterable[tuple[str, str, str]]) -> None:
    """Print what there is: names, what they are, and papers."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is", "paper"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for entry in entries:
        table.add_row(*entry)
    Console().print(table)


def print_table(table: RenderableType) -> None:
    """Print a table as wide as the terminal, and the same width everywhere else."""
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(table)


def print_evaluation(
    title: str, figures: Sequence[tuple[str, float | None, float]], console: Console | None = None
) -> bool:
    """Print the figures that were computed again beside those that a run wrote down; spreads are compared unseen.

    Args:
        title: the run and its round.
        figures: (column, what the run wrote down or None, what came out now).
        console: where to write; None writes to the standard output.

    Returns:
        Whether all are equal, to the last bit.
    """
    if not figures:
        print("no figure of this round can be computed again from its checkpoint")
        return True
    table = Table(title=title)
    for column in ("figure", "as the run wrote it", "computed again"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, then, now in figures:
        if not name.endswith(SPREADS):
            shown = measure_text if is_measure(name) else _percents
            table.add_row(name, "–" if then is None else shown(then), shown(now))
    (console or Console()).print(table)
    compared = sum(then is not None for _, then, _ in figures)
    different = [name for name, then, now in figures if then is not None and then != now]
    print(f"{compared - len(different)} of {compared} figures are equal to the last bit")
    if different:
        print(f"different: {', '.join(different)}", file=sys.stderr)
    return not different


def _percents(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.2f} %"


def _communication_table(summary: Mapping[str, Any], width: int) -> Table:
    total = summary["communication"]
    messages = summary["participants_per_round"] * summary["rounds"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    headers = ["communicated", "in all", "per client and round", "all clients, a round"]
    shown = len(headers) if width >= WIDEST else 3 if width >= WIDE else 2
    for header in headers[:shown]:
        table.add_column(header)
    for label, direction in (("up", "uplink"), ("down", "downlink")):
        amounts = total[f"{direction}_params"], total[f"{direction}_bytes"]
        each = f"{amounts[0] / messages:,.0f} values, {human(amounts[1] / messages, 'B')}" if messages else "-"
        of_a_round = total[f"{direction}_params_Mi_per_round"]
        table.add_row(*[label, _amounts(*amounts), each, f"{of_a_round:.2f} x 2^20 values"][:shown])
    return table


def _amounts(values: float, size: float) -> str:
    return f"{human(values):>6} values, {human(size, 'B'):>7}"


# --- numbers as text ------------------------------------------------------------------------------------------------


def percent(fraction: float | None) -> str:
    """A fraction as percent with one decimal; ``-`` if there is none.

    >>> percent(0.9314), percent(None)
    ('93.1', '-')
    """
    return f"{100 * fraction:.1f}" if fraction is not None and _is_number(fraction) else "-"


def loss_text(loss: float) -> str:
    """A loss with four decimals, or four digits where it is large; a loss that is no number shows as it is.

    >>> loss_text(0.12345), loss_text(123456.0), loss_text(float("nan"))
    ('0.1235', '1.235e+05', 'nan')
    """
    return f"{loss:.4f}" if abs(loss) < 1000 or math.isnan(loss) else f"{loss:.4g}"


def human(number: float, unit: str = "") -> str:
    """A count with three digits and a prefix of 10^3.

    >>> human(0, "B"), human(999), human(30_720, "B"), human(999_999)
    ('0 B', '999', '30.7 KB', '1.00 M')
    """
    value, prefixes = float(number), ["", "K", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    whole = value >= 99.95 or (value == number and value.is_integer())
    digits = f"{value:.{0 if whole else 1 if value >= 9.995 else 2}f}"
    return f"{digits} {prefixes[0]}{unit}".rstrip()


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> clock(9.4), clock(3725), clock(None)
    ('0:00:09', '1:02:05', '-:--:--')
    """
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def duration(seconds: float) -> str:
    """How long something took, in the units that people would use.

    >>> duration(7.31), duration(192), duration(7530)
    ('7.3 s', '3 min 12 s', '2 h 05 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _labels(known: Mapping[str, float]) -> dict[str, str]:
    """Labels of the accuracies that are known; ``received`` is short only where Local-T stands before it."""
    labels = {name: label for name, label in FIGURES.items() if name in known}
    if "Local-T" not in labels and "Local-T_received" in labels:
        labels["Local-T_received"] = "Local-T_received"
    return labels


def _is_number(value: Any) -> bool:
    return value is not None and not math.isnan(value)
