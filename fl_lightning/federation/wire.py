"""What a message passes between its sender and the exchange, and on the way down."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence

from torch import Tensor

from fl_lightning.core.message import Message
from fl_lightning.federation.exchange import Exchange

MEMORY = "wire."
"""What names in a client's private state begin with that a filter keeps there."""


class WireFilter(ABC):
    """One filter of a chain."""


class Wire:
    """The chain of filters.

    Args:
        filters: in their order on the way up and down.
        exchange: what carries the messages.
    """

    def __init__(self, filters: Sequence[WireFilter], exchange: Exchange) -> None:
        self.filters = list(filters)

    def up(self, message: Message, received: Message, memory: dict[str, Tensor]) -> Message:
        """What the exchange gets of what a client sends.

        Args:
            message: as the method sends it.
            received: what the client received in this round, which both ends know.
            memory: what filters keep for this client from round to round; changed in place.
        """
        return message

    def down(self, message: Message) -> Message:
        """What a client gets of what it is sent."""
        return message
