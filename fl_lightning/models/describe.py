"""Questions that the summary of a run asks about a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def count_parameters(module: nn.Module) -> int:
    """Number of parameter values, frozen ones included, buffers not; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def has_batch_norm(module: nn.Module) -> bool:
    """Whether any layer normalises over the batch, and so behaves differently in training on a batch of one."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())
