"""One forward pass of a mini-batch, as terms see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, nn

from fl_lightning.core.precision import widened
from fl_lightning.core.recall import Recall


@dataclass
class Forward:
    """One forward pass of a local mini-batch, shared by all terms.

    Args:
        x: [B, …] inputs.
        y: [B] int64 classes.
        features: feature maps of the body, first to last, as they were computed; or as they are when asked for.
        z: [B, D] embedding.
        logits: [B, C].
        dtype: of floating-point inputs to the model's layers; None takes the embedding's.
        precision: the context in which the pass was made.
        loss: the task's loss, where the model computes it by itself; None for the cross-entropy of the logits.
        recall: where what networks at rest make of the samples is kept; None keeps nothing.
    """

    x: Tensor
    y: Tensor
    features: Sequence[Tensor]
    z: Tensor
    logits: Tensor
    dtype: torch.dtype | None = None
    precision: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)
    loss: Tensor | None = None
    recall: Recall | None = field(default=None, repr=False)

    def wide(self) -> Forward:
        """The same pass with embedding and logits in float32 or wider."""
        if self.z.dtype in _WIDE and self.logits.dtype in _WIDE:
            return self
        return replace(self, z=widened(self.z), logits=widened(self.logits), dtype=self.dtype or self.z.dtype)

    def predicting(self, logits: Tensor) -> Forward:
        """The same pass, with other logits [B, C] for the losses to see."""
        return replace(self, logits=logits, loss=None)

    def through(self, network: nn.Module | Callable[..., Any], *inputs: Any) -> Any:
        """Pass inputs through a network in the precision in which this pass was made, and return what it gives.

        Args:
            network: the model's head, a teacher, …
            inputs: tensors; floating-point ones are brought to the type that layers take.
        """
        dtype = self.dtype or self.z.dtype
        with self.precision():
            return network(*(x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs))

    def told(self, network: nn.Module | Callable[..., Any], *parts: nn.Module) -> Any:
        """What a network that rests for the whole fit makes of the inputs, without a gradient.

        Where samples come as they are, it is made in a phase's first epoch and kept for the others, as far as
        `federation.recall` allows; a network that turns out to change, or to draw, is asked every time.

        Args:
            network: a module, or a bound method that calls some: a teacher, what came in, …
            parts: the modules that a method calls; all that it makes must come from them and the inputs.

        Returns:
            A tensor [B, …], or tuples and lists of such.
        """
        with torch.no_grad():
            if self.recall is None or not self.recall.is_of(self.x):
                return self.through(network, self.x)
            modules = [network] if isinstance(network, nn.Module) else parts
            return self.recall.of("told", network, modules, lambda: self.through(network, self.x))


class LateMaps(Sequence[Tensor]):
    """Feature maps of the first pass that is made; where none is, they are made when the first of them is asked for.

    Args:
        make: makes them all.
    """

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self._make = make

    @cached_property
    def _maps(self) -> Sequence[Tensor]:
        return self._make()

    def seen(self, features: Sequence[Tensor], z: Tensor) -> Tensor:
        """Take the maps of a pass, unless there are some, and give its embedding on."""
        vars(self).setdefault("_maps", features)
        return z

    def __len__(self) -> int:
        return len(self._maps)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._maps[index]

    def __add__(self, other: Sequence[Tensor]) -> list[Tensor]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Tensor]) -> list[Tensor]:
        return [*other, *self]


_WIDE = (torch.float32, torch.float64)
