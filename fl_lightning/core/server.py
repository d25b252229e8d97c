"""The server: takes the participants' messages in, gives one message out; one kind of it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.aggregation import ArtifactRule, ClassMeanRule, Partial, TensorMean, WeightedMean
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.errors import require_choices
from fl_lightning.seeding import isolated_streams

RuleFactory = Callable[[], ArtifactRule]
Weighting = Literal["samples", "uniform"]


class Server:
    """Averages weights by samples and merges every artifact by its rule.

    Messages are folded in as they arrive, so that memory does not grow with the number of clients. A method with
    another rule, or one that trains on the server, subclasses this and returns it from `ClientModule.make_server`.

    Args:
        initial: what clients receive in the first round (the common initial weights).
        rules: artifact name -> factory of its rule. The default merges `ClassMeans` by count and keeps classes that
            nobody held, and averages tensors by samples.
        weighting: ``samples`` weighs a client's weights by its training samples, ``uniform`` all alike.
    """

    def __init__(
        self,
        initial: Message,
        rules: Mapping[str, RuleFactory] | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        require_choices("method", weighting=(weighting, Weighting))
        self.mean_weighting = weighting
        self.message = initial
        self.rules = dict(rules or {})
        self.memories: dict[str, Mapping[str, Tensor]] = {}
        """What artifact rules carry from round to round."""
        self.seed = 0
        self.device = torch.device("cpu")
        self.open_round(0)

    def setup(self, seed: int, device: torch.device) -> None:
        """Learn the run's seed and the device of the messages; called once, before the first round."""
        self.seed, self.device = seed, device

    def message_for(self, client: int) -> Message:
        """What `client` receives at the start of its next round. The same for all unless a method says otherwise."""
        return self.message

    def open_round(self, round: int) -> None:
        """Start a round: forget what was folded in."""
        self.round = round
        self._weights = WeightedMean()
        self._artifacts: dict[str, ArtifactRule] = {}
        self._of_classes: dict[str, bool] = {}
        self._num_samples = 0

    @property
    def works_in_parts(self) -> bool:
        """Whether every worker may fold in its own clients, so that only sums travel.

        True where messages only meet in means. A server that overrides `collect` sees every message itself, in the
        order of clients, unless it overrides `partial` and `merge`, too.
        """
        own = type(self)
        folds = own.collect is Server.collect or own.merge is not Server.merge
        return folds and all(type(rule()).merge is not ArtifactRule.merge for rule in self.rules.values())

    def partial(self) -> Partial:
        """What was folded in so far, in plain containers, to be merged by another worker's server."""
        artifacts = {name: [self._of_classes[name], rule.partial()] for name, rule in self._artifacts.items()}
        return {"weights": self._weights.partial(), "artifacts": artifacts, "num_samples": self._num_samples}

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Fold in what another worker's server has folded in."""
        self._weights.merge(partial["weights"])
        for name, (of_classes, part) in partial["artifacts"].items():
            self._rule(name, of_classes).merge(part)
        self._num_samples += partial["num_samples"]

    def collect(self, client: int, message: Message) -> None:
        """Fold in one client's message."""
        if message.weights:
            self._weights.add(message.weights, 1 if self.mean_weighting == "uniform" else message.num_samples)
        for name, value in message.artifacts.items():
            self._rule(name, isinstance(value, ClassMeans)).add(value, message.num_samples)
        self._num_samples += message.num_samples

    def close_round(self) -> None:
        """Turn what came in into the next message. If nothing came in, the old one stays."""
        weights = self.message.weights if self._weights.empty else self._weights.result()
        artifacts = dict(self.message.artifacts)
        for name, rule in self._artifacts.items():
            merged = rule.result(self.message.artifacts.get(name))
            if merged is not None:
                artifacts[name] = merged
            memory = rule.memory()
            if memory is not None:
                self.memories[name] = memory
        self.message = Message(weights, artifacts, self._num_samples)
        self.open_round(self.round)

    def aggregate(self, messages: Mapping[int, Message]) -> Message:
        """One whole round at once: fold in `messages` and return what goes out."""
        self.open_round(self.round + 1)
        for client, message in messages.items():
            self.collect(client, message)
        self.close_round()
        return self.message

    def _rule(self, name: str, of_classes: bool) -> ArtifactRule:
        """The rule of an artifact in the open round."""
        if name not in self._artifacts:
            default = ClassMeanRule if of_classes else TensorMean
            rule = self._artifacts[name] = self.rules.get(name, default)()
            self._of_classes[name] = of_classes
            rule.round = self.round
            if name in self.memories:
                rule.remember(self.memories[name])
        return self._artifacts[name]

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on."""
        return {"message": self.message.state_dict(), "memories": {n: dict(m) for n, m in self.memories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.message = Message.from_state_dict(state["message"])
        self.memories = dict(state["memories"])


class TrainingServer(Server, ABC):
    """A server with a network of its own, which it trains on what a round's participants sent.

    A round is: train on all messages (`train`, with last round's `message` still in place), average as every server
    does, put what was trained into what goes out (`publish`). A subclass takes the hyperparameters of its training in
    its constructor, from its method. Everything that the next round depends on is in the network's and the optimizer's
    states, which are saved and resumed.
    """

    network: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def build(self) -> nn.Module:
        """Make the network; called once, under a stream seeded from the run's seed."""

    @abstractmethod
    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer, once for the whole run; `train` may make it anew where a paper does."""

    @abstractmethod
    def train(self, messages: Mapping[int, Message]) -> None:
        """Train `network` on the messages of a round.

        Runs in float32, outside any autocast, under streams seeded from (seed, round): shuffles and noise may come from
        the global streams.

        Args:
            messages: by client, in the order of clients; not empty.
        """

    def publish(self, message: Message) -> Message:
        """Add what was trained to the round's averages, before they go out; called at setup, too. Default: nothing."""
        return message

    def setup(self, seed: int, device: torch.device) -> None:
        """Make network and optimizer, and the first message."""
        super().setup(seed, device)
        with isolated_streams(seed, "server/init"):
            self.network = self.build().to(device, torch.float32)
        self.optimizer = self.make_optimizer(self.network.parameters())
        self.message = self.publish(self.message)

    def open_round(self, round: int) -> None:
        """Start a round: forget what came in."""
        super().open_round(round)
        self._messages: dict[int, Message] = {}

    def collect(self, client: int, message: Message) -> None:
        """Fold in one client's message, and keep it until the round closes."""
        super().collect(client, message)
        self._messages[client] = message

    def close_round(self) -> None:
        """Train, average, publish. If nothing came in, nothing changes."""
        messages = dict(sorted(self._messages.items()))
        if not messages:
            super().close_round()
            return
        streams = isolated_streams(self.seed, "server", self.round)
        with streams, torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            self.train(messages)
        super().close_round()
        self.message = self.publish(self.message)

    def state_dict(self) -> dict[str, Any]:
        """The base's state, the network's and the optimizer's."""
        own = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
