"""First convolutions of several clients as one product of matrices.

Stacked, a convolution becomes one of as many groups as there are clients. GPUs are slow at those where a group has few
channels, as images have: there the windows of the image are laid out and multiplied with each client's filters. It
pays where nobody asks for the gradient of the image, which would have to be added up from its windows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

MOST = 128
"""Numbers in a window (channels, rows and columns) up to which it is laid out."""


class WindowedConvolutions(TorchFunctionMode):
    """Within it, convolutions of small windows of inputs without a gradient are products of matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and _is_first(*args, **kwargs):
            return windowed(*args, **kwargs)
        return func(*args, **kwargs)


def _is_first(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    return plain and x.dim() == 4 and not _has_gradient(x) and math.prod(weight.shape[1:]) <= MOST


def _has_gradient(x: Tensor) -> bool:
    """Whether a tensor, seen by one of several clients, has a gradient: what stands for it within `vmap` never says."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def windowed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d` of one group and no dilation.

    Args:
        x: [B, C, H, W] images.
        weight: [O, C, kh, kw] filters.
        bias: [O].
        stride: a number, or one for rows and one for columns.
        padding: likewise.
        dilation: 1.
        groups: 1.

    Returns:
        [B, O, h, w].
    """
    (down, right), (rows, columns), (kh, kw) = _pair(stride), _pair(padding), weight.shape[2:]
    if rows or columns:
        x = pad(x, (columns, columns, rows, rows))
    windows = x.unfold(2, kh, down).unfold(3, kw, right)  # [B, C, h, w, kh, kw]
    height, width = windows.shape[2:4]
    windows = windows.permute(0, 2, 3, 1, 4, 5).reshape(len(x) * height * width, -1)
    out = windows @ weight.reshape(len(weight), -1).T
    out = out if bias is None else out + bias
    return out.view(len(x), height, width, -1).permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
