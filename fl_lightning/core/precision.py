"""Arithmetic that must not be narrowed: losses are computed in float32 whatever the trainer's precision."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.float()
