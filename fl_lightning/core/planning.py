"""What a local fit does: its phases, with their parameters and epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from fl_lightning.core.division import matches
from fl_lightning.core.naming import check_phases

if TYPE_CHECKING:
    from fl_lightning.core.facts import Phase
    from fl_lightning.core.method import Method
    from fl_lightning.core.workload import Workload


class Planned(NamedTuple):
    """A phase of a fit with its epochs and its parameters, by part; `last` mini-batches in the last epoch, None all."""

    phase: Phase
    epochs: int
    parts: dict[str, list[nn.Parameter]]
    last: int | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained in it."""
        return list({id(p): p for own in self.parts.values() for p in own}.values())


class Plan(tuple[Planned, ...]):
    """The phases of a fit, one after another."""

    @property
    def epochs(self) -> int:
        """Epochs of all phases together, those that are cut short among them."""
        return sum(planned.epochs for planned in self)

    def at(self, epoch: int) -> tuple[int, int, int | None]:
        """The phase that an epoch of the fit belongs to, its place there, and its mini-batches; None for all."""
        for index, planned in enumerate(self):
            if epoch < planned.epochs:
                return index, epoch, planned.last if epoch == planned.epochs - 1 else None
            epoch -= planned.epochs
        raise IndexError(epoch)

    def passes(self, batches: int) -> float:
        """Passes over the training part, of so many mini-batches each."""
        cut = sum(1 - planned.last / batches for planned in self if planned.last is not None)
        return self.epochs - cut


def plan_of(method: Method, workload: Workload) -> Plan:
    """A method's phases with their parameters and epochs; those without either are left out.

    Args:
        method: the method.
        workload: how much is trained in phases that do not say.
    """
    phases, planned = method.phases(), []  # first: a method may freeze something as it says them
    check_phases(method, phases)
    free = [(name, p) for name, p in method.named_parameters() if p.requires_grad]
    for phase in phases:
        epochs, last = workload.of(phase.epochs)
        parts = {name: [p for n, p in free if matches(n, own)] for name, own in phase.by_part.items()}
        parts = {name: own for name, own in parts.items() if own}
        if epochs > 0 and parts:
            planned.append(Planned(phase, epochs, parts, last))
    return Plan(planned)
