"""Local-T, Global-T and Server-T: what every client's model gets right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.checkup import Unsound
from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import training
from fl_lightning.core.method import Seen, headline
from fl_lightning.seeding import isolated_streams

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData

Moment = Literal["trained", "received"]
Correct = dict[str, Tensor]
"""Prediction name -> [n] bool, whether each test sample is predicted right."""
CorrectBatches = dict[str, list[Tensor]]
"""The same in batches."""
Scores = dict[str, float]
"""Column -> accuracy in [0, 1] of one client."""


class Evaluator:
    """Runs a client's module over test samples, in large batches, in the trainer's precision.

    Args:
        data: the federation's data, on the training device.
        batch_size: test samples a batch.
        context: the trainer's autocast context.
        seed: the run's seed; adaptation before an evaluation draws from streams of its own.
        globally: whether to evaluate on the union of all clients' test splits, too.
    """

    def __init__(
        self,
        data: FederatedData,
        batch_size: int,
        context: Callable[[], AbstractContextManager[None]],
        seed: int,
        globally: bool = True,
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.context = context
        self.seed = seed
        self.globally = globally
        self._positions: dict[int, Tensor] = {}

    def client(self, module: ClientModule, client: int, moment: Moment) -> Scores:
        """Accuracies of one client's present model, by column; a client without test samples has no Local-T."""
        indices = self.data.server_test if self.globally else self.data.clients[client].test
        correct = self.correct(module, indices, client, moment)
        return self.scores(module, client, moment, correct) if self.globally else self._local(module, moment, correct)

    def scores(self, module: ClientModule, client: int, moment: Moment, correct: Correct) -> Scores:
        """Read a client's accuracies off what its model got right on the union of all test splits."""
        local = self._local(module, moment, {name: hit[self._own(client)] for name, hit in correct.items()})
        return {**local, **_columns("Global-T", module, moment, correct)} if self.globally else local

    def _local(self, module: ClientModule, moment: Moment, correct: Correct) -> Scores:
        return _columns("Local-T", module, moment, correct) if self.data.local_test else {}

    def correct(self, module: ClientModule, indices: Tensor, client: int, moment: Moment) -> Correct:
        """Which of the samples a client's module predicts right, for each of its ways to predict.

        Those that adapt do so on a throw-away copy.
        """
        ways = module.predictors
        adapting = [name for name, way in ways.items() if way.adapts]
        plain = [name for name in ways if name not in adapting]
        hits = self.correct_batches(module, indices, names=plain) if plain else {}
        if adapting:
            with _ThrowAway(self, module, client, moment):
                hits |= self.correct_batches(module, indices, names=adapting)
        return {name: join_batches([hits[name]]) for name in ways}

    @torch.no_grad()
    def correct_batches(
        self, module: ClientModule, indices: Tensor, first: int = 0, step: int = 1, names: Sequence[str] | None = None
    ) -> CorrectBatches:
        """The same, batch by batch and as the module is now, for every `step`-th batch from the `first` on.

        Args:
            module: the module.
            indices: of the samples.
            first: this worker.
            step: how many workers there are.
            names: ways to predict; None takes all.

        Raises:
            Unsound: if a score is no number: the largest of such would pass for the first class.
        """
        ways = module.predictors
        hits: CorrectBatches = {name: [] for name in (ways if names is None else names)}
        broken: CorrectBatches = {name: [] for name in hits}
        with training(module, False), self.context():
            for part in indices.split(self.batch_size)[first::step]:
                x, y = self.data.store.gather(part)
                seen = Seen(x)
                for name, found in hits.items():
                    scores = ways[name].scores(seen)
                    found.append(scores.argmax(1) == y)
                    broken[name].append(scores.isnan().any())
        for name, flags in broken.items():
            if flags and bool(torch.stack(flags).any()):
                raise Unsound(f"the scores{f' by {name}' if name else ''} are nan, so that nothing is predicted")
        return {name: _to_cpu(batches) for name, batches in hits.items()}

    def _own(self, client: int) -> Tensor:
        """Positions of the client's test samples in the union."""
        if client not in self._positions:
            own = self.data.clients[client].test.cpu()
            self._positions[client] = torch.searchsorted(self.data.server_test.cpu(), own)
        return self._positions[client]


def join_batches(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Put together what was right of all samples, [n] bool; batches were dealt out to workers one after another."""
    longest = max(len(part) for part in parts)
    batches = [part[index] for index in range(longest) for part in parts if index < len(part)]
    return torch.cat(batches) if batches else torch.zeros(0).bool()


def _to_cpu(batches: list[Tensor]) -> list[Tensor]:
    """Move batches to the CPU at once."""
    return list(torch.cat(batches).cpu().split([len(batch) for batch in batches])) if batches else []


class _ThrowAway(AbstractContextManager[None]):
    """Personalise a module for the length of an evaluation: its state and all random streams come back unharmed."""

    def __init__(self, evaluator: Evaluator, module: ClientModule, client: int, moment: Moment) -> None:
        self.module = module
        self.data = evaluator.data.clients[client]
        # The same in every round: who sits out keeps its figures, and `evaluate` need not know when they were made.
        self.streams = isolated_streams(evaluator.seed, f"adapt/{moment}", client=client)
        self.context = evaluator.context

    def __enter__(self) -> None:
        self.saved = {name: tensor.detach().clone() for name, tensor in self.module.entries.items()}
        self.streams.__enter__()
        with self.context():
            self.module.adapt(self.data)

    def __exit__(self, *exception: object) -> None:
        self.streams.__exit__(None, None, None)
        self.module.load(self.saved)


def _columns(figure: Literal["Local-T", "Global-T"], module: ClientModule, moment: str, hit: Correct) -> Scores:
    name = figure if moment == "trained" else f"{figure}_received"
    accuracy = {key: float(h.double().mean()) if len(h) else math.nan for key, h in hit.items()}
    named = {f"{name}/{key}": value for key, value in accuracy.items()} if len(accuracy) > 1 else {}
    best = headline(module.predictors, figure)
    return {**({} if best is None else {name: accuracy[best]}), **named}


def score_columns(module: ClientModule, moments: Iterable[str], local: bool, globally: bool) -> list[str]:
    """The columns that evaluations of `module` fill, in their order in a table."""
    nothing = {name: torch.zeros(0).bool() for name in module.predictors}
    columns: list[str] = []
    for moment in moments:
        columns += _columns("Local-T", module, moment, nothing) if local else []
        columns += _columns("Global-T", module, moment, nothing) if globally else []
    return columns


def spread(values: np.ndarray, num_test: np.ndarray) -> dict[str, float]:
    """Mean over clients and how they are spread around it; clients without a value are left out.

    Args:
        values: [N] accuracies of clients, NaN where a client has none.
        num_test: [N] test samples.

    Returns:
        ``""`` the unweighted mean, ``_std`` the population standard deviation, ``_min`` the worst client,
        ``_worst10`` the mean over the worst tenth (at least one client), ``_weighted`` the mean weighted by samples.
    """
    there = ~np.isnan(values)
    if not there.any():
        return {}
    known, weights = values[there], num_test[there]
    worst = np.sort(known)[: max(1, math.ceil(len(known) / 10))]
    weighted = {"_weighted": float((known * weights).sum() / weights.sum())} if weights.sum() else {}
    return {
        "": float(known.mean()),
        "_std": float(known.std()),
        "_min": float(known.min()),
        "_worst10": float(worst.mean()),
        **weighted,
    }
