"""How messages travel between participants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server


class Exchange(ABC):
    """Carries messages from one round to the next.

    A round is ``open`` → one ``post`` per participant → ``close``; after that `inbox` holds what every client hears at
    the start of its next round. Messages are posted as fits end, so that an exchange which only averages never holds
    more than one of them.
    """

    paper: ClassVar[str] = ""
    keeps_shared: ClassVar[bool] = False
    """Whether a client's next receive may leave its shared weights as they are, so that they must be kept for it."""

    @abstractmethod
    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:
        """Start a federation whose clients are like `template`, with its present weights."""

    @abstractmethod
    def inbox(self, client: int) -> Message:
        """What `client` hears at the start of its next round; an empty message where there is nothing."""

    @abstractmethod
    def open(self, round: int, participants: Sequence[int]) -> None:
        """Start round `round` among `participants`."""

    @abstractmethod
    def post(self, client: int, message: Message) -> None:
        """Take what `client` sends after its fit."""

    @abstractmethod
    def close(self) -> None:
        """End the round: aggregate, or route."""

    def global_message(self) -> Message | None:
        """The message that all clients will hear, where there is such a one."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""


class Star(Exchange):
    """A server in the middle: every participant sends to it and hears from it."""

    server: Server

    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:  # noqa: D102
        self.server = template.make_server(template.initial_message())

    def inbox(self, client: int) -> Message:  # noqa: D102
        return self.server.message_for(client)

    def open(self, round: int, participants: Sequence[int]) -> None:  # noqa: D102
        self.server.open_round(round)

    def post(self, client: int, message: Message) -> None:  # noqa: D102
        self.server.collect(client, message)

    def close(self) -> None:  # noqa: D102
        self.server.close_round()

    def global_message(self) -> Message | None:  # noqa: D102
        return self.server.message

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.server.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.server.load_state_dict(state)
