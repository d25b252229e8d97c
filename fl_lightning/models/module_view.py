"""What a LightningModule finds in place of its trainer and its optimizers while it is fitted locally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fl_lightning.models.module_optimizers import Stretch


class LocalFit(Protocol):
    """A module's local fit, of which it is told here."""

    present: Stretch
    epoch: int
    batch: int
    done: int
    steps: int
    accumulate: int

    def means(self) -> dict[str, float]:
        """What was logged in the present epoch, each value's mean."""
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

    def __init__(self, training: LocalFit) -> None:
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
        return {name: torch.tensor(value) for name, value in self._own.means().items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there in a federated fit")
