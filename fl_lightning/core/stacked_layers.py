"""Convolutions of several clients at once.

Stacked, a convolution becomes one of as many groups as there are clients, which a GPU does one after another where they
are small: of 50 clients' second convolution at batch 10 the three passes start 150 kernels of 50 to 90 microseconds.
There the windows of the images are laid out and multiplied with each client's filters. And mixed precision does not
know a stacked convolution, nor batch norm, by its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, pad
from torch.overrides import TorchFunctionMode

MOST = 1 << 24
"""Numbers in a client's windows of one convolution up to which they are laid out: beyond, its arithmetic is longer."""
SHARE = 8
"""All clients' windows of a step take no more than the device's memory divided by this."""


class WindowedConvolutions(TorchFunctionMode):
    """Within it, small convolutions of several clients are products of matrices.

    Args:
        count: clients.
        room: numbers that their windows may take in all.
    """

    def __init__(self, count: int, room: int) -> None:
        super().__init__()
        self.count = count
        self.room = room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d:
            size = _windows(*args, **kwargs)
            if size is not None and size <= MOST and self.count * size <= self.room:
                self.room -= self.count * size
                return windowed(*args, **kwargs)
        return func(*args, **kwargs)


def _windows(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> int | None:
    """Numbers in all windows of a convolution; None for one that is not done so."""
    if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or x.dim() != 4:
        return None
    sizes = zip(x.shape[2:], weight.shape[2:], _pair(stride), _pair(padding), strict=True)
    places = math.prod((size + 2 * edge - kernel) // step + 1 for size, kernel, step, edge in sizes)
    return len(x) * places * math.prod(weight.shape[1:])


_CONVOLUTIONS: set[Any] = {torch.conv1d, torch.conv2d, torch.conv3d}
_CONVOLUTIONS |= {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}


class MixedPrecision(TorchFunctionMode):
    """Within it, layers of several clients have the types of mixed precision where that is on, as they have alone.

    Convolutions have its type; batch norm, which has its statistics in float32, is in that.

    Args:
        kind: of the device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func in _CONVOLUTIONS or func is batch_norm) and torch.is_autocast_enabled(self.kind):
            dtype = torch.float32 if func is batch_norm else torch.get_autocast_dtype(self.kind)
            args = [_as(value, dtype) for value in args]
            kwargs = {name: _as(value, dtype) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def layers(device: torch.device, count: int) -> Iterator[None]:
    """How the layers of one step of several clients are computed.

    Args:
        device: where.
        count: clients.
    """
    with ExitStack() as modes:
        if count > 1 and torch.is_autocast_enabled(device.type):
            modes.enter_context(MixedPrecision(device.type))
        if count > 1 and device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory // SHARE // 4
            modes.enter_context(WindowedConvolutions(count, room))
        yield


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
    filters = weight.reshape(len(weight), -1)
    is_mixed = torch.is_autocast_enabled(x.device.type)
    out = windows @ filters.T if is_mixed else _Products.apply(windows, filters)
    out = out if bias is None else out + bias
    return out.view(len(x), height, width, -1).permute(0, 3, 1, 2)


class _Products(torch.autograd.Function):
    """Windows [n, w] times filters [O, w], rounded as convolutions are where a GPU multiplies factors of 10 bits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(windows: Tensor, filters: Tensor) -> Tensor:
        with _as_convolutions():
            return windows @ filters.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        windows, filters = ctx.saved_tensors
        first, second = ctx.needs_input_grad
        with _as_convolutions():
            return gradient @ filters if first else None, gradient.T @ windows if second else None


@contextmanager
def _as_convolutions() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
