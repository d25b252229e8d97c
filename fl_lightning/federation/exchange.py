"""How messages travel between participants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server
from fl_lightning.errors import require_choices


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

    def hears_global(self, client: int) -> bool:
        """Whether what `client` will hear is the global message."""
        message = self.global_message()
        return message is not None and self.inbox(client) is message

    # --- many workers -----------------------------------------------------------------------------------------------

    @property
    def in_turn(self) -> bool:
        """Whether a client hears what others have finished in the same round, so that one must wait for the other."""
        return False

    @property
    def works_in_parts(self) -> bool:
        """Whether every worker may post its own clients' messages to an exchange of its own, to be merged at the end.

        Default: no, the main process's exchange gets every message, in the order of clients.
        """
        return False

    def partial(self) -> Any:
        """What was posted in the open round, merged, in plain containers."""
        raise NotImplementedError(f"{type(self).__name__} does not work in parts")

    def merge(self, partial: Any) -> None:
        """Take in the `partial` of another worker's exchange."""
        raise NotImplementedError(f"{type(self).__name__} does not work in parts")

    def address(self, owners: Mapping[int, int]) -> None:  # noqa: B027 - with one worker everything is here already
        """Bring what clients will hear to the workers that own them."""

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
        self.server.setup(seed, template.device)

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

    @property
    def works_in_parts(self) -> bool:  # noqa: D102
        return self.server.works_in_parts

    def partial(self) -> Any:  # noqa: D102
        return self.server.partial()

    def merge(self, partial: Any) -> None:  # noqa: D102
        self.server.merge(partial)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.server.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.server.load_state_dict(state)


Schedule = Literal["parallel", "sequential"]


class Ring(Exchange):
    """A directed ring without a server: client m hears from client m − 1 (mod N), and from nobody else.

    A client that did not finish the round before is skipped: its successor hears from the nearest predecessor that did.
    Who would hear only itself hears nothing. In the first round nobody has finished one, so nothing is heard.

    Args:
        schedule: ``parallel`` delivers what the predecessor finished in the round before (all exchange at the end of a
            round); ``sequential`` lets clients train one after another around the ring, each hearing what its
            predecessor has just finished in the same round, and the first one the last one's of the round before.
    """

    paper = "Guo et al. (2025), Algorithm 1 (parallel) and Figure 1 (sequential)"
    keeps_shared = True

    def __init__(self, schedule: Schedule = "parallel") -> None:
        require_choices("federation.exchange", schedule=(schedule, Schedule))
        self.schedule = schedule

    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:  # noqa: D102
        self.num_clients = num_clients
        self._finished: dict[int, Message] = {}  # of the last closed round
        self._posted: dict[int, Message] = {}  # of the round that is open
        self._active: set[int] = set(range(num_clients))

    @property
    def in_turn(self) -> bool:  # noqa: D102
        return self.schedule == "sequential"

    def inbox(self, client: int) -> Message:  # noqa: D102
        for step in range(1, self.num_clients):
            predecessor = (client - step) % self.num_clients
            if predecessor in self._posted and self.schedule == "sequential":
                return self._posted[predecessor]
            if predecessor in self._finished and (predecessor in self._active or self.schedule == "parallel"):
                return self._finished[predecessor]
        return Message()

    def open(self, round: int, participants: Sequence[int]) -> None:  # noqa: D102
        self._posted, self._active = {}, set(participants)

    def post(self, client: int, message: Message) -> None:  # noqa: D102
        self._posted[client] = message

    def close(self) -> None:  # noqa: D102
        self._finished, self._posted = self._posted or self._finished, {}
        self._active = set(self._finished)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {str(client): message.state_dict() for client, message in self._finished.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self._finished = {int(client): Message.from_state_dict(message) for client, message in state.items()}
        self._active = set(self._finished)


EXCHANGES: dict[str, type[Exchange]] = {"Star": Star, "Ring": Ring}
"""What `ClientModule.exchange` may say."""
