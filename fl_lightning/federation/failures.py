"""Clients that are out for a round: failures as something to study."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fl_lightning.errors import require
from fl_lightning.seeding import numpy_generator

KEY = "federation.failures"


@dataclass(frozen=True)
class Failures:
    """Who is out, and when; what is given is added up.

    A client that is out neither receives, trains nor sends: its state and its last accuracies stay, and the exchange
    goes round it. The same seed gives the same failures, whatever the method.

    Args:
        probability: with which every client is out of every round by itself, in [0, 1).
        schedule: rounds -> clients that are out in them; a key is a round (``3``) or a stretch of them (``5-8``).
        clients: clients that are out in every round.
    """

    probability: float = 0.0
    schedule: dict[str, list[int]] = field(default_factory=dict)
    clients: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(0 <= self.probability < 1, f"{KEY}.probability", "must be in [0, 1)", self.probability)
        for stretch in self.schedule:
            _rounds(stretch)

    def check(self, num_clients: int, rounds: int | None = None) -> None:
        """Refuse clients and rounds that do not exist, and a federation of which nobody is left.

        Args:
            num_clients: N.
            rounds: of the run; a stretch may reach beyond them, but must begin within. None does not look: a run that
                is continued may end earlier than was planned, and must keep its schedule.

        Raises:
            ConfigError: naming the first one.
        """
        allowed = f"must be clients from 0 to {num_clients - 1}"
        named = [(f"{KEY}.schedule.{stretch}", clients) for stretch, clients in self.schedule.items()]
        for key, clients in [*named, (f"{KEY}.clients", self.clients)]:
            for client in clients:
                require(0 <= client < num_clients, key, allowed, client)
        left = len(set(self.clients)) < num_clients
        require(left, f"{KEY}.clients", f"must leave at least one of the {num_clients} clients", self.clients)
        within = f"keys must begin within federation.rounds ({rounds})"
        for stretch in self.schedule:
            require(rounds is None or _rounds(stretch).start <= rounds, f"{KEY}.schedule", within, stretch)

    def among(self, clients: Iterable[int], seed: int, round: int) -> set[int]:
        """Which of `clients` are out of `round`; for each it depends on the seed, the round and the client alone."""
        named = {client for stretch, out in self.schedule.items() if round in _rounds(stretch) for client in out}
        named.update(self.clients)
        return {client for client in clients if client in named or self._falls(client, seed, round)}

    def _falls(self, client: int, seed: int, round: int) -> bool:
        if self.probability == 0:
            return False
        return bool(numpy_generator(seed, "failures", round, client).random() < self.probability)


def _rounds(stretch: str | int) -> range:
    """The rounds that a key of a schedule names."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(stretch))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    allowed = "keys must be a round (3) or a stretch of rounds (5-8), from 1 on"
    require(1 <= first <= last, f"{KEY}.schedule", allowed, stretch)
    return range(first, last + 1)
