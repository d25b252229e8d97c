"""What a message passes between its sender and the exchange, and on the way down: a chain of filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning.core.handover import unchanged
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.packing import Packet
from fl_lightning.running_on import RunningOn
from fl_lightning.seeding import streams_of_own_code
from fl_lightning.trust import is_known

MEMORY = "wire."
"""What names in a client's private state begin with that a filter keeps there."""
KEY = "federation.wire"

Given = TypeVar("Given")
Ways = Literal["up", "down", "both"]


class WireFilter(ABC):
    """One filter of a chain: takes a packet, gives another one, and keeps what it must remember of a client.

    It changes the values that are sent, which of them are sent (`Packed.only`), and what they take
    (`Packed.carrying`). Random numbers may come from torch's global streams: on the way up these depend on seed, round
    and client alone, on the way down on seed and round. Filters hold no state of their own, because one object serves
    all clients.
    """

    paper: ClassVar[str] = ""
    ways: Ways = "both"
    """On which way messages pass it; ``down`` needs a server."""
    needs_server: bool | str = False
    """Whether it makes no sense between clients that have no server; where an option of it does not, which one."""

    @abstractmethod
    def apply(self, packet: Packet, memory: dict[str, Tensor]) -> Packet:
        """What goes on of what came in.

        Args:
            packet: a message, as the filters before have left it; its tensors are others', too, and are not changed.
            memory: what this filter keeps for this client, by names of its own; what is taken out is forgotten. Empty,
                and forgotten, on the way down.
        """


class MessageFilter(WireFilter, ABC):
    """A filter that changes a message as a whole, before anything else does; on the way up alone."""

    ways = "up"
    last: bool = False
    """Whether no other filter may follow on the way up, because the server takes apart what this one made."""

    @abstractmethod
    def change(self, message: Message, received: Message) -> Message:
        """What goes on of what the method sends.

        Args:
            message: as the method sends it.
            received: what the client received in this round.
        """

    def apply(self, packet: Packet, memory: dict[str, Tensor]) -> Packet:
        """Nothing is left to be done."""
        return packet


class Wire:
    """The chain of filters.

    Without a server messages go one way: what a client sends passes as on the way up, and is mixed as it arrives.

    Args:
        filters: in their order on the way up and down.
        exchange: what carries the messages.
        trained: names of the weights that are parameters; None for all.
        seed: the run's.

    Raises:
        ConfigError: for a filter that needs a server where there is none, or that stands in the wrong place.
    """

    def __init__(
        self,
        filters: Sequence[WireFilter],
        exchange: Exchange,
        trained: Collection[str] | None = None,
        seed: int = 0,
    ) -> None:
        self._exchange, self._trained, self._seed = exchange, trained, seed
        named = list(enumerate(filters))
        for index, own in named:
            require_choices(f"{KEY}.{index}", ways=(own.ways, Ways))
            needs = own.needs_server or (own.ways == "down" and "ways: down")  # clients send one another nothing down
            if needs and exchange.between_clients:
                rule = f"needs a server, which a federation on a {type(exchange).__name__} has not: leave it out"
                option = "" if needs is True else f" with {needs}"
                raise ConfigError(KEY, f"{type(own).__name__}{option} {rule}")
        self._whole = [own for _, own in named if isinstance(own, MessageFilter)]
        self._up = [(index, own) for index, own in named if own.ways != "down" and own not in self._whole]
        _check_order([own for _, own in named if own.ways != "down"])
        self._down = [own for _, own in named if own.ways != "up" and not exchange.between_clients]
        self._last: tuple[Message, int, Message] | None = None
        remedy = "keep it in the `memory` that `apply` is given"
        self._running_on = RunningOn([*self._whole, *(own for _, own in self._up)], remedy, tensors=True)
        remedy = "on the way down nothing is remembered"
        self._running_down = RunningOn([own for own in self._down if own.ways == "down"], remedy, tensors=True)

    @torch.no_grad()
    def up(
        self, message: Message, received: Message, memory: dict[str, Tensor], moved: Collection[str] = ()
    ) -> Message:
        """What the exchange gets of what a client sends.

        Args:
            message: as the method sends it.
            received: what the client received in this round, which both ends know.
            memory: what filters keep for this client from round to round; changed in place.
            moved: weights that the client's fit has not begun from as they were received.
        """
        self._running_on.begin()
        for whole in self._whole:
            known = replace(received, weights=dict(received.weights), artifacts=dict(received.artifacts))
            with unchanged([received], f"{type(whole).__name__}.change()", by_bits=not _is_ours(whole)):
                message = _given(whole, "change", whole.change(message, known), Message)
        message = self._packed(message, received, memory, moved) if self._up else message
        self._running_on.end()
        return message

    def _packed(
        self, message: Message, received: Message, memory: dict[str, Tensor], moved: Collection[str]
    ) -> Message:
        trained = message.weights.keys() if self._trained is None else self._trained
        packet = Packet.of(message, received, set(trained).difference(moved), self._exchange.increments)
        for index, own in self._up:
            prefix = f"{MEMORY}{index}."
            before = [name for name in memory if name.startswith(prefix)]
            ours = _is_ours(own)  # others may write to it, and then fail
            kept = {n.removeprefix(prefix): memory[n] if ours else memory[n].clone() for n in before}
            packet = _applied(own, packet, kept, received)
            odd = next((name for name, value in kept.items() if not isinstance(value, Tensor)), None)
            if odd is not None:
                said = f"{type(own).__name__}.apply() remembers {odd!r}, {type(kept[odd]).__name__}"
                raise TypeError(f"{said}: a client's memory holds tensors, as its state does")
            memory.update({prefix + name: tensor for name, tensor in kept.items()})
            for name in before:
                if name.removeprefix(prefix) not in kept:
                    del memory[name]
        return packet.unpacked(message)

    @torch.no_grad()
    def down(self, message: Message, round: int = 0) -> Message:
        """What a client gets of what it is sent in a round; random numbers are the same for all clients."""
        if not self._down:
            return message
        if self._last is None or self._last[0] is not message or self._last[1] != round:  # mostly one for all clients
            packet = Packet.of(message)
            self._running_down.begin()
            with streams_of_own_code(self._down, self._seed, "wire/down", round):
                for own in self._down:
                    packet = _applied(own, packet, {}, message)
            self._running_down.end()
            self._last = message, round, packet.unpacked(message)
        return self._last[2]


def _applied(own: WireFilter, packet: Packet, memory: dict[str, Tensor], shared: Message) -> Packet:
    """What a filter makes of a packet, which may lie in the memory of a message that others hear, too."""
    with unchanged([shared], f"{type(own).__name__}.apply()", by_bits=not _is_ours(own)):
        return _given(own, "apply", own.apply(packet, memory), Packet)


def _is_ours(own: object) -> bool:
    return is_known(type(own).__module__)


def _given(own: object, name: str, value: Any, kind: type[Given]) -> Given:
    """What a filter gives back, if it is of the kind that it must give."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(own).__name__}.{name}() gives {type(value).__name__}, and must give a {kind.__name__}")
    return value


def _check_order(filters: Sequence[WireFilter]) -> None:
    """Filters of whole messages come first, and some alone."""
    for place, own in enumerate(filters):
        if isinstance(own, MessageFilter):
            name = type(own).__name__
            require(place == 0, KEY, f"{name} must be the first filter on the way up, and there can be only one")
            alone = not own.last or len(filters) == 1
            require(
                alone, KEY, f"{name} at the server must be the only filter on the way up (Quantize may be ways: down)"
            )
