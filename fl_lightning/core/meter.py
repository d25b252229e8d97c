"""Mean losses of a local fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fl_lightning.core.devices import SharedFit


class LossMeter:
    """Takes down the losses of steps; means over samples are read once, after the fit.

    Args:
        devices: those that share the fit; None for one.
    """

    def __init__(self, devices: SharedFit | None = None) -> None:
        self.devices = devices
        self.losses: dict[str, list[tuple[Tensor, int]]] = {}
        self.num_steps = 0
        """Steps that were taken down."""

    def add(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Take down one step's losses.

        Args:
            values: scalars, by name.
            batch_size: samples that they are means over.
        """
        for name, value in values.items():
            self.losses.setdefault(name, []).append((value.detach(), batch_size))
        self.num_steps += 1

    def means(self) -> dict[str, float]:
        """Mean over the samples of all steps, by name."""
        means = {}
        for name, pairs in self.losses.items():
            values = torch.stack([value for value, _ in pairs]).cpu().double()
            sizes = torch.tensor([size for _, size in pairs], dtype=torch.float64)
            sums = torch.stack([(values * sizes).sum(), sizes.sum()])
            sums = sums if self.devices is None else self.devices.total(sums)
            means[name] = float(sums[0] / sums[1])
        return means
