"""How much each client trains in a round: the same for all, or drawn for every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.core.workload import Workload
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.seeding import numpy_generator

Number = int | float


@dataclass(frozen=True)
class Draw:
    """A number that is drawn for every client, from the run's seed, the client and the round alone.

    FedNova's setting (Wang et al., NeurIPS 2020, section 5) is ``{uniform: [2, 5]}``: E_i ~ U(2, 5), anew in every
    round.

    Args:
        uniform: least and largest: whole numbers draw a whole one, both ends among them, others any number between.
        choice: draw one of these, each with the same chance.
        each: ``round`` draws anew in every round, ``client`` once for the whole run.
    """

    uniform: list[int | float] | None = None
    choice: list[int | float] | None = None
    each: Literal["round", "client"] = "round"

    def __post_init__(self) -> None:
        require_choices("federation.local_epochs", each=(self.each, Literal["round", "client"]))
        if (self.uniform is None) == (self.choice is None):
            raise ConfigError("uniform", "say one of uniform: [LEAST, LARGEST] and choice: [A, B, …]")
        if self.uniform is not None:
            ordered = len(self.uniform) == 2 and self.uniform[0] <= self.uniform[1]
            require(ordered, "uniform", "must be two numbers, the least first", self.uniform)
        require(self.choice is None or len(self.choice) > 0, "choice", "must hold a number", self.choice)

    @property
    def values(self) -> list[int | float]:
        """The numbers that were given."""
        return [*(self.uniform or ()), *(self.choice or ())]

    def of(self, seed: int, purpose: str, round: int, client: int) -> Number:
        """The number of one client in one round."""
        rng = numpy_generator(seed, purpose, round if self.each == "round" else 0, client)
        if self.choice is not None:
            return self.choice[int(rng.integers(len(self.choice)))]
        assert self.uniform is not None
        least, largest = self.uniform
        if isinstance(least, int) and isinstance(largest, int):
            return int(rng.integers(least, largest + 1))
        return float(rng.uniform(least, largest))


def check_workload(epochs: Number | Draw, steps: int | Draw | None) -> None:
    """Refuse what is no amount of training.

    Args:
        epochs: `federation.local_epochs`.
        steps: `federation.local_steps`.

    Raises:
        ConfigError: naming the key.
    """
    for number in epochs.values if isinstance(epochs, Draw) else [epochs]:
        require(0 < number < float("inf"), "federation.local_epochs", "must be > 0 and finite", number)
    if steps is None:
        return
    for number in steps.values if isinstance(steps, Draw) else [steps]:
        whole = isinstance(number, int) and number >= 1
        require(whole, "federation.local_steps", "must be whole numbers of mini-batches >= 1", number)
    require(epochs == 1, "federation.local_steps", "takes the place of federation.local_epochs; leave one out", steps)


def cuts_epochs(epochs: Number | Draw, steps: int | Draw | None) -> bool:
    """Whether the last pass of a fit may be cut short."""
    numbers = epochs.values if isinstance(epochs, Draw) else [epochs]
    drawn = isinstance(epochs, Draw) and epochs.uniform is not None and not all(isinstance(n, int) for n in numbers)
    return steps is not None or drawn or any(number != int(number) for number in numbers)


def workload_of(
    epochs: Number | Draw, steps: int | Draw | None, seed: int, round: int, client: int, batches: int
) -> Workload:
    """How much a client trains in a round.

    Args:
        epochs: `federation.local_epochs`.
        steps: `federation.local_steps`.
        seed: the run's.
        round: 1-based.
        client: 0-based.
        batches: local mini-batches of the client's whole epoch.
    """
    if isinstance(epochs, Draw):
        epochs = epochs.of(seed, "local_epochs", round, client)
    if isinstance(steps, Draw):
        steps = int(steps.of(seed, "local_steps", round, client))
    return Workload(epochs, steps, max(1, batches))
