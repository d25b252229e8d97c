"""Figures over rounds: accuracies with their spreads, the receive drop, losses, communication and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fl_lightning.report.columns import HURT, LOG, SECONDS, accuracy_of, is_score, is_spread, measure_of
from fl_lightning.report.page.figure import (
    DASH,
    ROUNDS,
    THIRD,
    WHOLE,
    Figure,
    Rows,
    Spec,
    colour,
    known,
    quantity,
    shape,
    thinned,
    tips,
)
from fl_lightning.report.series import Curve, Series, curve_of

TIMES = tuple(SECONDS + part for part in ("", "_fit", "_evaluate", "_exchange", "_save"))
SPREAD = {"sl": "− std over seeds", "sh": "+ std over seeds"}
ACCURACIES = {
    "Local-T": "Each client's own model after its local fit, on its own test samples; the mean over clients.",
    "Local-T_received": "Each client's model right after the receive, before the fit, on its own test samples.",
    "Global-T": "Each client's own model after its local fit, on all clients' test samples.",
    "Global-T_received": "Each client's model right after the receive, on all clients' test samples.",
    "Server-T": "The global model on all clients' test samples, where the method has one.",
}
VALUES: Spec = {
    "labelExpr": "abs(toNumber(replace(datum.label, regexp(',', 'g'), '')) - datum.value) > 1e-9 * abs(datum.value)"
    " ? format(datum.value, '.4~g') : datum.label"
}
"""An axis that names its values: where there is only one, the library rounds it to a whole number."""
FEW_POINTS = 30  # lines of so many points show them
COSTED_POINTS = 60  # of a line over communication, whose points can each be hovered over
HEIGHT = 260


def accuracies(lines: Sequence[Series]) -> Iterator[Figure]:
    """One figure a column, in percent, with the spread over seeds or over clients."""
    for column, text in ACCURACIES.items():
        rows = Rows("s", "x", "y", "sl", "sh", "cl", "ch")
        for place, line in enumerate(lines):
            curve, spread = line.curve(column), _by_round(line.curve(f"{column}_std"))
            for point in thinned(len(curve.rounds)):
                round, mean, std = int(curve.rounds[point]), curve.mean[point], curve.std[point]
                over = spread.get(round, np.nan)
                sides = [*_sides(mean, std), *_sides(mean, over)]
                values = dict(zip(("sl", "sh", "cl", "ch"), sides, strict=True))
                rows.add(s=place, x=round, y=100 * mean, **values)
        if len(rows):
            heads = {"label": "run", "x": "round", "y": "mean, %", "sl": "− std over seeds", "sh": "+ std over seeds"}
            heads |= {"cl": "− std over clients", "ch": "+ std over clients"}
            how = " The band is ± one standard deviation, over seeds or over clients as chosen above."
            spec = over_rounds("accuracy, %", rows, bands=True)
            yield Figure(_key(column), "Accuracy", column, text + how, spec, rows.columns, heads)


def _sides(mean: float, std: float) -> tuple[float, float]:
    """Both ends of a band in percent, beyond what an accuracy can be, too; NaN where there is no spread."""
    return 100 * (mean - std), 100 * (mean + std)


def _by_round(curve: Curve) -> dict[int, float]:
    return dict(zip(map(int, curve.rounds), map(float, curve.mean), strict=True))


def _key(column: str) -> str:
    return column.lower().replace("_", "-").replace("/", "-")


def receive_drop(lines: Sequence[Series]) -> Iterator[Figure]:
    """What a receive costs, as FedCPD's Figure 2 shows it."""
    text = (
        "Local-T after the fit of the round before, minus Local-T right after the receive: what the received model has "
        "forgotten of the client's own. Where participants alone are tested, two rounds' participants are compared."
    )
    yield from _single(lines, "receive_drop", "Accuracy", "Receive drop", text, "points")


def measures(lines: Sequence[Series]) -> Iterator[Figure]:
    """What else is read off predictions, one figure at a time, as chosen."""
    text = (
        "The mean over clients of a figure beside those above: another measure (eval_loss is the cross-entropy of what "
        "is predicted), another way to predict (/prototype, /fine_tuned), V for the validation parts, newcomers for "
        "the clients that join later. Gini is 0 and Jain 1 where all clients are equal; hurt is the share of clients "
        "below what they reach alone."
    )
    rows, picks = _chosen_among(lines, _measured(lines))
    if len(rows):
        heads = {"label": "run", "pick": "measure", "x": "round", "y": "mean", **SPREAD}
        spec = over_rounds(None, rows, True)
        yield Figure("measures", "Accuracy", "Other measures", text, spec, rows.columns, heads, {}, picks)


def _chosen_among(lines: Sequence[Series], columns: Sequence[str]) -> tuple[Rows, list[str]]:
    """Curves of columns of which one at a time is shown, and the columns that there are."""
    rows, picks = Rows("s", "pick", "x", "y", "sl", "sh"), list[str]()
    for column in columns:
        for place, line in enumerate(lines):
            curve = line.curve(column)
            if len(curve.rounds) and column not in picks:
                picks.append(column)
            for point in thinned(len(curve.rounds), MOST_OF_A_TERM):
                y, std = curve.mean[point], curve.std[point]
                ends = {"sl": y - std, "sh": y + std}
                rows.add(s=place, pick=picks.index(column), x=curve.rounds[point], y=y, **ends)
    return rows, picks


FAIRNESS = ("_worst10", "_gini", "_jain", HURT)


def _measured(lines: Sequence[Series]) -> list[str]:
    """The columns that are chosen among: all but the accuracies that have figures of their own; of spreads a few."""
    names = dict.fromkeys(name for line in lines for run in line.runs for name in (run.rows[0] if run.rows else ()))
    other = [name for name in names if is_score(name) and not is_spread(name) and name not in ACCURACIES]
    other = [name for name in other if not _repeats(name, lines)]
    joined = [f"{name}_newcomers" for name in ACCURACIES]
    fair = [f"{name}{suffix}" for name in ("Local-T", "Local-T_received") for suffix in FAIRNESS]
    return [*other, *(name for name in (*joined, *fair) if name in names)]


def _repeats(column: str, lines: Sequence[Series]) -> bool:
    """Whether a way to predict is the usual one in all runs that have it: ``Local-T/classifier`` of many a method."""
    usual = f"{measure_of(column)}/{accuracy_of(column)}".removeprefix("/")
    curves = [(line.curve(column), line.curve(usual)) for line in lines]
    return column != usual and all(np.array_equal(own.mean, other.mean) for own, other in curves if len(own.rounds))


def seconds(lines: Sequence[Series]) -> Iterator[Figure]:
    """How long rounds take, and where the time goes."""
    text = (
        "Seconds of each round, whole or one of its parts; comparable only between runs on one machine. A checkpoint "
        "is written after its round's row, so that it counts in the next one."
    )
    rows, picks = _chosen_among(lines, TIMES)
    if len(rows):
        heads = {"label": "run", "pick": "of", "x": "round", "y": "Time a round, seconds", **SPREAD}
        spec = over_rounds("seconds", rows, True)
        yield Figure("seconds", "Cost", "Time a round", text, spec, rows.columns, heads, {}, picks)


def _single(lines: Sequence[Series], column: str, section: str, title: str, text: str, unit: str) -> Iterator[Figure]:
    factor, least = (100.0, -np.inf) if unit == "points" else (1.0, 0.0)
    rows = Rows("s", "x", "y", "sl", "sh")
    for place, line in enumerate(lines):
        curve = line.curve(column)
        for point in thinned(len(curve.rounds)):
            y, std = factor * curve.mean[point], factor * curve.std[point]
            rows.add(s=place, x=curve.rounds[point], y=y, sl=max(least, y - std), sh=y + std)
    if len(rows):
        heads = {"label": "run", "x": "round", "y": f"{title}, {unit}", **SPREAD}
        yield Figure(_key(column), section, title, text, over_rounds(unit, rows, True), rows.columns, heads)


def losses(lines: Sequence[Series]) -> Iterator[Figure]:
    """The loss and its terms, a panel each."""
    text = (
        "Means over those of the round's steps that have them, and over clients; terms without their weights. The "
        "total is their weighted sum where every step has all of them: not so where parts are trained in turn."
    )
    yield from _small_panels(lines, "loss", "term", "Loss and its terms", text)


def logged(lines: Sequence[Series]) -> Iterator[Figure]:
    """What models and callbacks of the user's own logged, a panel each."""
    text = "What models with a training step of their own, and callbacks, logged in their fits; means over clients."
    yield from _small_panels(lines, LOG, "name", "Logged in the fits", text)


def _small_panels(lines: Sequence[Series], prefix: str, kind: str, title: str, text: str) -> Iterator[Figure]:
    columns = sorted(
        {name for line in lines for run in line.runs for name in run.rows[0] if name.startswith(prefix)},
        key=lambda name: (name != "loss", name),
    )
    rows, names = Rows("s", "x", "y", "term"), []
    for column in columns:
        for place, line in enumerate(lines):
            curve = line.curve(column)
            if len(curve.rounds) and column not in names:
                names.append(column)
            for point in thinned(len(curve.rounds), MOST_OF_A_TERM):
                rows.add(s=place, x=curve.rounds[point], y=curve.mean[point], term=names.index(column))
    if len(rows):
        heads = {"label": "run", "term": kind, "x": "round", "y": "value"}
        spec: Spec = {
            "facet": {"field": "term", "type": "nominal", "title": None, "sort": names, "header": {"labelLimit": 240}},
            "columns": 3,
            "resolve": {"scale": {"y": "independent"}},
            "spec": {**over_rounds(None, rows, False, ["term"]), "width": THIRD, "height": 150},
        }
        yield Figure(prefix.rstrip("/"), "Training", title, text, spec, rows.columns, heads, {"term": names}, wide=True)


MOST_OF_A_TERM = 150  # points of a line in a small panel


def communication(lines: Sequence[Series]) -> Iterator[Figure]:
    """Accuracy against what has been sent by then."""
    for column, moment in (("Local-T", "after the fit"), ("Local-T_received", "as received")):
        rows = Rows("s", "x", "y", "round", "flat")
        for place, line in enumerate(lines):
            sent = _sent(line)
            curve = line.curve(column)
            silent = not any(sent.values())
            for point in thinned(len(curve.rounds), COSTED_POINTS):
                round, last = int(curve.rounds[point]), point == len(curve.rounds) - 1
                if last or not silent:
                    rows.add(s=place, x=sent.get(round, 0.0), y=100 * curve.mean[point], round=round, flat=silent)
        if len(rows) and any(rows.columns["x"]):
            text = (
                "All messages from and to clients, summed over the rounds so far, as they cross the wire; without a "
                "server each goes from one client to another, and counts once. A run that sends nothing is a "
                "horizontal line at its last value."
            )
            heads = {"label": "run", "round": "round", "x": "MB sent so far", "y": f"{column}, %"}
            title = f"{column} against communication"
            key = f"communication-{_key(column)}"
            yield Figure(key, "Cost", title, f"Accuracy {moment}. {text}", _against(rows), rows.columns, heads)


def _sent(line: Series) -> dict[int, float]:
    """Round -> megabytes that were sent until then, the mean over runs."""
    totals: list[list[dict[str, Any]]] = []
    for run in line.runs:
        total, rows = 0.0, []
        # Without a server what a client hears is what another has sent, and counted.
        sent = ("uplink_bytes",) if run.between_clients else ("uplink_bytes", "downlink_bytes")
        for row in run.rows:
            total += sum(known(row.get(name) for name in sent)) / 1e6
            rows.append({"round": row["round"], "sent": total})
        totals.append(rows)
    return _by_round(curve_of(totals, "sent"))


def _against(rows: Rows) -> Spec:
    y = quantity("y", "accuracy, %", axis=VALUES, scale={"zero": False})
    points = {"size": 18} if len(set(rows.columns["round"])) <= FEW_POINTS else False
    said = tips(("label", "run"), ("round", "round"), ("x", "MB sent"), ("y", "accuracy, %"))
    nearest = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    return {
        "width": WHOLE,
        "height": HEIGHT,
        "layer": [
            {
                "transform": [{"filter": "!datum.flat"}],
                "mark": {"type": "line", "strokeWidth": 2, "point": points},
                "encoding": {"order": {"field": "round"}, "strokeDash": dash()},
            },
            {
                "transform": [{"filter": "datum.flat"}],
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"strokeDash": dash(), "x": {"value": 0}, "x2": {"value": "width"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70},
                "params": [{"name": "hover", "select": nearest}],
                "encoding": {
                    "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
                    "tooltip": said,
                },
            },
        ],
        "encoding": {"x": quantity("x", "MB sent so far", axis=VALUES), "y": y, "color": colour()},
    }


def dash() -> Spec:
    """The encoding by the line's dash."""
    return {"field": "label", "type": "nominal", "scale": DASH, "legend": None}


def _of_one_point(unit: str | None, band: Spec, groups: Sequence[str]) -> tuple[Spec, Spec]:
    """The spread, and a point that is seen, of lines that have one point, of which there is no band and no line."""
    alone = [{"joinaggregate": [{"op": "count", "as": "points"}], "groupby": ["label", *groups]}]
    alone.append({"filter": "datum.points === 1"})
    over: Spec = {
        "transform": [*alone, *band["transform"]],
        "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.5},
        "encoding": band["encoding"],
    }
    point: Spec = {
        "transform": alone,
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, "clip": False},
        "encoding": {"y": quantity("y", unit, axis=VALUES), "shape": shape()},
    }
    return over, point


def over_rounds(unit: str | None, rows: Rows, bands: bool, groups: Sequence[str] = ()) -> Spec:
    """Lines over rounds; hovering anywhere names all lines' values of that round.

    Args:
        unit: title of the vertical axis.
        rows: with fields ``x`` and ``y``; with `bands`, ``sl`` to ``sh`` over seeds and maybe ``cl`` to ``ch``.
        bands: whether bands are drawn.
        groups: fields that tell panels apart.
    """
    clients = "cl" in rows.columns  # of an accuracy, in percent
    few = len(set(rows.columns["x"])) <= FEW_POINTS
    low, high = ("sl", "sh") if not clients else ("low", "high")
    spread = [
        {"calculate": f"band == 'clients' ? datum.c{end} : band == 'seeds' ? datum.s{end} : null", "as": name}
        for end, name in (("l", "low"), ("h", "high"))
    ]
    cut = [{"calculate": f"clamp(datum.{end}, 0, 100)", "as": end} for end in (low, high)] if clients else []
    band: Spec = {
        "transform": [*(spread if clients else []), {"filter": f"datum.{low} !== null"}, *cut],
        "mark": {"type": "area", "opacity": 0.16, "line": False},
        "encoding": {"y": quantity(low, unit, axis=VALUES), "y2": {"field": high}},
    }
    line: Spec = {
        "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 18} if few else False},
        "encoding": {"y": quantity("y", unit, axis=VALUES, scale={"zero": False}), "strokeDash": dash()},
    }
    over, point = _of_one_point(unit, band, groups)
    chosen = {"type": "point", "encodings": ["x"], "on": "pointerover", "nearest": True, "clear": "pointerout"}
    hover: Spec = {
        "transform": [{"aggregate": [{"op": "count", "as": "n"}], "groupby": ["x", *groups]}],
        "mark": {"type": "rule", "strokeWidth": 1},
        "params": [{"name": "hover", "select": chosen}],
        "encoding": {
            "color": {"value": "#888888"},
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 0.8}, "value": 0},
            "tooltip": [{"field": name, "type": "nominal"} for name in ("x", *groups)],
        },
    }
    spec: Spec = {
        "width": WHOLE,
        "height": HEIGHT,
        "layer": [*([band, over] if bands else []), line, point, hover],
        "encoding": {"x": quantity("x", "round", axis=ROUNDS, scale={"zero": False, "nice": False}), "color": colour()},
    }
    if clients:
        spec["params"] = [{"name": "band", "value": "seeds"}]
    return spec
