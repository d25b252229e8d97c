"""Who holds what, as bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fl_lightning.report.page.figure import AREA, WHOLE, Figure, Rows, Spec, quantity, tips
from fl_lightning.report.partition_figures import label_skew
from fl_lightning.report.recorded_run import RecordedRun
from fl_lightning.report.series import Series

MOST_BUBBLES = 10_000  # of one partition; of a larger one the largest are drawn
MOST_PARTITIONS = 20


def bubbles(lines: Sequence[Series]) -> Iterator[Figure]:
    """Clients against classes, a bubble's area the training samples."""
    settings = list(dict.fromkeys(line.setting for line in lines))
    rows, picks, classes = Rows("g", "pick", "client", "class_", "n"), list[str](), list[str]()
    seen: set[tuple[str, str]] = set()  # of a setting; another one may have the same partition
    for line in lines:
        for run in line.runs:
            counts = class_counts(run)
            if not counts or (line.setting, run.partition_hash) in seen or len(picks) == MOST_PARTITIONS:
                continue
            seen.add((line.setting, run.partition_hash))
            picks.append(f"{_title(run, line)}{_shown(run, len(counts))}, label skew {label_skew(counts):.2f}")
            names = [str(name) for name in run.partition["classes"]]
            held = [(n, client, c) for client, own in enumerate(counts) for c, n in enumerate(own) if n]
            for n, client, c in sorted(held, reverse=True)[:MOST_BUBBLES]:
                if names[c] not in classes:
                    classes.append(names[c])
                place = classes.index(names[c])
                rows.add(g=settings.index(line.setting), pick=len(picks) - 1, client=client, class_=place, n=n)
    if not len(rows):
        return
    said = tips(("client", "client"), ("class_", "class"), ("n", "training samples"))
    order = sorted(set(classes), key=lambda name: (len(name), name) if name.isdigit() else (0, name))
    legend = {"orient": "top", "tickMinStep": 1, "format": "d"}
    spec: Spec = {
        "width": WHOLE,
        "height": {"step": 28} if len(order) <= 40 else 600,
        "mark": {"type": "circle", "opacity": 0.75, "color": "#3A87C8"},
        "encoding": {
            "x": {
                "field": "client",
                "type": "ordinal",
                "title": "client",
                "axis": {"labelAngle": 0, "labelOverlap": True},
            },
            "y": {
                "field": "class_",
                "type": "nominal",
                "title": "class",
                "sort": order[::-1],
                "axis": {"grid": True, "labelOverlap": True},
            },
            "size": quantity("n", "training samples", scale={"range": [0, AREA]}, legend=legend),
            "tooltip": said,
        },
    }
    text = (
        "Clients against classes; a bubble's area is the number of training samples. Label skew: how far a client's "
        "mix of classes is from all clients' (total variation distance, in the mean by samples; 0 is the same mix)."
    )
    heads = {"pick": "partition", "client": "client", "class_": "class", "n": "training samples"}
    yield Figure(
        "partition", "Data", "Who holds what", text, spec, rows.columns, heads, {"class_": classes}, picks, wide=True
    )


def class_counts(run: RecordedRun) -> list[list[int]]:
    """[K][C] training samples; empty where the run's folder does not say it."""
    counts, classes = run.partition.get("class_counts"), run.partition.get("classes")
    if not isinstance(counts, list) or not isinstance(classes, list) or not run.partition_hash:
        return []
    fits = all(
        isinstance(own, list) and len(own) == len(classes) and all(type(n) is int and n >= 0 for n in own)
        for own in counts
    )
    return counts if fits else []


def _title(run: RecordedRun, line: Series) -> str:
    seed = run.partition.get("seed")
    return line.setting + ("" if seed is None else f", seed {seed}")


def _shown(run: RecordedRun, count: int) -> str:
    """How many clients the counts are of, where these are not all: of a large `Population` the first ones."""
    clients = run.partition.get("num_clients")
    return f", the first {count:,} clients" if isinstance(clients, int) and clients > count else ""
