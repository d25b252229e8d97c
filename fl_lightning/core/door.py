"""What may stand between clients and their server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.message import Message


class Door(ABC):
    """Takes a round's messages in the server's place, and lets through what it makes of all of them.

    Attributes:
        key: of its state, in that of the exchange.
        works_in_parts: whether every worker may have one for its own clients, merged at the end.
        rule: that it goes by and that may be somebody's own; None where there is none.
    """

    key: ClassVar[str]
    works_in_parts: ClassVar[bool] = False
    rule: Aggregator | None = None

    @abstractmethod
    def open_round(self) -> None:
        """Forget what came in."""

    @abstractmethod
    def add(self, client: int, message: Message) -> None:
        """Take what a client sends."""

    @abstractmethod
    def release(self, round: int, previous: Message) -> Iterable[tuple[int, Message]]:
        """What the server collects, and of whom.

        Args:
            round: 1-based.
            previous: what the server had sent, as the round's clients have heard it where that matters.
        """

    def partial(self) -> Any:
        """What was taken in the open round, merged, in plain containers."""
        raise NotImplementedError(f"{type(self).__name__} does not work in parts")

    def merge(self, partial: Any) -> None:
        """Take in the `partial` of another worker's."""
        raise NotImplementedError(f"{type(self).__name__} does not work in parts")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the next rounds depend on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
