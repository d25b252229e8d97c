"""The processes that share out a round's clients, on `torch.distributed`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fl_lightning.core.message import Message, Size
from fl_lightning.errors import CommonError, ConfigError, shortened
from fl_lightning.federation import transport
from fl_lightning.federation.exchange import Carriers, Exchange, Hop
from fl_lightning.federation.unsaved import checked_state
from fl_lightning.files import WriteError, sign_in

MAIN = 0
"""Rank of the process that holds the exchange, writes the run's folder and calls the callbacks."""


class Workers:
    """The processes of a run, seen from one of them. Unless said otherwise, all of them must call a method together.

    Args:
        rank: this process among those that share out clients.
        size: how many there are; 1 shares nothing out and needs no process group.
        is_main: whether this process writes files and calls callbacks.
    """

    def __init__(self, rank: int = 0, size: int = 1, is_main: bool = True) -> None:
        self.rank = rank
        self.size = size
        self.is_main = is_main
        self.is_team = size > 1 or not is_main
        self.writes = size > 1 or is_main
        """Whether this process keeps clients' states that no other one keeps."""

    @classmethod
    def present(cls, spread: bool = True) -> Workers:
        """The processes that were started; this one alone inside a run of theirs, as for a fit in a callback.

        Args:
            spread: share clients out among them; otherwise each runs the whole federation, because their Trainers
                share every fit.
        """
        if not transport.has_others():
            return cls()
        rank, size = dist.get_rank(), dist.get_world_size()
        workers = cls(rank, size, rank == MAIN) if spread else cls(is_main=rank == MAIN)
        workers.is_team = size > 1
        return workers

    def share_out(self, costs: Mapping[int, float], holders: Mapping[int, int]) -> dict[int, int]:
        """Which worker takes which client: the dearest first, each to the worker with the least to do so far.

        Not collective; the same on every process.

        Args:
            costs: client -> how long it takes, in any unit.
            holders: client -> the worker that has its private state; it is preferred where two have as little to do.
        """
        load = [0.0] * self.size
        owners = {}
        for client in sorted(costs, key=lambda client: (-costs[client], client)):
            holder = holders.get(client, MAIN)
            worker = min(range(self.size), key=lambda worker: (load[worker], worker != holder, worker))
            load[worker] += costs[client]
            owners[client] = worker
        return {client: owners[client] for client in costs}

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank; for small things."""
        return [value] if self.size == 1 else transport.gather(value)

    def main_says(self, value: Any) -> Any:
        """The main process's value, on every process, which waits for no other one; for small things."""
        return transport.tell(value) if self.is_team else value

    def everyone_says(self, value: Any) -> list[Any]:
        """Every process's value, also where each runs the whole federation; for small things."""
        return transport.gather(value) if self.is_team else [value]

    def move(self, holders: Mapping[int, int], owners: Mapping[int, int], pool: Any) -> None:
        """Bring clients' private states to the workers that need them.

        Args:
            holders: client -> worker that has the state; a client that is not named has none yet.
            owners: client -> worker that needs it.
            pool: this process's `ClientPool`.
        """
        cpu = torch.device("cpu")
        moves: dict[tuple[int, int], list[int]] = {}
        for client in sorted(owners.keys() & holders.keys()):
            moves.setdefault((holders[client], owners[client]), []).append(client)
        for (there, here), clients in sorted(
            moves.items()
        ):  # in one order everywhere, so that nobody waits in a circle
            if there != here and self.rank == there:
                transport.send({client: pool.release(client) for client in clients}, here, cpu)
            elif there != here and self.rank == here:
                for client, released in transport.receive(there, cpu).items():
                    pool.adopt(client, released)

    def reduce(self, part: Callable[[], Any], merge: Callable[[Any], None], device: torch.device) -> None:
        """Merge every process's part into the main one's, two by two, so that nobody ever holds more than two.

        Args:
            part: this process's part, in plain containers.
            merge: folds another process's part into this one's.
            device: where parts are, on either side.
        """
        step = 1
        while step < self.size:
            if self.rank % (2 * step) == step:
                transport.send(part(), self.rank - step, device)
            elif self.rank % (2 * step) == 0 and self.rank + step < self.size:
                merge(transport.receive(self.rank + step, device))
            step *= 2


def of_one_kind(workers: Workers, data: Any) -> Workers:
    """The processes, all with the same data; each has decoded them, and shared them out, by itself.

    Args:
        workers: the processes.
        data: the federation's (`data/module.py`), set up.

    Raises:
        ConfigError: on every process, if one has others than the main one.
    """
    if not workers.is_team:
        return workers
    said = workers.everyone_says((data.samples_hash, data.partition_hash))
    for key, hashes in zip(("data", "data.partition"), zip(*said, strict=True), strict=True):
        other = next((rank for rank, own in enumerate(hashes) if own != hashes[MAIN]), None)
        if other is not None:
            rule = "every process of the run has drawn its own: draw from the `rng` that is given"
            rule = f"{rule}, or from the global streams (torch's, NumPy's, Python's), which are seeded"
            raise CommonError(key, f"{rule}; or process {other} has read other files" if key == "data" else rule)
    return workers


@contextmanager
def refused_together(workers: Workers) -> Iterator[None]:
    """Let all processes refuse what one of them met alone, as where its machine lacks a file.

    Args:
        workers: the processes.

    Raises:
        ConfigError: on every process, about what the first of them met; what the system refused is that, too.
        OSError: if there is one process, as it met it.
    """
    met = None
    try:
        yield
    except (ConfigError, OSError) as error:
        if not workers.is_team:
            raise
        met = _told_by(error)
    for rank, (host, own) in enumerate(workers.everyone_says((platform.node(), met))):
        if own is not None:
            key, told = own
            raise CommonError(key, told if rank == MAIN else f"{told} (process {rank} on {host})")


def _told_by(error: ConfigError | OSError) -> tuple[str, str]:
    """The key of an error, and what it says, without its value, which may be anything."""
    if isinstance(error, ConfigError):
        return error.key, error.told
    if isinstance(error, WriteError):
        return "output", str(error)
    return str(error.filename or type(error).__name__), error.strerror or str(error)


def require_told_alike(workers: Workers, told: Mapping[str, Any]) -> None:
    """Refuse processes that were started for different runs; each has read its command line and files by itself.

    Where a file lies, each may be told otherwise: what files hold is told by itself, or known from the data.

    Args:
        workers: the processes.
        told: what this one goes by, by key.

    Raises:
        ConfigError: on every process, naming the first key in which one differs from the main one, and both values.
    """
    everyone = workers.everyone_says({key: repr(value) for key, value in told.items()})
    for key in dict.fromkeys(key for own in everyone for key in own):
        said = [own.get(key, "none") for own in everyone]
        for rank, other in enumerate(said):
            if other != said[MAIN] and os.sep not in other + said[MAIN]:
                both = f"process {MAIN} has {shortened(said[MAIN], 60)}, process {rank} has {shortened(other, 60)}"
                raise CommonError(key, f"must be the same in every process of the run; {both}")


def require_one_folder(workers: Workers, folder: Path) -> None:
    """Refuse processes of which one does not see the folder that the main one holds: files would be lost on the way.

    A folder of the same name on each machine's own disk, where a run was once, looks like it: so the main process puts
    something new there, which the others look for.

    Args:
        workers: the processes.
        folder: the run's; the main process has made it.

    Raises:
        ConfigError: on every process, also where the system lets the main one write nothing there.
    """
    if not workers.is_team:
        return
    with ExitStack() as held:
        name, met = "", None
        try:
            name = held.enter_context(sign_in(folder)).name if workers.is_main else ""
        except WriteError as error:
            met = _told_by(error)
        name, met = workers.main_says((name, met))
        if met is not None:
            raise CommonError(*met)
        for rank, (host, sees) in enumerate(workers.everyone_says((platform.node(), (folder / name).exists()))):
            where = f"process {rank} on {host} does not"
            if not sees:
                raise CommonError("output", f"{folder} must lie in a folder that all machines of the run see; {where}")


def shared_exchange(exchange: Exchange, workers: Workers, device: torch.device, carriers: Carriers) -> Exchange:
    """Carry messages between clients of several workers: the exchange itself is on the main one.

    Where messages only meet in means, each worker folds in its own clients and the sums are merged; otherwise the main
    process gets every message. Either way the result is the one of a single process, bit for bit.

    Args:
        exchange: how messages travel; set up on every process, its later state is the main one's.
        workers: the processes.
        device: where messages are, on either side.
        carriers: whose random streams the exchange has.

    Returns:
        What every process posts its own clients' messages to; the exchange itself where there is one process.
    """
    return exchange if workers.size == 1 else _SharedExchange(exchange, workers, device, carriers)


class _SharedExchange(Exchange):
    """What `shared_exchange` returns where there are several processes."""

    works_in_parts = True  # each takes its own clients' messages, whatever becomes of them

    def __init__(self, exchange: Exchange, workers: Workers, device: torch.device, carriers: Carriers) -> None:
        self.exchange = exchange
        self.streams = carriers.streams
        self.workers = workers
        self.device = device
        self.keeps_shared = exchange.keeps_shared  # type: ignore[misc]
        self.between_clients = exchange.between_clients  # type: ignore[misc]
        self._outbox: dict[int, Message] = {}
        self._inbox: dict[int, Message] = {}
        self._hears_global: dict[int, bool] = {}
        self._downlink: dict[int, Size] = {}
        self._global: Message | None = None
        self._share_global()

    def setup(self, template: Any, facts: Any) -> None:
        """Set up already."""

    @property
    def in_turn(self) -> bool:
        return self.exchange.in_turn

    def _share_global(self) -> None:
        message = self.exchange.global_message() if self.workers.is_main else None
        state = transport.broadcast(None if message is None else message.state_dict(), self.device)
        self._global = message if self.workers.is_main or state is None else Message.from_state_dict(state)

    def address(self, owners: Mapping[int, int]) -> None:
        """Bring every client's inbox to the worker that owns it."""
        messages: list[Message] = []
        places: dict[int, int] = {}
        if self.workers.is_main:
            index: dict[int, int] = {}
            for client in owners:
                with self.streams("inbox", client):
                    message = self.exchange.inbox(client)
                if message is self._global:
                    places[client] = -1
                    continue
                if id(message) not in index:
                    index[id(message)] = len(messages)
                    messages.append(message)
                places[client] = index[id(message)]
        sizes = {client: tuple(self.exchange.downlink(client)) for client in places}
        places, sizes = self.workers.main_says((places, sizes))
        self._downlink = {client: Size(*size) for client, size in sizes.items()}
        wanted: dict[int, set[int]] = {}
        for client, place in places.items():
            wanted.setdefault(place, set()).add(owners[client])
        here = {place: self._carry(messages, place, wanted[place]) for place in sorted(wanted) if place >= 0}
        self._inbox = {
            client: self._global if place < 0 else here[place]  # type: ignore[misc]
            for client, place in places.items()
            if owners[client] == self.workers.rank
        }
        self._hears_global = {client: place < 0 for client, place in places.items()}

    def _carry(self, messages: Sequence[Message], place: int, workers: set[int]) -> Message | None:
        if self.workers.is_main:
            for worker in sorted(workers - {MAIN}):
                transport.send(messages[place].state_dict(), worker, self.device)
            return messages[place]
        if self.workers.rank in workers:
            return Message.from_state_dict(transport.receive(MAIN, self.device))
        return None

    def inbox(self, client: int) -> Message:
        return self.exchange.inbox(client) if self.workers.is_main else self._inbox[client]

    def hears_global(self, client: int) -> bool:
        return self._hears_global[client]

    def downlink(self, client: int) -> Size:
        return self.exchange.downlink(client) if self.workers.is_main else self._downlink[client]

    def uplink(self, client: int, message: Message) -> Size:
        return self.exchange.uplink(client, message)

    def pulled(self) -> Size:
        return self.exchange.pulled()

    @property
    def hops(self) -> Sequence[Hop]:
        return self.exchange.hops

    def open(self, round: int, participants: Sequence[int]) -> None:
        self.exchange.open(round, participants)
        self._outbox = {}

    def withdraw(self, clients: Sequence[int]) -> None:
        self.exchange.withdraw(clients)

    def outgoing(self) -> Iterable[tuple[str, Message]]:
        """The main process's; nothing elsewhere."""
        return self.exchange.outgoing() if self.workers.is_main else ()

    def post(self, client: int, message: Message) -> None:
        if self.exchange.works_in_parts or self.exchange.in_turn:
            self.exchange.post(client, message)
        else:
            self._outbox[client] = message

    def close(self) -> None:
        if self.exchange.works_in_parts:
            self.workers.reduce(self.exchange.partial, self.exchange.merge, self.device)
        elif not self.in_turn:
            self._collect()
        if self.workers.is_main:
            self.exchange.close()
        self._share_global()

    def _collect(self) -> None:
        """Bring all messages to the main process, in the order of clients."""
        by_worker = self.workers.gather(list(self._outbox))
        senders = {client: worker for worker, clients in enumerate(by_worker) for client in clients}
        for client in sorted(senders):
            if self.workers.is_main:
                here = senders[client] == MAIN
                state = None if here else transport.receive(senders[client], self.device)
                message = self._outbox[client] if state is None else Message.from_state_dict(state)
                with self.streams("post", client):
                    self.exchange.post(client, message)
            elif senders[client] == self.workers.rank:
                transport.send(self._outbox[client].state_dict(), MAIN, self.device)
        self._outbox = {}

    def global_message(self) -> Message | None:
        return self._global

    def state_dict(self) -> dict[str, Any]:
        """The main process's; empty elsewhere."""
        return checked_state(self.exchange) if self.workers.is_main else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.workers.is_main:
            self.exchange.load_state_dict(state)
        self._share_global()
