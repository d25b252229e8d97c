"""What a LightningModule finds in place of its trainer and its optimizers while it is fitted locally."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.models.module_optimizers import Stretch


class Logged:
    """What a module logs: kept for `trainer.callback_metrics` and for schedulers, until the next epoch.

    A loss under one of the names that `LOSSES` has stands for that of a step which returns none.
    """

    LOSSES = ("loss", "train_loss")

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._metrics: dict[str, Metric] = {}
        self._forked: set[str] = set()  # logged by the step and by the epoch
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
        **kwargs: Any,
    ) -> None:
        """In place of Lightning's."""
        if on_step and on_epoch:
            self._forked.add(name)
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        value = value.detach() if isinstance(value, Tensor) else value
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            self._values.setdefault(name, []).append(float(value))
            if name in self.LOSSES:
                self.loss = torch.as_tensor(value).reshape(())

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """The same of several values."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def means(self) -> dict[str, float]:
        """What was logged in the present epoch: each value's mean, a metric of what it has seen so far.

        What was logged by the step and by the epoch is there under Lightning's three names.
        """
        found = {name: sum(values) / len(values) for name, values in self._values.items()}
        for name, metric in self._metrics.items():
            value = metric.compute() if metric.update_called else None
            if isinstance(value, Tensor) and value.numel() == 1:
                found[name] = float(value)
        steps = {f"{name}_step": self._values[name][-1] for name in self._forked & self._values.keys()}
        epochs = {f"{name}_epoch": found[name] for name in self._forked & found.keys()}
        return {**found, **steps, **epochs}


class LocalFit(Protocol):
    """A module's local fit, of which it is told here."""

    present: Stretch
    epoch: int
    batch: int
    num_steps: int
    steps: int
    accumulate: int
    logged: Logged

    def before_step(self, optimizer: Any) -> None:
        """One of the module's optimizers is about to step."""
        ...

    def pull(self, parameters: Sequence[Tensor]) -> None:
        """Add what the method's terms add to the gradients of some parameters."""
        ...


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
        """Step, after the closure's passes and with the terms' gradients."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._training.pull([p for group in self.optimizer.param_groups for p in group["params"]])
        self._training.before_step(self.optimizer)
        return self.optimizer.step()

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
    max_steps = -1
    gradient_clip_val = gradient_clip_algorithm = None
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
        return -(-steps // accumulate) * (present.epochs - 1) + -(-last // accumulate)

    @property
    def is_last_batch(self) -> bool:
        """Whether no mini-batch of the epoch comes after the present one."""
        return self._own.batch >= self.num_training_batches - 1

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What was logged in the present epoch."""
        return {name: torch.tensor(value) for name, value in self._own.logged.means().items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there in a federated fit")
