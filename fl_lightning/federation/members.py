"""Who is in a cohort: its clients as their fits begin, which of them are alike, and their mini-batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_lightning.core.mark import Mark
from fl_lightning.core.stacked_fit import Batches, Entered
from fl_lightning.data.together import together

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.federation.runner import Runner
    from fl_lightning.federation.visits import Visit


@dataclass
class Member:
    """A client of a cohort, as its fit begins.

    Args:
        visit: its round up to the fit.
        row: where it stands among those that have entered.
        entered: its phases, optimizers and fit.
        options: of its optimizers, and the weights of its losses.
        mark: of its method's attributes.
        attributes: the same, to be brought back.
        streams: the global random streams' states.
        free: of every parameter, whether it was to be trained before the fit began, and is after it.
    """

    visit: Visit
    row: int
    entered: Entered
    options: tuple[Hashable, Hashable]
    mark: Mark
    attributes: list[dict[str, Any]]
    streams: tuple[Any, ...]
    free: tuple[bool, ...]

    @property
    def key(self) -> Hashable:
        """Clients are stacked with those of the same."""
        return self.mark, self._phases, tuple(own.epochs for own in self.entered.plan), self.options

    @property
    def alike(self) -> Hashable:
        """What is the same in all fits whose steps are stacked in the same way, whatever numbers are in them."""
        return self.mark.kind, self.about

    @property
    def about(self) -> Hashable:
        """What is the same in all fits that a recorded step may serve, the learning rate apart."""
        optimizers = tuple(options_of(optimizer, "lr", "initial_lr") for optimizer in self.entered.templates)
        return self.mark.modes, self.mark.free, self._phases, optimizers, self.options[1]

    @property
    def _phases(self) -> Hashable:
        found: list[Hashable] = []
        for own in self.entered.plan:
            parts = tuple((part, *map(id, parameters)) for part, parameters in own.parts.items())
            phase = own.phase
            told = phase.name, phase.trains, phase.terms, phase.through, tuple(phase.resting), phase.epochs
            found.append((told, parts))
        return tuple(found)


def epoch_of(runner: Runner, own: Sequence[Member], epoch: int, limits: Sequence[int | None]) -> Iterable[Batches]:
    """The steps of an epoch: each client's mini-batches are those of its fit by itself."""
    epochs = [
        member.visit.data.bundles(
            runner.epoch_seed(epoch, member.visit.job.round, member.visit.job.client),
            *runner.bundle_rules(member.visit.job.client),
            limit=limit,
        )
        for member, limit in zip(own, limits, strict=True)
    ]
    return together(epochs, runner.data.batch_size, runner.steps_per_bundle)


def options_of(optimizer: Optimizer, *but: str) -> tuple[Hashable, ...]:
    """What an optimizer was told, but for its parameters, and some more."""
    left = {"params", *but}
    groups = [{key: str(value) for key, value in own.items() if key not in left} for own in optimizer.param_groups]
    return type(optimizer), *(tuple(own.items()) for own in groups)
