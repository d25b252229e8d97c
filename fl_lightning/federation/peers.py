"""Exchanges without a server: messages travel from client to client over a ring or a graph."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import NOTHING, Message, Size
from fl_lightning.core.mixing import Heard
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.federation.exchange import Exchange, Hop, Star
from fl_lightning.seeding import numpy_generator

Topology = dict[int, dict[int, float]]
"""Receiver -> sender -> how much of the sender's message goes to the receiver, its own share among them."""

PUSH_WEIGHT = "push_weight"
"""Artifact that tells a client its push-sum weight μ, a scalar; where it is missing μ is 1."""

LEAST_MASS = 1e-8


class Arrival(NamedTuple):
    """What a client will hear, and what sending it there cost."""

    message: Message
    size: Size


class Peers(Exchange, ABC):
    """Clients that send to one another.

    A round's graph joins its participants alone: who is out neither sends nor hears, and keeps its state. When the
    round ends, everybody sends to its neighbours, and the method's `Mixer` makes one message of what each hears; it
    receives that at the start of its next round, whenever that is. In the first round nothing has been sent. A client
    that takes part for the first time later on is sent what its neighbours finished the round before.
    """

    keeps_shared = True
    between_clients = True

    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:
        """Start a federation whose clients are like `template`.

        Raises:
            ConfigError: if the method cannot do without its server, or the graph does not fit `num_clients`.
        """
        self.num_clients, self.seed = num_clients, seed
        mixer = template.make_mixer()
        if mixer is None:
            rule = f"{type(template).__name__} cannot do without its server: must be Star"
            raise ConfigError("federation.exchange", rule, type(self).__name__)
        self.mixer = mixer
        self.round = 0
        self.participants: list[int] = []
        self.topology: Topology = {}
        self._posted: dict[int, Message] = {}  # of the round that is open
        self._finished: dict[int, Message] = {}  # of the last round that anybody finished, for who joins
        self._arrived: dict[int, Arrival] = {}
        self._hops: list[Hop] = []

    @abstractmethod
    def connect(self, round: int, live: Sequence[int]) -> Topology:
        """The graph of a round among the clients that are there."""

    @abstractmethod
    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        """From which of those who finished the round before `round` a client that joins hears."""

    # --- a round ----------------------------------------------------------------------------------------------------

    def inbox(self, client: int) -> Message:  # noqa: D102
        return self._arrival(client).message

    def downlink(self, client: int) -> Size:  # noqa: D102
        return self._arrival(client).size

    def open(self, round: int, participants: Sequence[int]) -> None:  # noqa: D102
        self.round, self.participants = round, list(participants)
        self._posted = {}
        self.topology = self.connect(round, self.participants)
        self._out = {client: 0 for client in participants}
        for receiver, row in self.topology.items():
            for sender in row:
                self._out[sender] += sender != receiver
        self._hops = self._hops_to_joiners()
        self._num_pulled = len(self._hops)

    def uplink(self, client: int, message: Message) -> Size:  # noqa: D102
        params, size = self._size(message)
        return Size(params * self._out[client], size * self._out[client])

    def pulled(self) -> Size:  # noqa: D102
        hops = self._hops[: self._num_pulled]
        return Size(sum(hop.num_params for hop in hops), sum(hop.num_bytes for hop in hops))

    def post(self, client: int, message: Message) -> None:  # noqa: D102
        self._posted[client] = message

    def close(self) -> None:  # noqa: D102
        shares = self.shares(self.topology)
        for receiver, row in shares.items():
            own = Heard(receiver, self._posted[receiver], row[receiver])
            others = [Heard(s, self._posted[s], share) for s, share in row.items() if s != receiver]
            before = self._arrived.get(receiver)
            message = self.mixer.mix(own, others, None if before is None else before.message)
            hops = [self._hop(heard, receiver) for heard in others]
            self._hops += hops
            self._arrived[receiver] = Arrival(self.addressed(receiver, message), _total(hops))
        self._finish()

    def _finish(self) -> None:
        self._finished, self._posted = self._posted or self._finished, {}
        if len(self._arrived) == self.num_clients:
            self._finished = {}  # nobody is left to join

    def shares(self, topology: Topology) -> Topology:
        """The share that every message has in its receiver's mean, from the graph of the round that closes."""
        return topology

    def addressed(self, client: int, message: Message) -> Message:
        """What goes to `client` beside the mixed message."""
        return message

    @property
    def hops(self) -> Sequence[Hop]:  # noqa: D102
        return self._hops

    def _arrival(self, client: int) -> Arrival:
        return self._arrived[client] if client in self._arrived else self._join(client)[0]

    def _join(self, client: int) -> tuple[Arrival, list[Hop]]:
        """What a client hears that never took part, and its hops."""
        if client in self._arrived or not self._finished:
            return Arrival(Message(), NOTHING), []
        sponsors = self.sponsors(self.round, client, sorted(self._finished))
        heard = [Heard(s, self._finished[s], 1 / len(sponsors)) for s in sponsors]
        hops = [self._hop(part, client) for part in heard]
        return Arrival(self.mixer.mix(None, heard, None), _total(hops)), hops

    def _hops_to_joiners(self) -> list[Hop]:
        return [hop for client in self.participants for hop in self._join(client)[1]]

    def _size(self, message: Message) -> Size:
        return message.size

    def _hop(self, heard: Heard, receiver: int) -> Hop:
        return Hop(heard.sender, receiver, heard.share, *self._size(heard.message))

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {
            "round": self.round,
            "finished": {str(client): message.state_dict() for client, message in self._finished.items()},
            "arrived": {
                str(client): {"message": arrival.message.state_dict(), "size": list(arrival.size)}
                for client, arrival in self._arrived.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.round = state["round"]
        self._finished = {int(client): Message.from_state_dict(own) for client, own in state["finished"].items()}
        self._arrived = {
            int(client): Arrival(Message.from_state_dict(own["message"]), Size(*own["size"]))
            for client, own in state["arrived"].items()
        }


def _total(hops: Iterable[Hop]) -> Size:
    hops = list(hops)
    return Size(sum(hop.num_params for hop in hops), sum(hop.num_bytes for hop in hops))


# --- the ring ---------------------------------------------------------------------------------------------------------

Schedule = Literal["parallel", "sequential"]
Directions = Literal["one", "both"]


class Ring(Peers):
    """A ring without a server: client m hears from client m − 1 (mod N), or from both sides.

    A client that is out of a round is skipped: its successor hears from the nearest predecessor that is there. A client
    that takes part for the first time is inserted: it hears from its nearest predecessor of the round before. Who would
    hear only itself hears nothing.

    Args:
        schedule: ``parallel`` lets all exchange at the end of a round, so that everybody hears at the start of the next
            one; ``sequential`` lets clients train one after another around the ring, each hearing what its predecessor
            has just finished in the same round, and the first one what its predecessor finished last.
        directions: hear from the predecessor alone (``one``), or from both neighbours (``both``; parallel only).
    """

    paper = "Guo et al. (2025), Algorithm 1 (parallel) and Figure 1 (sequential)"

    def __init__(self, schedule: Schedule = "parallel", directions: Directions = "one") -> None:
        require_choices("federation.exchange", schedule=(schedule, Schedule), directions=(directions, Directions))
        one = schedule == "parallel" or directions == "one"
        require(one, "federation.exchange.directions", "must be one where schedule is sequential", directions)
        self.schedule = schedule
        self.directions = directions

    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:  # noqa: D102
        super().setup(template, num_clients, seed)
        self._last: dict[int, Message] = {}  # sequential: everybody's last message

    @property
    def in_turn(self) -> bool:  # noqa: D102
        return self.schedule == "sequential"

    def connect(self, round: int, live: Sequence[int]) -> Topology:  # noqa: D102
        if self.in_turn:
            return {}
        ring = sorted(live)
        steps = (-1,) if self.directions == "one" else (-1, 1)
        topology = {}
        for place, client in enumerate(ring):
            around = {client, *(ring[(place + step) % len(ring)] for step in steps)}
            topology[client] = dict.fromkeys(sorted(around), 1 / len(around))
        return topology

    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:  # noqa: D102
        return [self._predecessor(client, there)]

    def _predecessor(self, client: int, among: Iterable[int]) -> int:
        return min(set(among) - {client}, key=lambda other: (client - other) % self.num_clients)

    # --- one after another: a message is heard in the round in which it is finished -----------------------------------

    def _arrival(self, client: int) -> Arrival:
        if not self.in_turn:
            return super()._arrival(client)
        message, hops = self._hear(client)
        return Arrival(message, _total(hops))

    def _hear(self, client: int) -> tuple[Message, list[Hop]]:
        """What a client hears now: what its predecessor has finished in this round, or else in the one before."""
        waiting = {c: own for c, own in self._finished.items() if c in self.participants or not self.participants}
        there = {**waiting, **self._posted}
        there.pop(client, None)
        own = [Heard(client, self._last[client], 0.5)] if client in self._last else []
        sender = self._predecessor(client, there) if there else None
        heard = [] if sender is None else [Heard(sender, there[sender], 0.5 if own else 1.0)]
        return self.mixer.mix(own[0] if own else None, heard, None), [self._hop(part, client) for part in heard]

    def _hops_to_joiners(self) -> list[Hop]:
        return [] if self.in_turn else super()._hops_to_joiners()

    def post(self, client: int, message: Message) -> None:  # noqa: D102
        if self.in_turn:
            self._hops += self._hear(client)[1]
            self._num_pulled = len(self._hops)
            self._last[client] = message
        super().post(client, message)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        last = {str(client): message.state_dict() for client, message in self._last.items()}
        return {**super().state_dict(), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().load_state_dict(state)
        self._last = {int(client): Message.from_state_dict(own) for client, own in state["last"].items()}


# --- graphs -----------------------------------------------------------------------------------------------------------

Mixing = Literal["push_sum", "uniform"]


class DirectedGraph(Peers):
    """A directed graph without a server, drawn anew for every round or fixed; averages stay true by push-sum.

    Every sender splits its mass in equal parts over its out-neighbours and itself, so that the columns of the round's
    matrix P sum to 1, and sends its push-sum weight μ along (1 at first). With u = μ·z,

        u_i ← Σ_j p_ij u_j,   μ_i ← Σ_j p_ij μ_j,   z_i ← u_i / μ_i,

    so Σ u and Σ μ do not change by an exchange, and z converges to the clients' mean on any strongly connected
    sequence of graphs, though a node may hear more often than it is heard. Clients train z; the own μ comes to them as
    artifact ``push_weight``.

    Args:
        degree: neighbours that every client draws in a round, >= 1: the ones it sends to (``push_sum``), or hears from
            (``uniform``). Fewer where fewer are there.
        redraw: draw neighbours anew for every round; false draws them once, one of each client's along a circle of all,
            so that everybody is reached.
        edges: a fixed graph instead, as pairs [sender, receiver].
        mixing: ``push_sum``, or ``uniform``: the plain mean of the own and the heard, whose limit is not the mean.
    """

    paper = "Nedić & Olshevsky, IEEE TAC 2016; Assran et al., ICML 2019 (push-sum)"

    def __init__(
        self,
        degree: int = 10,
        redraw: bool = True,
        edges: list[list[int]] | None = None,
        mixing: Mixing = "push_sum",
    ) -> None:
        require(degree >= 1, "federation.exchange.degree", "must be >= 1", degree)
        require_choices("federation.exchange", mixing=(mixing, Mixing))
        for edge in edges or ():
            pair = len(edge) == 2 and edge[0] != edge[1]
            require(pair, "federation.exchange.edges", "each must be a pair of different clients", edge)
        self.degree = degree
        self.redraw = redraw
        self.edges = None if edges is None else sorted({(sender, receiver) for sender, receiver in edges})
        self.mixing = mixing

    def setup(self, template: ClientModule, num_clients: int, seed: int) -> None:  # noqa: D102
        super().setup(template, num_clients, seed)
        for edge in self.edges or ():
            there = all(0 <= client < num_clients for client in edge)
            allowed = f"each must be between clients 0 to {num_clients - 1}"
            require(there, "federation.exchange.edges", allowed, list(edge))
        self._fixed = self._fixed_edges()
        self.mass: dict[int, float] = {}
        """Client -> its push-sum weight μ, where it is not 1."""

    @property
    def pushes(self) -> bool:
        """Whether push-sum weights travel: they do not matter to a method that weighs messages its own way."""
        return self.mixing == "push_sum" and self.mixer.takes_shares

    def connect(self, round: int, live: Sequence[int]) -> Topology:  # noqa: D102
        there = set(live)
        edges = [edge for edge in self._edges(round, live) if set(edge) <= there]
        senders: dict[int, list[int]] = {client: [client] for client in live}
        copies = dict.fromkeys(live, 1)
        for sender, receiver in edges:
            senders[receiver].append(sender)
            copies[sender] += 1
        pushed = self.mixing == "push_sum"
        return {
            receiver: {sender: 1 / (copies[sender] if pushed else len(own)) for sender in sorted(own)}
            for receiver, own in senders.items()
        }

    def _edges(self, round: int, live: Sequence[int]) -> Iterable[tuple[int, int]]:
        if self.edges is not None:
            return self.edges
        if not self.redraw:
            return self._fixed
        drawn = [(client, other) for client in live for other in self._draw("graph", round, client, live, self.degree)]
        return drawn if self.mixing == "push_sum" else [(other, client) for client, other in drawn]

    def _fixed_edges(self) -> list[tuple[int, int]]:
        """A circle in random order and, for each client, `degree` - 1 others: strongly connected."""
        everybody = range(self.num_clients)
        circle = numpy_generator(self.seed, "exchange/graph").permutation(self.num_clients).tolist()
        edges = []
        for client, follower in zip(circle, [*circle[1:], circle[0]], strict=True):
            others = [other for other in everybody if other != follower]
            more = self._draw("graph", 0, client, others, self.degree - 1)
            edges += [(client, other) for other in (follower, *more) if other != client]
        return edges if self.mixing == "push_sum" else [(other, client) for client, other in edges]

    def _draw(self, purpose: str, round: int, client: int, among: Iterable[int], count: int) -> list[int]:
        """So many of the others, without replacement; depends on seed, round, client and who is there alone."""
        others = [other for other in among if other != client]
        rng = numpy_generator(self.seed, f"exchange/{purpose}", round, client)
        return [int(other) for other in rng.choice(others, min(count, len(others)), replace=False)]

    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:  # noqa: D102
        if self.edges is None:
            return self._draw("join", round, client, there, self.degree)
        senders = [sender for sender, receiver in self.edges if receiver == client and sender in there]
        return senders or list(there)

    def shares(self, topology: Topology) -> Topology:
        """Rows that sum to 1: p_ij μ_j / μ_i, with the new μ_i, which they leave in `mass`.

        Raises:
            RuntimeError: if a client's μ falls below 1e-8, where z = u/μ loses its meaning.
        """
        if not self.pushes:
            return super().shares(topology)
        rows, mass = {}, dict(self.mass)
        for receiver, row in topology.items():
            arriving = {sender: part * self.mass.get(sender, 1.0) for sender, part in row.items()}
            mass[receiver] = math.fsum(arriving.values())
            if mass[receiver] < LEAST_MASS:
                raise RuntimeError(
                    f"DirectedGraph: client {receiver}'s push-sum weight is {mass[receiver]:.1e} after round "
                    f"{self.round}: it hears too little; add edges to it or take mixing: uniform"
                )
            rows[receiver] = {sender: part / mass[receiver] for sender, part in arriving.items()}
        self.mass = mass
        return rows

    def addressed(self, client: int, message: Message) -> Message:
        """The mixed message with the client's μ."""
        if not self.pushes:
            return message
        own = {**message.artifacts, PUSH_WEIGHT: torch.tensor(self.mass[client], dtype=torch.float32)}
        return Message(message.weights, own, message.num_samples)

    def _size(self, message: Message) -> Size:
        params, size = message.size
        return Size(params + 1, size + 4) if self.pushes else message.size

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {**super().state_dict(), "mass": {str(client): mass for client, mass in self.mass.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().load_state_dict(state)
        self.mass = {int(client): mass for client, mass in state["mass"].items()}


class RandomPeers(Peers):
    """A random undirected graph without a server, drawn anew for every round or once.

    Clients stand in a random order around a circle and are joined to their nearest ones, so that all have as many
    neighbours and the graph is connected from two neighbours on. Shares are Metropolis-Hastings': with d_i neighbours,
    1 / (1 + max(d_i, d_j)) for each and the rest for the own message, so the clients' mean does not change by an
    exchange.

    Args:
        degree: neighbours of every client, >= 1; 1 makes pairs. Fewer where fewer are there, and one fewer for one of
            the clients where both their number and `degree` are odd.
        redraw: draw the graph anew for every round; false draws one order for the whole run.
    """

    paper = "Xiao & Boyd, Systems & Control Letters 2004 (weights)"

    def __init__(self, degree: int = 10, redraw: bool = True) -> None:
        require(degree >= 1, "federation.exchange.degree", "must be >= 1", degree)
        self.degree = degree
        self.redraw = redraw

    def connect(self, round: int, live: Sequence[int]) -> Topology:  # noqa: D102
        order = numpy_generator(self.seed, "exchange/graph", round if self.redraw else 0)
        there = set(live)
        circle = [client for client in order.permutation(self.num_clients).tolist() if client in there]
        around: dict[int, set[int]] = {client: set() for client in live}
        for one, other in self._pairs(circle):
            around[one].add(other)
            around[other].add(one)
        topology = {}
        for client in live:
            row = {o: 1 / (1 + max(len(around[client]), len(around[o]))) for o in sorted(around[client])}
            topology[client] = {**row, client: 1 - math.fsum(row.values())}
        return topology

    def _pairs(self, circle: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Edges of the graph: every place with the next ones, and with the opposite one where `degree` is odd."""
        size = len(circle)
        degree = min(self.degree, size - 1)
        for place in range(size):
            for step in range(1, degree // 2 + 1):
                yield circle[place], circle[(place + step) % size]
        if degree % 2:
            half = size // 2
            yield from zip(circle[:half], circle[half : 2 * half], strict=True)

    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:  # noqa: D102
        rng = numpy_generator(self.seed, "exchange/join", round, client)
        return [int(other) for other in rng.choice(there, min(self.degree, len(there)), replace=False)]


EXCHANGES: dict[str, type[Exchange]] = {kind.__name__: kind for kind in (Star, Ring, DirectedGraph, RandomPeers)}
"""What `ClientModule.exchange` may say."""
