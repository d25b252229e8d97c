"""Backward passes and steps where nothing stands between loss and parameters: one device, full precision, no onlooker.

A step through Lightning's strategy, precision plugin and hooks, and torch's own wrapper around an optimizer's step,
takes a small model as long as its arithmetic. Which fits may do without is decided once a fit (`is_plain`); the bits
are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.bare_steps import bare_step
from fl_lightning.core.descent import Descent, FitSettings, Machine, clip
from fl_lightning.core.engine import backward
from fl_lightning.own_methods import has_own, overrides

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer

    from fl_lightning.core.facts import Fit

WATCHED = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks of callbacks around the step on a mini-batch."""
_PASSED = ("pre_backward", "backward", "post_backward", "optimizer_step", "forward_context")


def is_plain(trainer: Trainer) -> bool:
    """Whether all that a Trainer does around a backward pass and a step is to count the step."""
    plugin: Any = trainer.precision_plugin
    passes = not any(overrides(type(plugin), Precision, name) for name in _PASSED)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    watched = any(has_own(each, Callback, name) for each in callbacks for name in WATCHED)
    profiled = type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]
    return passes and type(trainer.strategy) is SingleDeviceStrategy and not watched and not profiled


def tell_of_steps(machine: Machine, trainer: Trainer, module: LightningModule | None, by_model: bool) -> None:
    """Let a Trainer and its callbacks hear what Lightning's own wrapper of an optimizer does not tell them.

    Args:
        machine: of the fit.
        trainer: counts steps.
        module: that its callbacks are told of; None where none of them listens.
        by_model: whether the model steps by itself, with optimizers that are not wrapped.
    """
    told = None if module is None else partial(_tell, trainer, module)
    if by_model:
        machine.before_step = None if told is None else partial(told, "on_before_optimizer_step")
        machine.after_step = lambda optimizer: _count(trainer, 1)
    elif told is not None:  # Lightning leaves it to fits with automatic optimization
        machine.after_step = partial(told, "on_before_zero_grad")


def _tell(trainer: Trainer, module: LightningModule, hook: str, *given: Any) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        getattr(callback, hook)(trainer, module, *given)


def _count(trainer: Trainer, steps: int) -> None:
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    for count in (progress.total, progress.current):
        count.ready += steps
        count.completed += steps


class PlainDescent(Descent):
    """The optimizers of one phase in a plain fit.

    Args:
        fit: of the method, which counts steps.
        trainer: which counts them, too.
        machine: see `Descent`, and so on.
        optimizers: part -> Lightning's wrapper of its optimizer.
        settings: clipping and accumulation.
    """

    def __init__(
        self, fit: Fit, trainer: Trainer, machine: Machine, optimizers: Mapping[str, Any], settings: FitSettings
    ) -> None:
        super().__init__(machine, optimizers, settings)
        self._trainer = trainer
        self._uncounted = 0
        self._all = list(optimizers.values())
        module: Any = trainer.lightning_module
        changes = bool(trainer.callbacks) or module.own.has_optimizer  # type: ignore[attr-defined]
        steps = [bare_step(own.optimizer, fit, changes) or _whole_step(own.optimizer) for own in self._all]
        self._steps = {id(own): step for own, step in zip(self._all, steps, strict=True)}

    @override
    def descend(self, loss: Tensor, factor: float, parts: Sequence[str], steps_now: bool) -> None:
        if parts or factor != 1 or self.settings.accumulate != 1:
            super().descend(loss, factor, parts, steps_now)
            return
        with self.machine.whole():
            backward(loss)
        self.step(self._all)

    @override
    def step(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            clip(self.settings, [optimizer])
            self._steps[id(optimizer)]()
        self._uncounted += len(optimizers)

    @override
    def end_bundle(self) -> None:
        _count(self._trainer, self._uncounted)
        self._uncounted = 0


def _whole_step(optimizer: Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step(closure=_nothing)  # type: ignore[arg-type]
        optimizer.zero_grad()

    return step


def _nothing() -> None:
    """Do nothing: gradients are there already."""
