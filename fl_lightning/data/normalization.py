"""How images are normalised: a mean and a standard deviation per channel, on the [0, 1] scale."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.data.arrays import KEY
from fl_lightning.errors import require

Normalize = Literal["standard", "half"]
Constants = tuple[tuple[float, ...], tuple[float, ...]]


def require_normalize(normalize: str) -> None:
    """Refuse any other word for how images are normalised."""
    require(normalize in ("standard", "half"), f"{KEY}.normalize", "must be standard or half", normalize)


def half(channels: int) -> Constants:
    """Mean 0.5 and std 0.5 for every channel."""
    return (0.5,) * channels, (0.5,) * channels


def mean_and_std(x: Tensor) -> Constants:
    """Mean and population std per channel on the [0, 1] scale, in float64; a constant channel gets a std of 1."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float((share * levels).sum())
        variance = float((share * (levels - mean) ** 2).sum())
        means.append(mean)
        stds.append(variance**0.5 if variance > 1e-12 else 1.0)
    return tuple(means), tuple(stds)
