"""What a run's models say of new samples, as a CSV file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.classifier import Classifier, classifier_of, note_shift, without_model
from fl_lightning.data.unlabelled import Unlabelled, read_unlabelled
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.files import write_text
from fl_lightning.rebuilding import rebuilt
from fl_lightning.report.escaping import in_spreadsheet
from fl_lightning.terminal import say
from fl_lightning.trust import Trust
from fl_lightning.undisturbed import undisturbed


def predict_run(
    folder: Path, data: Path, client: str, output: Path, trust: Trust, batch_size: int = 512
) -> tuple[int, int]:
    """Write what a run's models say of new samples.

    Args:
        folder: the run's.
        data: the samples (`data/unlabelled.py`).
        client: a client's number, ``all``, or ``global``.
        output: the CSV file.
        trust: what the run's configuration may import.
        batch_size: samples at once.

    Returns:
        Samples, and rows that were written.

    Raises:
        ConfigError: if there is no such client or model, or the samples do not fit it.
    """
    with undisturbed():
        loop = rebuilt(folder, trust)
        samples = read_unlabelled(data, loop.data.dataset, loop.data.arrays)
        classes = told_apart(loop.data.arrays.classes)
        rows = _rows(models_of(loop, folder, client), classes, samples, batch_size, client == "all")
        number = _write(output, rows)
        note_shift(loop, client)
        return len(samples.names), number


def models_of(loop: FederatedLoop, folder: Path, client: str) -> Iterator[Classifier]:
    """The models that ``--client`` means, one after another.

    Raises:
        ConfigError: if there is none.
    """
    if client != "all":
        yield classifier_of(loop, folder, None if client == "global" else int(client))
        return
    found = False
    for index in range(loop.num_clients):
        lacks = without_model(loop, folder, index)
        if lacks is None:
            found = True
            yield classifier_of(loop, folder, index)
        else:
            say(f"fl-lightning: left out: {lacks}")
    require(found, "--client", "there is no client's model to predict by; nothing is written", "all")


def probabilities(model: Classifier, x: Tensor, batch_size: int = 512) -> Tensor:
    """Softmax of a model's scores for samples as they are stored, float64 [N, C].

    Args:
        model: the model.
        x: [N, …] images as bytes, tokens, or features.
        batch_size: samples at once.
    """
    with torch.no_grad():
        parts = [model(model.normalise(part)).cpu().double().softmax(1) for part in x.split(batch_size)]
    return torch.cat(parts) if parts else torch.zeros(0, model.num_classes, dtype=torch.float64)


def told_apart(classes: Sequence[str]) -> list[str]:
    """Names of classes, those that are several classes' with their numbers, as ImageNet has two of some.

    >>> told_apart(["cat", "crane", "crane"])
    ['cat', 'crane (1)', 'crane (2)']
    """
    count = Counter(classes)
    return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(classes)]


def _rows(
    models: Iterator[Classifier], classes: Sequence[str], samples: Unlabelled, batch_size: int, with_client: bool
) -> Iterator[list[Any]]:
    """The head, then a row a sample, model by model; classes are in the data set's order."""
    head = ["sample", "class", *(f"p({name})" for name in classes)]
    yield ["client", *head] if with_client else head
    for model in models:
        shares = probabilities(model, samples.x, batch_size)[:, torch.tensor(model.stands_for).argsort()]
        for name, values in zip(samples.names, shares, strict=True):
            row = [name, classes[int(values.argmax())], *(f"{value:.6g}" for value in values.tolist())]
            yield [model.client, *row] if with_client else row


def _write(path: Path, rows: Iterator[list[Any]]) -> int:
    """Write a CSV file whole or not at all; returns its rows without the head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    number = -1
    for row in rows:
        writer.writerow([in_spreadsheet(cell) if isinstance(cell, str) else cell for cell in row])
        number += 1
    try:
        write_text(path, text.getvalue())
    except OSError as error:
        raise ConfigError("--output", str(error)) from error
    return number
