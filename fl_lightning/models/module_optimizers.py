"""A LightningModule's own optimizers and schedulers, over the phases of a local fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fl_lightning.errors import ConfigError, require

KEY = "model.module"
_STARTS = ("initial_lr", "max_lr", "min_lr", "swa_lr")  # what schedulers of torch's keep in an optimizer's groups


class Stretch:
    """Optimizers and schedulers of one phase of a fit.

    Args:
        epochs: of the phase.
        last: mini-batches of its last one, where that is cut short; None for all.
    """

    def __init__(self, epochs: int = 1, last: int | None = None) -> None:
        self.epochs, self.last = epochs, last
        self.optimizers: list[Any] = []
        """The module's, without the parameters that the phase does not train."""
        self.trains = False
        """Whether any of them is the module's."""
        self.schedulers: list[Any] = []
        """Lightning's configurations of its schedulers."""

    def configure(self, module: L.LightningModule) -> None:
        """Take the module's own.

        Raises:
            ConfigError: if there is none, or there are several without manual optimization.
        """
        name = type(module).__name__
        said = module.configure_optimizers()
        rule = f"{name}'s configure_optimizers must return an optimizer; or say optimizer: configured"
        require(said is not None, KEY, rule)
        try:
            optimizers, schedulers, monitor = _configure_optimizers(said)  # type: ignore[arg-type]
            if module.automatic_optimization:
                schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)
            else:
                schedulers = _configure_schedulers_manual_opt(schedulers)
        except MisconfigurationException as error:
            raise ConfigError(KEY, f"{name}'s configure_optimizers: {error}") from error
        several = f"{name} has {len(optimizers)} optimizers, which needs self.automatic_optimization = False"
        require(len(optimizers) == 1 or not module.automatic_optimization, KEY, several)
        by_step = any(own.reduce_on_plateau and own.interval == "step" for own in schedulers)
        rule = f"{name}'s ReduceLROnPlateau must have interval: epoch, after which a local fit knows what it watches"
        require(not (by_step and module.automatic_optimization), KEY, rule)
        self.optimizers, self.schedulers = list(optimizers), list(schedulers)

    def add(self, optimizers: Sequence[Any], after_step: Callable[..., None]) -> None:
        """Take optimizers into the phase.

        Args:
            optimizers: made for it.
            after_step: called with one that has stepped.
        """
        for optimizer in optimizers:
            optimizer.register_step_post_hook(after_step)
        self.optimizers += optimizers

    def narrow(self, parameters: Sequence[nn.Parameter], theirs: set[int]) -> None:
        """Train these parameters alone; those that are not the module's join the first optimizer's first group.

        A group of their own would have no part in the schedule that moves the others.

        Args:
            parameters: what the phase trains.
            theirs: ids of the module's parameters.
        """
        wanted = {id(parameter) for parameter in parameters}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        known = {id(parameter) for group in groups for parameter in group["params"]}
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        rest = [parameter for parameter in parameters if id(parameter) not in theirs | known]
        if rest:
            self.optimizers[0].param_groups[0]["params"] += rest

    def scale(self, factor: float) -> None:
        """Decay from round to round what schedulers start from; the rates themselves are the fit's to scale."""
        if factor != 1:
            for optimizer in self.optimizers:
                self._multiply(optimizer, [factor] * len(optimizer.param_groups), _STARTS)

    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer's groups, and the schedulers that move them, start from a learning rate.

        Returns:
            False, and does nothing, where no schedule moves all of them.
        """
        bases = [group.get("initial_lr") for group in optimizer.param_groups]
        if not all(bases):
            return False
        self._multiply(optimizer, [lr / base for base in bases], ("lr", *_STARTS))
        return True

    def tune(self, optimizer: Any, change: Callable[[Any], None]) -> None:
        """Change an optimizer; its schedulers start from where that leaves its learning rates.

        The change is asked for at what the schedule starts from: where that warms up, the rate of the first step is 0.
        """
        moved = [(group, group["lr"]) for group in optimizer.param_groups if group.get("initial_lr")]
        for group, _ in moved:
            group["lr"] = group["initial_lr"]
        change(optimizer)
        factors = {id(group): group["lr"] / group["initial_lr"] for group, _ in moved}
        for group, rate in moved:
            group["lr"] = rate
        if moved:
            every = [factors.get(id(group), 1.0) for group in optimizer.param_groups]
            self._multiply(optimizer, every, ("lr", *_STARTS))

    def _multiply(self, optimizer: Any, factors: Sequence[float], keys: Sequence[str]) -> None:
        """Multiply an optimizer's learning rates, and what its schedulers start from, by a factor a group."""
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            for key in keys:
                if key in group:
                    group[key] *= factor
        for own in (inner for config in self.schedulers for inner in _within(config.scheduler)):
            for rates in ("base_lrs", "max_lrs"):  # the latter are a CyclicLR's
                if hasattr(own, rates) and own.optimizer is optimizer:
                    scaled = [rate * factor for rate, factor in zip(getattr(own, rates), factors, strict=True)]
                    setattr(own, rates, scaled)

    def unmoved(self) -> Any:
        """The optimizers as one, each at the learning rate that its schedule would have begun from."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group.pop("initial_lr", group["lr"])
        return self.optimizers[0] if len(self.optimizers) == 1 else AsOne(self.optimizers)

    def step_with_optimizer(self, batch: Callable[[], int], whole: AbstractContextManager[Any]) -> None:
        """Let steps of the first optimizer step the schedulers that go by the step, as Lightning's fit does.

        Args:
            batch: the number of the present mini-batch in its epoch, from 1, by which their `frequency` goes.
            whole: the module's, in which they may read its epoch; entered once a step.
        """
        self.optimizers[0].register_step_post_hook(_stepping(self.schedulers, batch, whole))

    def end_epoch(self, epoch: int, logged: Mapping[str, float] | None) -> None:
        """Step the schedulers that go by the epoch; as in Lightning those that watch something after the module's hook.

        Args:
            epoch: that ends; counts from 0.
            logged: what a scheduler may watch; None for those that watch nothing.

        Raises:
            ConfigError: if one watches what was not logged.
        """
        for config in self.schedulers:
            watches = logged is not None
            if config.interval != "epoch" or (epoch + 1) % config.frequency or config.reduce_on_plateau != watches:
                continue
            if logged is None:
                config.scheduler.step()
                continue
            if config.monitor not in logged and not config.strict:
                continue  # as in Lightning
            if config.monitor not in logged:
                rule = "schedulers can watch what training_step logs; a local fit has no validation"
                raise ConfigError(KEY, rule, config.monitor)
            config.scheduler.step(logged[config.monitor])


class AsOne:
    """Several optimizers that are stepped as one, outside a fit, where no training step of the module's says which.

    Args:
        optimizers: they have no parameter in common.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.defaults = dict(optimizers[0].defaults)

    def step(self) -> None:
        """Step all."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def _within(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it is made of (`SequentialLR`, `ChainedScheduler`)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _within(inner)


def _stepping(
    schedulers: Sequence[Any], batch: Callable[[], int], whole: AbstractContextManager[Any]
) -> Callable[..., None]:
    """What steps schedulers by the step, called after every step of their optimizer."""
    by_step = [config for config in schedulers if config.interval == "step"]

    def step(*_: Any) -> None:
        number = batch()
        due = [config.scheduler for config in by_step if number % config.frequency == 0]
        with whole if due else nullcontext():
            for scheduler in due:
                scheduler.step()

    return step
