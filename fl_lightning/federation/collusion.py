"""Attackers that know what the honest clients of a round send before they send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.message import Message, accumulation_dtype
from fl_lightning.errors import ConfigError
from fl_lightning.federation import transport
from fl_lightning.federation.attacks import KEY, attacked, rebuilt
from fl_lightning.federation.posting import Posts
from fl_lightning.federation.runner import Runner
from fl_lightning.federation.workers import Workers

Key = tuple[str, str, str]


class Held(NamedTuple):
    """A message that waits, with what its sender started the round from and was sent."""

    message: Message
    start: Mapping[str, Tensor]
    received: Message


class Collusion:
    """Holds a round's messages back until all are there, then posts them, the attackers' changed.

    Every attacker sends r − s · mean(x − r), with the unweighted mean over the round's honest clients, per tensor and,
    of class means, over those that hold the class. Sums are exact, so that neither order nor workers change a bit.
    All messages of a round are in memory at once.

    Args:
        runner: knows the attackers and the resident modules.
        posts: where messages go.
        workers: the processes that share the work.
        in_turn: whether clients hear each other in the same round.

    Raises:
        ConfigError: if they do, so that nobody knows all messages before they count.
    """

    def __init__(self, runner: Runner, posts: Posts, workers: Workers, in_turn: bool) -> None:
        if in_turn:
            rule = "must be another one where clients train in turn: nobody knows the others' messages in time"
            raise ConfigError(f"{KEY}.kind", rule, "inner_product")
        assert runner.attackers.attack is not None
        runner.keeps_start = True
        self.strength = runner.attackers.attack.s
        self.attackers = runner.attackers.clients
        self.increments = runner.attackers.increments
        self.parameters = runner.trained_names
        self.device = runner.device
        self.posts = posts
        self.workers = workers
        self._held: dict[int, Held] = {}
        self._sums: dict[Key, tuple[ExactSum, ExactSum]] = {}

    def hold(self, client: int, held: Held) -> None:
        """Take a client's message, as it has passed the wire."""
        self._held[client] = held
        if client in self.attackers:
            return
        for entry in attacked(*held, self.parameters, self.increments):
            crosses = torch.ones_like(entry.value) if entry.crosses is None else entry.crosses.expand_as(entry.value)
            wide = accumulation_dtype(entry.value.device)
            update = (entry.value.to(wide) - entry.start.to(wide)) * crosses
            total, count = self._sums.setdefault(self._key(entry.key, update), (ExactSum(), ExactSum()))
            total.add(update.reshape(-1), 1.0)
            count.add(crosses.reshape(-1), 1.0)

    def release(self, round: int) -> None:
        """Post what was held; all processes together.

        Args:
            round: 1-based.
        """
        means = self._means()
        held, self._held, self._sums = self._held, {}, {}
        for client in sorted(held):
            own = held[client]
            message = self._forged(own, means) if client in self.attackers else own.message
            self.posts.take(round, client, message)

    def _forged(self, own: Held, means: Mapping[Key, Tensor]) -> Message:
        changed = {}
        for entry in attacked(*own, self.parameters, self.increments):
            key = self._key(entry.key, entry.value)
            mean = means[key].view(entry.value.shape) if key in means else entry.value - entry.start
            changed[entry.key] = entry.changed(entry.start - self.strength * mean.to(entry.value))
        return rebuilt(own.message, changed)

    def _means(self) -> dict[Key, Tensor]:
        """The honest clients' mean updates, on every process; 0 where nobody sends anything."""
        if self.workers.size > 1:
            self.workers.reduce(self._partial, self._merge, self.device)
        means = {key: total.value(1.0) / count.value(1.0).clamp(min=1) for key, (total, count) in self._sums.items()}
        return means if self.workers.size == 1 else transport.broadcast(means, self.device)

    def _partial(self) -> dict[Key, Any]:
        return {key: [total.partial(), count.partial()] for key, (total, count) in self._sums.items()}

    def _merge(self, partial: Mapping[Key, Any]) -> None:
        for key, parts in partial.items():
            for own, part in zip(self._sums.setdefault(key, (ExactSum(), ExactSum())), parts, strict=True):
                own.merge(part)

    @staticmethod
    def _key(key: Key, tensor: Tensor) -> Key:
        """Tensors of other shapes (rows that were kept, sparse values) are no part of a mean."""
        kind, name, field = key
        return kind, name, f"{field} {tuple(tensor.shape)}"
