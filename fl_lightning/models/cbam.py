"""CBAM: attention over the channels of a feature map, then over its positions.

Woo, Park, Lee, Kweon, "CBAM: Convolutional Block Attention Module", ECCV 2018, equations 1-3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.small_maps import convolved


class CBAM(nn.Module):
    """Refines a feature map by a gate per channel, then by a gate per position; shapes stay as they are.

    M_c = σ(MLP(mean_hw F) + MLP(max_hw F)), F′ = M_c · F; M_s = σ(Conv7x7([max_c F′, mean_c F′])), result M_s · F′.
    The MLP is C → max(C / reduction, 1) → C with a ReLU and biases; the convolution has neither bias nor batch norm.

    Args:
        channels: C.
        reduction: how much narrower the MLP's hidden layer is.
        kernel_size: odd size of the spatial convolution.
    """

    def __init__(self, channels: int, reduction: int = 16, kernel_size: int = 7) -> None:
        super().__init__()
        require(channels >= 1, "CBAM.channels", "must be >= 1", channels)
        require(reduction >= 1, "CBAM.reduction", "must be >= 1", reduction)
        require(kernel_size % 2 == 1, "CBAM.kernel_size", "must be odd", kernel_size)
        hidden = max(channels // reduction, 1)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.spatial = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def channel_gate(self, x: Tensor) -> Tensor:
        """M_c [B, C, 1, 1] in (0, 1) of a feature map [B, C, H, W]."""
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))])
        mean, peak = self.mlp(pooled).chunk(2)
        return (mean + peak).sigmoid()[:, :, None, None]

    def spatial_gate(self, x: Tensor) -> Tensor:
        """M_s [B, 1, H, W] in (0, 1) of a feature map [B, C, H, W] that its channels' gate has passed."""
        return convolved(self.spatial, torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], dim=1)).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """The refined map [B, C, H, W]."""
        x = x * self.channel_gate(x)
        return x * self.spatial_gate(x)
