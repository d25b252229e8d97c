"""Optimizer steps under mixed and half precision: in float32, of unscaled gradients.

Micikevicius et al., "Mixed Precision Training", ICLR 2018: a step that is small beside its weight is lost in half
precision, and so is a small gradient in float16. Hence float32 copies of the weights to step on, and a scaled loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from fl_lightning.core.precision import Wide
from fl_lightning.models.encoders import attention_step_by_step
from fl_lightning.models.own_training import trained_by
from fl_lightning.own_methods import overrides

if TYPE_CHECKING:
    from torch.optim import Optimizer

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
"""What `trainer.precision` may be; Lightning's short forms (32, "bf16", …) are allowed, too."""
SHORT_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
HALF = (torch.bfloat16, torch.float16)


class CarefulSteps(Precision):
    """Optimizer steps of a client under mixed or half precision.

    With a scaler, its scale changes once an effective mini-batch, after all optimizers' steps: several may follow one
    backward pass, and one may step several times, and what was scaled together must be unscaled by the same number. The
    scale is a buffer of the client, ``loss_scale`` (the scale, and steps since it changed): neither the order of
    clients nor a resumption changes it, and a client need not search for it in every fit.
    """

    scaler: torch.amp.GradScaler | None = None
    widens = False
    """Whether steps are made on float32 copies."""

    @property
    def scales(self) -> bool:
        """Whether losses are scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give a client's method its loss scale."""
        home = getattr(module, "method", module)
        if self.scaler is not None and self.scales and "loss_scale" not in home._buffers:
            home.register_buffer("loss_scale", torch.tensor([self.scaler.get_scale(), 0.0]))
        return self._convert(module)

    def _convert(self, module: nn.Module) -> nn.Module:
        return module

    def start_fit(self, module: nn.Module) -> None:
        """Take up the client's loss scale."""
        self._prepared: dict[int, _OneStep] = {}
        self._taken: list[_OneStep] = []
        if self.scaler is not None and self.scales:
            scale, steps = module.get_buffer("loss_scale").tolist()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(steps)})

    def end_fit(self, module: nn.Module) -> None:
        """Leave the loss scale with the client."""
        if self.scaler is not None and self.scales:
            state = self.scaler.state_dict()
            module.get_buffer("loss_scale").copy_(torch.tensor([state["scale"], state["_growth_tracker"]]))

    def break_off(self) -> None:
        """Leave what a step has taken in which a fit broke off."""

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer that is about to step, so that they can be clipped."""
        if self.scaler is not None and self.scales and _has_gradient(optimizer):
            # Torch keeps one state an optimizer and refuses a second step before the next update.
            self._prepared[id(optimizer)] = step = _OneStep(optimizer)
            self.scaler.unscale_(step)  # type: ignore[arg-type]

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **arguments: Any
    ) -> Any:
        """Step, unless a gradient is not finite where losses are scaled; without a model no callback hears of it."""
        closure()
        if id(optimizer) not in self._prepared:
            self.prepare_step(optimizer)
        if model is not None:
            self._after_closure(model, optimizer)
        step = self._prepared.pop(id(optimizer), None)
        if self.scaler is None or step is None:
            return optimizer.step(**arguments)
        self._taken.append(step)
        return self.scaler.step(step, **arguments)  # type: ignore[arg-type]

    def end_batch(self) -> None:
        """Let the scale follow the steps of an effective mini-batch."""
        if self.scaler is not None and self._taken:
            self.scaler.update()
            self._taken.clear()


class _OneStep:
    """An optimizer as the scaler sees it, for one step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.step = optimizer.step


class MixedSteps(CarefulSteps, MixedPrecision):
    """Lightning's mixed precision: weights in float32, forward passes under autocast."""

    def autocast_context_manager(self) -> torch.autocast:
        """Lightning's, in which no cast of a weight is kept; before 2.5.5 they were for as long as its step lasts."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.half
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast, of attention, too."""
        with super().forward_context(), attention_step_by_step():
            yield


class HalfLayers(CarefulSteps, HalfPrecision):
    """Lightning's half precision for layers; `keeps_float32` says what stays wide, and optimizers step in float32.

    During a fit every parameter in half precision has a float32 copy on which optimizers step (clipping, momentum and
    weight decay included) and of which it is the rounded value; the copies end with the fit. Under float16 the loss is
    scaled.

    Args:
        precision: ``bf16-true`` or ``16-true``.
        device: the training device's type, for the scaler.
        scaler: scales the loss; by default one under ``16-true``.
    """

    widens = True

    def __init__(self, precision: str, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        super().__init__(precision)  # type: ignore[arg-type]
        self.scaler = torch.amp.GradScaler(device) if scaler is None and precision == "16-true" else scaler
        self._copies: dict[int, Tensor] = {}
        self._stored: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def _convert(self, module: nn.Module) -> nn.Module:
        """Narrow all layers but those that keep float32."""
        for part in module.modules():
            if not keeps_float32(part):
                part._apply(self._narrowed, recurse=False)
        return module

    def _narrowed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._desired_input_dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Leave torch's default type as it is: what losses, terms and metrics make and count with stays float32."""
        yield

    def start_fit(self, module: nn.Module) -> None:
        """Begin with the rounded weights: nothing but the client's state crosses a round."""
        super().start_fit(module)
        self._copies.clear()

    def end_fit(self, module: nn.Module) -> None:
        """Drop the copies."""
        super().end_fit(module)
        self._copies.clear()

    def break_off(self) -> None:
        """Narrow the parameters again that were to step, for the clients that come next."""
        for parameter, narrow in self._stored.values():
            parameter.grad = None
            parameter.data = narrow
        self._stored.clear()

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:  # type: ignore[override]
        """Scale the loss under float16."""
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Put parameters and gradients of an optimizer that is about to step into float32."""
        for parameter in trained_by(optimizer):
            if parameter.dtype in HALF and parameter.grad is not None:
                gradient, narrow = parameter.grad.float(), parameter.data
                parameter.grad = None
                self._stored[id(parameter)] = parameter, narrow
                parameter.data = self._copy(parameter)
                parameter.grad = gradient
        super().prepare_step(optimizer)

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        """The float32 copy; what changed the parameter since the last step (a clamp, loaded weights) wins over it."""
        narrow = parameter.data
        known = self._copies.get(id(parameter))
        return narrow.float() if known is None else torch.where(known.to(narrow.dtype) == narrow, known, narrow.float())

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **arguments: Any
    ) -> Any:
        """Step in float32, then round the parameters."""
        result = super().optimizer_step(optimizer, model, closure, **arguments)
        for parameter in trained_by(optimizer):
            taken = self._stored.pop(id(parameter), None)
            if taken is not None:
                self._copies[id(parameter)] = wide = parameter.data
                parameter.grad = None
                parameter.data = taken[1].copy_(wide)
        return result


class ReadsWide(Precision):
    """Float32 for clients that were trained in float16: their loss scale is a part of their state, and does nothing."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give a client's method the place of its loss scale."""
        getattr(module, "method", module).register_buffer("loss_scale", torch.zeros(2))
        return module


def careful(plugin: Precision, device: str) -> Precision:
    """Lightning's mixed or half precision with steps that are right for clients; any other plugin as it is.

    Args:
        plugin: the Trainer's.
        device: the training device's type.
    """
    if type(plugin) is MixedPrecision:
        return MixedSteps(plugin.precision, plugin.device, plugin.scaler)
    return HalfLayers(plugin.precision, device) if type(plugin) is HalfPrecision else plugin


def keeps_casts(plugin: Precision) -> bool:
    """Whether a plugin has contexts of its own, in which torch's autocast may keep casts of weights over several steps.

    Ours for mixed precision keeps none, and Lightning's others cast nothing as they go.
    """
    known = isinstance(plugin, (MixedSteps, HalfPrecision, DoublePrecision))
    names = ("forward_context", "train_step_context")
    return not known and any(overrides(type(plugin), Precision, name) for name in names)


def keeps_float32(module: nn.Module) -> bool:
    """Whether a module's own parameters and buffers (not its submodules') stay in float32 under half precision.

    Batch norm does, because a running mean moves by less than half precision can tell; so do methods and terms, and
    metrics, which count samples.
    """
    return isinstance(module, (_BatchNorm, Metric, Wide))


class WideCopies:
    """Parameters to step on by an optimizer of their own: float32 copies of narrow ones, the others themselves.

    Args:
        parameters: those of a module.
        make_optimizer: makes the optimizer, of a list of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], make_optimizer: Callable[[Any], Optimizer]) -> None:
        self.own = list(parameters)
        self._wide: list[Any] = [p.detach().float().requires_grad_() if p.dtype in HALF else p for p in self.own]
        self._optimizer = make_optimizer(self.own)
        stepped = {id(own): wide for own, wide in zip(self.own, self._wide, strict=True)}
        for group in self._optimizer.param_groups:  # made of the parameters themselves, which groups may be told by
            group["params"][:] = [stepped[id(own)] for own in group["params"]]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step by gradients that the parameters have; theirs are narrowed after it."""
        for wide, gradient in zip(self._wide, gradients, strict=True):
            wide.grad = gradient.to(wide.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for own, wide in zip(self.own, self._wide, strict=True):
                if own is not wide:
                    own.copy_(wide)


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in trained_by(optimizer))
