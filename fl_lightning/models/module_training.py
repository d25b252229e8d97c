"""The local fit of a user's own LightningModule: its training step, optimizers, schedulers and hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.errors import require
from fl_lightning.models.fit_optimizers import ConfiguredOptimizers, OwnOptimizers
from fl_lightning.models.head_cut import Joined, watched
from fl_lightning.models.module_hooks import STEPS, hooks_of, keeping_metrics, reset_metrics, with_fitting
from fl_lightning.models.module_optimizers import KEY, Stretch
from fl_lightning.models.module_view import FitView, Logged, PulledOptimizer, bring_together, is_careful
from fl_lightning.models.own_training import Clipping, MakeOptimizer, OwnTraining, Pass, Pull, SkippedBatch

_ENDLESS = 10**6  # steps of a fit that no schedule comes to the end of
_OF_FIT = ("steps", "present", "epoch", "batch", "num_steps", "logged_in_fit")  # what a module reads of its fit
_REPLACED = ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward")


class ModuleTraining(OwnTraining):
    """A LightningModule's own loss, optimizers, schedulers and hooks.

    Args:
        joined: the module.
        configured: whether the configuration's optimizer takes the place of its own.
    """

    has_loss = True

    def __init__(self, joined: Joined, configured: bool = False) -> None:
        self.joined = joined
        self.configured = configured
        self.has_optimizer = not configured
        self.steps_itself = not joined.module.automatic_optimization
        self.hooks = hooks_of(joined.module)
        self.watches = not self.steps_itself and not self.hooks.isdisjoint(STEPS)
        rule = "configured needs a module of automatic optimization, which makes no optimizer steps itself"
        require(not (configured and self.steps_itself), "model.optimizer", rule)
        self.stretches: list[Stretch] = []
        self.present = Stretch()
        self.epoch, self.num_steps = 0, 0
        self.batch = -1
        """The present mini-batch of the epoch; before the first one -1."""
        self.logged = Logged()
        self.logged_in_fit: dict[str, float] = {}
        """What is at hand in the fit, for schedulers and `trainer.callback_metrics`; what is kept from loggers, too."""
        self.logged_for_run: dict[str, float] = {}
        self.accumulate, self._lr_factor = 1, 1.0
        self.clipping: Clipping = None
        self._waits_for_end: tuple[Any, ...] = ()
        self.pull: Pull | None = None
        self._depth = 0  # of the blocks in which the module is whole
        self._skips = False  # the rest of the epoch
        self.has_passed = False
        """Whether a training pass waits for its way back."""
        self.trains = False
        """Whether the module was given a mini-batch in the fit; a method may train a copy of it alone."""

    # --- the module, whole, in its fit --------------------------------------------------------------------------------

    def __enter__(self) -> L.LightningModule:
        module = self.joined.__enter__().module
        self._depth += 1
        module.trainer = FitView(self)  # type: ignore[assignment]
        own = (self.logged.log, self.logged.log_dict, self.optimizers, self.lr_schedulers, self.manual_backward)
        module.__dict__.update(zip(_REPLACED, own, strict=True))
        return module

    def __exit__(self, *exception: object) -> None:
        module = self.joined.module
        self._depth -= 1
        if not self._depth:  # a hook within a training step that steps by itself: the rest of it needs them, too
            for name in _REPLACED:
                module.__dict__.pop(name, None)
            module.trainer = None  # type: ignore[assignment]
        self.joined.__exit__()

    def _call(self, hook: str, *arguments: Any) -> Any:
        """Call one of the module's hooks, with as many arguments as it takes; None where it has none of its own."""
        if hook not in self.hooks:
            return None
        around, self.logged.hook = self.logged.hook, hook
        try:
            with self as module:
                return with_fitting(getattr(module, hook), arguments)
        finally:
            self.logged.hook = around

    @override
    def beside(self, copies: Sequence[OwnTraining]) -> OwnTraining:
        others = [copy for copy in copies if isinstance(copy, ModuleTraining)]
        return Together([self, *others]) if others else self

    # --- optimizers ---------------------------------------------------------------------------------------------------

    @override
    def optimizer(
        self, configured: MakeOptimizer, accumulate: int, lr_factor: float, clipping: Clipping = None
    ) -> MakeOptimizer:
        rule = "must be left out: the module steps by itself (manual optimization)"
        require(not (self.steps_itself and accumulate > 1), "trainer.accumulate_grad_batches", rule)
        require(not (self.steps_itself and clipping), "trainer.gradient_clip_val", rule)
        self.stretches, self.present = [], Stretch()
        self.epoch, self.batch, self.num_steps, self.trains = 0, -1, 0, False
        self._reset_metrics()  # those of a fit that broke off
        self.logged, self.logged_in_fit, self.logged_for_run = Logged(), {}, {}
        self.accumulate, self._lr_factor, self.clipping = accumulate, lr_factor, clipping
        return ConfiguredOptimizers([self], configured) if self.configured else OwnOptimizers([self])

    @override
    def plan(self, epochs: int, last: int | None = None) -> None:
        self.present = Stretch(epochs, last)
        self.stretches.append(self.present)

    def make(self, parameters: list[nn.Parameter], in_fit: bool = True) -> list[Any]:
        """The module's optimizers, of some parameters; those that are not the module's are added to the first.

        Args:
            parameters: what they train.
            in_fit: false outside a fit, whose length no schedule knows: the learning rate stays as it is given, and
                one steps for all.
        """
        fit = {name: getattr(self, name) for name in _OF_FIT}
        if not in_fit:  # at the beginning of a schedule, whoever was fitted last
            self.steps, self.present = _ENDLESS, Stretch()
            self.epoch, self.batch, self.num_steps, self.logged_in_fit = 0, -1, 0, {}
        stretch = Stretch()
        try:
            with self as module:
                theirs = {id(parameter) for parameter in module.parameters()}
                stretch.configure(module)
        finally:
            vars(self).update(fit)
        stretch.narrow(parameters, theirs)
        if not in_fit:
            return [stretch.unmoved()]
        stretch.scale(self._lr_factor)
        if not self.steps_itself:
            stretch.step_with_optimizer(lambda: self.batch + 1, self)
        self.present.schedulers += stretch.schedulers
        self.present.add(stretch.optimizers, self.after_step)
        return stretch.optimizers

    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer of the present phase, and its schedule, start from a learning rate of the first round's.

        Returns:
            False, and does nothing, where no schedule moves all of its groups.
        """
        return self.present.rescale(optimizer, lr * self._lr_factor)

    @override
    def one_optimizer(self) -> Any:
        if self.configured:
            return None
        made = [optimizer for stretch in self.stretches for optimizer in stretch.optimizers]
        rates = {float(group["lr"]) for optimizer in made for group in optimizer.param_groups}
        moved = any(stretch.schedulers for stretch in self.stretches)
        rule = "the method reckons with one learning rate a fit, and the module's own optimizers have"
        require(not moved, KEY, f"{rule} a schedule; say optimizer: configured")
        require(len(rates) < 2, KEY, f"{rule} several; say optimizer: configured", sorted(rates))
        return made[0] if made else None

    # --- a fit --------------------------------------------------------------------------------------------------------

    @override
    def start_fit(self) -> None:
        self._call("on_fit_start")
        self._call("on_train_start")

    @override
    def start_epoch(self, phase: int, epoch: int, calls: bool = True) -> None:
        self.epoch, self.batch, self._skips = epoch, -1, False
        self.present = self.stretches[phase] if self.stretches else Stretch()
        if calls:
            self._call("on_train_epoch_start")
            _forget(self, "on_train_epoch_start")

    @override
    def logged_in_epoch(self) -> dict[str, float]:
        return self.logged.means(_on_all_devices(self))

    @override
    def end_epoch(self) -> Mapping[str, float]:
        self.logged.counts = True
        _step_schedulers(self)
        self._call("on_train_epoch_end")
        parts = _on_all_devices(self)
        logged = self.logged.means(parts)
        self.logged_in_fit |= logged
        self.logged_for_run |= self.logged.means(parts, for_run=True)
        _step_schedulers(self, self.logged_in_fit)
        self._reset_metrics()
        self.logged = Logged()
        return logged

    def _reset_metrics(self) -> None:
        reset_metrics(self.joined.module)
        self.logged.reset_metrics()

    @override
    def end_fit(self) -> None:
        self.epoch += 1
        self._call("on_train_end")
        self._call("on_fit_end")
        self.stretches, self.present, self.machine, self.pull = [], Stretch(), None, None

    @override
    def end_batch(self) -> None:
        if self._waits_for_end:
            self._call("on_train_batch_end", *self._waits_for_end)
            self._waits_for_end = ()

    @override
    def whole(self) -> AbstractContextManager[Any]:
        return self

    @override
    def watched(self, backward: Callable[..., None]) -> Callable[..., None]:
        def go_back(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._call("on_before_backward", loss)
            backward(loss, *args, **kwargs)
            if self.steps_itself or "on_after_backward" in self.hooks:  # there, as under Lightning's own DDP
                bring_together(self)
            self._call("on_after_backward")

        return go_back

    @override
    def before_step(self, optimizer: Any) -> None:
        if any(optimizer is own for own in self.present.optimizers):
            self._call("on_before_optimizer_step", optimizer)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """One of the phase's optimizers has stepped."""
        self.num_steps += 1
        if not self.steps_itself:  # else the module calls zero_grad by itself, as in Lightning
            self._call("on_before_zero_grad", optimizer)

    @override
    def training_pass(self, x: Tensor, y: Tensor, pull: Pull, again: bool = False) -> Pass:
        self.pull = pull
        self.batch += not again
        self.logged.batch_size, self.logged.counts = len(y), self.counts
        batch, index = _transferred(self, [x, y]), self.batch
        self._skips = self._skips or (not again and self._call("on_train_batch_start", batch, index) == -1)
        if self._skips:
            raise SkippedBatch
        if not again and index % self.accumulate == 0:
            _forget(self, "on_train_batch_start")
        self.logged.loss = None
        seen: list[tuple[Tensor, Tensor]] = []
        with self as module:
            handle = watched(self.joined.head, seen)
            try:
                with nullcontext() if self.counts else keeping_metrics(module):
                    said = with_fitting(module.training_step, (batch, index))
            finally:
                handle.remove()
        self.has_passed = self.trains = True
        loss = said.get("loss") if isinstance(said, Mapping) else said
        self._waits_for_end = said if self.steps_itself else _outputs(said, loss, self.accumulate), batch, index
        if self.steps_itself:
            loss = self.logged.loss if loss is None else loss
            loss = None if loss is None else loss.detach().to(x.device)
        elif loss is None:
            raise SkippedBatch
        return Pass(*_at_head(self.joined, seen, x), loss)

    # --- what the module calls ----------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """In place of Lightning's: the present phase's."""
        own = [PulledOptimizer(optimizer, self) for optimizer in self.present.optimizers]
        return own[0] if len(own) == 1 else own

    def lr_schedulers(self) -> Any:
        """In place of Lightning's."""
        own = [config.scheduler for config in self.present.schedulers]
        return None if not own else own[0] if len(own) == 1 else own

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of Lightning's."""
        if loss.requires_grad:  # a phase may have frozen all that it reaches
            own = loss if self.devices is None else loss * self.factor
            backward = Tensor.backward if self.machine is None else self.machine.backward
            with self.machine.wide() if is_careful(self) else nullcontext():
                self.watched(backward)(own, *args, **kwargs)


def _at_head(joined: Joined, seen: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """The embedding [B, D] and logits [B, C] that the head has seen of a mini-batch; else made, without gradients."""
    for z, logits in seen:
        if len(z) == len(x):
            return z, logits
    with torch.no_grad():  # of a step that does not classify: the run's own terms may ask for it still
        z = joined.embed(x)
        return z, joined.head(z)


def _on_all_devices(training: ModuleTraining) -> list[Any]:
    """What each device that shares a fit has logged in the epoch, by rank; nothing for a fit on one."""
    return [] if training.devices is None else training.devices.gather(training.logged.numbers())


def _step_schedulers(training: ModuleTraining, logged: Mapping[str, float] | None = None) -> None:
    """Step, at an epoch's end, the schedules that watch nothing, or those that watch what was logged."""
    if not training.steps_itself:
        with training:  # one may read the module's epoch
            training.present.end_epoch(training.epoch, logged)


def _forget(training: ModuleTraining, hook: str) -> None:
    """Clear, as Lightning does before a step, what has gathered in parameters that a hook may have added."""
    adds = hook in training.hooks and not training.steps_itself
    for optimizer in training.present.optimizers if adds else ():
        optimizer.zero_grad()


def _outputs(said: Any, loss: Any, accumulate: int) -> Any:
    """What `on_train_batch_end` gets of an automatic training step, as Lightning makes it."""
    if not isinstance(loss, Tensor):
        return said
    return {**(said if isinstance(said, Mapping) else {}), "loss": loss.detach() / accumulate}


class Together(OwnTraining):
    """The share of a module and of its copies that learn beside it: what the fit says goes to all of them.

    Args:
        homes: their own shares, the module's first.
    """

    has_loss = True

    def __init__(self, homes: Sequence[ModuleTraining]) -> None:
        self.homes = list(homes)
        self.has_optimizer, self.steps_itself = homes[0].has_optimizer, homes[0].steps_itself
        self.watches, self.logs = homes[0].watches, homes[0].logs
        self._training = self.homes
        """Those of which the present phase trains something: of others no epoch begins or ends."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for home in self.homes if name in ("steps", "most_steps", "devices", "machine") else ():
            setattr(home, name, value)

    @override
    def optimizer(
        self, configured: MakeOptimizer, accumulate: int, lr_factor: float, clipping: Clipping = None
    ) -> MakeOptimizer:
        for home in self.homes:
            home.optimizer(configured, accumulate, lr_factor, clipping)
        return OwnOptimizers(self.homes) if self.has_optimizer else ConfiguredOptimizers(self.homes, configured)

    @override
    def plan(self, epochs: int, last: int | None = None) -> None:
        for home in self.homes:
            home.plan(epochs, last)

    @override
    def start_fit(self) -> None:
        for home in self.homes:
            home.start_fit()

    @override
    def start_epoch(self, phase: int, epoch: int) -> None:
        self._training = [home for home in self.homes if home.stretches[phase].trains] or self.homes
        for home in self.homes:
            home.start_epoch(phase, epoch, home in self._training)

    @override
    def end_batch(self) -> None:
        for home in self.homes:
            home.end_batch()

    @override
    def logged_in_epoch(self) -> Mapping[str, float]:
        return self._shown([home.logged_in_epoch() for home in self.homes])

    @override
    def end_epoch(self) -> Mapping[str, float]:
        return self._shown([home.end_epoch() if home in self._training else {} for home in self.homes])

    def _shown(self, each: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Of what each home has logged, that of the first that trains."""
        return next((own for own, home in zip(each, self.homes, strict=True) if home.trains), each[0])

    @override
    def end_fit(self) -> None:
        for home in self.homes:
            home.end_fit()
        self.machine = None
        self.logged_for_run = self._shown([home.logged_for_run for home in self.homes])

    @override
    def whole(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for home in self.homes:
            stack.enter_context(home)
        return stack

    @override
    def watched(self, backward: Callable[..., None]) -> Callable[..., None]:
        ways = {id(home): home.watched(backward) for home in self.homes}

        def go_back(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            passed = next((home for home in self.homes if home.has_passed), self.homes[0])
            passed.has_passed = False
            ways[id(passed)](loss, *args, **kwargs)

        return go_back

    @override
    def before_step(self, optimizer: Any) -> None:
        for home in self.homes:
            home.before_step(optimizer)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _transferred(training: ModuleTraining, batch: Any) -> Any:
    """A mini-batch as a module's hooks of the transfer make it; it is on the training device already."""
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        batch = training._call(hook, batch, 0) if hook in training.hooks else batch
    return batch
