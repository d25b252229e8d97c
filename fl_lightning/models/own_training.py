"""What a model may bring along for its local fit: a loss, optimizers and hooks of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]
"""Makes optimizers of parameters; a model's own may do more (`OptimizerMaker`)."""
Clipping = tuple[float, str] | None
"""The largest gradient norm (or value) of a step, and which of them it is; None clips nothing."""
Pull = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""Parameters -> the gradient that the method's terms add to the model's own; None where they add none."""


def trained_by(*optimizers: Any) -> list[Any]:
    """The parameters of some optimizers, in the order of their groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


class OptimizerMaker(ABC):
    """Makes the optimizers of a fit, and knows what becomes of them."""

    further: Sequence[Any] = ()
    """The optimizers that the last call made beside the one that it gave."""

    @abstractmethod
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """One for the fit's next phase."""

    def outside(self, parameters: Iterable[nn.Parameter]) -> Any:
        """One that trains outside a fit."""
        return self(parameters)

    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer's schedulers start from another learning rate; false, and nothing is done, where none do."""
        return False

    def tune(self, optimizer: Any, change: Callable[[Any], None]) -> None:
        """Change an optimizer; the schedulers that move it start from its learning rates as they are afterwards."""
        change(optimizer)


class _Plain(OptimizerMaker):
    """Makes them by a function, and does no more."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make

    @override
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        return self._make(parameters)


def maker_of(make: MakeOptimizer) -> OptimizerMaker:
    """What makes optimizers by a function; one that can do more is itself."""
    return make if isinstance(make, OptimizerMaker) else _Plain(make)


class Counter:
    """A hook of an optimizer that looks at no gradient, so that it may be called once they are cleared.

    Args:
        count: called with the optimizer that has stepped.
    """

    def __init__(self, count: Callable[[Any], object]) -> None:
        self.count = count

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """Count a step."""
        self.count(optimizer)


class SkippedBatch(Exception):
    """A model that has a loss of its own leaves a mini-batch out: nothing is trained on it, nothing is taken down."""


class Pass(NamedTuple):
    """A mini-batch's way through a model that computes its loss by itself.

    Args:
        z: [B, D] embedding.
        logits: [B, C].
        loss: scalar; without a graph where the model has stepped on it already, None where it has not said which.
    """

    z: Tensor
    logits: Tensor
    loss: Tensor | None


class OwnTraining:
    """A model's own share in its local fit. This one brings nothing: the method's losses, the configured optimizer."""

    has_loss = False
    """Whether `training_pass` gives the task's loss."""
    has_optimizer = False
    """Whether optimizers are the model's own, whatever the configuration says."""
    steps_itself = False
    """Whether a training pass makes optimizer steps (manual optimization)."""
    watches = False
    """Whether `watched` and `before_step` do anything: whether a module looks at gradients on their way."""
    steps = 1
    """Mini-batches of an epoch, as the runner says before a fit."""
    most_steps = -1
    """Optimizer steps after which the Trainer ends a fit, whatever is left of its epochs; -1 for no such number."""
    devices: Any = None
    """Those that share the present fit (`core/devices.py`); None for one."""
    machine: Any = None
    """What a model that steps by itself does so by (`core/descent.py`); None outside a fit."""
    counts = True
    """Whether the present mini-batch's samples count; a device that would have none sees one that does not."""
    factor = 1.0
    """What a mean over those samples is worth, so that the average over devices is the whole mini-batch's mean."""
    logged_for_run: Mapping[str, float] = MappingProxyType({})
    """What the model has logged for loggers in the present fit, or in the last one: of each name its last epoch's."""
    logs: frozenset[str] | None = frozenset()
    """Names that a training pass logs; None where hooks that are not tried out beforehand may log others."""

    def beside(self, copies: Sequence[OwnTraining]) -> OwnTraining:
        """The share of the model and of further copies of it, which a method trains beside it.

        Args:
            copies: their own shares; what a fit is told goes to all of them.
        """
        return self

    def optimizer(
        self, configured: MakeOptimizer, accumulate: int, lr_factor: float, clipping: Clipping = None
    ) -> MakeOptimizer:
        """What makes the fit's optimizers; called once a fit, before `plan`.

        Args:
            configured: what the configuration makes.
            accumulate: mini-batches an optimizer step.
            lr_factor: the round's learning rate in units of the first round's.
            clipping: the largest gradient norm (or value) of a step, and which of them it is; None clips nothing.

        Raises:
            ConfigError: if the model makes steps by itself and cannot do that.
        """
        return configured

    def plan(self, epochs: int, last: int | None = None) -> None:
        """The next optimizers are those of a phase of so many epochs.

        Args:
            epochs: of the phase.
            last: mini-batches of its last one, where that is cut short; None for all.
        """

    def one_optimizer(self) -> Any:
        """The first of the present fit's optimizers, where they are the model's; None else.

        Raises:
            ConfigError: if there is no such one that speaks for the fit: rates that differ, or a schedule.
        """
        return None

    def start_fit(self) -> None:
        """A local fit begins."""

    def start_epoch(self, phase: int, epoch: int) -> None:
        """An epoch of a phase begins; both count from 0."""

    def end_batch(self) -> None:
        """A mini-batch is done, its step made."""

    def logged_in_epoch(self) -> Mapping[str, float]:
        """What the model has logged in the present epoch so far, on all devices: they wait for one another."""
        return {}

    def end_epoch(self) -> Mapping[str, float]:
        """An epoch ends; what the model has logged in it."""
        return {}

    def end_fit(self) -> None:
        """The fit ends."""

    def whole(self) -> AbstractContextManager[Any]:
        """Within it the model is as its own code expects it: a backward pass may call that code once more."""
        return nullcontext()

    def watched(self, backward: Callable[..., None]) -> Callable[..., None]:
        """A backward pass with the model's own hooks around it.

        Args:
            backward: without them.
        """
        return backward

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step: gradients are accumulated, not yet clipped."""

    def training_pass(self, x: Tensor, y: Tensor, pull: Pull, again: bool = False) -> Pass:
        """A mini-batch of a fit, where the model has a loss of its own.

        Args:
            x: [B, …] inputs.
            y: [B] int64 classes.
            pull: for models that step by themselves.
            again: whether it is one more pass of the same mini-batch, which counts once.

        Raises:
            SkippedBatch: where the model leaves the mini-batch out.
        """
        raise NotImplementedError
