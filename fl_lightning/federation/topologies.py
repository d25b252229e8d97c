"""A round's graph, and what a class of one's own may say of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real

from fl_lightning.errors import require

KEY = "federation.exchange"
Topology = dict[int, dict[int, float]]
"""Receiver -> sender -> how much of the sender's message goes to the receiver, its own share among them."""


def check_graph(who: str, topology: Topology, participants: Iterable[int]) -> None:
    """Everybody who is there has a row of senders who are there, itself among them.

    Args:
        who: has said it, and of which round, for errors.
        topology: what was said.
        participants: who is there.

    Raises:
        ConfigError: naming the client and what was said of it.
    """
    there = {*participants}
    rows = isinstance(topology, Mapping) and {*topology} == there
    said = sorted(topology) if isinstance(topology, Mapping) else topology
    require(rows, KEY, f"{who} connect() must give a row to each of clients {sorted(there)}, and to no other", said)
    for receiver, row in topology.items():
        what = f"{who} connect() must give client {receiver}"
        shares = isinstance(row, Mapping) and all(_is_share(share) for share in row.values())
        require(shares, KEY, f"{what} senders with their shares, numbers >= 0", row)
        senders = f"{what} itself and senders that take part, of clients {sorted(there)}"
        require(receiver in row and {*row} <= there, KEY, senders, row)


def check_sums(who: str, shares: Topology) -> None:
    """What a mean is made of sums to 1.

    Args:
        who: has said it, and of which round, for errors.
        shares: receiver -> sender -> share.

    Raises:
        ConfigError: naming the client and its shares.
    """
    for receiver, row in shares.items():
        whole = not row or abs(math.fsum(row.values()) - 1) < 1e-6
        require(whole, KEY, f"{who} shares of client {receiver} must sum to 1", row)


def check_sponsors(who: str, sponsors: Iterable[int], finished: Collection[int]) -> None:
    """Who was out of a round hears from those who finished it.

    Args:
        who: has said it, and of which round, for errors.
        sponsors: of a client.
        finished: the round before.

    Raises:
        ConfigError: naming those who did not.
    """
    strange = sorted({*sponsors} - {*finished})
    require(not strange, KEY, f"{who} sponsors() may name only who finished the round before", strange)


def _is_share(value: object) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]
