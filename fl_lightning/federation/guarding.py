"""A server that does not trust its clients: a round's messages wait until a robust rule has treated them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from fl_lightning.core.aggregator import KEY, Aggregator
from fl_lightning.core.door import Door
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server
from fl_lightning.core.vectors import Unsuited
from fl_lightning.errors import ConfigError, require
from fl_lightning.terminal import say


class Guard(Door):
    """Stands between clients and a server that averages.

    Args:
        aggregator: the rule.
        server: set up.
        method: a client's.
        participants: the fewest of a round in which nobody fails, on average where they are drawn singly.

    Raises:
        ConfigError: if the server makes something else than means of messages, or rounds are too small for the rule.
    """

    key = "aggregator"
    rule: Aggregator

    def __init__(self, aggregator: Aggregator, server: Server, method: Method, participants: int) -> None:
        self.rule = aggregator
        self.increments = server.increments
        self.name, self.method = type(aggregator).__name__, type(method).__name__
        averages = (
            f"needs a server for which one mean can stand for all messages, which {self.method}'s is not: must be null"
        )
        require(server.only_averages or server.hears_mean, KEY, averages, self.name)
        for key, rule in server.rules.items():
            alike = f"{self.method}'s artifact {key} must be heard from every client as it is: must be null"
            require(rule().hears_alike, KEY, alike, self.name)
        silent = f"needs messages, and {self.method} sends none: must be null"
        require(bool(server.message.weights or method.interface()), KEY, silent, self.name)
        least = aggregator.least(participants)
        few = f"needs at least {least} participants a round, and there are {participants}"
        require(participants >= least, KEY, few, self.name)
        aggregator.start(name for name, _ in method.named_parameters(remove_duplicate=False))
        self._told = False
        self.open_round()

    @override
    def open_round(self) -> None:
        """Forget what came in."""
        self._messages: dict[int, Message] = {}

    @override
    def add(self, client: int, message: Message) -> None:
        """Hold a client's message until the round closes."""
        self._messages[client] = message

    @override
    def release(self, round: int, previous: Message) -> Iterator[tuple[int, Message]]:
        """What the server folds in, by client; nothing where too few came for the rule.

        Args:
            round: 1-based.
            previous: what the round's clients had heard.

        Raises:
            ConfigError: for an artifact that the rule cannot treat.
        """
        held = dict(sorted(self._messages.items()))
        self.open_round()
        least = self.rule.least(len(held))
        if len(held) < least:
            self._tell(f"round {round}: {self.name} needs {least} participants, and {len(held)} sent something")
            return iter(())
        try:
            messages = list(held.values())
            treated = self.rule.treat(messages, self._reference(previous, messages))
        except Unsuited as error:
            rule = f"cannot take {self.method}'s {error}, which is no floating-point tensor: must be null"
            raise ConfigError(KEY, rule, self.name) from error
        except ValueError as error:
            raise ConfigError(KEY, f"{self.method}: {error}", self.name) from error
        return iter(zip(held, treated, strict=True))

    def _reference(self, previous: Message, messages: Sequence[Message]) -> Message:
        """What messages are updates of: of what is added up, nothing, in the first round, too."""
        zeros = {
            name: torch.zeros_like(value)
            for message in messages
            for name, value in message.artifacts.items()
            if name in self.increments and isinstance(value, torch.Tensor)
        }
        return replace(previous, artifacts={**previous.artifacts, **zeros})

    def _tell(self, text: str) -> None:
        if not self._told:
            say(f"fl-lightning: {text}; what is shared stays as it was, in later rounds like it, too")
        self._told = True

    @override
    def state_dict(self) -> dict[str, Any]:
        """What the rule keeps from round to round."""
        return self.rule.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rule.load_state_dict(state)
