"""``fl-lightning predict``: what a run's models say of new samples, as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.classifier import Classifier, classifier_of, rebuilt
from fl_lightning.data.unlabelled import read_unlabelled
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.files import write_text
from fl_lightning.parser import one_line_parser
from fl_lightning.trust import Trust
from fl_lightning.undisturbed import undisturbed

DESCRIPTION = (
    "Predict the classes of new samples by a client's model, all clients' or the global one, normalised as in "
    "training. "
    "DATA is a folder of images or one image, .npz or .pt (x), a table (.csv, .tsv, .jsonl), or .txt (a text a line). "
    "The run's data set must be there."
)
TRUST = "a package of your own that the run's configuration may import; may be given several times"


def predict(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: what follows ``predict``.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such run, client or model, or the samples do not fit it.
    """
    parser = one_line_parser("predict", description=DESCRIPTION)
    parser.add_argument("run", type=str, help="a run's folder")
    parser.add_argument("data", type=str, help="the samples")
    parser.add_argument("--client", default="global", help="a client's number, all, or global (the default)")
    parser.add_argument("--output", default="predictions.csv", help="the CSV file; default: predictions.csv")
    parser.add_argument("--batch-size", type=int, default=512, help="samples at once")
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    options = parser.parse_args(list(argv))
    folder, output = Path(options.run), Path(options.output)
    require((folder / "config.yaml").is_file(), "predict", "there is no run in that folder", options.run)
    require(options.batch_size >= 1, "--batch-size", "must be at least 1", options.batch_size)
    require(not output.is_dir(), "--output", "must be a file, as predictions.csv", options.output)
    named = options.client in ("all", "global") or options.client.isdecimal()
    require(named, "--client", "must be a client's number, all or global", options.client)
    with undisturbed():
        loop = rebuilt(folder, Trust(tuple(options.trust)))
        samples = read_unlabelled(Path(options.data), loop.data.dataset, loop.data.arrays)
        models = models_of(loop, folder, options.client)
        rows = _rows(models, samples.x, samples.names, options.batch_size, options.client == "all")
        written = _write(output, rows)
    print(f"{len(samples.names)} samples, {written} predictions in {output}")
    return 0


def models_of(loop: FederatedLoop, folder: Path, client: str) -> Iterator[Classifier]:
    """The models that ``--client`` means, one after another."""
    if client != "all":
        yield classifier_of(loop, folder, None if client == "global" else int(client))
        return
    for index in range(loop.num_clients):
        yield classifier_of(loop, folder, index)


def probabilities(model: Classifier, x: Tensor, batch_size: int = 512) -> Tensor:
    """Softmax of a model's scores for samples as they are stored, float64 [N, C].

    Args:
        model: the model.
        x: [N, …] images as bytes, tokens, or features.
        batch_size: samples at once.
    """
    with torch.no_grad():
        parts = [model(model.normalise(part)).double().softmax(1) for part in x.split(batch_size)]
    return torch.cat(parts) if parts else torch.zeros(0, model.num_classes, dtype=torch.float64)


def _rows(
    models: Iterator[Classifier], x: Tensor, names: Sequence[str], batch_size: int, with_client: bool
) -> Iterator[list[Any]]:
    """The head, then a row a sample, model by model."""
    for number, model in enumerate(models):
        if number == 0:
            head = ["sample", "class", *(f"p({name})" for name in model.classes)]
            yield ["client", *head] if with_client else head
        for name, values in zip(names, probabilities(model, x, batch_size), strict=True):
            row = [name, model.classes[int(values.argmax())], *(f"{value:.6g}" for value in values.tolist())]
            yield [model.client, *row] if with_client else row


def _write(path: Path, rows: Iterator[list[Any]]) -> int:
    """Write a CSV file whole or not at all; returns its rows without the head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    number = -1
    for row in rows:
        writer.writerow(row)
        number += 1
    try:
        write_text(path, text.getvalue())
    except OSError as error:
        raise ConfigError("--output", str(error)) from error
    return number
