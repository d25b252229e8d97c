"""One local fit on several devices: each takes its part of every mini-batch, and gradients are averaged.

Lightning's DDP wrapper expects one backward pass a step that reaches every parameter. Phases, several losses a step and
gradients for some parameters only are what clients are made of, so they average what an optimizer is about to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fl_lightning.core.precision import stretches, widened
from fl_lightning.terminal import say
from fl_lightning.trust import is_known


class Part(NamedTuple):
    """The samples of a mini-batch that one device sees.

    Args:
        x: [B, …] inputs.
        y: [B] int64 classes.
        own: which samples of the mini-batch they are.
        batch_size: samples of the mini-batch, on all devices together.
        counts: whether they count; who is left without any sees one that does not.
        factor: what a mean over them is worth, so that the average over devices is the mini-batch's mean.
        rows: [B] int64 on the CPU, their places in the client's training part; None where they are not known.
    """

    x: Tensor
    y: Tensor
    own: slice
    batch_size: int
    counts: bool = True
    factor: float = 1.0
    rows: Tensor | None = None

    @classmethod
    def whole(cls, x: Tensor, y: Tensor) -> Part:
        """The whole mini-batch, on the only device."""
        return cls(x, y, slice(None), len(y))


class SharedFit:
    """The devices of one fit, seen from one of them; all call each method together.

    Args:
        rank: this device.
        size: how many there are, at least 2.
    """

    _was_said = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def part(self, x: Tensor, y: Tensor) -> Part:
        """This device's part of a mini-batch: every `size`-th sample.

        Where there are fewer samples than devices, those that are left over see one that does not count.
        """
        counts = self.rank < len(y)
        own = slice(self.rank, None, self.size) if counts else slice(0, 1)
        factor = len(y[own]) * self.size / len(y) if counts else 0.0
        return Part(x[own], y[own], own, len(y), counts, factor)

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients by their average over devices; a parameter without one anywhere keeps none."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            own = [parameter for parameter in parameters if parameter.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            flat = widened(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            there = torch.tensor([p.grad is not None for p in own], dtype=flat.dtype, device=flat.device)
            whole = self.total(torch.cat([flat, there]))
            sums = whole[: -len(own)].div_(self.size).split([p.numel() for p in own])
            for parameter, total, known in zip(own, sums, whole[-len(own) :].tolist(), strict=True):
                parameter.grad = total.view_as(parameter).to(dtype, copy=True) if known else None

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages over devices, for gradients that a method uses before any optimizer does."""
        whole = self.total(torch.cat([widened(tensor).reshape(-1) for tensor in tensors])).div_(self.size)
        return [part.to(tensor.dtype) for tensor, part in stretches(whole, tensors)]

    @torch.no_grad()
    def agree(self, method: nn.Module, terms: Iterable[Any]) -> None:
        """Make the client the same on all devices, at the end of a fit.

        Parameters are already, but for what a library may round elsewhere; running statistics are averaged, what terms
        have added up over samples is added up, and counters take the largest. A line names what that moves in a class
        of somebody's own: a memory of samples makes no sense as a mean.
        """
        added = {id(getattr(term, name)) for term in terms for name in term.accumulates}
        buffers = list(method.buffers())
        rest = [buffer for buffer in buffers if id(buffer) not in added]
        before = [
            (place, buffer, buffer.clone()) for place, buffer in _of_own_classes(method) if id(buffer) not in added
        ]
        _replace([parameter.data for parameter in method.parameters()], lambda own: self.first(widened(own)))
        _replace([buffer for buffer in buffers if id(buffer) in added], self.total)
        floats, others = ([b for b in rest if b.is_floating_point() is kind] for kind in (True, False))
        _replace(floats, lambda own: self.total(widened(own)) / self.size)
        _replace(others, self.largest)
        moved = (place for place, own, value in before if not torch.allclose(own, value, equal_nan=True))
        if (place := next(moved, None)) and self.rank == 0 and not SharedFit._was_said:
            SharedFit._was_said = True
            kept = "their mean is kept, of whole numbers the largest"
            say(f"fl-lightning: {place} differs between devices, which see other samples of a mini-batch: {kept}")

    def gather(self, value: Any) -> list[Any]:
        """Every device's value, by rank, on every device; for small things."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @staticmethod
    def largest(value: Tensor) -> Tensor:
        """The largest over devices, of whole numbers."""
        whole = value.long()
        whole = whole.clone() if whole is value else whole
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        return whole

    @staticmethod
    def first(value: Tensor) -> Tensor:
        """What the first device has: random streams part where devices see parts of different sizes."""
        value = value.clone()
        dist.broadcast(value, 0)
        return value

    @staticmethod
    def total(value: Tensor) -> Tensor:
        """Sum over devices."""
        value = value.clone()
        dist.all_reduce(value)
        return value


def _of_own_classes(method: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that classes of somebody's own have, with whose they are."""
    for part in method.modules():
        kind = type(part)
        if not is_known(kind.__module__):
            yield from ((f"{kind.__name__}.{name}", own) for name, own in part.named_buffers(recurse=False))


def _replace(tensors: Sequence[Tensor], agreed: Callable[[Tensor], Tensor]) -> None:
    """Fill tensors with what devices agree on, all of one type together: [n] their values -> [n]."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        whole = agreed(torch.cat([tensor.reshape(-1) for tensor in own]))
        for tensor, part in stretches(whole, own):
            tensor.copy_(part)
