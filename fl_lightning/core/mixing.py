"""The rule of a federation without a server: what a client makes of its own message and its neighbours'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fl_lightning.core.aggregation import ArtifactRule, ClassMeanRule, TensorMean, WeightedMean
from fl_lightning.core.message import Artifact, ClassMeans, Message
from fl_lightning.core.server import RuleFactory

PUSH_WEIGHT = "push_weight"
"""Artifact that tells a client its push-sum weight μ, a scalar; where it is missing μ is 1."""


class Heard(NamedTuple):
    """A message, who sent it, and its share in the receiver's mean.

    Args:
        sender: 0-based client.
        message: what it sent.
        share: > 0; the shares of one receiver, its own among them, sum to 1 unless it has just joined.
    """

    sender: int
    message: Message
    share: float


class Mixer(ABC):
    """Turns what a client hears in one round into the one message that it receives at the start of its next."""

    takes_shares: bool = True
    """Whether results depend on the exchange's shares, so that a push-sum weight must travel along."""

    @abstractmethod
    def mix(self, own: Heard | None, neighbours: Sequence[Heard], previous: Message | None) -> Message:
        """The message for one client.

        Args:
            own: what it sent itself, None if it never took part.
            neighbours: what it hears from others, in any order; the result must not depend on it.
            previous: what this gave the client last time, None if it is the first.
        """


class MeanMixer(Mixer):
    """Mean of the own and the neighbours' weights by their shares; artifacts by their rules.

    Args:
        rules: artifact name -> factory of its rule, as for `Server`.
        own: whether the client's own message is in the mean. A method that merges what it hears with its own state by
            itself leaves it out: then the message of an only neighbour comes as it was sent.
    """

    def __init__(self, rules: Mapping[str, RuleFactory] | None = None, own: bool = True) -> None:
        self.rules = dict(rules or {})
        self.own = own

    def mix(self, own: Heard | None, neighbours: Sequence[Heard], previous: Message | None) -> Message:  # noqa: D102
        heard = [*neighbours, *([own] if self.own and own is not None else [])]
        if len(heard) < 2:
            return heard[0].message if heard else Message()
        mean = WeightedMean()
        rules: dict[str, ArtifactRule] = {}
        for _, message, share in sorted(heard, key=lambda part: part.sender):
            if message.weights:
                mean.add(message.weights, share)
            for name, value in message.artifacts.items():
                if name not in rules:
                    default = ClassMeanRule if isinstance(value, ClassMeans) else TensorMean
                    rules[name] = self.rules.get(name, default)()
                rules[name].add(value, message.num_samples)
        before = {} if previous is None else previous.artifacts
        artifacts: dict[str, Artifact] = {}
        for name, rule in rules.items():
            merged = rule.result(before.get(name))
            if merged is not None:
                artifacts[name] = merged
        num_samples = sum(part.message.num_samples for part in heard)
        return Message({} if mean.empty else mean.result(), artifacts, num_samples)


def forget(rules: Mapping[str, RuleFactory]) -> bool:
    """Whether no rule carries anything from round to round, which without a server there is nobody to keep."""
    return all(type(rule()).memory is ArtifactRule.memory for rule in rules.values())
