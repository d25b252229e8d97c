"""What a server makes of a round's messages where some clients may lie: robust rules in the place of the mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fl_lightning.core.message import Message
from fl_lightning.core.vectors import Vectors, combined
from fl_lightning.errors import require

KEY = "federation.aggregator"


class Aggregator(ABC):
    """A robust rule: first it may leave clients out, then it combines what the others sent, vector by vector.

    All clients count alike: a number of samples is easily made up.
    """

    paper: ClassVar[str] = ""

    def __init__(self) -> None:
        self.trained: frozenset[str] | None = None
        """Names of the weights that are parameters; None for all that are floating-point."""

    def start(self, trained: Iterable[str]) -> None:
        """Begin a federation: nothing is remembered.

        Args:
            trained: names of the weights that are parameters.
        """
        self.trained = frozenset(trained)

    def least(self, participants: int) -> int:
        """How many clients must send something in a round of so many, for the rule to mean anything."""
        return 1

    def selected(self, messages: Sequence[Message]) -> list[int]:
        """Positions of the clients that count, in order; by default all."""
        return list(range(len(messages)))

    @abstractmethod
    def combine(self, vectors: Vectors) -> Tensor:
        """[P] what becomes of several clients' vectors, of which there is at least one."""

    def treat(self, messages: Sequence[Message], previous: Message) -> list[Message]:
        """What is averaged in the place of a round's messages: as many, all alike.

        Args:
            messages: in the order of clients; not empty.
            previous: what the clients had received.

        Raises:
            Unsuited: for an artifact of which no vectors can be made.
            ValueError: if names or shapes differ between clients.
        """
        chosen = self.selected(messages)
        who, places = type(self).__name__, range(len(messages))
        positions = all(isinstance(place, int) and not isinstance(place, bool) for place in chosen)
        if not chosen or not positions or len({*chosen}) < len(chosen) or not {*chosen} <= {*places}:
            rule = f"{who}.selected() must give the positions, from 0 to {len(messages) - 1}, of clients that count"
            raise ValueError(f"{rule}, each once and one at least; got {chosen}")
        return combined([messages[place] for place in chosen], previous, self.trained, self.combine, len(messages))

    def state_dict(self) -> dict[str, Any]:
        """What is kept from round to round. Default: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most rules keep nothing
        """The inverse of `state_dict`."""


def check_byzantine(num_byzantine: float) -> None:
    """Refuse what is neither a number of clients nor a share of them below a half."""
    whole = isinstance(num_byzantine, int) or float(num_byzantine).is_integer()
    allowed = num_byzantine >= 0 and (whole or num_byzantine < 0.5)
    require(allowed, f"{KEY}.num_byzantine", "must be a whole number >= 0 or a share in [0, 0.5)", num_byzantine)


def byzantine(num_byzantine: float, participants: int) -> int:
    """How many of so many participants may lie, f; a share is rounded up.

    >>> byzantine(2, 10), byzantine(0.2, 10), byzantine(0.2, 8)
    (2, 2, 2)
    """
    return int(num_byzantine) if num_byzantine >= 1 else math.ceil(num_byzantine * participants - 1e-9)
