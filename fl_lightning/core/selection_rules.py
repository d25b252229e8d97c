"""Robust rules that choose clients by how near they are to one another, and leave out all that the others sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregator import KEY, Aggregator, byzantine, check_byzantine
from fl_lightning.core.coordinate_rules import mean_around_median
from fl_lightning.core.message import Message
from fl_lightning.core.vectors import Vectors, squared_distances
from fl_lightning.errors import require


class Krum(Aggregator):
    """The client whose n − f − 2 nearest others are the nearest; multi-Krum: the mean of the `select` nearest such.

        s(i) = Σ_{j → i} ‖x_i − x_j‖²,  j → i the n − f − 2 clients nearest to i;  x = mean of the least s(i)

    Distances are those of weights, where there are any, batch norm's statistics among them (of a chosen client they
    count, too, and must not be a way in); else those of artifacts over what two clients both sent. Of equal scores the
    first client counts. It takes 2f + 3 participants, and f + `select`, at least.

    Args:
        num_byzantine: f, how many may lie: a number, or a share of the participants, rounded up.
        select: m, how many clients count, >= 1; null takes n − f.

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017, section 4 and multi-Krum of section 5.
    """

    paper = "Blanchard et al., NeurIPS 2017"

    def __init__(self, num_byzantine: int | float = 0.2, select: int | None = 1) -> None:
        super().__init__()
        check_byzantine(num_byzantine)
        require(select is None or select >= 1, f"{KEY}.select", "must be >= 1", select)
        self.num_byzantine = num_byzantine
        self.select = select

    @override
    def least(self, participants: int) -> int:
        f = byzantine(self.num_byzantine, participants)
        return max(2 * f + 3, f + (self.select or 1))

    @override
    def selected(self, messages: Sequence[Message]) -> list[int]:
        size = len(messages)
        f = byzantine(self.num_byzantine, size)
        scores = krum_scores(squared_distances(messages), f)
        return sorted(scores.argsort(stable=True)[: self.select or size - f].tolist())

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        return vectors.each(lambda values: values.mean(0))


class Bulyan(Aggregator):
    """Krum's choices, then of every coordinate the mean of the values nearest to the median.

        θ = n − 2f clients by Krum, each chosen taken out;  x_k = mean of the θ − 2f values nearest to their median

    Distances are Krum's. Where fewer of the chosen sent something (a class's prototype), fewer values are taken, at
    least one. It takes n >= 4f + 3 participants.

    Args:
        num_byzantine: f, how many may lie: a number, or a share of the participants, rounded up.

    Reference: El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML
    2018, section 4.
    """

    paper = "El Mhamdi et al., ICML 2018"

    def __init__(self, num_byzantine: int | float = 0.2) -> None:
        super().__init__()
        check_byzantine(num_byzantine)
        self.num_byzantine = num_byzantine
        self._f = 0

    @override
    def least(self, participants: int) -> int:
        return 4 * byzantine(self.num_byzantine, participants) + 3

    @override
    def selected(self, messages: Sequence[Message]) -> list[int]:
        self._f = f = byzantine(self.num_byzantine, len(messages))
        squares = squared_distances(messages)
        left, chosen = list(range(len(messages))), list[int]()
        while len(chosen) < len(messages) - 2 * f:
            among = torch.tensor(left)
            chosen.append(left.pop(int(krum_scores(squares[among][:, among], f).argmin())))
        return sorted(chosen)

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        size = max(1, len(vectors.points) - 2 * self._f)
        return vectors.each(lambda values: mean_around_median(values, size))


def krum_scores(squares: Tensor, f: int) -> Tensor:
    """[n] the sum of each client's n − f − 2 least squared distances to others; of one at least, where there is one.

    Args:
        squares: [n, n] squared distances, symmetric.
        f: how many may lie.

    >>> krum_scores(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), f=0).tolist()
    [1.0, 1.0, 4.0]
    """
    size = len(squares)
    others = squares.masked_fill(torch.eye(size, dtype=torch.bool), float("inf")).sort(1).values
    return others[:, : min(size - 1, max(1, size - f - 2))].sum(1)
