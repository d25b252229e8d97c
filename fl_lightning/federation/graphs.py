"""Exchanges without a server over graphs: a directed one with push-sum, and a random undirected one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import Message, Size
from fl_lightning.core.mixing import PUSH_WEIGHT
from fl_lightning.errors import require, require_choices
from fl_lightning.federation.exchange import Exchange, Star
from fl_lightning.federation.peers import Peers, Ring, Topology
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
