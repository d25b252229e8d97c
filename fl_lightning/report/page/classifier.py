"""What the classification layers say of the classes: soft labels against class relation, and norms against shares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.archives import check_stored
from fl_lightning.report.page.figure import WHOLE, Figure, Rows, Spec, colour, quantity, shape, tips
from fl_lightning.report.page.partition import class_counts
from fl_lightning.report.recorded_run import RecordedRun
from fl_lightning.report.series import Series
from fl_lightning.sealed import verify

HEAD = re.compile(r"(.*?\.)??head\.(.+\.)?weight")
"""Names of weights in a model's head, whose last matrix is the classification layer's, [C, D]."""
PERSONAL = "personal."
"""What a client's weights begin with that it predicts by, where it has a personal model beside the shared one."""
MOST_CLASSES = 100  # of a heat map
MOST_MODELS = 100  # clients whose models are read
MOST_WEIGHTS = 10**7  # of a layer that is read; a file of a hundred bytes can claim any number
MOST_DOTS = 2000  # of a line
SECTION = "Classifier"


class Heads(NamedTuple):
    """Classification layers of a run: the global one, and clients' own by client; None and empty where not kept."""

    shared: np.ndarray | None
    own: Mapping[int, np.ndarray]
    soft_labels: np.ndarray | None


def relations(lines: Sequence[Series], found: Sequence[Heads], measured: bool = False) -> Iterator[Figure]:
    """Soft labels (SL) beside the relation of classes that the weights say (CR), as FedDW's Figure 8.

    Args:
        lines: what the page shows.
        found: classification layers of each line's first run.
        measured: whether the soft labels were measured after training, not collected in it.
    """
    rows, picks, names = Rows("s", "pick", "what", "i", "j", "v"), list[str](), list[str]()
    kinds = ["SL", "CR"]
    for place, (line, heads) in enumerate(zip(lines, found, strict=True)):
        run = line.runs[0]
        weights = [heads.shared] if heads.shared is not None else list(heads.own.values())
        if not weights or len(weights[0]) > MOST_CLASSES:
            continue
        relation = np.mean([class_relation(weight) for weight in weights], axis=0)
        picks.append(f"{line.label}, seed {run.seed}" if run.seed is not None else line.label)
        for what, matrix in enumerate((heads.soft_labels, relation)):
            if matrix is None or matrix.shape != relation.shape:
                continue
            own = _classes(run, len(matrix))
            names += [name for name in own if name not in names]
            for (i, j), value in np.ndenumerate(matrix):
                values = {"i": names.index(own[i]), "j": names.index(own[j]), "v": value}
                rows.add(s=place, pick=len(picks) - 1, what=what, **values)
    if not len(rows):
        return
    axis: Spec = {"type": "nominal", "sort": names, "axis": {"labelLimit": 90, "labelOverlap": True}}
    cell: Spec = {
        "width": 250,
        "height": 250,
        "mark": "rect",
        "encoding": {
            "x": {"field": "j", "title": "says of class", **axis},
            "y": {"field": "i", "title": "class", **axis},
            "color": quantity("v", "share", scale={"scheme": "viridis", "domainMin": 0}),
            "tooltip": tips(("i", "class"), ("j", "says of"), ("v", "share")),
        },
    }
    facet = {"column": {"field": "what", "type": "nominal", "title": None, "sort": kinds}}
    collected = "the federation's mean soft labels, where a term collects them"
    after = "the mean prediction for each class's training samples, by their own client's trained model"
    text = (
        f"SL: {after if measured else collected}; CR: the softmax of each row of W Wᵀ, W the "
        f"global classification layer, or the mean over clients' own (the first {MOST_MODELS}, if there are more) "
        "where there is no global one. Each matrix has its own scale of colours."
    )
    columns = {"label": "run", "what": "matrix", "i": "class", "j": "says of class", "v": "share"}
    texts, title = {"what": kinds, "i": names, "j": names}, "Soft labels and class relation"
    spec = {"facet": facet, "spec": cell, "resolve": {"scale": {"color": "independent"}}}
    key = "class-relation-measured" if measured else "class-relation"
    title += ", measured after training" if measured else ""
    yield Figure(key, SECTION, title, text, spec, rows.columns, columns, texts, picks, wide=True)


def norms(lines: Sequence[Series], found: Sequence[Heads]) -> Iterator[Figure]:
    """The norm of a class's weights against the class's share of the client's samples, as FedDW's Figure 4."""
    rows = Rows("s", "client", "held", "x", "y")
    names: list[str] = []
    for place, (line, kept) in enumerate(zip(lines, found, strict=True)):
        run, own = line.runs[0], kept.own
        counts = np.array(class_counts(run), dtype=float)
        if counts.ndim != 2 or not own:
            continue
        added = 0
        for client, weight in own.items():
            if client >= len(counts) or counts.shape[1] != len(weight) or added >= MOST_DOTS:
                continue
            sizes = np.linalg.norm(weight, axis=1)
            shares = counts[client] / max(1.0, counts[client].sum())
            relative = sizes / (sizes.mean() or 1.0)
            for name, size, share in zip(_classes(run, len(weight)), relative, shares, strict=True):
                names += [] if name in names else [name]
                rows.add(s=place, client=client, held=names.index(name), x=100 * share, y=size)
                added += 1
    if not len(rows):
        return
    said = tips(("label", "run"), ("client", "client"), ("held", "class"), ("x", "share, %"), ("y", "relative norm"))
    spec: Spec = {
        "width": WHOLE,
        "height": 300,
        "mark": {"type": "point", "filled": True, "size": 35, "opacity": 0.6},
        "encoding": {
            "x": quantity("x", "class's share of the client's training samples, %"),
            "y": quantity("y", "‖w‖ over the client's mean ‖w‖", scale={"zero": False}),
            "color": colour(),
            "shape": shape(),
            "tooltip": said,
        },
    }
    text = (
        "One point a client and class of each line's first run: the norm of the class's row in the client's own "
        "classification layer over the mean of its rows, against the class's share of the client's samples; "
        f"of the first {MOST_MODELS} clients, and about {MOST_DOTS} points a line, if there are more."
    )
    heads = {"label": "run", "client": "client", "held": "class", "x": "share, %", "y": "relative norm"}
    yield Figure("norms", SECTION, "Norm of weights against share", text, spec, rows.columns, heads, {"held": names})


def class_relation(weight: np.ndarray) -> np.ndarray:
    """The softmax of each row of W Wᵀ: CR (FedDW, equation 3) as equation 11 compares it.

    Args:
        weight: [C, D].

    >>> class_relation(np.zeros((2, 3))).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    product = weight.astype(np.float64) @ weight.astype(np.float64).T
    raised = np.exp(product - product.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


def heads_of(run: RecordedRun) -> Heads:
    """The classification layers that a run's folder holds; what is missing, damaged or of later rounds is left out."""
    if run.is_past:
        return Heads(None, {}, None)
    own = {}
    for client in range(MOST_MODELS):
        state = _load(run.path / "models" / f"{client:05d}.pt")
        weight = _head(state, PERSONAL) if isinstance(state, Mapping) else None
        if weight is not None:
            own[client] = weight
    message = _message(run)
    weights = message.get("weights")
    shared = _head(weights) if isinstance(weights, Mapping) else None
    return Heads(shared, own, _soft_labels(message))


def _message(run: RecordedRun) -> Mapping[str, Any]:
    """The global message of the newest checkpoint; empty where there is none."""
    files = [file for file in (run.path / "checkpoints").glob("round-*.ckpt") if re.fullmatch(r"round-\d+", file.stem)]
    if not files:
        return {}
    node: Any = _load(max(files, key=lambda file: int(file.stem[6:])))
    for name in ("exchange", "message"):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _soft_labels(message: Mapping[str, Any]) -> np.ndarray | None:
    artifacts = message.get("artifacts")
    for artifact in artifacts.values() if isinstance(artifacts, Mapping) else ():
        if isinstance(artifact, Mapping) and artifact.get("relates_classes"):
            return _matrix(artifact.get("mean"))
    return None


def _head(state: Mapping[str, Any], first: str = "") -> np.ndarray | None:
    """The classification layer among a model's weights; that of the place named `first`, where there is one."""
    found = [(HEAD.fullmatch(name), value) for name, value in state.items() if isinstance(name, str)]
    layers = [(match[1] or "", value) for match, value in found if match and getattr(value, "ndim", 0) == 2]
    if not layers:
        return None
    # the model's own; a term may carry another one along
    whose = min((place for place, _ in layers), key=lambda place: (place != first, len(place)))
    own = [value for place, value in layers if place == whose]
    in_turn = all(after.shape[1] == before.shape[0] for before, after in pairwise(own))
    beside = sum(name.startswith(f"{whose}head.") and getattr(v, "ndim", 0) == 2 for name, v in state.items())
    if not in_turn or beside != len(own):  # an adapter's, of which no matrix alone tells the classes apart
        return None
    return _matrix(own[-1])


def _matrix(value: Any) -> np.ndarray | None:
    if getattr(value, "ndim", 0) != 2 or value.is_complex() or not 0 < value.numel() <= MOST_WEIGHTS:
        return None
    try:
        matrix = value.detach().float().numpy()
    except (RuntimeError, TypeError):  # a sparse tensor, a quantized one, one without a content
        return None
    return matrix if np.isfinite(matrix).all() else None


def _load(path: Path) -> Any:
    """Tensors and plain containers, and nothing that is code; None where the file is missing or damaged."""
    if not path.is_file():
        return None
    import torch

    try:
        verify(path, "report")
        check_stored(path, path, "report")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whoever has sealed it, torch raises a dozen types
        return None


def _classes(run: RecordedRun, count: int) -> list[str]:
    names = run.partition.get("classes")
    fits = isinstance(names, list) and len(names) == count and len(set(map(str, names))) == count
    return [str(name) for name in names] if fits and isinstance(names, list) else [str(place) for place in range(count)]
