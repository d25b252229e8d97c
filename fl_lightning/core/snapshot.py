"""What tensors were at some moment, remembered until they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fl_lightning.core.precision import Wide, widened


class Snapshot(Wide):
    """Copies of some tensors, in float32 or wider; they are in no state dict.

    Args:
        tensors: what is remembered.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_buffer(str(index), widened(tensor.detach()).clone(), persistent=False)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.buffers())

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Remember what the tensors are now.

        Args:
            tensors: as the constructor's, in the same order.
        """
        for own, tensor in zip(self, tensors, strict=True):
            own.copy_(tensor)
