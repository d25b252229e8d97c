"""Figures over clients at a run's last evaluated round: bars, the worst tenth, both moments, who was hurt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fl_lightning.report.page.figure import (
    BY_NAME,
    FULL,
    LABELS,
    LIMIT,
    WHOLE,
    Figure,
    Rows,
    Spec,
    colour,
    known,
    quantity,
    shape,
    tips,
)
from fl_lightning.report.record import ever_trained
from fl_lightning.report.recorded_run import RecordedRun
from fl_lightning.report.series import Series

MOMENTS = {"Local-T": "after the fit", "Local-T_received": "as received"}
MOST_CLIENTS = 500  # of a run, in figures of single clients
STEP = 26  # height of a line's row
SECTION = "Clients"
BY_LINE = {"field": "label", "type": "nominal", "sort": LABELS, "title": None, "axis": {"labelLimit": LIMIT}}


def last_of_clients(run: RecordedRun, column: str) -> dict[int, float]:
    """Client -> the column in the last round in which any client has it."""
    rows, last = run.client_rows, -math.inf
    found: dict[int, float] = {}
    for round, client, value in zip(*map(rows.column, ("round", "client", column)), strict=True):
        if round >= last and known([value]):
            found = found if round == last else {}
            found[client], last = float(value), round
    return found


def worst_tenth(values: Sequence[float]) -> float:
    """The mean over the worst tenth of clients, at least one.

    >>> worst_tenth([0.9, 0.1, 0.5])
    0.1
    """
    return float(np.mean(sorted(values)[: math.ceil(len(values) / 10)]))


KINDS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "worst tenth": worst_tenth,
    "worst client": min,
}


def _moment_and_seed(run: RecordedRun, column: str) -> str:
    return f"{'one run' if run.seed is None else f'seed {run.seed}'}, {MOMENTS[column]}"


def bars(lines: Sequence[Series]) -> Iterator[Figure]:
    """Every client's accuracy, the worst tenth of each line in full colour."""
    rows, picks = Rows("s", "pick", "client", "y", "worst"), list[str]()
    for column in MOMENTS:
        for place, line in enumerate(lines):
            for run in line.runs:
                found = last_of_clients(run, column)
                order = sorted(found, key=lambda client: found[client])
                worst = set(order[: math.ceil(len(order) / 10)])
                pick = _moment_and_seed(run, column)
                if found and pick not in picks:
                    picks.append(pick)
                for client in sorted(found)[:MOST_CLIENTS]:
                    value = 100 * found[client]
                    rows.add(s=place, pick=picks.index(pick), client=client, y=value, worst=client in worst)
    if not len(rows):
        return
    said = tips(("label", "run"), ("client", "client"), ("y", "Local-T, %"), ("worst", "worst tenth"))
    full = {"condition": {"test": "datum.worst", "value": 1}, "value": 0.45}
    single: Spec = {
        "width": WHOLE,
        "height": 58,
        "layer": [
            {
                "mark": {"type": "bar"},
                "encoding": {
                    "x": {"field": "client", "type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0}},
                    "y": quantity("y", "%", axis={"tickCount": 3}, scale={"domain": [0, 100]}),
                    "color": colour(),
                    "opacity": full,
                    "tooltip": said,
                },
            },
            {"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"y": quantity("y", "%", aggregate="mean")}},
        ],
    }
    header = {"labelAngle": 0, "labelAlign": "left", "labelAnchor": "start", "labelOrient": "top", "title": None}
    header["labelLimit"] = WHOLE
    spec = {"facet": {"row": {"field": "label", "type": "nominal", "sort": LABELS, "header": header}}, "spec": single}
    text = (
        "Local-T of every client in the last evaluated round, but for attackers and newcomers, who count in no mean of "
        f"it; the worst tenth stands out, the dashed line is the mean. Of more than {MOST_CLIENTS} clients the first "
        "are drawn, and the line is theirs. "
        "Bars above each other are the same client wherever the partition is the same."
    )
    heads = {"label": "run", "pick": "run and moment", "client": "client", "y": "Local-T, %", "worst": "worst tenth"}
    yield Figure("clients", SECTION, "Every client", text, spec, rows.columns, heads, {}, picks)


def spread(lines: Sequence[Series]) -> Iterator[Figure]:
    """Mean, worst tenth and worst client of every line."""
    kinds = list(KINDS)
    rows = Rows("s", "pick", "kind", "x", "low", "high")
    for moment, column in enumerate(MOMENTS):
        for place, line in enumerate(lines):
            values = [list(last_of_clients(run, column).values()) for run in line.over]
            values = [own for own in values if own]
            for kind, take in enumerate(KINDS.values()):
                if values:
                    each = [100 * float(take(own)) for own in values]
                    std = float(np.std(each, ddof=1)) if len(each) > 1 else np.nan
                    mean = float(np.mean(each))
                    rows.add(s=place, pick=moment, kind=kind, x=mean, low=mean - std, high=mean + std)
    if not len(rows):
        return
    said = tips(
        ("label", "run"), ("kind", "figure"), ("x", "%"), ("low", "− std over seeds"), ("high", "+ std over seeds")
    )
    by_kind: Spec = {"field": "kind", "type": "nominal", "title": None, "sort": kinds}
    by_kind["legend"] = {"orient": "top", "columns": 2}
    by_kind["scale"] = {"domain": kinds, "range": ["circle", "diamond", "triangle-left"]}
    spec: Spec = {
        "width": FULL,
        "height": {"step": STEP},
        "autosize": BY_NAME,
        "layer": [
            {
                "transform": [{"filter": "datum.low !== null"}],
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": quantity("low", ""), "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {
                    "x": quantity("x", "Local-T, %", scale={"zero": False}),
                    "shape": by_kind,
                    "tooltip": said,
                },
            },
        ],
        "encoding": {"y": BY_LINE, "color": colour()},
    }
    text = (
        "Means and ± one standard deviation over seeds: of all clients, of the worst tenth of them, of the worst one."
    )
    heads = {"label": "run", "pick": "moment", "kind": "figure", "x": "%", "low": "− std", "high": "+ std"}
    names = {"kind": kinds}
    yield Figure(
        "worst-tenth", SECTION, "The worst tenth", text, spec, rows.columns, heads, names, list(MOMENTS.values())
    )


def both_moments(lines: Sequence[Series]) -> Iterator[Figure]:
    """What each client received against what it made of it."""
    rows = Rows("s", "seed", "client", "x", "y")
    for place, line in enumerate(lines):
        for run in line.runs:
            trained, received = (last_of_clients(run, column) for column in MOMENTS)
            for client in sorted(trained.keys() & received.keys())[:MOST_CLIENTS]:
                values = {"x": 100 * received[client], "y": 100 * trained[client]}
                rows.add(s=place, seed=run.seed, client=client, **values)
    if not len(rows):
        return
    said = tips(("label", "run"), ("seed", "seed"), ("client", "client"), ("x", "received, %"), ("y", "trained, %"))
    diagonal = {"values": [{"x": 0, "y": 0}, {"x": 100, "y": 100}]}
    spec: Spec = {
        "width": WHOLE,
        "height": 340,
        "layer": [
            {
                "data": diagonal,
                "mark": {"type": "line", "strokeDash": [4, 3], "color": "#888888"},
                "encoding": {"x": quantity("x", ""), "y": quantity("y", "")},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.65},
                "encoding": {
                    "x": quantity("x", "Local-T as received, %", axis={"tickCount": 10}),
                    "y": quantity("y", "Local-T after the fit, %", axis={"tickCount": 10}),
                    "color": colour(),
                    "shape": shape(),
                    "tooltip": said,
                },
            },
        ],
    }
    text = (
        "One point a client and seed, in the last round that has both. Above the line the local fit helped; far above "
        "it, the received model alone knows little of this client."
    )
    heads = {"label": "run", "seed": "seed", "client": "client", "x": "received, %", "y": "trained, %"}
    yield Figure("received-trained", SECTION, "Received against trained", text, spec, rows.columns, heads)


def hurt(lines: Sequence[Series]) -> Iterator[Figure]:
    """Each client's accuracy minus that of the model that it trains alone, where such a run has the same samples."""
    silent = [_silent(line) for line in lines]
    rows, facts = Rows("s", "pick", "seed", "client", "x", "own", "alone"), []
    for moment, column in enumerate(MOMENTS):
        for place, line in enumerate(lines):
            below = total = untrained = 0
            alike = [own if lines[at].setting == line.setting else {} for at, own in enumerate(silent)]  # a shift, too
            covered = [sum(run.clients in own for run in line.runs) for own in alike]
            chosen = max(range(len(lines)), key=covered.__getitem__)  # one for all seeds, the first of equals
            for run in line.runs:
                other = alike[chosen].get(run.clients)
                if other is None or is_silent(run):
                    continue
                own, reference = last_of_clients(run, column), last_of_clients(other, "Local-T")
                both, trained = own.keys() & reference.keys(), ever_trained(other.client_rows)
                gaps = {client: 100 * (own[client] - reference[client]) for client in both & trained}
                untrained += len(both - trained)
                below, total = below + sum(gap < -1e-9 for gap in gaps.values()), total + len(gaps)
                for client, gap in sorted(gaps.items())[:MOST_CLIENTS]:
                    values = {"own": 100 * own[client], "alone": 100 * reference[client]}
                    rows.add(s=place, pick=moment, seed=run.seed, client=client, x=gap, **values)
            if total:
                share = f"{below} of {total} clients ({100 * below / total:.0f} %)"
                where = f" ({line.setting})" if len({each.setting for each in lines}) > 1 else ""
                whose = f" ({lines[chosen].label})" if sum(map(bool, covered)) > 1 else ""
                said = f"{share} are below the model that they train alone{whose}."
                said += f" {untrained} more never trained there." if untrained else ""
                facts.append(f"{line.label}{where}, {MOMENTS[column]}: {said}")
    if not len(rows):
        return
    text = (
        "Each client's Local-T minus that of the run among these that sends nothing and has the same partition; of "
        "several lines that send nothing the one that has most of the seeds, the first of equals. Points left of the "
        "line, in full colour, are clients that federation hurt."
    )
    heads = {"label": "run", "pick": "moment", "seed": "seed", "client": "client", "x": "difference", "own": "here, %"}
    heads |= {"alone": "alone, %"}
    picks = list(MOMENTS.values())
    yield Figure("hurt", SECTION, "Who was hurt", text, _differences(), rows.columns, heads, {}, picks, facts)


def _silent(line: Series) -> dict[str, RecordedRun]:
    """Who holds which samples -> the line's run that sends nothing and has it."""
    return {run.clients: run for run in line.runs if run.clients and is_silent(run)}


def _differences() -> Spec:
    """Points on either side of the model that a client trains alone."""
    said = tips(("label", "run"), ("seed", "seed"), ("client", "client"), ("own", "here, %"), ("alone", "alone, %"))
    jitter = {"calculate": "((datum.client * 7919) % 101) / 101 - 0.5", "as": "jitter"}
    return {
        "width": FULL,
        "height": {"step": 44},
        "autosize": BY_NAME,
        "layer": [
            {
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#888888"},
                "encoding": {"x": {"datum": 0, "type": "quantitative"}},
            },
            {
                "transform": [jitter],
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {
                    "x": quantity("x", "points above or below the model trained alone"),
                    "y": BY_LINE,
                    "yOffset": quantity("jitter", "", scale={"domain": [-1, 1]}),
                    "color": colour(),
                    "opacity": {"condition": {"test": "datum.x < 0", "value": 0.95}, "value": 0.35},
                    "tooltip": said,
                },
            },
        ],
    }


def is_silent(run: RecordedRun) -> bool:
    """Whether nothing was ever sent, by clients that came through a fit: each trains alone."""
    sent = known(row.get(name) for row in run.rows for name in ("uplink_bytes", "uplink_params"))
    trained = any(row.get("participants", 1) for row in run.rows)
    return bool(sent) and not any(sent) and trained
