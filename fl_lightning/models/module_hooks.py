"""Which hooks a user's own LightningModule overrides: those that a federated fit calls, and those that it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import Tensor

from fl_lightning.errors import ConfigError
from fl_lightning.models.module_optimizers import KEY
from fl_lightning.own_methods import overrides

CALLED = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start", "on_train_batch_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
)  # fmt: skip
"""Hooks that are called in a local fit; `setup` and `configure_model` are once, before it."""
STEPS = CALLED[-4:]
"""Those around a backward pass and an optimizer's step."""
UNTRIED = frozenset({"on_train_batch_end", "on_train_epoch_end", *STEPS})
"""Those that may log something, and that nothing calls before the first fit."""

_STEPS_BY_HAND = "on_before_optimizer_step is called, and manual optimization steps by itself"
REFUSED: Mapping[str, str] = {
    "backward": "on_before_backward and on_after_backward are",
    "manual_backward": "on_before_backward and on_after_backward are",
    "optimizer_step": _STEPS_BY_HAND,
    "optimizer_zero_grad": "on_before_zero_grad is",
    "configure_gradient_clipping": "use trainer.gradient_clip_val, or on_before_optimizer_step",
    "lr_scheduler_step": "use a scheduler whose step() takes nothing",
    "optimizers": _STEPS_BY_HAND,
    "lr_schedulers": "use manual optimization, which steps schedulers by itself",
    "transfer_batch_to_device": "on_after_batch_transfer is",
    "configure_callbacks": "use trainer.callbacks",
    "configure_sharded_model": "configure_model is",
    "training_epoch_end": "of Lightning 1; on_train_epoch_end is",
    "training_step_end": "of Lightning 1; do it in training_step",
    "on_save_checkpoint": "keep in parameters or persistent buffers what a client must keep",
}
"""Hooks that would change the training and are not called, and what to do instead."""


def hooks_of(module: L.LightningModule) -> frozenset[str]:
    """Names of the hooks in a fit that a module overrides.

    Raises:
        ConfigError: for one that a federated fit does not call.
    """
    for hook, instead in REFUSED.items():
        if overrides(type(module), L.LightningModule, hook):
            raise ConfigError(KEY, f"{type(module).__name__} overrides {hook}, which is not called here; {instead}")
    return frozenset(hook for hook in CALLED if overrides(type(module), L.LightningModule, hook))


def build(module: L.LightningModule) -> None:
    """Let a module make what it makes in `setup` and `configure_model`, in Lightning's order.

    Raises:
        ConfigError: if that fails.
    """
    for hook, arguments in (("setup", ["fit"]), ("configure_model", [])):
        try:
            with_fitting(getattr(module, hook), arguments)
        except Exception as error:  # whatever a module of the user's own raises
            said = (str(error).splitlines() or [""])[0]
            rule = f"{type(module).__name__}'s {hook} fails ({type(error).__name__}: {said})"
            raise ConfigError(KEY, rule) from error


def reset_metrics(module: L.LightningModule) -> None:
    """One resident module serves all clients: what torchmetrics has counted of one must not reach the next."""
    from torchmetrics import Metric

    for part in module.modules():
        if isinstance(part, Metric):
            part.reset()


@contextmanager
def keeping_metrics(module: L.LightningModule) -> Iterator[None]:
    """Take back what a module's metrics hear inside: of a sample that another device counts.

    They have heard something all the same: devices wait for one another where a metric is computed, and all must come.
    """
    from torchmetrics import Metric

    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    kept = [(part.update_count, {name: _copied(getattr(part, name)) for name in part._defaults}) for part in metrics]
    yield
    for part, (count, state) in zip(metrics, kept, strict=True):
        for name, before in state.items():
            setattr(part, name, before or _emptied(getattr(part, name)) if isinstance(before, list) else before)
        part._update_count, part._computed = max(count, min(part.update_count, 1)), None


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return list(state) if isinstance(state, list) else state.clone()


def _emptied(state: list[Tensor]) -> list[Tensor]:
    """The same without rows: devices bring together what is of one type and as many axes."""
    return [(own if own.ndim else own[None])[:0] for own in state]


def with_fitting(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function with as many of the arguments as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return function(*arguments)
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*arguments[: len(places)])
