"""A model whose weights lie between those of two others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.models.split import SplitModel


def through_mixture(personal: SplitModel, other: SplitModel, alpha: Tensor, x: Tensor) -> Tensor:
    """What the model αv + (1 − α)w makes of inputs; gradients reach v and α alone.

    Args:
        personal: v; batch norm's statistics are its own.
        other: w, of the same architecture.
        alpha: α, [], in [0, 1].
        x: [B, …] inputs.

    Returns:
        Logits, [B, C].
    """
    w = dict(other.named_parameters())
    mixed = {n: torch.lerp(w[n].detach(), v, alpha.to(v.dtype)) for n, v in personal.named_parameters()}
    return functional_call(personal, mixed, x)
