"""What a LightningModule finds in place of its trainer and its optimizers while it is fitted locally."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.errors import require
from fl_lightning.models.head_cut import Joined
from fl_lightning.models.module_optimizers import Stretch
from fl_lightning.models.own_training import Clipping, Pull, trained_by

_NAMED: dict[Any, str] = {getattr(torch, name): name for name in ("mean", "sum", "max", "min")}
_REDUCTIONS = {**_NAMED, sum: "sum", max: "max", min: "min"}


class Entry:
    """What a module logs under one name in one of its hooks, over an epoch.

    Args:
        reduction: mean, sum, max or min of what is logged.
        forked: whether it is logged by the step and by the epoch, and has Lightning's three names.
        hidden: whether it is kept from loggers.
    """

    def __init__(self, reduction: str, forked: bool, hidden: bool = False) -> None:
        self.reduction, self.forked, self.hidden = reduction, forked, hidden
        self.values: list[float] = []
        self.weights: list[float] = []
        self.metric: Metric | None = None

    def of_epoch(self) -> float | None:
        """What the epoch comes to so far: a metric of what it has seen; None where it has seen nothing.

        Raises:
            ValueError: if a metric comes to several numbers.
        """
        if self.metric is not None:
            return _only(self.metric, self.metric.compute()) if self.metric.update_called else None
        if self.reduction == "mean":
            weighted = sum(value * weight for value, weight in zip(self.values, self.weights, strict=True))
            return weighted / sum(self.weights)
        if self.reduction == "sum":
            return sum(self.values)
        return max(self.values) if self.reduction == "max" else min(self.values)

    def of_step(self) -> float | None:
        """The last mini-batch's; None where a metric was not asked for that."""
        if self.metric is None:
            return self.values[-1]
        seen = self.metric._forward_cache
        return None if seen is None else _only(self.metric, seen)


class Logged:
    """What a module logs in an epoch: kept for `trainer.callback_metrics`, for schedulers, and for the run.

    Names, levels and reductions are Lightning's, and a mean is over samples, as there. What is logged by the step alone
    comes to its mean over the epoch. A loss under one of the names that `LOSSES` has stands for that of a step which
    returns none.
    """

    LOSSES = ("loss", "train_loss")

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        self.hook = "training_step"
        """The hook of the module's that is running."""
        self.batch_size = 1
        """Samples of the present mini-batch."""
        self.counts = True
        """Whether they count; those of a device that would have none do not."""
        self.loss: Tensor | None = None
        """The present mini-batch's, if it was logged."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """In place of Lightning's.

        Raises:
            ValueError: for what is no number, tensor of one element, or metric, or for another reduction.
            MisconfigurationException: for a hook in which Lightning has no logging, or not at that level.
        """
        levels = _FxValidator.check_logging_and_get_default_levels(self.hook, on_step, on_epoch)
        reduction = _REDUCTIONS.get(reduce_fx, reduce_fx) if callable(reduce_fx) else str(reduce_fx).lower()
        reduction = "mean" if reduction == "avg" else reduction
        if reduction not in _REDUCTIONS.values():
            raise ValueError(f"self.log({name!r}, reduce_fx=...) takes mean, sum, max or min, or log a metric")
        number = None if isinstance(value, Metric) else _number(value)
        if number is None and not isinstance(value, Metric):
            raise ValueError(f"self.log({name!r}, ...) takes one number, a tensor of one element, or a metric")
        if name in self.LOSSES and number is not None:
            self.loss = torch.as_tensor(value).detach().reshape(())
        if number is not None and not self.counts:
            return
        hidden = not (any(levels) and (logger is None or logger))
        entry = self._entries.setdefault((self.hook, name), Entry(reduction, all(levels), hidden))
        if number is None:  # on every device, which wait for one another when it is computed
            entry.metric = value
        else:
            entry.values.append(number)
            entry.weights.append(self.batch_size if batch_size is None else batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """The same of several values."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def names(self) -> Iterator[str]:
        """What was logged in the present epoch, each name that it goes by."""
        for (_, name), entry in self._entries.items():
            yield from (name, f"{name}_step", f"{name}_epoch") if entry.forked else (name,)

    def means(self, parts: Sequence[Mapping[tuple[str, str], Entry]] = (), for_run: bool = False) -> dict[str, float]:
        """What was logged in the present epoch; of a name that several hooks log, the last one's.

        What was logged by the step and by the epoch is there under Lightning's three names.

        Args:
            parts: what every device that shares the fit has logged of its part of the mini-batches, this one among
                them: their `numbers`, by rank; none for a fit on one.
            for_run: leave out what is kept from loggers: ``logger=False``, or neither by the step nor by the epoch.
        """
        found: dict[str, float | None] = {}
        for (_, name), entry in {**self._entries, **_merged(parts)}.items():
            own = {name: entry.of_epoch()}
            if entry.forked:
                own |= {f"{name}_step": entry.of_step(), f"{name}_epoch": own[name]}
            found |= dict.fromkeys(own) if for_run and entry.hidden else own
        return {name: value for name, value in found.items() if value is not None}

    def check(self) -> None:
        """Look whether metrics come to one number, without waiting for other processes.

        Raises:
            ValueError: if one comes to several.
        """
        for metric in filter(None, (entry.metric for entry in self._entries.values())):
            waits, metric._to_sync = metric._to_sync, False
            try:
                value = metric.compute() if metric.update_called else 0.0
            except Exception:  # it may want more samples than a rehearsal has
                continue
            finally:
                metric._to_sync = waits
            _only(metric, value)

    def numbers(self) -> dict[tuple[str, str], Entry]:
        """What was logged beside metrics, which add up over devices by themselves."""
        return {key: entry for key, entry in self._entries.items() if entry.metric is None}

    def reset_metrics(self) -> None:
        """Let metrics that were logged start anew, those that are no part of the module, too."""
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()


def _merged(parts: Sequence[Mapping[tuple[str, str], Entry]]) -> dict[tuple[str, str], Entry]:
    """What several devices have logged, as one's."""
    found = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        logged = [part[key] for part in parts if key in part]
        whole = found[key] = Entry(logged[0].reduction, logged[0].forked, logged[0].hidden)
        whole.values = [value for entry in logged for value in entry.values]
        whole.weights = [weight for entry in logged for weight in entry.weights]
    return found


def _number(value: Any) -> float | None:
    """A value as a number; None where it is none, or several."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, numbers.Real) else None


def _only(metric: Metric, value: Any) -> float:
    number = _number(value)
    if number is None:
        rule = "computes no single number: log one that you make of it"
        raise ValueError(f"self.log(..., {type(metric).__name__}) {rule}")
    return number


class LocalFit(Protocol):
    """A module's local fit, of which it is told here."""

    joined: Joined
    devices: Any
    machine: Any
    factor: float
    present: Stretch
    epoch: int
    batch: int
    num_steps: int
    steps: int
    most_steps: int
    accumulate: int
    clipping: Clipping
    logged: Logged
    logged_in_fit: dict[str, float]
    pull: Pull | None

    def before_step(self, optimizer: Any) -> None:
        """One of the module's optimizers is about to step."""
        ...


def bring_together(training: LocalFit) -> None:
    """Average gradients over the devices that share a fit; those that are the same everywhere stay so."""
    if training.devices is not None:
        with training.joined as joined:
            training.devices.average_gradients(list(joined.module.parameters()))


def add_pulled(training: LocalFit, parameters: Sequence[Tensor]) -> None:
    """Add what the method's terms add to the gradients of some parameters."""
    assert training.pull is not None, "a step outside a fit pulls nothing"
    own = [p for p in parameters if p.requires_grad]
    scaler = None if training.machine is None else training.machine.scaler
    for parameter, found in zip(own, training.pull(own), strict=True):
        if found is not None:
            gradient = found if scaler is None else scaler.scale(found)  # a step divides again
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad  # it may be sparse


def is_careful(training: LocalFit) -> bool:
    """Whether the module steps on float32 copies, or on unscaled gradients of a scaled loss."""
    return training.machine is not None and training.machine.steps_carefully


def _of_all(training: LocalFit, value: Any) -> Any:
    """What a closure gives, of the whole mini-batch: or a line search would take other steps on each device."""
    if training.devices is None or not isinstance(value, Tensor):
        return value
    return training.devices.average([value.detach() * training.factor])[0]


class PulledOptimizer:
    """An optimizer as a module of manual optimization sees it: before it steps, the method's terms pull, too.

    Args:
        optimizer: torch's.
        training: whose it is.
    """

    def __init__(self, optimizer: Any, training: LocalFit) -> None:
        self.optimizer = optimizer
        self._training = training

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step with the terms' gradients, after the closure's passes or, where the optimizer calls it itself, anew.

        Raises:
            ConfigError: if it calls it itself under a precision that steps on float32 copies or scales losses.
        """
        step = self._careful_step if is_careful(self._training) else self._straight_step
        stepped = step(closure, **kwargs)
        if self._training.machine is not None:
            self._training.machine.after_step(self.optimizer)
        return stepped

    def _straight_step(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        if closure is None:
            self._pull()
            return self.optimizer.step(**kwargs)
        values = []

        def passes() -> Any:
            with torch.enable_grad():
                values.append(_of_all(self._training, closure()))
            self._pull()
            return values[-1]

        stepped = self.optimizer.step(closure=passes, **kwargs)
        return values[-1] if stepped is None and values else stepped

    def _careful_step(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """The same of float32 copies, with unscaled gradients."""
        wants = inspect.signature(self.optimizer.step).parameters.get("closure")
        calls = wants is not None and wants.default is inspect.Parameter.empty
        rule = "32-true, 64-true or bf16-mixed: it goes back by itself, several times a step"
        require(not calls, "trainer.precision", f"under {type(self.optimizer).__name__} must be {rule}")
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = _of_all(self._training, closure())
        self._pull()
        stepped = self._training.machine.careful.optimizer_step(self.optimizer, None, lambda: None, **kwargs)
        return value if stepped is None else stepped

    def _pull(self) -> None:
        bring_together(self._training)  # once more, for who goes back without `manual_backward`
        add_pulled(self._training, trained_by(self.optimizer))
        machine = self._training.machine
        if is_careful(self._training):
            machine.careful.prepare_step(self.optimizer)
        if machine is not None and machine.before_step is not None:
            machine.before_step(self.optimizer)
        self._training.before_step(self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Within it, of all that the module's optimizers train, only what this one trains has gradients.

        Args:
            sync_grad: does nothing: gradients of devices that share a fit are brought together in any case.
        """
        own = {id(parameter) for parameter in trained_by(self.optimizer)}
        others = trained_by(*self._training.present.optimizers)
        resting = [p for p in others if p.requires_grad and id(p) not in own]
        try:
            for parameter in resting:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class FitView:
    """What a module sees as its trainer: one phase of one local fit.

    Args:
        training: the module's.
    """

    logger = datamodule = progress_bar_callback = train_dataloader = val_dataloaders = None
    loggers: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    precision_plugin = Precision()
    """What `self.clip_gradients` clips by; what autocasts is around the whole step."""
    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = node_rank = 0
    training = is_global_zero = True
    validating = testing = predicting = sanity_checking = fast_dev_run = False

    def __init__(self, training: LocalFit) -> None:
        vars(self)["_own"] = training

    def __setattr__(self, name: str, value: Any) -> None:
        ends = "; on_train_batch_start ends an epoch where it returns -1" if name == "should_stop" else ""
        raise AttributeError(f"self.trainer.{name} cannot be set in a federated fit{ends}")

    @property
    def accumulate_grad_batches(self) -> int:
        """Mini-batches an optimizer step."""
        return self._own.accumulate

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest gradient norm, or value, of a step; None where nothing is clipped."""
        return self._own.clipping and self._own.clipping[0]

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        """Which of the two it is."""
        return self._own.clipping and GradClipAlgorithmType(self._own.clipping[1])

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
    def max_steps(self) -> int:
        """Optimizer steps after which the fit ends; -1 for no such number."""
        return self._own.most_steps

    @property
    def current_epoch(self) -> int:
        """Of the phase, 0-based."""
        return self._own.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps of the fit so far, of all optimizers."""
        return self._own.num_steps

    @property
    def num_training_batches(self) -> int:
        """Mini-batches of the present epoch."""
        cut = self._own.present.last if self._own.epoch == self._own.present.epochs - 1 else None
        return self._own.steps if cut is None else cut

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the phase."""
        steps, present, accumulate = self._own.steps, self._own.present, self._own.accumulate
        last = steps if present.last is None else present.last
        found = -(-steps // accumulate) * (present.epochs - 1) + -(-last // accumulate)
        return found if self.max_steps == -1 else min(found, self.max_steps)

    @property
    def is_last_batch(self) -> bool:
        """Whether no mini-batch of the epoch comes after the present one."""
        return self._own.batch >= self.num_training_batches - 1

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What was logged in the fit: of each name the present epoch's, or the last one's that has it."""
        found = {**self._own.logged_in_fit, **self._own.logged.means()}
        return {name: torch.tensor(value) for name, value in found.items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there in a federated fit")
