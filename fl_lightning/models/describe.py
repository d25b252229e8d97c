"""What a run asks about a model before it fits it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_batch_norm(module: nn.Module) -> bool:
    """Whether any layer normalises over the batch, and so behaves differently in training on a batch of one."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())
