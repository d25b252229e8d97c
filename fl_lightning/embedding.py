"""Embeddings of test samples in the plane (t-SNE), with the prototypes that the federation shares.

As the figures of Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, and of
Liu et al., "FedDW", arXiv:2412.04521, show them. This needs the clients' models and the data, so the run is built again
from its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.message import ClassMeans
from fl_lightning.core.predictor import Predictor, Seen
from fl_lightning.errors import require
from fl_lightning.rebuilding import first_runs, own_way, trained, with_models
from fl_lightning.report.page.classifier import heads_of, relations
from fl_lightning.report.page.figure import Figure, Rows, Spec, quantity, tips

if TYPE_CHECKING:
    from fl_lightning.core.method import Method
    from fl_lightning.federation.loop import FederatedLoop
    from fl_lightning.report.series import Series
    from fl_lightning.trust import Trust

OPTION = "--embed"
MOST_SAMPLES = 600
"""Test samples of a run, the same number of every client."""
KINDS = ("test sample", "prototype")
PERPLEXITY = 30.0
SIDE = 420  # pixels


@dataclass(frozen=True)
class Embedded:
    """Points of one run.

    Args:
        z: [P, D] embeddings, test samples first, then prototypes.
        label: [P] classes.
        client: [P] whose model embedded it; -1 for prototypes.
        soft_labels: [C, C] the mean prediction for each class's training samples (FedDW, equations 4 to 7), by their
            own client's trained model, from at most `MOST_SAMPLES` of a client; 0 in the rows of classes without one.
        num_clients: of the run, with those that are not shown.
    """

    z: np.ndarray
    label: np.ndarray
    client: np.ndarray
    soft_labels: np.ndarray
    num_clients: int


def embeddings(lines: Sequence[Series], trust: Trust) -> Iterator[Figure]:
    """The lines' first runs in the plane, and the soft labels of their models beside the relation of classes.

    Args:
        lines: what the page shows.
        trust: what the runs' configurations may import.

    Raises:
        ConfigError: if a run cannot be built again, keeps no models, or embeds samples in several sizes.
    """
    rows, picks, names = Rows("s", "pick", "x", "y", "held", "client", "kind"), list[str](), list[str]()
    layers = [heads_of(line.runs[0]) for line in lines]
    there, facts = first_runs(lines, OPTION)
    for place, picked in there:
        found, classes = embed_run(lines[place].runs[0].path, trust)
        layers[place] = layers[place]._replace(soft_labels=found.soft_labels)
        picks.append(picked)
        shown = len({*found.client.tolist()} - {-1})
        if shown < found.num_clients:
            lack = "the others have no trained model or no test samples"
            facts.append(f"{picked}: {shown} of its {found.num_clients} clients are shown; {lack}")
        names += [name for name in classes if name not in names]
        for (x, y), label, client in zip(plane(found.z), found.label, found.client, strict=True):
            values: dict[str, Any] = {"client": client if client >= 0 else None, "kind": int(client < 0)}
            rows.add(s=place, pick=len(picks) - 1, x=x, y=y, held=names.index(classes[label]), **values)
    if not len(rows):
        return
    text = (
        "Test samples as their own client's model embeds them, and the prototypes that the federation shares, where it "
        f"shares any of that size: t-SNE, perplexity {PERPLEXITY:.0f}, {MOST_SAMPLES} samples of the line's first "
        "run at most (of more clients one each). Distances between far clusters mean nothing."
    )
    text += " There are twenty colours: classes that are twenty apart have the same." if len(names) > 20 else ""
    heads = {"label": "run", "kind": "point", "held": "class", "client": "client", "x": "t-SNE 1", "y": "t-SNE 2"}
    texts = {"held": names, "kind": list(KINDS)}
    spec, title = _points(names), "Test samples and prototypes"
    yield Figure("embedding", "Embeddings", title, text, spec, rows.columns, heads, texts, picks, facts)
    yield from relations(lines, layers, measured=True)


def _points(names: Sequence[str]) -> Spec:
    few = len(names) <= 10
    shape: Spec = {"field": "kind", "type": "nominal", "title": None}
    shape["scale"] = {"domain": list(KINDS), "range": ["circle", "diamond"]}
    hue: Spec = {"field": "held", "type": "nominal", "title": "class", "sort": list(names)}
    hue["scale"] = {"scheme": "tableau10" if few else "tableau20", "domain": list(names)}
    large = {"condition": {"test": f"datum.kind === '{KINDS[1]}'", "value": 190}, "value": 22}
    edge = {"condition": {"test": f"datum.kind === '{KINDS[1]}'", "value": "#888888"}, "value": None}
    return {
        "width": SIDE,
        "height": SIDE,
        "mark": {"type": "point", "filled": True, "opacity": 0.85, "strokeWidth": 1.5},
        "encoding": {
            "x": quantity("x", None, axis=None, scale={"zero": False}),
            "y": quantity("y", None, axis=None, scale={"zero": False}),
            "color": hue,
            "shape": shape,
            "size": large,
            "stroke": edge,
            "tooltip": tips(("held", "class"), ("client", "client"), ("kind", "point")),
        },
    }


def plane(z: np.ndarray) -> np.ndarray:
    """Embed points in the plane by t-SNE, from their principal components, the same every time.

    Args:
        z: [P, D].

    Returns:
        [P, 2]; fewer than four points, those of one coordinate, and those that all are one stay where their first two
        coordinates are: they have no principal components, and scikit-learn's process may end there.
    """
    if len(z) < 4 or z.shape[1] < 2 or (z == z[0]).all():
        return np.pad(z, ((0, 0), (0, 2)))[:, :2]
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(z) - 1) / 3)
    return np.asarray(TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(z))


def embed_run(folder: Path, trust: Trust) -> tuple[Embedded, list[str]]:
    """Embed a run's test samples, each by its own client's trained model, and take its prototypes.

    Returns:
        The points, and the names of all classes.

    Raises:
        ConfigError: if the run cannot be built again, keeps no models, or embeds samples in several sizes.
    """
    loop = with_models(folder, trust, OPTION)
    sums = np.zeros((len(loop.data.arrays.classes),) * 2)
    parts = [*_samples(loop, folder, sums)]
    require(bool(parts), OPTION, "no client has both a model and test samples", str(folder))
    sizes = sorted({part[0].shape[1] for part in parts})
    require(len(sizes) == 1, OPTION, f"the clients' models have embeddings of several sizes, {sizes}", str(folder))
    parts += _prototypes(loop, parts[0][0].shape[1])
    z, label, client = (np.concatenate(each) for each in zip(*parts, strict=True))
    soft_labels = sums / np.maximum(sums.sum(1, keepdims=True), 1e-12)
    return Embedded(z, label, client, soft_labels, loop.num_clients), [str(name) for name in loop.data.arrays.classes]


Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Embeddings, classes and clients of some points."""


@torch.no_grad()
def _samples(loop: FederatedLoop, folder: Path, sums: np.ndarray) -> Iterator[Part]:
    """Each client's test samples; their predictions for training samples are added to `sums` [C, C], class by class."""
    each = max(1, MOST_SAMPLES // loop.num_clients)
    for client, method in trained(loop, folder, OPTION):
        way = own_way(method)
        model: Any = _own_model(method, way)
        name = type(method).__name__
        require(hasattr(model, "embed"), OPTION, "the method has no model with one embedding", name)
        data, labels = loop.data.clients[client], loop.data.store.y.cpu()
        x, y = loop.data.store.gather(some_of(data.test, labels, each))
        held, of = loop.data.store.gather(some_of(data.train, labels, MOST_SAMPLES))
        scores = model(held) if way is None else way.scores(Seen(held))
        said = scores.softmax(1).cpu().double().numpy()
        if said.shape[1] == len(sums):
            np.add.at(sums, of.cpu().numpy(), said)
        z = model.embed(x).flatten(1).float().cpu().numpy()
        yield z, y.cpu().numpy(), np.full(len(z), client)


def _own_model(method: Method, way: Predictor | None) -> Any:
    """The model that the client predicts by: that of mixed weights, or its personal one beside that which all share."""
    if way is not None and way.merged is not None:
        return way.merged().eval()
    personal = getattr(method, "personal", None)
    return personal if hasattr(personal, "embed") else getattr(method, "model", None)


def some_of(indices: Tensor, labels: Tensor, most: int) -> Tensor:
    """At most so many of some samples, every class in its share: in many data sets the first ones are of one class.

    Args:
        indices: int64 [n], on the CPU.
        labels: of all samples, int64 [N], on the CPU.
        most: how many, >= 1.
    """
    if len(indices) <= most:
        return indices
    by_class = indices[labels[indices].argsort(stable=True)]
    return by_class[torch.linspace(0, len(by_class) - 1, most, dtype=torch.float64).round().long()]


def _prototypes(loop: FederatedLoop, width: int) -> list[Part]:
    """The shared rows that are points of the same space."""
    message = loop.exchange.global_message()
    for artifact in message.artifacts.values() if message is not None else ():
        if isinstance(artifact, ClassMeans) and not artifact.relates_classes and artifact.mean.shape[1:] == (width,):
            there = artifact.count.cpu().numpy() > 0
            rows = artifact.mean.float().cpu().numpy()[there]
            return [(rows, np.flatnonzero(there), np.full(len(rows), -1))]
    return []
