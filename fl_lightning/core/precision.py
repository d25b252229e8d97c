"""What must not be narrowed, whatever the trainer's precision: losses, distances, statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def widened(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays as it is."""
    return x if x.dtype in _WIDE else x.float()


def widened_vector(tensors: Iterable[Tensor]) -> Tensor:
    """[P] all entries of some tensors one after another, in float32 or wider.

    >>> widened_vector([torch.ones(1, 2), torch.zeros((), dtype=torch.bfloat16)])
    tensor([1., 1., 0.])
    """
    return torch.cat([widened(tensor).reshape(-1) for tensor in tensors])


def stretches(whole: Tensor, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `widened_vector`: each tensor beside its stretch of a vector [P], in the tensor's shape.

    >>> [(_, part)] = stretches(torch.tensor([1.0, 3.0]), [torch.zeros(1, 2)])
    >>> part
    tensor([[1., 3.]])
    """
    own = list(tensors)
    parts = whole.split([tensor.numel() for tensor in own])
    return [(tensor, part.view_as(tensor)) for tensor, part in zip(own, parts, strict=True)]


@torch.no_grad()
def move_by(tensors: Iterable[Tensor], way: Tensor, factor: float) -> None:
    """Add a stretch of a vector to each of some tensors, in place.

    Args:
        tensors: P entries in all.
        way: [P].
        factor: of the vector.

    >>> place = torch.zeros(1, 2)
    >>> move_by([place], torch.tensor([1.0, 3.0]), -2.0)
    >>> place
    tensor([[-2., -6.]])
    """
    for tensor, part in stretches(way, tensors):
        tensor.add_(part, alpha=factor)


_WIDE = (torch.float32, torch.float64)


class Wide(nn.Module):
    """A module whose own tensors are statistics (prototypes, soft labels, Gaussians, running sums), and no layers.

    They stay in float32 under half precision; its submodules' do not.
    """
