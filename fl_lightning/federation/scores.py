"""What is known of every client's accuracy, and the figures of a round that follow from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fl_lightning.core.meter import loss_column
from fl_lightning.federation.evaluation import Scores
from fl_lightning.federation.fairness import hurt, spread
from fl_lightning.report.columns import HURT, LOG, is_validated, spreads_of


class ScoreBoard:
    """Each client's last scores at both moments; a client that sits out keeps them.

    Where it follows the participants, it knows those of the present round alone, and nothing is kept of the others but
    what they reach by themselves, as far as that is known.

    Args:
        columns: the columns that evaluations fill.
        samples: ``T`` and ``V`` -> [N] each client's test and validation samples.
        num_founders: the first so many are there from the start, the others join later; None for all.
        hostile: clients that attack: they count in no mean.
        follows: whether it follows the participants.
    """

    def __init__(
        self,
        columns: Sequence[str],
        samples: Mapping[str, np.ndarray],
        num_founders: int | None = None,
        hostile: Collection[int] = (),
        follows: bool = False,
    ) -> None:
        number = len(samples["T"])
        self.samples = samples
        self.follows = follows
        self._columns = list(columns)
        self._hostile = np.array(sorted(hostile), dtype=int)
        self._num_founders = number if num_founders is None else num_founders
        self._seat(np.arange(0 if follows else number))
        self.took_part = np.zeros(number, dtype=bool)
        self.last_trained = np.full(len(self.clients), np.nan)
        """Local-T of the last evaluated round: [N], or of the founders in that round where it follows participants."""
        self.alone = np.full(number, np.nan)
        """[N] what every client reaches by itself, as far as it is known."""

    def _seat(self, clients: np.ndarray) -> None:
        """Begin anew with a place for each of these clients, which are in order."""
        self.clients = clients
        """The clients whose figures count, in the order of their places in `scores` and `losses`."""
        honest, early = ~np.isin(clients, self._hostile), clients < self._num_founders
        self._founders, self._later = np.flatnonzero(honest & early), np.flatnonzero(honest & ~early)
        self.scores = {name: np.full(len(clients), np.nan) for name in self._columns}
        self.losses = np.full(len(clients), np.nan)

    @property
    def counted(self) -> np.ndarray:
        """The clients whose figures count in some round so far: all, or all participants where it follows those."""
        return np.flatnonzero(self.took_part) if self.follows else self.clients

    def follow(self, participants: Sequence[int]) -> None:
        """Take note of who takes part in the round whose records come next."""
        if self.follows:
            self._seat(np.array(sorted(participants), dtype=int))

    def place(self, client: int) -> int:
        """Where a client's values are in `scores` and `losses`."""
        return int(np.searchsorted(self.clients, client)) if self.follows else client

    def record(
        self, client: int, scores: Scores, losses: Mapping[str, float] | None = None, alone: bool = False
    ) -> None:
        """Take in what a client scored; with `losses` it took part in the round.

        Args:
            client: 0-based.
            scores: by column.
            losses: of its fit.
            alone: whether nobody had told it anything yet.
        """
        place = self.place(client)
        for name, value in scores.items():
            self.scores[name][place] = value
        if losses is not None:
            self.losses[place] = losses.get("loss", np.nan)
            self.took_part[client] = True
        if alone and "Local-T" in scores:
            self.alone[client] = scores["Local-T"]

    def strangers(self, num_clients: int) -> list[int]:
        """Those of the first `num_clients` that never took part and were not evaluated either, where they count."""
        if self.follows:
            return []
        never = np.flatnonzero(~self.took_part[:num_clients])
        unknown = [c for c in never if all(np.isnan(v[c]) for v in self.scores.values())]
        return [int(client) for client in unknown]

    def figures(self, participants: Sequence[int], previous_evaluated: bool) -> dict[str, float | None]:
        """Mean and spread of every column, and the receive drop, in an evaluated round.

        Args:
            participants: clients that took part; the others count with their own last state at both moments.
            previous_evaluated: whether the round before was evaluated, too; only then is there a receive drop.
        """
        figures: dict[str, float | None] = {}
        for name, values in self.scores.items():
            if is_received(name):
                self._fill_resting(name, values, participants)
            figures |= self.spread(name, values)
        received = figures.get("Local-T_received")
        before = self.last_trained if self.follows else self.last_trained[self._founders]
        before = before[~np.isnan(before)]
        known = received is not None and len(before) > 0 and previous_evaluated
        figures["receive_drop"] = float(before.mean()) - received if known and received is not None else None
        if "Local-T" in self.scores:
            trained = self.scores["Local-T"]
            self.last_trained = trained[self._founders] if self.follows else trained.copy()
        return figures

    def spread(self, name: str, values: np.ndarray, others: Mapping[str, np.ndarray] | None = None) -> dict[str, float]:
        """A column's mean and spread over the honest founders, and its mean over those who joined later.

        Args:
            name: the column.
            values: [N] of `clients`, NaN where a client has none.
            others: the other columns of the same moment; None takes the present ones.
        """
        founders, later = self._founders, self._later
        num_samples, wanted = self.samples["V" if is_validated(name) else "T"], spreads_of(name)
        num_samples, alone = (own[self.clients] if self.follows else own for own in (num_samples, self.alone))
        found = spread(values[founders], num_samples[founders])
        figures = {name + suffix: value for suffix, value in found.items() if suffix in wanted}
        if "_undefined" in wanted:
            tested = (self.scores if others is None else others)[name.partition("/")[2]]
            if not np.isnan(tested[founders]).all():  # else nobody was tested, which is no figure
                figures[f"{name}_undefined"] = int((np.isnan(values) & ~np.isnan(tested))[founders].sum())
        share = hurt(values[founders], alone[founders]) if HURT in wanted else None
        figures |= {} if share is None else {name + HURT: share}
        joined = spread(values[later], num_samples[later])
        return {**figures, **({f"{name}_newcomers": joined[""]} if joined else {})}

    def spreads(self, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Means and spreads of columns of one moment, [N] each."""
        return {n: v for name, values in scores.items() for n, v in self.spread(name, values, scores).items()}

    def _fill_resting(self, name: str, values: np.ndarray, participants: Sequence[int]) -> None:
        trained = self.scores.get(name.replace("_received", ""))
        resting = np.ones(len(values), dtype=bool)
        resting[[self.place(client) for client in participants]] = False
        if trained is not None:
            values[resting] = trained[resting]

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors; of a board that follows participants as little as there is."""
        arrays = {"losses": self.losses, "took_part": self.took_part, "last_trained": self.last_trained}
        arrays["alone"] = self.alone
        if self.follows:
            known = np.flatnonzero(~np.isnan(self.alone))
            arrays |= {"took_part": np.flatnonzero(self.took_part), "clients": self.clients}
            arrays |= {"alone": self.alone[known], "alone_clients": known}
        return {
            "scores": {name: torch.from_numpy(values.copy()) for name, values in self.scores.items()},
            **{name: torch.from_numpy(values.copy()) for name, values in arrays.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if self.follows:
            self._seat(state["clients"].numpy().copy())
        self.scores = {name: values.numpy().copy() for name, values in state["scores"].items()}
        self.losses = state["losses"].numpy().copy()
        self.last_trained = state["last_trained"].numpy().copy()
        if self.follows:
            self.took_part[:], self.alone[:] = False, np.nan
            self.took_part[state["took_part"].numpy()] = True
            self.alone[state["alone_clients"].numpy()] = state["alone"].numpy()
        else:
            self.took_part = state["took_part"].numpy().copy()
            self.alone = state["alone"].numpy().copy()


def is_received(column: str) -> bool:
    """Whether a column is of the moment right after the receive."""
    return "_received" in column


def mean_losses(losses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Unweighted means over the participants, by column."""
    names = dict.fromkeys(name for own in losses for name in own)
    return {loss_column(name): float(np.mean([own[name] for own in losses if name in own])) for name in names}


def mean_logged(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Unweighted means over the participants that logged a finite value, by column."""
    names = dict.fromkeys(name for own in logged for name, value in own.items() if math.isfinite(value))
    finite = {name: [own[name] for own in logged if math.isfinite(own.get(name, math.nan))] for name in names}
    return {LOG + name: float(np.mean(values)) for name, values in finite.items()}
