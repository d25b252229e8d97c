"""Exchanges without a server: what they have in common, and the ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.handover import unchanged
from fl_lightning.core.message import NOTHING, Message, Size
from fl_lightning.core.mixing import Heard
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.federation.exchange import Exchange, Hop
from fl_lightning.federation.topologies import Topology, check_graph, check_sponsors, check_sums
from fl_lightning.trust import is_known


class Arrival(NamedTuple):
    """What a client will hear, and what sending it there cost."""

    message: Message
    size: Size


class Peers(Exchange, ABC):
    """Clients that send to one another.

    A round's graph joins its participants alone: who is out neither sends nor hears, and keeps its state. When the
    round ends, everybody sends to its neighbours, and the method's `Mixer` makes one message of what each hears; it
    receives that at the start of its next round. In the first round nothing has been sent. A client that takes part
    for the first time later on is sent what its neighbours finished the round before.

    Where the own message is part of what a client receives, that waits for as long as the client is out: a share of the
    clients' mean is in it. Where it is not, a client that comes back is sent newer messages, like one that joins.
    """

    keeps_shared = True
    between_clients = True

    def setup(self, template: ClientModule, facts: Facts) -> None:
        """Start a federation whose clients are like `template`.

        Raises:
            ConfigError: if the method cannot do without its server, or the graph does not fit the clients.
        """
        self.num_clients, self.seed, self.device = facts.num_clients, facts.seed, facts.device
        server = template.make_server(facts)
        mixer = server.mixer()
        if mixer is None:
            remembered = " and ".join(name for name, rule in server.rules.items() if rule().remembers)
            why = f", which must remember {remembered} from round to round" if remembered else ""
            rule = f"{type(template.method).__name__} cannot do without its server{why}: must be Star"
            raise ConfigError("federation.exchange", rule, type(self).__name__)
        self.mixer = mixer
        self.round = 0
        self.participants: list[int] = []
        self.topology: Topology = {}
        self._posted: dict[int, Message] = {}  # of the round that is open
        self._finished: dict[int, Message] = {}  # of the last round that anybody finished, for who was out of it
        self._arrived: dict[int, Arrival] = {}
        self._replaced: dict[int, Arrival | None] = {}  # of those brought into the open round, what they had before
        self._unheard: dict[int, Size] = {}  # came down to who fell sick as it joined
        self._hops: list[Hop] = []

    @abstractmethod
    def connect(self, round: int, live: Sequence[int]) -> Topology:
        """The graph of a round among the clients that are there."""

    @abstractmethod
    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        """From which of those who finished the round before `round` a client that was out of it hears."""

    # --- a round ----------------------------------------------------------------------------------------------------

    @override
    def inbox(self, client: int) -> Message:
        there = client in self.participants and client in self._arrived
        return self._arrived[client].message if there or self._waits(client) else self._join(client)[0]

    @override
    def downlink(self, client: int) -> Size:
        return self._arrived[client].size if client in self._arrived else NOTHING

    @override
    def open(self, round: int, participants: Sequence[int]) -> None:
        self.round, self.participants = round, list(participants)
        self._posted, self._replaced = {}, {}
        self.withdraw(())
        self._hops = self._bring_in()
        self._num_pulled = len(self._hops)

    @override
    def withdraw(self, clients: Sequence[int]) -> None:
        for client in clients:
            if client in self._replaced:  # it is brought in again the next time, though this has come down to it
                before, came = self._replaced.pop(client), self._arrived.pop(client).size
                if before is None:
                    self._unheard[client] = came
                else:
                    self._arrived[client] = Arrival(before.message, came)
        self.participants = [client for client in self.participants if client not in clients]
        self.topology = self.connect(self.round, self.participants) if self.participants else {}
        if not self.in_turn:
            check_graph(_named(self), self.topology, self.participants)
        self._out = {client: 0 for client in self.participants}
        for receiver, row in self.topology.items():
            for sender in row:
                self._out[sender] += sender != receiver

    @override
    def uplink(self, client: int, message: Message) -> Size:
        params, size = self._size(message)
        return Size(params * self._out[client], size * self._out[client])

    @override
    def pulled(self) -> Size:
        return _total(self._hops[: self._num_pulled])

    @override
    def post(self, client: int, message: Message) -> None:
        self._posted[client] = message

    @override
    def close(self) -> None:
        shares = self.shares(self.topology)
        check_sums(_named(self), shares)
        with unchanged(self._posted.values(), _mixers(self), _are_own(self)):
            for receiver, row in shares.items():
                own = Heard(receiver, self._posted[receiver], row[receiver]) if self.mixer.own else None
                others = [Heard(s, self._posted[s], share) for s, share in row.items() if s != receiver]
                before = self._arrived.get(receiver)
                message = self.mixer.mix(own, others, None if before is None else before.message)
                hops = [self._hop(heard, receiver) for heard in others]
                self._hops += hops
                self._arrived[receiver] = Arrival(self.addressed(receiver, message), _total(hops))
        self._finish()

    @override
    def outgoing(self) -> Iterable[tuple[str, Message]]:
        for client in self.topology:
            yield f"what client {client} hears", self._arrived[client].message

    def _finish(self) -> None:
        self._finished, self._posted = self._posted or self._finished, {}
        if self.mixer.own and len(self._arrived) == self.num_clients:
            self._finished = {}  # nobody is left to join

    def shares(self, topology: Topology) -> Topology:
        """The share that every message has in its receiver's mean, from the graph of the round that closes."""
        if self.mixer.takes_shares:
            return topology
        return {receiver: self._alike(receiver, row) for receiver, row in topology.items()}

    def _alike(self, receiver: int, row: Iterable[int]) -> dict[int, float]:
        mixed = [sender for sender in row if self.mixer.own or sender != receiver]
        return dict.fromkeys(mixed, 1 / max(len(mixed), 1))

    def addressed(self, client: int, message: Message) -> Message:
        """What goes to `client` beside the mixed message."""
        return message

    @property
    @override
    def hops(self) -> Sequence[Hop]:
        return self._hops

    def _waits(self, client: int) -> bool:
        """Whether `client` will hear what it was sent at the end of its last round."""
        return client in self._arrived and (self.mixer.own or client in self._finished)

    def _join(self, client: int) -> tuple[Message, list[Hop]]:
        """What a client hears that was out of the round before, and its hops."""
        if not self._finished:
            return Message(), []
        sponsors = self.sponsors(self.round, client, sorted(self._finished))
        check_sponsors(_named(self), sponsors, self._finished)
        heard = [Heard(s, self._finished[s], 1 / len(sponsors)) for s in sponsors]
        before = self._arrived.get(client)
        if not heard:  # nobody sends to it: what waits for it is the newest there is
            return Message() if before is None else before.message, []
        with unchanged((part.message for part in heard), _mixers(self), _are_own(self)):
            message = self.mixer.mix(None, heard, None if before is None else before.message)
        return message, [self._hop(part, client) for part in heard]

    def _bring_in(self) -> list[Hop]:
        """Send to the participants that were out of the round before; returns the hops."""
        brought = []
        for client in self.participants:
            if self._finished and not self._waits(client):
                message, hops = self._join(client)
                before = self._replaced[client] = self._arrived.get(client)
                came = self._unheard.pop(client, NOTHING) if before is None else before.size  # though nobody hears it
                self._arrived[client] = Arrival(message, _total([*hops, came]))
                brought += hops
        return brought

    def _neighbours(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        """From which of those who are there `client` would hear if it were there, too."""
        return [sender for sender in self.connect(round, sorted({*there, client}))[client] if sender != client]

    def _size(self, message: Message) -> Size:
        return message.size

    def _hop(self, heard: Heard, receiver: int) -> Hop:
        return Hop(heard.sender, receiver, heard.share, *self._size(heard.message))

    # --- state ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "finished": {str(client): message.state_dict() for client, message in self._finished.items()},
            "arrived": {
                str(client): {"message": arrival.message.state_dict(), "size": list(arrival.size)}
                for client, arrival in self._arrived.items()
            },
            "unheard": {str(client): list(size) for client, size in self._unheard.items()},
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round = state["round"]
        self._finished = {int(client): Message.from_state_dict(own) for client, own in state["finished"].items()}
        self._arrived = {
            int(client): Arrival(Message.from_state_dict(own["message"]), Size(*own["size"]))
            for client, own in state["arrived"].items()
        }
        self._unheard = {int(client): Size(*size) for client, size in state.get("unheard", {}).items()}


def _named(exchange: Peers) -> str:
    return f"{type(exchange).__name__}: in round {exchange.round}"


def _mixers(exchange: Peers) -> str:
    return f"{type(exchange.mixer).__name__}, or a rule of its,"


def _are_own(exchange: Peers) -> bool:
    """Whether one of these is somebody's own."""
    rules = (rule() for rule in getattr(exchange.mixer, "rules", {}).values())
    return not all(is_known(type(own).__module__) for own in (exchange.mixer, *rules))


def _total(parts: Iterable[Hop | Size]) -> Size:
    parts = list(parts)
    return Size(sum(part.num_params for part in parts), sum(part.num_bytes for part in parts))


# --- the ring ---------------------------------------------------------------------------------------------------------

Schedule = Literal["parallel", "sequential"]
Directions = Literal["one", "both"]


class Ring(Peers):
    """A ring without a server: client m hears from client m − 1 (mod N), or from both sides.

    A client that is out of a round is skipped: its successor hears from the nearest predecessor that is there. A client
    that takes part for the first time is inserted: it hears from its nearest predecessor of the round before. Who is
    alone goes on from its own message, as the wire left it.

    Args:
        schedule: ``parallel`` lets all exchange at the end of a round, so that everybody hears at the start of the next
            one; ``sequential`` lets clients train one after another around the ring, each hearing what its predecessor
            has just finished in the same round, and the first one what its predecessor finished last, however long ago.
            In the run's first round the first one hears nothing, because its predecessor still has the common initial
            weights; the others average with these, as their own.
        directions: hear from the predecessor alone (``one``), or from both neighbours (``both``; parallel only).
    """

    paper = "Guo et al. (2025), Algorithm 1 (parallel) and Figure 1 (sequential)"

    def __init__(self, schedule: Schedule = "parallel", directions: Directions = "one") -> None:
        require_choices("federation.exchange", schedule=(schedule, Schedule), directions=(directions, Directions))
        one = schedule == "parallel" or directions == "one"
        require(one, "federation.exchange.directions", "must be one where schedule is sequential", directions)
        self.schedule = schedule
        self.directions = directions

    @override
    def setup(self, template: ClientModule, facts: Facts) -> None:
        super().setup(template, facts)
        self._last: dict[int, Message] = {}  # sequential: everybody's last message
        self._heard: dict[int, Message] = {}  # and the artifacts that everybody heard last
        self._initial = template.initial_message() if self.in_turn else Message()

    @property
    @override
    def in_turn(self) -> bool:
        return self.schedule == "sequential"

    @override
    def connect(self, round: int, live: Sequence[int]) -> Topology:
        if self.in_turn:
            return {}
        ring = sorted(live)
        steps = (-1,) if self.directions == "one" else (-1, 1)
        topology = {}
        for place, client in enumerate(ring):
            around = {client, *(ring[(place + step) % len(ring)] for step in steps)}
            topology[client] = dict.fromkeys(sorted(around), 1 / len(around))
        return topology

    @override
    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        return [self._predecessor(client, there)]

    def _predecessor(self, client: int, among: Iterable[int]) -> int:
        return min(set(among) - {client}, key=lambda other: (client - other) % self.num_clients)

    # --- one after another: a message is heard in the round in which it is finished -----------------------------------

    @override
    def inbox(self, client: int) -> Message:
        if not self.in_turn:
            return super().inbox(client)
        own, heard = self._hear(client)
        with unchanged((part.message for part in (own, *heard) if part is not None), _mixers(self), _are_own(self)):
            return self.mixer.mix(own, heard, self._heard.get(client))

    @override
    def downlink(self, client: int) -> Size:
        return _total(self._hops_to(client)) if self.in_turn else super().downlink(client)

    def _hear(self, client: int) -> tuple[Heard | None, list[Heard]]:
        """The own message of a client and the one that it hears now: the newest of its predecessor in this round.

        Where nobody else in the round has ever finished anything, of its predecessor in the round before.
        """
        there = {c: self._last[c] for c in self.participants if c in self._last} | self._posted
        there.pop(client, None)
        there = there or {c: message for c, message in self._finished.items() if c != client}
        if not there:
            return (Heard(client, self._last[client], 1.0) if client in self._last and self.mixer.own else None), []
        last = self._last.get(client, None if self._finished else self._initial)
        sender = self._predecessor(client, there)
        if last is self._initial:  # of the common initial weights those that are sent as such
            sent = there[sender].weights
            last = Message({name: tensor for name, tensor in last.weights.items() if name in sent})
        own = Heard(client, last, 0.5) if last is not None and self.mixer.own else None
        return own, [Heard(sender, there[sender], 1.0 if own is None else 0.5)]

    def _hops_to(self, client: int) -> list[Hop]:
        return [self._hop(part, client) for part in self._hear(client)[1]]

    def _bring_in(self) -> list[Hop]:
        return [] if self.in_turn else super()._bring_in()

    @override
    def post(self, client: int, message: Message) -> None:
        if self.in_turn:
            self._hops += self._hops_to(client)
            self._num_pulled = len(self._hops)
            if message.artifacts:  # of which rules may carry something over
                self._heard[client] = Message(artifacts=self.inbox(client).artifacts)
            self._last[client] = message
        super().post(client, message)

    @override
    def state_dict(self) -> dict[str, Any]:
        last, heard = (
            {str(client): message.state_dict() for client, message in own.items()} for own in (self._last, self._heard)
        )
        return {**super().state_dict(), "last": last, "heard": heard}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last, self._heard = (
            {int(client): Message.from_state_dict(own) for client, own in state.get(name, {}).items()}
            for name in ("last", "heard")
        )
