"""What servers and clients are told of the federation and of a local fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.models.own_training import maker_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], "Optimizer"]


@dataclass(frozen=True)
class Facts:
    """What everybody in a federation knows of it.

    Args:
        num_clients: N, newcomers among them.
        rounds: of the whole run.
        seed: the run's.
        device: where messages and models are.
        round: the present one, 1-based; 0 before the first.
        participants: the clients that take part in it, in order; empty outside a round.
        newcomers: how many of the clients, the last ones, join after the first rounds.
        client: who is told, 0-based; -1 for a server.
        expected: clients that a round expects once all have joined, whoever fails; a mean where each comes by chance.
        joins_after: the round after which newcomers join.
    """

    num_clients: int = 1
    rounds: int = 1
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    round: int = 0
    participants: tuple[int, ...] = ()
    newcomers: int = 0
    client: int = -1
    expected: float = 1.0
    joins_after: int = 0

    def num_joined(self, round: int) -> int:
        """How many of the clients have joined by a round."""
        return self.num_clients if round > self.joins_after else self.num_clients - self.newcomers

    @property
    def is_newcomer(self) -> bool:
        """Whether the client joins after the first rounds."""
        return self.client >= self.num_clients - self.newcomers


@dataclass(frozen=True)
class Phase:
    """One stretch of a local fit, in which some of the parameters are trained and the others frozen.

    Args:
        name: how the phase is called in errors.
        trains: submodules (dotted names) whose parameters are trained; ``""`` is the whole method. The others are
            frozen: not given to the optimizer, and without a gradient. Beside `parts` they say it; what is named here
            must be in one of them.
        epochs: epochs of the phase; None takes `federation.local_epochs`, 0 leaves the phase out.
        terms: names of the terms that count in this phase; None takes all.
        through: the split model that `Step.forward` passes mini-batches through.
        resting: submodules whose batch norm rests: it uses its running statistics and leaves them as they are.
        parts: name -> submodules; each part has an optimizer of its own, and `Step.descend` names the ones that step.
            None is one part for all that is trained.
        settings: part -> options of its optimizer, by their names in it (``lr``, ``weight_decay``, …); None leaves one
            as it is.
        optimizer: makes the optimizers; None takes the configuration's.
        lr: learning rate before any decay from round to round; None takes the optimizer's own.
        tune: changes an optimizer that has been made.
    """

    name: str
    trains: tuple[str, ...] = ("",)
    epochs: int | None = None
    terms: tuple[str, ...] | None = None
    through: str = "model"
    resting: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] | None = None
    settings: Mapping[str, Mapping[str, float | None]] | None = None
    optimizer: OptimizerFactory | None = None
    lr: float | None = None
    tune: Callable[[Optimizer], None] | None = None

    @property
    def by_part(self) -> Mapping[str, tuple[str, ...]]:
        """Part -> submodules; without parts the one of the phase's name."""
        return self.parts or {self.name: self.trains}


class PlansRounds:
    """A method whose rounds depend on `Facts.rounds`, so that a run that has begun keeps the number of its rounds."""

    plans_rounds: bool = True
    """Whether these settings do; a method that can be told otherwise says so."""


class Fit:
    """What a method may know of its client's present local fit, and of it until the client's next receive.

    Args:
        optimizer: makes an optimizer of the configuration.
        epochs: of all phases together.
        lr_factor: the round's learning rate in units of the first round's.
        accumulate: local mini-batches an optimizer step.
    """

    def __init__(
        self, optimizer: OptimizerFactory | None = None, epochs: int = 0, lr_factor: float = 1.0, accumulate: int = 1
    ) -> None:
        self._optimizer = None if optimizer is None else maker_of(optimizer)
        self.epochs = epochs
        self.lr_factor = lr_factor
        self.accumulate = accumulate
        self.epoch = 0
        """The present one, 0-based."""
        self.num_batches = 0
        """Local mini-batches of the present phase that were done."""
        self.num_steps = 0
        """Optimizer steps that were really made; a gradient scaler may skip some."""
        self.lr = 0.0
        """Learning rate of the first optimizer."""
        self.descends = False
        """Whether a step has descended on its losses; others may only log them, or follow gradients of their own."""

    def afresh(self) -> Fit:
        """One that has not begun, of the same optimizers."""
        return Fit(self._optimizer, accumulate=self.accumulate)

    @property
    def in_last_epoch(self) -> bool:
        """Whether no epoch comes after the present one."""
        return self.epoch == self.epochs - 1

    def make_optimizer(
        self,
        parameters: Iterable[nn.Parameter],
        phase: Phase | None = None,
        decays: bool = True,
        part: str = "",
        lr: float | None = None,
    ) -> Optimizer:
        """A fresh optimizer: the phase's, else the configuration's.

        Args:
            parameters: what it trains.
            phase: the phase that it is for.
            decays: at the present round's learning rate; false takes the first round's.
            part: of the phase.
            lr: learning rate before any decay; None takes the phase's, else the optimizer's own.

        Raises:
            ConfigError: if the optimizer has no learning rate.
        """
        make = self._optimizer if phase is None or phase.optimizer is None else maker_of(phase.optimizer)
        assert make is not None, "a method outside a federation has no optimizer"
        optimizer = (make if decays else make.outside)(parameters)
        own: dict[str, Any] = {"lr": phase.lr if lr is None and phase is not None else lr}
        own |= {} if phase is None or phase.settings is None else phase.settings.get(part, {})
        own = {option: value for option, value in own.items() if value is not None}
        rule, given = f"a phase's learning rate must be above 0{f' ({part})' if part else ''}", own.get("lr")
        require(given is None or given > 0, "method", rule, given)
        for each in (optimizer, *(make.further if decays else ())):
            rescaled = "lr" in own and make.rescale(each, own["lr"])
            _set(each, {option: value for option, value in own.items() if not (rescaled and option == "lr")})
            for group in each.param_groups if decays and self.lr_factor != 1 else ():
                group["lr"] = group["lr"] * self.lr_factor
            if phase is not None and phase.tune is not None:
                make.tune(each, phase.tune)
        return optimizer


def _set(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Set options of all of an optimizer's groups."""
    for group in optimizer.param_groups:
        for option in options.keys() - group.keys():
            rule = f"a phase sets {option!r}, which {type(optimizer).__name__} does not have"
            raise ConfigError("method", f"{rule}; {suggest(option, [*optimizer.defaults])}")
        group.update(options)
        rule = f"{type(optimizer).__name__}'s parameter groups must have an 'lr', which a fit reads and sets"
        require("lr" in group, "optimizer", rule)
