"""A user's own training step, tried out before any training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.module_hooks import UNTRIED
from fl_lightning.models.module_optimizers import KEY
from fl_lightning.models.module_training import ModuleTraining
from fl_lightning.models.own_training import SkippedBatch

_MANY = 64  # times two samples: few enough to be passed in a second, enough for what needs pairs of a class
_LONG = 100  # epochs, and steps of each: what a short fit's schedules fail for is said when fits are known


def rehearse(training: ModuleTraining, x: Tensor, y: Tensor) -> None:
    """Try the training step out on a copy of a module, so that a mistake is answered before any training.

    Args:
        training: the module's, every part of it in the mode of a fit.
        x: [B, …] inputs.
        y: [B] int64 classes.

    Raises:
        ConfigError: if optimizers cannot be made, the step fails, or its loss reaches no parameter.
    """
    double = copy.deepcopy(training)
    name, what = type(training.joined.module).__name__, "configure_optimizers"
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            trained = [*double.joined.module.parameters(), *double.joined.head.parameters()]
            trained = [parameter for parameter in trained if parameter.requires_grad]
            if trained or not training.configured:
                make = double.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), 1, 1.0)
                double.steps = _LONG
                double.plan(_LONG)
                make(trained)
            what = "training step"
            double.start_fit()
            double.start_epoch(0, 0)
            loss = _loss(double, x, y)
            double.logged.check()
            training.logs = None if training.hooks & UNTRIED else frozenset(double.logged.names())
    except ConfigError:
        raise
    except Exception as error:  # whatever a module of the user's own raises
        said = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(KEY, f"{name}'s {what} fails ({type(error).__name__}: {said})") from error
    rule = f"{name}'s training_step must return a loss with a gradient (a scalar, or a dict with loss)"
    learns = loss is not None and loss.dim() == 0 and loss.requires_grad
    require(training.steps_itself or learns, KEY, rule)


def _loss(training: ModuleTraining, x: Tensor, y: Tensor) -> Tensor | None:
    """The loss of the samples, or of many times as many where the step leaves so few out; None where those, too."""
    for times in (1, _MANY):
        try:
            own = x.repeat(times, *[1] * (x.dim() - 1)), y.repeat(times)
            return training.training_pass(*own, lambda parameters: [None] * len(parameters)).loss
        except SkippedBatch:
            continue
    return None
