"""Sparse tensors that stay as sparse while they look for better places: how many active entries, and which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fl_lightning.shapes import checked


def erdos_renyi_kernel(shapes: Sequence[Sequence[int]], density: float) -> list[int]:
    """Active entries of every tensor, so that large ones are sparser and all together have about `density`.

    A tensor's density is ε · (sum of its dims / product of its dims), at most 1: those that would exceed it are dense,
    and ε is solved anew for the others. One-dimensional tensors (biases, norms) are the first to be dense. In exact
    fractions, rounded down tensor by tensor.

    Args:
        shapes: of the tensors; at least one of them has entries.
        density: active entries over all entries, in (0, 1].

    Reference:
        Mocanu et al., Nature Communications 2018; Evci et al., "Rigging the Lottery", ICML 2020, section 3.

    >>> erdos_renyi_kernel([(8, 8), (4, 4)], density=0.5)  # densities 5/12 and 5/6
    [26, 13]
    """
    sizes = [math.prod(shape) for shape in shapes]
    known = zip(shapes, sizes, strict=True)
    scores = [Fraction(sum(shape), size) if shape and size else Fraction(1) for shape, size in known]
    left = Fraction(str(density)) * sum(sizes)
    active = list(sizes)
    sparse = set(range(len(sizes)))
    while sparse:
        scale = left / sum(scores[index] * sizes[index] for index in sparse)
        highest = max(scores[index] for index in sparse)
        if scale * highest <= 1:
            for index in sparse:
                active[index] = math.floor(scale * scores[index] * sizes[index])
            break
        full = {index for index in sparse if scores[index] == highest}
        left -= sum(sizes[index] for index in full)
        sparse -= full
    return active


def random_mask(shape: Sequence[int], active: int, generator: torch.Generator) -> Tensor:
    """A bool mask on the CPU with so many active entries, drawn uniformly."""
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[torch.randperm(len(mask), generator=generator)[:active]] = True
    return mask.view(tuple(shape))


@checked
def regrown_mask(
    mask: Bool[Tensor, "*shape"], weights: Float[Tensor, "*shape"], promise: Float[Tensor, "*shape"], count: int
) -> Bool[Tensor, "*shape"]:
    """Drop the smallest active entries and grow as many others: the number of active entries stays.

    Args:
        mask: […] bool.
        weights: […] the active entries of smallest absolute value are dropped.
        promise: […] the inactive entries of highest value are grown, among them those that were just dropped.
        count: how many, at most as many as are active. Ties go to the first in row-major order.

    >>> mask = torch.tensor([True, True, False, False])
    >>> regrown_mask(mask, torch.tensor([2., -1., 0., 0.]), torch.tensor([9., 1., 2., 3.]), count=1).tolist()
    [True, False, False, True]
    """
    new = mask.flatten().clone()
    active = new.nonzero().squeeze(1)
    new[active[weights.flatten()[active].abs().argsort(stable=True)[:count]]] = False
    inactive = (~new).nonzero().squeeze(1)
    new[inactive[promise.flatten()[inactive].argsort(descending=True, stable=True)[:count]]] = True
    return new.view(mask.shape)
