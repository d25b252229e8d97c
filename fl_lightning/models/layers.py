"""Layers that several models share: conv blocks, FedDW's mapping layers and the linear head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.models.checks import require_size, require_sizes


def conv_block(
    in_channels: int, out_channels: int, kernel_size: int, dropout: nn.Module | None = None, padding: int = 0
) -> nn.Sequential:
    """Convolution, dropout, 2×2 max-pool, ReLU: [B, C_in, H, W] → [B, C_out, (H+2p-k+1)//2, (W+2p-k+1)//2].

    The pool comes before the ReLU: the function is the same, on a quarter of the values.
    """
    layers: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding)]
    if dropout is not None:
        layers.append(dropout)
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.ReLU())


def size_after_blocks(model: str, input_shape: tuple[int, ...], kernel_sizes: Sequence[int], padding: int = 0) -> int:
    """Number of positions H·W that are left after one `conv_block` per kernel size.

    Raises:
        ConfigError: if nothing is left.
    """
    sides = list(input_shape[1:])
    for kernel_size in kernel_sizes:
        sides = [(side + 2 * padding - kernel_size + 1) // 2 for side in sides]
        if min(sides) < 1:
            smallest = smallest_side(kernel_sizes, padding)
            raise ConfigError("model", f"{model} needs images of {smallest}x{smallest} or more", tuple(input_shape))
    return sides[0] * sides[1]


def smallest_side(kernel_sizes: Sequence[int], padding: int = 0) -> int:
    """Smallest side of an image that leaves 1×1 after one `conv_block` per kernel size."""
    side = 1
    for kernel_size in reversed(kernel_sizes):
        side = max(2 * side + kernel_size - 1 - 2 * padding, 1)
    return side


def mapping_layers(in_features: int, sizes: Sequence[int] | None) -> tuple[list[nn.Module], int]:
    """FedDW's mapping layers, with a ReLU after each but the last, and the size D of what they return.

    Args:
        in_features: size of the extractor's output.
        sizes: size of each mapping layer; none if empty or None, and D is then `in_features`.
    """
    sizes = sizes or []
    require_sizes("mapping", sizes)
    layers: list[nn.Module] = []
    for size in sizes:
        if layers:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(in_features, size))
        in_features = size
    return layers, in_features


def linear_head(embedding_size: int, num_classes: int, bias: bool = True) -> nn.Linear:
    """Linear classifier z [B, D] → logits [B, C]."""
    require_size("num_classes", num_classes)
    return nn.Linear(embedding_size, num_classes, bias=bias)
