"""What must not be narrowed, whatever the trainer's precision: losses, distances, statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def widened(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()


def keeps_float32(module: nn.Module) -> bool:
    """Whether a module's own parameters and buffers (not its submodules') stay in float32 under half precision.

    Batch norm does, because a running mean moves by less than half precision can tell; so does what says
    ``keeps_float32 = True``: clients and terms, whose own tensors are statistics (prototypes, soft labels, Gaussians,
    running sums), no layers.
    """
    return isinstance(module, _BatchNorm) or getattr(module, "keeps_float32", False)
