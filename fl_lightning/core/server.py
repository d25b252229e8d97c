"""The server: takes the participants' messages in, gives one message out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fl_lightning.core.aggregation import ArtifactRule, ClassMeanRule, Partial, TensorMean, WeightedMean
from fl_lightning.core.message import ClassMeans, Message

RuleFactory = Callable[[], ArtifactRule]


class Server:
    """Averages weights by samples and merges every artifact by its rule.

    Messages are folded in as they arrive, so that memory does not grow with the number of clients. A method with
    another rule, or one that trains on the server, subclasses this and returns it from `ClientModule.make_server`.

    Args:
        initial: what clients receive in the first round (the common initial weights).
        rules: artifact name -> factory of its rule. The default merges `ClassMeans` by count and keeps classes that
            nobody held, and averages tensors by samples.
    """

    def __init__(self, initial: Message, rules: Mapping[str, RuleFactory] | None = None) -> None:
        self.message = initial
        self.rules = dict(rules or {})
        self.memories: dict[str, Mapping[str, Tensor]] = {}
        """What artifact rules carry from round to round."""
        self.open_round(0)

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
            self._weights.add(message.weights, message.num_samples)
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
