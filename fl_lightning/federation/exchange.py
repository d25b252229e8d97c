"""How messages travel between participants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from fl_lightning.core.aggregator import KEY as AGGREGATOR
from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.checkup import Unsound, tensors_of
from fl_lightning.core.client import ClientModule
from fl_lightning.core.door import Door
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import NOTHING, Message, Size, writes_to
from fl_lightning.core.private_mean import PrivateMean
from fl_lightning.core.server import Heard, Server
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import ConfigError, own_code, require
from fl_lightning.federation.guarding import Guard
from fl_lightning.federation.unsaved import Kept, Unsaved, checked_state, names_of_ours
from fl_lightning.seeding import streams_of_own_code
from fl_lightning.terminal import say
from fl_lightning.trust import is_known


class Hop(NamedTuple):
    """One message on its way from one client to another.

    Args:
        sender: 0-based client.
        receiver: 0-based client.
        share: the message's share in the receiver's mean.
        num_params: values sent.
        num_bytes: their bytes.
    """

    sender: int
    receiver: int
    share: float
    num_params: int
    num_bytes: int


class Exchange(ABC):
    """Carries messages from one round to the next.

    A round is ``open`` → one ``post`` per participant → ``close``; after that `inbox` holds what every client hears at
    the start of its next round. Where messages only meet in sums (`works_in_parts`) they are posted as fits end, so
    that there is never more than one of them; otherwise in the order of clients, to an exchange, or a server, of one's
    own once all fits are done.
    """

    paper: ClassVar[str] = ""
    increments: frozenset[str] = frozenset()
    """Names of the artifacts that are added to what clients have received, not put in its place."""
    keeps_shared: ClassVar[bool] = False
    """Whether a client's next receive may leave its shared weights as they are, so that they must be kept for it."""
    between_clients: ClassVar[bool] = False
    """Whether messages go from client to client, so that there are `hops` to write down."""

    @abstractmethod
    def setup(self, template: ClientModule, facts: Facts) -> None:
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

    def withdraw(self, clients: Sequence[int]) -> None:  # noqa: B027 - who posts nothing is in no mean
        """Let participants of the open round leave it, who post nothing: as if they had been out of it."""

    @abstractmethod
    def close(self) -> None:
        """End the round: aggregate, or route."""

    def outgoing(self) -> Iterable[tuple[str, Message]]:
        """What was made of the round that was closed last, with who made it, to be looked at before it is sent."""
        return ()

    def know(self, heard: Heard) -> None:  # noqa: B027 - nothing comes down where there is no server
        """Learn what becomes of a server's message on its way down.

        Args:
            heard: what clients receive of a message that the server sends in a round.
        """

    def optimize(self, optimizer: ServerOptimizer, template: ClientModule) -> None:
        """Let an optimizer follow the server's mean.

        Raises:
            ConfigError: if there is no such mean.
        """
        rule = f"needs a server, which a federation on a {type(self).__name__} has not: must be null"
        raise ConfigError("federation.server_optimizer", rule, type(optimizer).__name__)

    def protect(self, mean: PrivateMean, template: ClientModule) -> None:
        """Let the server hear nothing but a round's private mean.

        Raises:
            ConfigError: if there is no server, or it must see more than a mean.
        """
        rule = f"noise at the server needs one, which a federation on a {type(self).__name__} has not: must be client"
        raise ConfigError("federation.wire.where", rule, "server")

    def guard(self, aggregator: Aggregator, template: ClientModule, participants: int) -> None:
        """Let a robust rule take the mean's place.

        Args:
            aggregator: the rule.
            template: a client.
            participants: the fewest of a round in which nobody fails, on average where they are drawn singly.

        Raises:
            ConfigError: if there is no such mean, or the rounds are too small.
        """
        rule = f"needs a server, which a federation on a {type(self).__name__} has not: must be null"
        raise ConfigError(AGGREGATOR, rule, type(aggregator).__name__)

    def global_message(self) -> Message | None:
        """The message that all clients will hear, where there is such a one."""
        return None

    # --- what it costs ----------------------------------------------------------------------------------------------

    def uplink(self, client: int, message: Message) -> Size:
        """What `client` sends in the open round by posting `message`: every copy of it counts."""
        return message.size

    def downlink(self, client: int) -> Size:
        """What was sent to `client` for it to have its `inbox`."""
        return self.inbox(client).size

    def pulled(self) -> Size:
        """What was sent at the start of the open round beyond what participants post in it."""
        return NOTHING

    @property
    def hops(self) -> Sequence[Hop]:
        """Who sent what to whom in the round that was closed last; empty where all goes through a server."""
        return ()

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


class Carriers:
    """What carries messages where it is somebody's own, its random streams: of seed, round and client alone.

    Args:
        exchange: set up.
        seed: the run's.
    """

    def __init__(self, exchange: Exchange, seed: int) -> None:
        mixer = getattr(exchange, "mixer", None)
        self._parts = (exchange, mixer, *(rule() for rule in getattr(mixer, "rules", {}).values()))
        self._exchange, self._seed = exchange, seed
        self._unsaved, self._ours = Unsaved(), names_of_ours(type(exchange))
        self.round = 0
        """The one that is open, 1-based."""

    @property
    def server(self) -> Server | None:
        """In the middle; None where there is none."""
        return getattr(self._exchange, "server", None)

    def streams(self, hook: str, client: int = -1) -> AbstractContextManager[None]:
        """For the length of one of the exchange's hooks."""
        return streams_of_own_code(self._parts, self._seed, f"exchange/{hook}", self.round, client)

    @contextmanager
    def opening(self, round: int) -> Iterator[None]:
        """Open a round; then say, once, what an exchange of one's own remembers and no checkpoint does."""
        self.round = round
        with self.streams("open"):
            yield
        if not is_known(type(self._exchange).__module__):
            self._unsaved.look(self._exchange, self._ours)


class Star(Exchange):
    """A server in the middle: every participant sends to it and hears from it."""

    server: Server
    door: Door | None = None
    """What stands between clients and server; None where the server hears every message."""

    @override
    def setup(self, template: ClientModule, facts: Facts) -> None:
        self.facts, self._unsaved = facts, [Unsaved(), Unsaved(), Unsaved()]
        self.server = template.make_server(facts)
        with own_code("method", self.server, "setup()"):
            self.server.setup(facts)
        given = self.server.message
        rule = f"{type(self.server).__name__}.message must be a Message once it is set up"
        require(isinstance(given, Message), "method", rule, type(given).__name__)
        self._is_ours = is_known(type(self.server).__module__)
        self._tells_left_out = not self._is_ours  # once
        self._shapes = {name: tensor.shape for name, tensor in self.server.message.weights.items()}
        self._rules = [rule() for rule in self.server.rules.values()]
        self.increments = self.server.increments

    @override
    def know(self, heard: Heard) -> None:
        self.server.as_heard = heard

    @override
    def optimize(self, optimizer: ServerOptimizer, template: ClientModule) -> None:
        name = type(template.method).__name__
        does = self.server.only_averages and bool(self.server.message.weights)
        rule = f"needs a server that only averages weights, which {name}'s is not: must be null"
        require(does, "federation.server_optimizer", rule, type(optimizer).__name__)
        optimizer.start(name for name, _ in template.method.named_parameters(remove_duplicate=False))
        self.server.optimizer = optimizer

    @override
    def protect(self, mean: PrivateMean, template: ClientModule) -> None:
        name, server = type(template.method).__name__, self.server
        odd = [f"the rule of {key}" for key, rule in server.rules.items() if not rule().hears_mean]
        odd = odd if server.hears_mean else [f"{name}'s server"]
        rule = f"{odd[0] if odd else name} must see every single message and not only their mean: must be client"
        require(not odd, "federation.wire.where", rule, "server")
        varies = f"{name} sends other things in other rounds, and a private mean would tell who did: must be client"
        require(not server.varies, "federation.wire.where", varies, "server")
        noise = "ClipAndNoise at the server blurs a mean, and a robust rule makes none: one of the two must go"
        require(self.door is None, AGGREGATOR, noise)
        self.door, server.expected = mean, mean.expected
        server.as_heard = None  # it adds the mean update to what it has sent, whatever clients have heard of that

    @override
    def guard(self, aggregator: Aggregator, template: ClientModule, participants: int) -> None:
        self.door = Guard(aggregator, self.server, template.method, participants)

    @override
    def inbox(self, client: int) -> Message:
        shared, was = self.server.message, {} if self._is_ours else _held(self.server.message)
        with self._streams("message", client):
            message = self.server.message_for(client)
        if not self._is_ours and shared is self.server.message and _held(shared) != was:
            rule = "changes self.message, which others hear, too: give replace(self.message, …)"
            raise Unsound(f"{type(self.server).__name__}.message_for() {rule}")
        if not isinstance(message, Message):
            who, given = type(self.server).__name__, type(message).__name__
            raise Unsound(f"{who}.message_for() gives {given}, and must give a Message")
        return message

    @override
    def open(self, round: int, participants: Sequence[int]) -> None:
        self.server.facts = replace(self.facts, round=round, participants=tuple(participants))
        with self._streams("open"):
            self.server.open_round()
        for unsaved, owner in zip(self._unsaved, self._keeping(), strict=True):
            if owner is not None:
                unsaved.look(owner)
        if self.door is not None:
            self.door.open_round()

    def _keeping(self) -> tuple[Kept | None, ...]:
        """What remembers something from round to round, and may be somebody's own."""
        return self.server, self.server.optimizer, None if self.door is None else self.door.rule

    def _streams(self, purpose: str, client: int = -1) -> AbstractContextManager[None]:
        """What a server, an optimizer or a rule of one's own draws from, whoever has fitted last in this process."""
        parts = (*self._keeping(), *self._rules)
        return streams_of_own_code(parts, self.facts.seed, f"server/{purpose}", self.server.round, client)

    @override
    def withdraw(self, clients: Sequence[int]) -> None:
        facts = self.server.facts
        self.server.facts = replace(facts, participants=tuple(c for c in facts.participants if c not in clients))

    @override
    def post(self, client: int, message: Message) -> None:
        if self.door is not None:
            self.door.add(client, message)
        else:
            with self._streams("collect", client):
                self.server.collect(client, message)

    @override
    def close(self) -> None:
        with self._streams("close"):
            if self.door is not None:
                for client, message in self.door.release(self.server.round, self.server.started):
                    self.server.collect(client, message)
            self.server.close_round()
        self._check_sent(self.server.message)

    def _check_sent(self, message: Message) -> None:
        """Refuse weights of other shapes, and say where a server of somebody's own leaves some out.

        Raises:
            ConfigError: naming the server and the first of them.
        """
        who, weights = type(self.server).__name__, message.weights
        for name, tensor in weights.items():
            shape = self._shapes.get(name, tensor.shape)
            rule = f"{who} must send {name!r} as {tuple(shape)}, as clients share it"
            require(tensor.shape == shape, "method", rule, tuple(tensor.shape))
        left_out = [name for name in self._shapes if name not in weights] if weights and self._tells_left_out else []
        if left_out:
            self._tells_left_out = False
            say(
                f"fl-lightning: {who} sends no {left_out[0]!r}, which clients share: they start from what it was in "
                "the beginning, round after round, unless they keep it"
            )

    @override
    def outgoing(self) -> Iterable[tuple[str, Message]]:
        known = {id(self.server.message)}
        yield "the server", self.server.message
        for client in self.server.facts.participants:
            message = self.inbox(client)
            if id(message) not in known:
                yield f"the server to client {client}", message

    @override
    def global_message(self) -> Message | None:
        return self.server.message

    @property
    def _taker(self) -> Server | Door:
        """Who takes what clients send."""
        return self.server if self.door is None else self.door

    @property
    @override
    def works_in_parts(self) -> bool:
        keeps = type(self).post is not Star.post  # it may, of each message, what `partial` does not tell
        return not keeps and self._taker.works_in_parts

    @override
    def partial(self) -> Any:
        return self._taker.partial()

    @override
    def merge(self, partial: Any) -> None:
        self._taker.merge(partial)

    @override
    def state_dict(self) -> dict[str, Any]:
        for owner in self._keeping()[1:]:
            if owner is not None:
                checked_state(owner)
        state = checked_state(self.server)
        return state if self.door is None else {"server": state, self.door.key: self.door.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.door is None:
            self.server.load_state_dict(state)
            return
        self.server.load_state_dict(state.get("server", state))  # once they stood in one, and names could clash
        self.door.load_state_dict(state[self.door.key])


def _held(message: Message) -> dict[str, tuple[int, int, int]]:
    """Which tensors a message holds, how often each has been changed in place, and what its bits add up to."""
    tensors = tensors_of(message)
    return {name: (id(tensors[name]), *now) for name, now in writes_to(tensors).items()}
