"""The page's tables, as HTML: honest moments, a published table, and how each run is made again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from fl_lightning.report.columns import FIGURES, is_spread
from fl_lightning.report.page.figure import known
from fl_lightning.report.page.ranking import RankedRow
from fl_lightning.report.recorded_run import RecordedRun
from fl_lightning.report.series import Series

COLUMNS = tuple(name + moment for name in FIGURES for moment in ("", "_received"))
MOMENTS = {"last": "last", "mean_last_10": "mean of last ten", "best": "best"}
MOST_TALL = 12  # rows whose cells show other moments from the start
MOST_NAMED = 500  # lines of a run's configuration


@dataclass(frozen=True)
class PublishedCell:
    """One printed cell.

    Args:
        text: ours, with its spreads.
        published: theirs; empty where nothing was printed.
        difference: ours minus theirs.
        mark: ``best``, ``second`` or nothing.
        moments: the same figure at other moments.
        pairs: what the test behind the mark rests on: ``5 seeds``.
    """

    text: str
    published: str = ""
    difference: str = ""
    mark: str = ""
    moments: Mapping[str, str] | None = None
    pairs: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A table beside the published one.

    Args:
        title: for people.
        notes: paragraphs below it.
        heads: its columns.
        rows: row's name and its cells, None where it has none.
        ranked: who is ahead in the columns that are ranked, of each the best first.
    """

    title: str
    notes: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[PublishedCell | None]]]
    ranked: Sequence[RankedRow] = ()


def published(table: PublishedTable) -> str:
    """Our figures with the published ones and the differences."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    body = []
    for name, cells in table.rows:
        shown = "".join(f"<td>{_cell(cell)}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{escape(name)}</th>{shown}</tr>')
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes if note)
    caption = f"<caption>{escape(table.title)}</caption>"
    choice = ""
    if any(cell is not None and cell.moments for _, cells in table.rows for cell in cells):
        said, checked = ", ".join(MOMENTS.values()), " checked" if len(table.rows) <= MOST_TALL else ""
        choice = f'<label class="others"><input type="checkbox"{checked}> other moments ({said})</label>'
    return (
        f'{choice}<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>{caption}'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{notes}"
    )


def _cell(cell: PublishedCell | None) -> str:
    if cell is None:
        return "–"
    text = escape(cell.text)
    text = {"best": f"<strong>{text}</strong>", "second": f"<u>{text}</u>"}.get(cell.mark, text)
    if cell.mark and cell.pairs:
        text += f' <span class="small">{escape(cell.pairs)}</span>'
    if cell.published:
        text += f'<br><span class="small">published {escape(cell.published)}'
        text += f"; ours {escape(cell.difference)}</span>" if cell.difference else "</span>"
    if cell.moments:
        other = ", ".join(f"{escape(MOMENTS.get(m, m))} {escape(v)}" for m, v in cell.moments.items())
        text += f'<span class="small moments"><br>{other}</span>'
    return text


def moments(lines: Sequence[Series]) -> str:
    """Each line's accuracies at the three moments, in percent: mean ± std over seeds.

    A method's further ways to predict have rows of their own, where their figures are not those of the first.
    """
    columns = [name for name in COLUMNS if any(len(line.curve(name).rounds) for line in lines)]
    if not columns:
        return "<p>No accuracy was measured in these runs.</p>"
    many = len({line.setting for line in lines}) > 1
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = []
    for line in lines:
        said = [run.figures for run in line.over]
        for way in ("", *_ways(line)):
            small = [f"by {way.removeprefix('/')}"] if way else []
            small += [line.setting] if many else []
            label = escape(line.label) + "".join(f'<br><span class="small">{escape(text)}</span>' for text in small)
            found = {moment: [_at(said, moment, name + way) for name in columns] for moment in MOMENTS}
            if way and found == {moment: [_at(said, moment, name) for name in columns] for moment in MOMENTS}:
                continue
            for moment, title in MOMENTS.items():
                cells = "".join(f"<td>{_spread(values)}</td>" for values in found[moment])
                first = f'<th scope="rowgroup" rowspan="{len(MOMENTS)}">{label}</th>' if moment == "last" else ""
                body.append(f'<tr>{first}<th scope="row">{title}</th>{cells}</tr>')
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Accuracies at three moments"><table>'
        "<caption>Accuracy, %: mean ± std over seeds</caption>"
        f'<thead><tr><th scope="col">run</th><th scope="col">moment</th>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{_best_is_chosen(lines)}"
    )


def _ways(line: Series) -> list[str]:
    """What ends the columns of a method's further ways to predict: ``/fine_tuned``."""
    names = dict.fromkeys(name for run in line.runs for name in (run.rows[0] if run.rows else ()))
    found = (name.removeprefix(own) for own in COLUMNS for name in names if name.startswith(f"{own}/"))
    return list(dict.fromkeys(way for way in found if not is_spread(way)))


def _at(summaries: Sequence[Mapping[str, Any]], moment: str, name: str) -> list[float]:
    found = [said[moment].get(name) for said in summaries]
    return known(value.get("value") if isinstance(value, Mapping) else value for value in found)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{100 * float(np.mean(values)):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * float(np.std(values, ddof=1)):.2f}"


def _best_is_chosen(lines: Sequence[Series]) -> str:
    runs = [run for line in lines for run in line.runs]
    choosers = [str(run.summary.get("best_by") or run.figures.get("best_by", "")) for run in runs]
    by = escape(" or ".join(sorted({*choosers} - {""})))
    others = [run for run, chooser in zip(runs, choosers, strict=True) if not chooser]
    on = escape(" or ".join(sorted({_evaluated_on(run) for run in others})))
    honest = f"the round in which {by} is best: chosen on the validation parts, reported on all"
    flattering = f"the highest round's, chosen on the {on} split that it is reported on"
    if by and others:
        said = f"“Best” is, of runs that have {by}, {honest}; of the others {flattering}"
    else:
        said = f"“Best” is {honest if by else flattering}"
    return f"<p>{said}; “last” and the mean of the last ten evaluated rounds are not chosen at all.</p>"


def _evaluated_on(run: RecordedRun) -> str:
    data = run.config.get("data")
    said = data.get("evaluate_on") if isinstance(data, Mapping) else run.partition.get("evaluate_on")
    return said if said in ("test", "validation") else "test"


def configurations(lines: Sequence[Series]) -> Iterator[str]:
    """What each line is, and how it is run again."""
    for line in lines:
        commands = "\n".join(_command(run) for run in line.runs)
        facts = {
            "runs": ", ".join(run.name for run in line.runs),
            "seeds": ", ".join(str(run.seed) for run in line.runs if run.seed is not None),
            "setting": line.setting,
            "rounds": ", ".join(sorted({str(len(run.rows)) for run in line.runs})),
            "versions": "; ".join(sorted({_pairs(run.summary.get("versions")) for run in line.runs} - {""})),
            "git commit": ", ".join(sorted({str(run.summary.get("git_commit") or "") for run in line.runs} - {""})),
            "partition": ", ".join(f"{run.partition_hash[:16]}…" for run in line.runs if run.partition_hash),
            "seconds": ", ".join(f"{v:.1f}" for run in line.runs for v in known([run.summary.get("seconds")])),
            "notes": "; ".join(f"{run.name}: {note}" for run in line.runs for note in run.notes),
        }
        listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
        keys = "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{escape(_plain(value))}</td></tr>'
            for key, value in list(line.runs[0].identity.items())[:MOST_NAMED]
            if not key.endswith(".length")
        )
        yield (
            f'<details class="run"><summary>{escape(line.label)}<span class="small"> {escape(line.setting)}</span>'
            f"</summary><dl>{listed}</dl><h3>Run it again</h3><pre>{escape(commands)}</pre>"
            '<h3>Every key that changes a number</h3><div class="wide" tabindex="0" role="region" '
            'aria-label="Configuration"><table><thead><tr><th scope="col">key</th><th scope="col">value</th></tr>'
            f"</thead><tbody>{keys}</tbody></table></div></details>"
        )


def _command(run: RecordedRun) -> str:
    words = ["--config", str(run.path / "config.yaml"), "--name", f"{run.name}-again"]
    words += ["--federation.rounds", str(run.rows[-1]["round"])] if run.is_past else []  # the file says later ones
    return shlex.join(["fl-lightning", "fit", *words])


def _pairs(node: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in node.items()) if isinstance(node, Mapping) else ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
