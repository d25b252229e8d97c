"""Clients that fall sick in a round: what happened to them, and what becomes of the round."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fl_lightning.core.checkup import Unsound, check_new, check_values, tensors_of
from fl_lightning.core.message import NOTHING, Message, Size
from fl_lightning.errors import ConfigError, place_of, shortened
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.transport import WorkerLost
from fl_lightning.federation.wire import Wire
from fl_lightning.federation.workers import Workers
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.federation.watch import Watch

OnClientError = Literal["stop", "skip"]
LONGEST_REASON = 160
"""Characters; round, client and the way to go on stand in the same line."""
OF_VIEWS = "view size is not compatible"
"""What torch says of a `view` of maps whose channels are last."""
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class RoundError(RuntimeError):
    """Why a round cannot be ended, in one line."""


class ClientError(RoundError):
    """A failure inside a client, with the round, the client and the step in which it happened."""


class ServerError(RoundError):
    """What the server makes of a round is no use to anybody."""


class Ward:
    """Takes down which clients fall sick in a round, until all processes agree on what becomes of it.

    Args:
        policy: ``stop`` ends the run, ``skip`` leaves sick clients out of the round.
        workers: the processes that share out the clients.
        exchange: how messages travel.
        wire: what they pass on their way.
        growth: `federation.max_growth`.
        parameters: names of the weights that are trained.
    """

    def __init__(
        self,
        policy: OnClientError,
        workers: Workers,
        exchange: Exchange,
        wire: Wire,
        growth: float,
        parameters: Collection[str] = (),
    ) -> None:
        self.policy = policy
        self.workers = workers
        self.exchange = exchange
        self.wire = wire
        self.growth = growth
        self.trained = frozenset(f"weight {name}" for name in parameters)
        self.skipped: list[int] = []
        """The clients that were left out of the last round that was ended."""
        self.heard = NOTHING
        """What a server had sent them; what clients send to one another waits, and counts when it is heard."""
        self.watch: Watch | None = None
        """Of the run's other processes, where there are some."""
        self._errors: dict[int, RoundError] = {}
        self._sizes: dict[int, Size] = {}
        self._before: dict[str, Tensor] = {}  # largest magnitudes of what the server sends in this round

    @property
    def ends_round(self) -> bool:
        """Whether the round cannot be ended, as far as this process knows."""
        fatal = self.policy == "stop" or any(isinstance(error, ServerError) for error in self._errors.values())
        return bool(self._errors) and fatal

    def knows(self, clients: Iterable[int]) -> bool:
        """Whether one of these clients has fallen sick in the open round, as far as this process knows."""
        return not self._errors.keys().isdisjoint(clients)

    @contextmanager
    def care(self, client: int, takes_part: bool = True) -> Iterator[None]:
        """Take down what happens to a client, and go on behind the block.

        Args:
            client: 0-based.
            takes_part: whether it does so in the open round; a client that is only tested was sent nothing, and what
                it would hear is known to nobody but the main process.
        """
        try:
            yield
        except RoundError as error:
            if self.watch is not None and self.workers.size == 1:  # devices that share fits fall sick together
                self.watch.require_all(str(error))
            self._errors[client] = error
            if isinstance(error, ServerError):  # which may have nothing for it, and ends the run
                return
            if takes_part and not self.exchange.between_clients:
                self._sizes[client] = heard(self.exchange, client, self.wire.down(self.exchange.inbox(client)))
            if takes_part and self.exchange.in_turn and not self.ends_round:  # who comes next must not wait for it
                self.exchange.withdraw([client])

    def agree(self) -> dict[int, Size]:
        """Who is left out, on all processes, and what it was sent nevertheless; says so once.

        Raises:
            RoundError: if the round cannot be ended, the same on every process.
        """
        own, self._errors = self._errors, {}
        sizes, self._sizes = self._sizes, {}
        told = {c: (isinstance(e, ServerError), str(e), tuple(sizes.get(c, NOTHING))) for c, e in own.items()}
        everybody = {client: said for part in self.workers.gather(told) for client, said in part.items()}
        for client, (at_server, text, _) in sorted(everybody.items(), key=lambda item: (not item[1][0], item[0])):
            if at_server or self.policy == "stop":
                raise own.get(client) or (ServerError if at_server else ClientError)(text)
        for client in sorted(everybody):
            self._say(f"{everybody[client][1]}; left out of the round")
        return {client: Size(*size) for client, (_, _, size) in sorted(everybody.items())}

    def leave_out(
        self, round: int, participants: Sequence[int], streams: AbstractContextManager[None] | None = None
    ) -> list[int]:
        """Close the ranks around the sick clients of a round; returns the participants that are left.

        Args:
            round: 1-based.
            participants: in order.
            streams: of random numbers for the exchange, which may draw another graph; None leaves the present ones.

        Raises:
            RoundError: if the round cannot be ended.
        """
        sizes = self.agree()
        self.skipped = list(sizes)
        self.heard = Size(*(sum(size[unit] for size in sizes.values()) for unit in (0, 1)))
        left = [client for client in participants if client not in self.skipped]
        if self.skipped:
            with at_server(round, streams):
                self.exchange.withdraw(self.skipped)
        if self.skipped and not left:
            self._say(
                f"round {round}: all {len(participants)} participants are left out; what is shared stays as it was"
            )
        return left

    def note_outgoing(self) -> None:
        """Take down how large a server's weights are before a round, of which its own step is a part."""
        self._before = {}
        for _, message in () if self.exchange.between_clients else self.exchange.outgoing():
            for name, tensor in tensors_of(message).items():
                if tensor.is_floating_point() and tensor.numel():
                    most, known = tensor.detach().abs().max(), self._before.get(name)
                    self._before[name] = most if known is None else torch.maximum(most, known)

    def check_outgoing(self, round: int) -> None:
        """Look at what the exchange will send after a round that was closed, before anything is made of it.

        Raises:
            ServerError: naming what is not finite or absurd, the same on every process.
        """
        found = self.workers.main_says(self._broken(round) if self.workers.is_main else None)
        if found is not None:
            raise ServerError(found)

    def _broken(self, round: int) -> str | None:
        seen: set[int] = set()
        for sender, message in self.exchange.outgoing():
            tensors = {name: tensor for name, tensor in tensors_of(message).items() if id(tensor) not in seen}
            seen |= set(map(id, tensors.values()))
            try:
                known = {name: tensors.pop(name) for name in [*tensors] if name in self._before}
                check_values(known, self._before, self.growth, self.trained)
                check_new(tensors, self.growth)  # all between clients, whose own steps were looked at
            except Unsound as error:
                return f"round {round}, {sender}: {error} in what it sends"
        return None

    def _say(self, text: str) -> None:
        if self.workers.is_main:
            say(f"fl-lightning: {text}")


def heard(exchange: Exchange, client: int, message: Message) -> Size:
    """What was sent to a client for it to have a message, as the wire made it."""
    return exchange.downlink(client) if message.sent is None else message.sent


@contextmanager
def at(round: int, client: int, step: str, kind: type[RoundError] = ClientError) -> Iterator[None]:
    """Say of a failure in which round, client and step it happened.

    Args:
        round: 1-based.
        client: 0-based.
        step: of the client's round.
        kind: what is raised; anything but a `ClientError` ends the run whatever the policy.

    Raises:
        RoundError: the original error chained. What befalls the whole run passes as it is: a full or read-only disk,
            a configuration that is refused.
    """
    try:
        yield
    except (RoundError, ConfigError):
        raise
    except Exception as error:
        _let_stop(error)
        raise kind(f"round {round}, client {client}, {step}: {_reason(error)}") from error


@contextmanager
def at_server(round: int, streams: AbstractContextManager[None] | None = None) -> Iterator[None]:
    """Say of a failure that it happened to the server, as it made something of a round.

    Args:
        round: 1-based.
        streams: of random numbers for the block; None leaves the present ones.

    Raises:
        ServerError: the original error chained. What befalls the whole run, or refuses what it is told, passes.
    """
    try:
        with nullcontext() if streams is None else streams:
            yield
    except (RoundError, ConfigError, WorkerLost):
        raise
    except Exception as error:
        _let_stop(error)
        raise ServerError(f"round {round}, the server: {_reason(error)}") from error


def _let_stop(error: BaseException) -> None:
    """Let somebody's wish to stop at once pass that met another error on its way out.

    A Trainer that is taken down in the middle of setting a fit up raises one of its own.

    Raises:
        BaseException: the wish, if there was one.
    """
    met: BaseException | None = error
    while met is not None:
        if not isinstance(met, Exception):
            raise met
        met = met.__cause__ or met.__context__


def _reason(error: Exception) -> str:
    """What happened, in short; a full or read-only disk befalls the whole run, and passes as it is."""
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        raise error
    if isinstance(error, Unsound):
        return shortened(str(error), LONGEST_REASON)
    where = place_of(error)
    said = f"{OF_VIEWS} with channels last: say reshape" if OF_VIEWS in str(error) else error
    reason = shortened(f"{type(error).__name__}: {said}", LONGEST_REASON - len(where))
    return f"{reason}{where}"
