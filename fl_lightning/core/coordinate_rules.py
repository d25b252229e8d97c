"""Robust rules that look at every coordinate by itself."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregator import KEY, Aggregator, byzantine
from fl_lightning.core.vectors import Vectors
from fl_lightning.errors import require


class CoordinateMedian(Aggregator):
    """The median of every coordinate; of an even number of values the mean of the middle two.

        x_k = median{x_{i,k} : i}

    It takes 3 participants: of two it is their mean.

    Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018, definition 1.
    """

    paper = "Yin et al., ICML 2018"

    @override
    def least(self, participants: int) -> int:
        return 3

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        return vectors.each(median)


class TrimmedMean(Aggregator):
    """The mean of every coordinate without its b least and its b largest values, b = ⌈share · n⌉.

        x_k = 1/(n − 2b) Σ_{i ∈ U_k} x_{i,k},  U_k without the b least and the b largest of the n values

    Where few clients sent something (a class's prototype), b is made smaller so that a value is left. It takes 2b + 1
    participants.

    Args:
        share: β, what is cut off at each end, in (0, 0.5); at least the share of clients that may lie.

    Reference: Yin et al., ICML 2018, definition 2.
    """

    paper = "Yin et al., ICML 2018"

    def __init__(self, share: float = 0.2) -> None:
        super().__init__()
        require(0 < share < 0.5, f"{KEY}.share", "must be in (0, 0.5)", share)
        self.share = share

    @override
    def least(self, participants: int) -> int:
        return 2 * max(1, byzantine(self.share, participants)) + 1

    @override
    def combine(self, vectors: Vectors) -> Tensor:
        size = len(vectors.points)
        cut = min(byzantine(self.share, size), (size - 1) // 2)
        return vectors.each(lambda values: values.sort(0).values[cut : size - cut].mean(0))


def median(values: Tensor) -> Tensor:
    """[…] the median over the first dimension of [n, …], n >= 1.

    >>> median(torch.tensor([[1.0], [9.0], [2.0], [4.0]])).tolist()
    [3.0]
    """
    ordered, size = values.sort(0).values, len(values)
    return (ordered[(size - 1) // 2] + ordered[size // 2]) / 2


def mean_around_median(values: Tensor, size: int) -> Tensor:
    """[…] the mean of the `size` values of [n, …] that are nearest to their median; of equally near ones the least.

    >>> mean_around_median(torch.tensor([[1.0], [9.0], [2.0], [4.0], [3.0]]), 3).tolist()
    [3.0]
    """
    ordered = values.sort(0).values
    nearest = (ordered - median(values)).abs().argsort(dim=0, stable=True)[:size]
    return torch.gather(ordered, 0, nearest).mean(0)
