"""Who is in a cohort, which of its clients are alike, and their mini-batches.

A client is a `Guest` once it has entered, a `Member` as its fit begins, and an `Outcome` after the fit, until it is
brought into the module once more. Who cannot be fitted with others is fitted by itself, as the guest that it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_lightning.core.mark import Mark
from fl_lightning.core.rows import Rows
from fl_lightning.core.stacked_fit import Batches, Entered, StackedFit
from fl_lightning.data.together import together

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.federation.runner import Runner
    from fl_lightning.federation.visits import Visit


@dataclass
class Guest:
    """A client that has entered, as it came: it is fitted by itself from here, and tested after its receive.

    Args:
        visit: its round up to the fit.
        entry: holds those that enter with it.
        row: where it stands among them.
        attributes: of its method, to be brought back.
        mark: of the same.
        moved: the client after `Method.on_fit_start`, where that has written to it.
    """

    visit: Visit
    entry: Rows
    row: int
    attributes: list[dict[str, Any]]
    mark: Mark
    moved: Rows | None = None


@dataclass
class Member:
    """A client that has something to train, as its fit begins; once it has ended, its attributes are those of then.

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


class Fitted(NamedTuple):
    """Clients after their fit.

    Args:
        rows: as they are then.
        fit: theirs.
        wait: lets the present stream wait until all of it is done.
    """

    rows: Rows
    fit: StackedFit
    wait: Callable[[], None] = lambda: None


@dataclass
class Outcome:
    """A client after its fit, one of several; only its visit keeps it, or the rows would outlive it.

    Args:
        member: the client.
        fitted: all of them.
        place: where it is among them.
        has_ended: whether method and terms have kept what they need of its fit, or need nothing.
    """

    member: Member
    fitted: Fitted
    place: int
    has_ended: bool


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
