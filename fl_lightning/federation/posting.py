"""Messages on their way from their senders to the exchange."""

from __future__ import annotations

from fl_lightning.core.message import Message
from fl_lightning.federation.exchange import Carriers, Exchange
from fl_lightning.federation.sickness import ServerError, at
from fl_lightning.trust import is_known


class Posts:
    """Posts what clients send, as if all had sent at the same time and in their order.

    At once where messages only meet in sums, or clients take turns. Else once all fits are done, if clients are fitted
    in another order than theirs, or somebody's own server, or exchange, might let those of the same round hear what a
    message has changed in it.

    Args:
        exchange: where messages go.
        carriers: whose random streams it has.
        in_order: whether clients are fitted in their order.
    """

    def __init__(self, exchange: Exchange, carriers: Carriers, in_order: bool) -> None:
        self._exchange, self._carriers = exchange, carriers
        looks = not (exchange.works_in_parts or exchange.in_turn)
        ours = all(is_known(type(own).__module__) for own in (exchange, getattr(exchange, "server", exchange)))
        self._waits = looks and not (ours and in_order)
        self._round, self._held = 0, dict[int, Message]()

    def take(self, round: int, client: int, message: Message) -> None:
        """Take what a client sends.

        Args:
            round: 1-based.
            client: 0-based.
            message: as it has passed the wire.
        """
        if self._waits:
            self._waiting(round)[client] = message
        else:
            self._post(round, client, message)

    def deliver(self, round: int) -> None:
        """Post what waits."""
        held, self._held = self._waiting(round), {}
        for client in sorted(held):
            self._post(round, client, held[client])

    def _waiting(self, round: int) -> dict[int, Message]:
        """What waits; what waited in a round that broke off is nobody's any more."""
        if round != self._round:
            self._round, self._held = round, {}
        return self._held

    def _post(self, round: int, client: int, message: Message) -> None:
        with at(round, client, "message", ServerError), self._carriers.streams("post", client):
            self._exchange.post(client, message)  # if it fails, half of it may be in the sums already
