"""Backward passes and optimizer steps of one phase: accumulation, clipping, precision, devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from fl_lightning.core.engine import gradients
from fl_lightning.core.facts import OptimizerFactory
from fl_lightning.core.steps import CarefulSteps
from fl_lightning.models.own_training import trained_by

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

    from fl_lightning.core.devices import SharedFit


@dataclass(frozen=True)
class FitSettings:
    """What the experiment, not the method, decides about a local fit.

    Args:
        optimizer: makes an optimizer for some parameters; called anew for every phase of every fit.
        local_epochs: epochs of a phase that names none, until a fit has a workload of its own.
        clip_value: largest gradient norm (or value); None does not clip.
        clip_algorithm: ``norm`` or ``value``.
        accumulate: local mini-batches an optimizer step.
        clips_itself: whether a step clips; else somebody else does between backward and step.
        recall: bytes that may be kept in a phase of what networks at rest made of the client's samples.
    """

    optimizer: OptimizerFactory
    local_epochs: int = 1
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1
    clips_itself: bool = True
    recall: int = 256 << 20

    @property
    def clipping(self) -> tuple[float, str] | None:
        """The largest gradient norm (or value) and which of them it is; None where nothing is clipped."""
        return None if self.clip_value is None else (self.clip_value, self.clip_algorithm)


class Machine:
    """What a step stands on: the trainer's precision, the devices of the fit, and a way to go backward.

    Args:
        device: the training device's type.
        plugin: the trainer's precision plugin; None outside a trainer.
        devices: those that share the fit; None for one.
        backward: Lightning's backward pass; None outside a trainer.
        before_step: shown every optimizer whose gradients are whole, before they are clipped; None shows nobody.
    """

    def __init__(
        self,
        device: str = "cpu",
        plugin: Precision | None = None,
        devices: SharedFit | None = None,
        backward: Callable[..., None] | None = None,
        before_step: Callable[[Any], None] | None = None,
    ) -> None:
        self.device = device
        self.before_step = before_step
        self.after_step: Callable[[Any], None] | None = None
        """Shown every optimizer that has stepped, before its gradients are cleared."""
        self.devices = devices
        self.backward = backward
        self.whole: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The context of a backward pass through a model of the user's own."""
        self.autocasts = isinstance(plugin, MixedPrecision)
        self.narrows = self.autocasts and getattr(plugin, "precision", "") == "16-mixed"
        """Whether passes are made in float16, whose small gradients vanish."""
        self.careful = plugin if isinstance(plugin, CarefulSteps) else None
        self.precision: Callable[[], AbstractContextManager[Any]] = (
            plugin.forward_context if self.autocasts and plugin is not None else nullcontext
        )
        """The context of a pass through a network."""

    def wide(self) -> AbstractContextManager[Any]:
        """The context of losses and backward passes: the trainer's autocast is for forward passes alone."""
        return torch.autocast(self.device, enabled=False) if self.autocasts else nullcontext()

    @property
    def steps_carefully(self) -> bool:
        """Whether gradients and parameters are made ready for a step: unscaled, or in float32."""
        return self.careful is not None and (self.careful.scales or self.careful.widens)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales losses, where something does."""
        careful = self.careful
        return careful.scaler if careful is not None and careful.scales else None

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """∇ loss with respect to some parameters; zeros where the loss does not reach, nothing left in `.grad`.

        Under float16 autocast the loss is scaled on the way.
        """
        found = self.reached(loss, parameters)
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        return given if self.devices is None else self.devices.average(given)

    def reached(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The same on this device alone, and None where the loss does not reach."""
        scale = 1024.0 if self.narrows else 1.0
        with torch.enable_grad(), self.wide():
            found = gradients(loss * scale if self.narrows else loss, parameters)
        return [gradient / scale if self.narrows and gradient is not None else gradient for gradient in found]


class Descent:
    """The optimizers of one phase, by part, and how they step.

    Args:
        machine: what steps stand on.
        optimizers: part -> Lightning's wrapper of its optimizer.
        settings: clipping and accumulation.
    """

    def __init__(self, machine: Machine, optimizers: Mapping[str, Any], settings: FitSettings) -> None:
        self.machine = machine
        self.optimizers = dict(optimizers)
        self.settings = settings
        self._accumulated: dict[tuple[str, ...], list[Tensor | None]] = {}

    def descend(self, loss: Tensor, factor: float, parts: Sequence[str], steps_now: bool) -> None:
        """Backward, and step if it is time.

        Args:
            loss: what is minimised.
            factor: what a mean over this device's part of the mini-batch is worth.
            parts: those that step, and alone get a gradient; empty for all there are, without the latter.
            steps_now: whether enough mini-batches were accumulated.
        """
        names = tuple(name for name in parts if name in self.optimizers)
        if parts and not names:
            return
        share = factor / self.settings.accumulate
        optimizers = [self.optimizers[name] for name in names or self.optimizers]
        apart = bool(names) and self.settings.accumulate > 1
        parameters = trained_by(*optimizers) if names else []
        if apart:  # two losses may step on one part: while they accumulate, each keeps its gradients
            for parameter, gradient in zip(parameters, self._accumulated.pop(names, ()), strict=False):
                parameter.grad = gradient
        assert self.machine.backward is not None, "a step outside a fit cannot descend"
        own = {"inputs": parameters} if names else {}
        with self.machine.whole(), self.machine.wide():
            self.machine.backward(loss if share == 1 else loss * share, **own)
        if steps_now:
            self.step(optimizers)
        elif apart:
            self._accumulated[names] = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def follow(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], steps_now: bool) -> None:
        """Add gradients that were found by hand, and step if it is time."""
        scaler = self.machine.scaler
        for parameter, gradient in zip(parameters, gradients, strict=True):
            scaled = gradient if scaler is None else scaler.scale(gradient)  # its step divides again
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        if steps_now:
            self.step(list(self.optimizers.values()))

    def step(self, optimizers: Sequence[Any]) -> None:
        """Step on the gradients there are, with the trainer's precision and clipping, and clear them."""
        if self.machine.devices is not None:
            self.machine.devices.average_gradients(trained_by(*optimizers))
        for optimizer in optimizers:
            if self.machine.careful is not None:
                self.machine.careful.prepare_step(optimizer.optimizer)
            if self.machine.before_step is not None:
                self.machine.before_step(optimizer.optimizer)
            if self.settings.clips_itself:
                clip(self.settings, [optimizer])
            optimizer.step()
            if self.machine.after_step is not None:
                self.machine.after_step(optimizer.optimizer)
            optimizer.zero_grad()

    def skip(self, steps_now: bool) -> None:
        """A mini-batch adds nothing: step on what those before it have accumulated, if it is time."""
        optimizers = list(self.optimizers.values())
        if steps_now and any(parameter.grad is not None for parameter in trained_by(*optimizers)):
            self.step(optimizers)

    def end_bundle(self) -> None:
        """Several consecutive steps are done."""


def clip(settings: FitSettings, optimizers: Sequence[Any]) -> None:
    """Clip the gradients of some optimizers together, as a fit's settings say."""
    if settings.clip_value is None:
        return
    parameters = [own for own in trained_by(*optimizers) if own.grad is not None]
    if settings.clip_algorithm == "value":
        if parameters:  # torch's own function raises an error where there is no gradient at all
            nn.utils.clip_grad_value_(parameters, settings.clip_value)
    else:
        nn.utils.clip_grad_norm_(parameters, settings.clip_value)
