"""What commands print in the terminal: a table of figures at a run's end, an evaluation, lists."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fl_lightning.report.columns import SPREADS, is_measure, is_spread, measure_of
from fl_lightning.report.numerals import duration, human, is_number, measure_text, percent
from fl_lightning.report.plain import PlainConsole
from fl_lightning.terminal import named_clients

HEADLINES = (
    "Local-T", "Local-T_received", "Global-T", "Global-T_received", "Server-T",
    "Local-V", "Local-V_received", "Server-V",
)  # fmt: skip
"""Accuracies of the table at a run's end, in its order; named inferences follow the headline that they belong to."""
PLAIN_WIDTH = 100
WIDE, WIDEST = 78, 92
"""Characters that all columns of the accuracies, and of what was communicated, need."""


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
    evaluated = summary.get("evaluated_rounds", summary["rounds"])
    averaged = min(10, evaluated)
    some = evaluated < summary["rounds"]
    rounds = f"mean of last\n{averaged} evaluated" if some else f" mean of\n last {averaged}"
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
    notes += [_untested_line(untested, split)] if untested else []
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
        if not is_number(last.get(f"{name}_gini")):
            continue
        worst = f"worst tenth {percent(last.get(f'{name}_worst10'))}"
        said = f"{worst}, Gini {last[f'{name}_gini']:.3f}, Jain {last[f'{name}_jain']:.3f}"
        share = last.get(f"{name}_hurt")
        hurt = f", {percent(share)} % of clients below what they reach alone" if is_number(share) else ""
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


def _with_spread(values: Mapping[str, Any], name: str) -> str:
    value, std = values.get(name), values.get(f"{name}_std")
    spread = f" ± {percent(std):>4}" if is_number(value) and is_number(std) else ""
    return f"{percent(value):>5}{spread}"


def _best(best: Mapping[str, Any] | None) -> str:
    return f"{percent(best['value']):>5} ({best['round']})" if best and is_number(best.get("value")) else "    -"


def _untested_line(clients: Sequence[int], split: str) -> str:
    return f"Left out of all means, for want of {split} samples: {named_clients(clients)}."


def print_list(entries: Iterable[tuple[str, str, str]]) -> None:
    """Print what there is: names, what they are, and papers."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is", "paper"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for entry in entries:
        table.add_row(*entry)
    PlainConsole().print(table)


def print_table(table: RenderableType) -> None:
    """Print a table as wide as the terminal, and the same width everywhere else."""
    console = PlainConsole()
    (console if console.is_terminal else PlainConsole(width=PLAIN_WIDTH)).print(table)


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
        if not is_spread(name):
            shown = measure_text if is_measure(name) else _percents
            table.add_row(name, "–" if then is None else shown(then), shown(now))
    (console or PlainConsole()).print(table)
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
        of_one = total.get(f"{direction}_params_per_client")
        times = amounts[0] / of_one if of_one else messages  # down, those that fell sick in a round count, too
        each = f"{amounts[0] / times:,.0f} values, {human(amounts[1] / times, 'B')}" if times else "-"
        of_a_round = total[f"{direction}_params_Mi_per_round"]
        table.add_row(*[label, _amounts(*amounts), each, f"{of_a_round:.2f} x 2^20 values"][:shown])
    return table


def _amounts(values: float, size: float) -> str:
    return f"{human(values):>6} values, {human(size, 'B'):>7}"
