"""One forward pass of a mini-batch, as terms see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.precision import widened


@dataclass
class Forward:
    """One forward pass of a local mini-batch, shared by all terms.

    Args:
        x: [B, …] inputs.
        y: [B] int64 classes.
        features: feature maps of the body, first to last, as they were computed.
        z: [B, D] embedding.
        logits: [B, C].
        dtype: of floating-point inputs to the model's layers; None takes the embedding's.
        precision: the context in which the pass was made.
        loss: the task's loss, where the model computes it by itself; None for the cross-entropy of the logits.
    """

    x: Tensor
    y: Tensor
    features: list[Tensor]
    z: Tensor
    logits: Tensor
    dtype: torch.dtype | None = None
    precision: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)
    loss: Tensor | None = None

    def wide(self) -> Forward:
        """The same pass with embedding and logits in float32 or wider."""
        if self.z.dtype in _WIDE and self.logits.dtype in _WIDE:
            return self
        return replace(self, z=widened(self.z), logits=widened(self.logits), dtype=self.dtype or self.z.dtype)

    def predicting(self, logits: Tensor) -> Forward:
        """The same pass, with other logits [B, C] for the losses to see."""
        return replace(self, logits=logits, loss=None)

    def through(self, network: nn.Module | Callable[..., Any], *inputs: Any) -> Any:
        """Pass inputs through a network in the precision in which this pass was made, and return what it gives.

        Args:
            network: the model's head, a teacher, …
            inputs: tensors; floating-point ones are brought to the type that layers take.
        """
        dtype = self.dtype or self.z.dtype
        with self.precision():
            return network(*(x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs))


_WIDE = (torch.float32, torch.float64)
