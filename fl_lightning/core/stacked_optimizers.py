"""SGD and Adam over rows: what `torch.optim` does, element by element, for several clients at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam

from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.rows import Unstackable

Stretch = tuple[int, int]
"""First column, and the one behind the last."""
_MANY = 1 << 16
"""Numbers from which on a pass over all of them takes longer than some more calls."""


class StackedOptimizer:
    """One optimizer's share of K clients' parameters: its state stands in rows, too, each with its own count of steps.

    Args:
        template: the optimizer as it was made for the resident module's parameters.
        index: which of its parameter groups.
        stretches: the columns of its parameters.
        flat: [K, width] the clients' parameters.
        counts_there: whether steps and learning rate are numbers on the parameters' device: a GPU does not wait for
            the CPU then, and a recorded step can be replayed at another rate.

    Raises:
        Unstackable: for an optimizer that is not one of `torch.optim`'s SGD, Adam and AdamW, or an option of theirs
            that is not stacked.
    """

    def __init__(
        self,
        template: Optimizer,
        index: int,
        stretches: Sequence[Stretch],
        flat: Tensor,
        counts_there: bool = False,
    ) -> None:
        kind, group = type(template), template.param_groups[index]
        if kind not in (SGD, Adam, AdamW):
            raise Unstackable(f"its optimizer is {kind.__name__}, and not SGD, Adam or AdamW")
        for option in ("amsgrad", "dampening", "maximize", "differentiable"):
            if group.get(option):
                raise Unstackable(f"its optimizer has {option}, which is not stacked")
        self.kind = kind
        self.index = index
        self.group = group
        self.stretches = list(stretches)
        self.flat = flat
        self.counts = [0] * len(flat)
        self.counts_there = counts_there or flat.is_cuda
        self.by_piece = kind is SGD and counts_there and not flat.is_cuda and flat.numel() >= _MANY
        """Whether gradients are taken as they come: a tape calls torch in no time, and to put many side by side takes a
        CPU as long as to step on them."""
        self._steps = torch.zeros(len(flat), 1, dtype=accumulation_dtype(flat.device), device=flat.device)
        self._rate = math.nan
        self._less = torch.zeros((), dtype=flat.dtype, device=flat.device)  # -lr, there
        self._lr = self._less.clone()
        momentum = group.get("momentum", 0.0)
        needed = (1 if momentum else 0) if kind is SGD else 2
        self.state = [[torch.zeros_like(flat[:, a:b]) for _ in range(needed)] for a, b in self.stretches]

    def tensors(self) -> list[Tensor]:
        """Its state, as far as steps read it."""
        return [self._steps, self._less, self._lr, *(moment for own in self.state for moment in own)]

    @torch.no_grad()
    def begin(self, group: dict[str, Any]) -> None:
        """Be as one that is made anew, with the options of a parameter group that is as the first one was."""
        self.group = group
        self.counts = [0] * len(self.flat)
        torch._foreach_zero_([self._steps, *(moment for own in self.state for moment in own)])

    def tell_rate(self) -> None:
        """Let the device know of another learning rate."""
        rate = float(self.group["lr"])
        if self.counts_there and rate != self._rate:
            self._rate = rate
            self._less.fill_(-rate)
            self._lr.fill_(rate)

    @torch.no_grad()
    def step(self, rows: slice | Tensor, own: Sequence[int], gradients: Sequence[Sequence[Tensor]]) -> None:
        """One step of some clients.

        Args:
            rows: which, as an index: a slice of the first ones, or any.
            own: the same, as numbers.
            gradients: [n, columns] of each stretch, in pieces that lie side by side.
        """
        self.tell_rate()
        counts: Any = ()
        if not self.counts_there:
            for row in own:
                self.counts[row] += 1
            counts = [self.counts[row] for row in own]
        elif self.kind is not SGD:
            counts = _of(self._steps, rows).add_(1)
            if not isinstance(rows, slice):
                self._steps.index_copy_(0, rows, counts)
        for (start, end), state, pieces in zip(self.stretches, self.state, gradients, strict=True):
            flat = self.flat[:, start:end]
            values, moments = _of(flat, rows), [_of(moment, rows) for moment in state]
            widths = [piece.shape[1] for piece in pieces]
            for piece, *split in zip(pieces, *(tensor.split(widths, 1) for tensor in (values, *moments)), strict=True):
                self._step(split[0], piece, split[1:], counts)
            if isinstance(rows, slice):  # which shows the rows themselves
                continue
            for old, new in zip((flat, *state), (values, *moments), strict=True):
                old.index_copy_(0, rows, new)

    def _step(self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], counts: Any) -> None:
        group = self.group
        decay, lr = group["weight_decay"], float(group["lr"])
        if decay and self._decouples:
            values.mul_(self._less * decay + 1 if self.counts_there else 1 - lr * decay)
        elif decay:
            gradient = gradient.add(values, alpha=decay)
        if self.kind is SGD:
            if moments:
                gradient = self._with_momentum(gradient, moments[0])
            if self.counts_there:
                values.addcmul_(gradient, self._less)
            else:
                values.add_(gradient, alpha=-lr)
        elif self.counts_there:
            self._adam_there(values, gradient, moments, counts)
        else:
            self._adam(values, gradient, moments, counts, lr)

    @property
    def _decouples(self) -> bool:
        """Whether weight decay shrinks the weights, and not their gradient."""
        return self.kind is AdamW or bool(self.group.get("decoupled_weight_decay"))

    def _with_momentum(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        momentum = self.group["momentum"]
        buffer.mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if self.group["nesterov"] else buffer

    def _adam(
        self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], counts: Sequence[int], lr: float
    ) -> None:
        (beta1, beta2), eps = self.group["betas"], self.group["eps"]
        mean, square = moments
        whole = all(own.is_contiguous() for own in (values, gradient, mean, square))
        if whole and len(set(counts)) == 1:  # in one pass
            adam(
                [values], [gradient], [mean], [square], [], [torch.tensor(counts[0] - 1.0)], fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=lr, weight_decay=0.0, eps=eps, maximize=False,
            )  # fmt: skip
            return
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        sizes = [lr / (1 - beta1**count) for count in counts]
        roots = [(1 - beta2**count) ** 0.5 for count in counts]
        size, root = (values.new_tensor(own)[:, None] for own in (sizes, roots))
        denominator = square.sqrt().div_(root).add_(eps)
        values.sub_(mean.mul(size).div_(denominator))

    def _adam_there(self, values: Tensor, gradient: Tensor, moments: Sequence[Tensor], steps: Tensor) -> None:
        """The same with steps [n, 1] that the CPU does not know."""
        (beta1, beta2), eps = self.group["betas"], self.group["eps"]
        mean, square = moments
        if values.device.type == "cpu" and values.stride(1) == gradient.stride(1) == 1:  # in one pass
            torch._fused_adam_(
                values.unbind(), gradient.unbind(), mean.unbind(), square.unbind(), [], steps.flatten().unbind(),
                lr=self._lr, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (self._less.double() / (1 - beta1**steps)).to(values)
        root = (1 - beta2**steps).sqrt_().to(values)
        values.addcmul_(mean / square.sqrt().div_(root).add_(eps), size)


def _of(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Some rows: views of the first ones, or copies of any, which an index in brackets takes twice as long to make."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
