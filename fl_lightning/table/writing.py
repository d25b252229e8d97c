"""A table as Markdown, CSV and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fl_lightning.files import remove, write_text
from fl_lightning.report.escaping import in_latex, in_markdown, in_spreadsheet
from fl_lightning.table import ranking
from fl_lightning.table.definition import Definition, all_digits
from fl_lightning.table.figures import BESIDE, Head, Value, Values
from fl_lightning.table.quantity import Figure, decimals

DASH = "–"
RANKING = "ranking.csv"
"""Who is ahead, where the table's file wants it ranked."""
ABOUT = "about.json"
"""What a reader must know beside the figures, for the page that `report` makes of the folder."""
LEGEND = (
    "**Best** and _second best_ are marked only where a paired t-test at 5 % tells them from the next row (over three "
    "seeds or more, else over three clients or more of the same partition, each on its own samples), without a "
    "correction for the number of rows."
)


def write(folder: Path, table: Definition, values: Values, notes: Sequence[str]) -> list[Path]:
    """Write `table.md`, `table.csv` and `table.tex`, and `ranking.csv` where the file wants one.

    Args:
        folder: where.
        table: what the file says.
        values: what is known.
        notes: lines on what is missing.
    """
    texts = {
        "table.md": markdown(table, values, notes),
        "table.csv": as_csv(table, values),
        "table.tex": latex(table, values, notes),
        ABOUT: about(table, values, notes),
    }
    if ranking.heads_ranked(table, values):
        texts[RANKING] = ranking.as_csv(table, values)
    else:  # one of an earlier start would be shown with the table
        remove(folder / RANKING)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def about(table: Definition, values: Values, notes: Sequence[str]) -> str:
    """What stands beside the figures, as JSON."""
    said = {"note": table.note, "source": table.source, "missing": list(notes)}
    return f"{json.dumps({**said, 'columns': list(map(str, heads_of(table, values)))}, indent=2)}\n"


def heads_of(table: Definition, values: Values) -> list[Head]:
    """The printed columns that have cells."""
    heads = [Head(column.name, name) for column, name in table.heads]
    return [head for head in heads if any(own == head for _, own in values)]


def markdown(table: Definition, values: Values, notes: Sequence[str] = ()) -> str:
    """The table with its spreads, and beside each figure the published one and the difference."""
    heads = heads_of(table, values)
    named = " | ".join(in_markdown(str(head)) for head in heads)
    lines = [f"# {in_markdown(table.title)}", ""]
    lines += [f"{in_markdown(table.note)}\n"] if table.note else []
    lines += [f"| | {named} |", "|---|" + "---|" * len(heads)]
    for row in table.rows:
        cells = [values.get((row.name, head)) for head in heads]
        if any(cell is not None for cell in cells):
            lines.append(f"| {in_markdown(row.name)} | " + " | ".join(map(_marked, cells)) + " |")
    lines += ["", *_explained(table, values), f"{LEGEND}{marks_rest_on(values)}", ""]
    lines += ["## The same figures at other moments", ""]
    lines += ["`best` is chosen on validation parts where a run has figures on them, else on the test split.", ""]
    lines += [f"| | moment | {named} |", "|---|---|" + "---|" * len(heads)]
    for row in table.rows:
        for moment in BESIDE:
            known = [values.get((row.name, head), Value()).beside.get(moment) for head in heads]
            if any(figure is not None for figure in known):
                lines.append(f"| {in_markdown(row.name)} | {moment} | " + " | ".join(map(_plain, known)) + " |")
    lines += ranking.as_markdown(table, values)
    if notes:
        lines += ["", "## What is missing", "", *(f"- {in_markdown(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def marks_rest_on(values: Values) -> str:
    """How many pairs the tests behind a table's marks have; empty where nothing is marked."""
    found = {value.rests_on for value in values.values() if value.mark and value.rests_on}
    told = sorted(found, key=lambda text: (text.split()[1], int(text.split()[0])))
    few = " Of three or four pairs, which is few, a test finds more by chance than it should."
    said = f" The tests rest on {' or '.join(told)}." if told else ""
    return said + (few if any(text.split()[0] in ("3", "4") for text in told) else "")


def how_many_seeds(numbers: Iterable[int]) -> str:
    """Of how many seeds the cells of a table are means, where they have any.

    >>> how_many_seeds([3, 0, 1]), how_many_seeds([1, 1]), how_many_seeds([])
    ('1 to 3 seeds', '1 seed', '0 seeds')
    """
    known = {number for number in numbers if number}
    if len(known) > 1:
        return f"{min(known)} to {max(known)} seeds"
    return "1 seed" if known == {1} else f"{max(known, default=0)} seeds"


def _explained(table: Definition, values: Values) -> list[str]:
    seeds = how_many_seeds(len(value.seeds) for value in values.values())
    said = f"Means of {seeds}; ± over seeds (sample deviation), in parentheses over clients."
    if any(value.published for value in values.values()):
        over = f", ± over {table.spread}" if table.spread else ""
        source = f" ({in_markdown(table.source)})" if table.source else ""
        said += f" In brackets: published{source}{over}, and ours minus that."
    figures = sorted({_unit(table, figure) for column in table.columns for figure in column.figures.values()})
    own = [(row, figure) for row in table.rows for figure in (row.figure, *row.figures.values()) if figure]
    figures += sorted({f"{_unit(table, figure)} ({in_markdown(row.name)})" for row, figure in own})
    said_of = "column of `metrics.csv` and moment, or entry of `summary.json`"
    return [said, f"Figure ({said_of}): {', '.join(figures)}.", ""]


def _unit(table: Definition, figure: Figure) -> str:
    """A figure and what it is printed in: percent, or itself times a factor."""
    scale = table.scale_of(figure)
    if scale == 100 and figure.is_share:
        return f"{replace(figure, scale=None)} in percent"
    return str(replace(figure, scale=None if scale == 1 else scale))


def _marked(value: Value | None) -> str:
    if value is None:
        return DASH
    text = spread_out(value)
    text = {"best": f"**{text}**", "second": f"_{text}_"}.get(value.mark, text)
    if value.published is not None:
        gap = "" if value.difference is None else f"; {value.difference:+{decimals(value.mean)}}"
        text += f" [{value.published}{gap}]"
    return text


def spread_out(value: Value) -> str:
    """``66.2 ± 0.4 (7.1)``: mean, over seeds, over clients."""
    if value.mean is None:
        return "…"
    form = decimals(value.mean)
    over = "" if value.over_seeds is None else f" ± {value.over_seeds:{form}}"
    clients = "" if value.over_clients is None else f" ({value.over_clients:{form}})"
    return f"{value.mean:{form}}{over}{clients}"


def _plain(figure: float | None) -> str:
    return DASH if figure is None else f"{figure:{decimals(figure)}}"


def as_csv(table: Definition, values: Values) -> str:
    """One line a cell: every digit, each seed's figure, and what was published."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    own = [
        "mean",
        "over_seeds",
        "over_clients",
        *BESIDE,
        "published",
        "published_spread",
        "difference",
        "mark",
        "mark_rests_on",
        "seeds",
    ]
    writer.writerow(["row", "column", "figure", *own])
    for row in table.rows:
        for head in heads_of(table, values):
            value = values.get((row.name, head))
            if value is not None:
                printed = value.published
                known = [value.mean, value.over_seeds, value.over_clients, *(value.beside.get(m) for m in BESIDE)]
                known += [printed.value, printed.spread, value.difference] if printed else [None] * 3
                seeds = " ".join(f"{seed}:{figure!r}" for seed, figure in sorted(value.seeds.items()))
                cells = ["" if figure is None else repr(figure) for figure in known]
                names = map(in_spreadsheet, (row.name, head.column, head.figure))
                writer.writerow([*names, *cells, value.mark, value.rests_on, seeds])
    return buffer.getvalue()


def latex(table: Definition, values: Values, notes: Sequence[str] = ()) -> str:
    """A booktabs table: mean ± over seeds, the published figure below in small print; the notes as comments."""
    heads = heads_of(table, values)
    marked = marks_rest_on(values)
    source = f"published figures: {table.source}" if table.source else ""
    said = [*filter(None, (table.note, source)), *notes]
    lines = [f"% note: {' '.join(note.split())}" for note in said]
    lines += [rf"% bold and underlined: told from the next row by a paired t-test at 5 %.{marked}"] if marked else []
    lines += [r"% needs \usepackage{booktabs}", r"\begin{tabular}{l" + "r" * len(heads) + "}", r"\toprule"]
    lines.append(" & ".join(["Method", *(in_latex(str(head)) for head in heads)]) + r" \\")
    lines.append(r"\midrule")
    for row in table.rows:
        cells = [values.get((row.name, head)) for head in heads]
        if any(cell is not None for cell in cells):
            lines.append(" & ".join([in_latex(row.name), *map(_in_latex, cells)]) + r" \\")
            if any(cell is not None and cell.published for cell in cells):
                figures = [all_digits(cell.published.value) if cell and cell.published else "" for cell in cells]
                small = [rf"{{\scriptsize {figure}}}" if figure else "" for figure in figures]
                lines.append(" & ".join([r"\quad{\scriptsize published}", *small]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _in_latex(value: Value | None) -> str:
    if value is None or value.mean is None:
        return "--"
    form = decimals(value.mean)
    over = "" if value.over_seeds is None else rf" \pm {value.over_seeds:{form}}"
    inner = f"{value.mean:{form}}{over}"
    return {"best": rf"$\mathbf{{{inner}}}$", "second": rf"\underline{{${inner}$}}"}.get(value.mark, f"${inner}$")
