"""The local fit of a user's own LightningModule: its training step, optimizers, schedulers and hooks."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.head_cut import Joined
from fl_lightning.models.own_training import MakeOptimizer, OwnTraining, Pass, Pull

KEY = "model.module"
_STARTS = ("initial_lr", "max_lr", "min_lr")  # what schedulers of torch's keep in an optimizer's groups
_ENDLESS = 10**6  # steps of a fit that no schedule comes to the end of


class Stretch:
    """Optimizers and schedulers of one phase of a fit.

    Args:
        epochs: of the phase.
    """

    def __init__(self, epochs: int = 1) -> None:
        self.epochs = epochs
        self.optimizers: list[Any] = []
        """The module's, without the parameters that the phase does not train."""
        self.schedulers: list[Any] = []
        """Lightning's configurations of its schedulers."""


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
        rule = "configured needs a module of automatic optimization, which makes no optimizer steps itself"
        require(not (configured and self.steps_itself), "model.optimizer", rule)
        self.stretches: list[Stretch] = []
        self.present = Stretch()
        self.epoch, self.batch, self.done = 0, 0, 0
        self.logged: dict[str, list[float]] = {}
        self.accumulate, self._lr_factor = 1, 1.0
        self._waits_for_end: tuple[Any, ...] = ()

    # --- the module, whole, in its fit --------------------------------------------------------------------------------

    def __enter__(self) -> L.LightningModule:
        module = self.joined.__enter__().module
        module.trainer = FitView(self)  # type: ignore[assignment]
        own = (self.log, self.log_dict, self.optimizers, self.lr_schedulers, self.manual_backward)
        module.__dict__.update({method.__name__: method for method in own})
        return module

    def __exit__(self, *exception: object) -> None:
        module = self.joined.module
        for name in ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward"):
            module.__dict__.pop(name, None)
        module.trainer = None  # type: ignore[assignment]
        self.joined.__exit__()

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call one of the module's hooks, with as many arguments as it takes."""
        method = getattr(self.joined.module, hook)
        if method.__func__ is not getattr(L.LightningModule, hook, None):
            with self as module:
                _with_fitting(getattr(module, hook), arguments)

    # --- optimizers ---------------------------------------------------------------------------------------------------

    @override
    def optimizer(
        self, configured: MakeOptimizer, accumulate: int, lr_factor: float, clips: bool = False
    ) -> MakeOptimizer:
        rule = "must be left out: the module steps by itself (manual optimization)"
        require(not (self.steps_itself and accumulate > 1), "trainer.accumulate_grad_batches", rule)
        require(not (self.steps_itself and clips), "trainer.gradient_clip_val", rule)
        self.stretches, self.present = [], Stretch()
        self.accumulate, self._lr_factor = accumulate, lr_factor
        return configured if self.configured else OwnOptimizers(self, configured)

    @override
    def plan(self, epochs: int) -> None:
        self.present = Stretch(epochs)
        self.stretches.append(self.present)

    def make(self, parameters: list[nn.Parameter], configured: MakeOptimizer, in_fit: bool = True) -> Any:
        """The module's optimizers, of some parameters; those that are not the module's are added to the first.

        Args:
            parameters: what they train.
            configured: makes the optimizer of parameters none of which is the module's.
            in_fit: false outside a fit, whose length no schedule knows: the learning rate stays as it is given.
        """
        wanted = {id(parameter) for parameter in parameters}
        length = self.steps, self.present
        if not in_fit:  # at the beginning of a schedule, whoever was fitted last
            self.steps, self.present = _ENDLESS, Stretch(1)
        try:
            with self as module:
                theirs = {id(parameter) for parameter in module.parameters()}
                if not wanted & theirs:
                    return configured(parameters)
                optimizers, schedulers = _parsed(module)
        finally:
            self.steps, self.present = length
        known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        rest = [parameter for parameter in parameters if id(parameter) not in theirs | known]
        if rest:
            optimizers[0].add_param_group({"params": rest})
        if not in_fit:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group.pop("initial_lr", group["lr"])
            return optimizers[0]
        self._scale(optimizers, schedulers)
        if not self.steps_itself:
            optimizers[0].register_step_post_hook(_stepping(schedulers))
        self.present.optimizers += optimizers
        self.present.schedulers += schedulers
        return optimizers[0]

    def _scale(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Decay from round to round: what schedulers start from, and further optimizers, which nobody else scales."""
        if self._lr_factor != 1:
            for number, optimizer in enumerate(optimizers):
                factors = [self._lr_factor] * len(optimizer.param_groups)
                _multiply(optimizer, schedulers, factors, _STARTS if number == 0 else ("lr", *_STARTS))

    def rescale(self, optimizer: Any, lr: float) -> bool:
        """Let an optimizer's groups, and the schedulers that move them, start from a learning rate.

        Returns:
            False, and does nothing, where no schedule moves all of them.
        """
        bases = [group.get("initial_lr") for group in optimizer.param_groups]
        if not all(bases):
            return False
        factors = [lr * self._lr_factor / base for base in bases]
        _multiply(optimizer, self.present.schedulers, factors, ("lr", *_STARTS))
        return True

    # --- a fit --------------------------------------------------------------------------------------------------------

    @override
    def start_fit(self) -> None:
        self.batch = self.done = 0
        self._reset_metrics()
        self._call("on_fit_start")
        self._call("on_train_start")

    @override
    def start_epoch(self, phase: int, epoch: int) -> None:
        self.epoch, self.batch, self.logged = epoch, 0, {}
        self.present = self.stretches[phase] if self.stretches else Stretch()
        self._call("on_train_epoch_start")

    @override
    def end_epoch(self) -> None:
        self._end_batch()
        self._call("on_train_epoch_end")
        for config in self.present.schedulers if not self.steps_itself else ():
            if config.interval == "epoch" and (self.epoch + 1) % config.frequency == 0:
                self._step_at_epochs_end(config)
        self._reset_metrics()

    def _step_at_epochs_end(self, config: Any) -> None:
        if not config.reduce_on_plateau:
            config.scheduler.step()
            return
        watched = self.means().get(config.monitor)
        if watched is None:
            rule = "schedulers can watch what training_step logs; a local fit has no validation"
            raise ConfigError(KEY, rule, config.monitor)
        config.scheduler.step(watched)

    @override
    def end_fit(self) -> None:
        self._call("on_train_end")
        self._call("on_fit_end")
        self.stretches, self.present = [], Stretch()

    def _end_batch(self) -> None:
        if self._waits_for_end:
            self._call("on_train_batch_end", *self._waits_for_end)
            self._waits_for_end = ()

    def _reset_metrics(self) -> None:
        """One resident module serves all clients: what torchmetrics has counted of one must not reach the next."""
        from torchmetrics import Metric

        for part in self.joined.module.modules():
            if isinstance(part, Metric):
                part.reset()

    @override
    def training_pass(self, x: Tensor, y: Tensor, pull: Pull) -> Pass:
        self._end_batch()
        self._pull = pull
        batch, index = [x, y], self.batch
        self._call("on_train_batch_start", batch, index)
        seen: list[tuple[Tensor, Tensor]] = []
        with self as module:
            handle = self.joined.head.register_forward_hook(lambda head, args, out: seen.append((args[0], out)))
            try:
                said = _with_fitting(module.training_step, (batch, index))
            finally:
                handle.remove()
        self.batch += 1
        self.done += 1
        self._waits_for_end = said, batch, index
        loss = said.get("loss") if isinstance(said, Mapping) else said
        if loss is None or self.steps_itself:
            loss = torch.zeros((), device=x.device) if loss is None else loss.detach()
        z, logits = next((pair for pair in seen if len(pair[0]) == len(y)), (None, None))
        if z is None or logits is None:  # a step that does not classify: the run's own terms may ask for it still
            with torch.no_grad():
                z = self.joined.embed(x)
                logits = self.joined.head(z)
        return Pass(z, logits, loss)

    def rehearse(self, x: Tensor, y: Tensor) -> None:
        """Try the training step out on a copy, so that a mistake is answered before any training.

        Raises:
            ConfigError: if optimizers cannot be made, the step fails, or its loss reaches no parameter.
        """
        double = copy.deepcopy(self)
        name = type(self.joined.module).__name__
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                double.joined.module.train()
                double.joined.head.train()
                trained = [*double.joined.module.parameters(), *double.joined.head.parameters()]
                trained = [parameter for parameter in trained if parameter.requires_grad]
                if not self.configured:
                    make = double.optimizer(_none, 1, 1.0)
                    double.plan(1)
                    make(trained)
                    double.start_epoch(0, 0)
                loss = double.training_pass(x, y, lambda parameters: [torch.zeros_like(p) for p in parameters]).loss
        except ConfigError:
            raise
        except Exception as error:  # whatever a module of the user's own raises
            said = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise ConfigError(KEY, f"{name}'s training step fails ({type(error).__name__}: {said})") from error
        rule = f"{name}'s training_step must return a loss with a gradient (a scalar, or a dict with loss)"
        require(self.steps_itself or (loss.dim() == 0 and loss.requires_grad), KEY, rule)

    # --- what the module calls ----------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """In place of Lightning's: kept for `trainer.callback_metrics` and for schedulers, until the next epoch."""
        value = value.detach() if isinstance(value, Tensor) else value
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            self.logged.setdefault(name, []).append(float(value))

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """The same of several values."""
        for name, value in dictionary.items():
            self.log(name, value)

    def means(self) -> dict[str, float]:
        """What was logged in the present epoch, each value's mean."""
        return {name: sum(values) / len(values) for name, values in self.logged.items()}

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
            loss.backward(*args, **kwargs)

    def pull(self, parameters: Sequence[Tensor]) -> None:
        """Add what the method's terms add to the gradients of some parameters."""
        own = [p for p in parameters if p.requires_grad]
        for parameter, gradient in zip(own, self._pull(own), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _multiply(optimizer: Any, schedulers: Sequence[Any], factors: Sequence[float], keys: Sequence[str]) -> None:
    """Multiply an optimizer's learning rates, and what its schedulers start from, by a factor a group."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for key in keys:
            if key in group:
                group[key] *= factor
    for config in schedulers:
        own = config.scheduler
        if hasattr(own, "base_lrs") and own.optimizer is optimizer:
            own.base_lrs = [base * factor for base, factor in zip(own.base_lrs, factors, strict=True)]


class OwnOptimizers:
    """Makes a module's own optimizers for a fit.

    Args:
        training: the module's.
        configured: makes the optimizer of parameters none of which is the module's.
    """

    def __init__(self, training: ModuleTraining, configured: MakeOptimizer) -> None:
        self.training, self.configured = training, configured
        self.rescale = training.rescale

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """One for the fit's next phase."""
        return self.training.make(list(parameters), self.configured)

    def outside(self, parameters: Iterable[nn.Parameter]) -> Any:
        """An optimizer that no schedule moves, and that nobody keeps."""
        return self.training.make(list(parameters), self.configured, in_fit=False)


class PulledOptimizer:
    """An optimizer as a module of manual optimization sees it: before it steps, the method's terms pull, too.

    Args:
        optimizer: torch's.
        training: whose it is.
    """

    def __init__(self, optimizer: Any, training: ModuleTraining) -> None:
        self.optimizer = optimizer
        self._training = training

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step, after the closure's passes and with the terms' gradients."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._training.pull([p for group in self.optimizer.param_groups for p in group["params"]])
        return self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class FitView:
    """What a module sees as its trainer: one phase of one local fit.

    Args:
        training: the module's.
    """

    logger = datamodule = train_dataloader = val_dataloaders = None
    loggers: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    max_steps = -1
    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = node_rank = 0
    training = is_global_zero = True
    validating = testing = predicting = sanity_checking = fast_dev_run = False

    def __init__(self, training: ModuleTraining) -> None:
        self._own = training

    @property
    def optimizers(self) -> list[Any]:
        """The present phase's."""
        return self._own.present.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Of the present phase's schedulers."""
        return self._own.present.schedulers

    @property
    def max_epochs(self) -> int:
        """Epochs of the phase."""
        return self._own.present.epochs

    @property
    def current_epoch(self) -> int:
        """Of the phase, 0-based."""
        return self._own.epoch

    @property
    def global_step(self) -> int:
        """Mini-batches of the fit so far."""
        return self._own.done

    @property
    def num_training_batches(self) -> int:
        """Mini-batches of an epoch."""
        return self._own.steps

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the phase."""
        return -(-self._own.steps // self._own.accumulate) * self._own.present.epochs

    @property
    def is_last_batch(self) -> bool:
        """Whether no mini-batch of the epoch comes after the present one."""
        return self._own.batch >= self._own.steps - 1

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What was logged in the present epoch."""
        return {name: torch.tensor(value) for name, value in self._own.means().items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there in a federated fit")


# --- helpers ----------------------------------------------------------------------------------------------------------


def _stepping(schedulers: Sequence[Any]) -> Callable[..., None]:
    """What steps schedulers by the step, called after every step of their optimizer."""
    steps = itertools.count(1)

    def step(*_: Any) -> None:
        number = next(steps)
        for config in schedulers:
            if config.interval == "step" and number % config.frequency == 0:
                config.scheduler.step()

    return step


def _none(parameters: Iterable[nn.Parameter]) -> Any:
    return torch.optim.SGD(parameters, lr=0.0)


def _with_fitting(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function with as many of the arguments as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return function(*arguments)
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function(*arguments[: len(places)])


def _parsed(module: L.LightningModule) -> tuple[list[Any], list[Any]]:
    """The module's optimizers, and Lightning's configurations of its schedulers.

    Raises:
        ConfigError: if there is none, or there are several without manual optimization.
    """
    name = type(module).__name__
    said = module.configure_optimizers()
    rule = f"{name}'s configure_optimizers must return an optimizer; or say optimizer: configured"
    require(said is not None, KEY, rule)
    try:
        optimizers, schedulers, monitor = _configure_optimizers(said)  # type: ignore[arg-type]
        if not module.automatic_optimization:
            return list(optimizers), list(_configure_schedulers_manual_opt(schedulers))
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
    except MisconfigurationException as error:
        raise ConfigError(KEY, f"{name}'s configure_optimizers: {error}") from error
    several = f"{name} has {len(optimizers)} optimizers, which needs self.automatic_optimization = False"
    require(len(optimizers) == 1, KEY, several)
    return list(optimizers), list(configs)
