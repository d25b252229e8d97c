"""Exchanges without a server over graphs: a directed one with push-sum, and a random undirected one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message, Size
from fl_lightning.core.method import Method
from fl_lightning.core.mixing import PUSH_WEIGHT
from fl_lightning.errors import ConfigError, require, require_choices, suggest
from fl_lightning.federation.exchange import Exchange, Star
from fl_lightning.federation.peers import Peers, Ring
from fl_lightning.federation.topologies import Topology
from fl_lightning.seeding import numpy_generator

LEAST_MASS = 1e-8

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
        redraw: draw neighbours anew for every round; false draws them once, one of each client's along a circle of all
            who are there, so that everybody is reached.
        edges: a fixed graph instead, as pairs [sender, receiver]. Push-sum needs a way back along each of them, or mass
            would only leave its sender; a client without edges goes on alone, from its message as the wire left it. One
            that joins or comes back while all its neighbours were out hears others, who are drawn.
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
        some = edges is None or len(edges) > 0
        require(some, "federation.exchange.edges", "must not be empty; null draws them", edges)
        for edge in edges or ():
            pair = len(edge) == 2 and edge[0] != edge[1]
            require(pair, "federation.exchange.edges", "each must be a pair of different clients", edge)
        self.degree = degree
        self.redraw = redraw
        self.edges = None if edges is None else sorted({(sender, receiver) for sender, receiver in edges})
        self.mixing = mixing

    def setup(self, template: ClientModule, facts: Facts) -> None:
        """Start a federation whose clients are like `template`.

        Raises:
            ConfigError: if the method cannot do without its server, or `edges` names other clients than there are or,
                under push-sum, lets a client give mass away that never comes back.
        """
        super().setup(template, facts)
        for edge in self.edges or ():
            there = all(0 <= client < self.num_clients for client in edge)
            allowed = f"each must be between clients 0 to {self.num_clients - 1}"
            require(there, "federation.exchange.edges", allowed, list(edge))
        if self.edges is not None and self.pushes:
            reached = {client: _reached(client, self.edges) for client in {receiver for _, receiver in self.edges}}
            for sender, receiver in self.edges:
                way = f"under push-sum there must be a way back from client {receiver} to client {sender}, whose mass"
                allowed = f"{way} would only drain (or take mixing: uniform)"
                require(sender in reached[receiver], "federation.exchange.edges", allowed, [sender, receiver])
        drawn_once = self.edges is None and not self.redraw
        self._circle, self._more = self._fixed_edges() if drawn_once else ([], [])
        self.mass: dict[int, float] = {}
        """Client -> its push-sum weight μ, where it is not 1."""

    @property
    def pushes(self) -> bool:
        """Whether push-sum weights travel: they do not matter to a method that weighs messages its own way."""
        return self.mixing == "push_sum" and self.mixer.takes_shares

    @override
    def connect(self, round: int, live: Sequence[int]) -> Topology:
        there = set(live)
        edges = [edge for edge in self._edges(round, live, there) if set(edge) <= there]
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

    def _edges(self, round: int, live: Sequence[int], there: Collection[int]) -> Iterable[tuple[int, int]]:
        if self.edges is not None:
            return self.edges
        if not self.redraw:
            order = [client for client in self._circle if client in there]  # it goes round who is out
            edges = {*zip(order, [*order[1:], *order[:1]], strict=True), *self._more}
            edges = {(client, other) for client, other in edges if client != other}
            return edges if self.mixing == "push_sum" else {(other, client) for client, other in edges}
        drawn = [(client, other) for client in live for other in self._draw("graph", round, client, live, self.degree)]
        return drawn if self.mixing == "push_sum" else [(other, client) for client, other in drawn]

    def _fixed_edges(self) -> tuple[list[int], list[tuple[int, int]]]:
        """A circle in random order, along which each client has a neighbour, and `degree` - 1 others of each."""
        everybody = range(self.num_clients)
        circle = numpy_generator(self.seed, "exchange/graph").permutation(self.num_clients).tolist()
        more = []
        for client, follower in zip(circle, [*circle[1:], circle[0]], strict=True):
            others = self._draw("graph", 0, client, everybody, self.degree - 1, but=follower)
            more += [(client, other) for other in others]
        return circle, more

    def _draw(
        self, purpose: str, round: int, client: int, among: Sequence[int], count: int, but: int | None = None
    ) -> list[int]:
        """So many of the others, without replacement; depends on seed, round, client and who is there alone.

        Args:
            purpose: of the random stream.
            round: 1-based.
            client: 0-based.
            among: in ascending order; no list of the others is made of it, for there may be many clients.
            count: how many; fewer where fewer are there.
            but: one more that is left out.
        """
        gaps = []
        for own in sorted({client, client if but is None else but}):
            place = bisect_left(among, own)
            gaps += [place] if place < len(among) and among[place] == own else []
        others = len(among) - len(gaps)
        drawn = numpy_generator(self.seed, f"exchange/{purpose}", round, client)
        places = drawn.choice(others, min(count, others), replace=False).tolist() if others else []
        for gap in gaps:
            places = [place + (place >= gap) for place in places]
        return [among[place] for place in places]

    @override
    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        fixed = self.edges is not None or not self.redraw
        senders = self._neighbours(round, client, there) if fixed else []
        if self.edges is not None and all(receiver != client for _, receiver in self.edges):
            return []  # to which no edge leads
        return senders or self._draw("join", round, client, there, self.degree)

    def shares(self, topology: Topology) -> Topology:
        """Rows that sum to 1: p_ij μ_j / μ_i, with the new μ_i, which they leave in `mass`.

        Raises:
            ConfigError: if a client's μ falls below 1e-8, where z = u/μ loses its meaning.
        """
        if not self.pushes:
            return super().shares(topology)
        rows, mass = {}, dict(self.mass)
        for receiver, row in topology.items():
            arriving = {sender: part * self.mass.get(sender, 1.0) for sender, part in row.items()}
            mass[receiver] = math.fsum(arriving.values())
            if mass[receiver] < LEAST_MASS:
                weight = f"its push-sum weight is {mass[receiver]:.1e} after round {self.round}"
                advice = "take redraw: true" if self.edges is None else "add edges to it"
                rule = f"client {receiver} hears too little ({weight}): {advice} or mixing: uniform"
                raise ConfigError("federation.exchange", rule)
            rows[receiver] = {sender: part / mass[receiver] for sender, part in arriving.items()}
        self.mass = mass
        return rows

    def addressed(self, client: int, message: Message) -> Message:
        """The mixed message with the client's μ."""
        if not self.pushes:
            return message
        mass = torch.full((), self.mass[client], dtype=torch.float32, device=self.device)
        return Message(message.weights, {**message.artifacts, PUSH_WEIGHT: mass}, message.num_samples)

    def _size(self, message: Message) -> Size:
        params, size = message.size
        return Size(params + 1, size + 4) if self.pushes else message.size

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mass": {str(client): mass for client, mass in self.mass.items()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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

    @override
    def connect(self, round: int, live: Sequence[int]) -> Topology:
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

    @override
    def sponsors(self, round: int, client: int, there: Sequence[int]) -> list[int]:
        senders = [] if self.redraw else self._neighbours(round, client, there)
        rng = numpy_generator(self.seed, "exchange/join", round, client)
        return senders or [int(other) for other in rng.choice(there, min(self.degree, len(there)), replace=False)]


def _reached(client: int, edges: Iterable[tuple[int, int]]) -> set[int]:
    """The clients to which a way leads from `client`, itself among them."""
    followers: dict[int, list[int]] = {}
    for sender, receiver in edges:
        followers.setdefault(sender, []).append(receiver)
    reached, waiting = {client}, [client]
    while waiting:
        new = set(followers.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached


EXCHANGES: dict[str, type[Exchange]] = {kind.__name__: kind for kind in (Star, Ring, DirectedGraph, RandomPeers)}
"""What `Method.exchange` may say."""


def exchange_of(method: Method) -> Exchange:
    """The exchange that a method brings along.

    Raises:
        ConfigError: if it names none that there is.
    """
    name = method.exchange
    rule = f"{type(method).__name__}.exchange names none; {suggest(str(name), EXCHANGES)}"
    require(name in EXCHANGES, "method", rule, name)
    return EXCHANGES[name]()
