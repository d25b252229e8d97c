"""Convolutions that leave a map its size, on maps that are smaller than their kernels.

An MLP's features are maps of 1x1: eight of nine numbers of a 3x3 kernel, and 48 of 49 of a 7x7 one, meet nothing but
padding there. Their gradient is 0 either way.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` of a map [B, C, H, W].

    Args:
        layer: a convolution of one group, stride 1, an odd kernel and half of it as padding; another module is called.
        x: the map.
    """
    if not isinstance(layer, nn.Conv2d) or (x.shape[2:] != (1, 1) and reached(layer.weight, x) is layer.weight):
        return layer(x)  # type: ignore[no-any-return]
    return convolution(x, layer.weight, layer.bias)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.conv2d` with as much padding as leaves the map its size.

    Args:
        x: [B, C, H, W] maps.
        weight: [O, C, kh, kw] kernels, of odd sizes.
        bias: [O].

    Returns:
        [B, O, H, W].
    """
    weight = reached(weight, x)
    if x.shape[2:] == (1, 1):
        return F.linear(x.flatten(1), weight.flatten(1).contiguous(), bias)[..., None, None]
    return F.conv2d(x, weight, bias, padding=(weight.shape[2] // 2, weight.shape[3] // 2))


def reached(weight: Tensor, x: Tensor) -> Tensor:
    """Of kernels [O, C, kh, kw] what meets a map [B, C, H, W]: at most 2H - 1 by 2W - 1 numbers around the middle."""
    height, width = weight.shape[2:]
    if x.shape[2:] == (1, 1) and height * width > 1:
        return weight.flatten(2).narrow(2, height * width // 2, 1)[..., None]
    for axis, size in ((2, height), (3, width)):
        room = 2 * x.shape[axis] - 1
        if size > room:
            weight = weight.narrow(axis, (size - room) // 2, room)
    return weight
