"""Backward passes without torch's way into them, which takes as long as a small model's whole pass (25 µs of 50).

On a CPU autograd's engine is called as `Tensor.backward` and `torch.autograd.grad` call it in the end, with the same
bits. What they do before is for several losses, for hooks that log, and for compiled passes on a GPU's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

_run: Any = Variable._execution_engine.run_backward  # nothing that torch promises, but there since its beginnings


def backward(loss: Tensor, *given: Any, **options: Any) -> None:
    """Add the gradient of a scalar to `.grad`, as `Tensor.backward` does.

    Args:
        loss: a scalar.
        given: what else `Tensor.backward` takes, by its place.
        options: the same by name.
    """
    if given or options or not _goes_straight(loss):
        loss.backward(*given, **options)
    else:
        _run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """∇ loss with respect to some parameters; None where the loss does not reach.

    Args:
        loss: a scalar.
        parameters: tensors that require a gradient.
    """
    if not _goes_straight(loss):
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    options = {"allow_unreachable": True, "accumulate_grad": False}
    found: Sequence[Tensor | None] = _run((loss,), (torch.ones_like(loss),), False, False, tuple(parameters), **options)
    return found


def _goes_straight(loss: Tensor) -> bool:
    """Whether there is nothing that torch would refuse or do beside."""
    return (
        loss.is_cpu and loss.ndim == 0 and loss.is_floating_point() and not torch._C._are_functorch_transforms_active()
    )
