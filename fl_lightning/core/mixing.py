"""The rule of a federation without a server: what a client makes of its own message and its neighbours'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import RuleFactory, WeightedMean, default_rule
from fl_lightning.core.message import Artifact, Message, kind_of

PUSH_WEIGHT = "push_weight"
"""Artifact that tells a client its push-sum weight μ, a scalar; where it is missing μ is 1."""


class Heard(NamedTuple):
    """A message, who sent it, and its share in the receiver's mean.

    Args:
        sender: 0-based client.
        message: what it sent.
        share: >= 0; the shares of one receiver, its own among them where it counts, sum to 1.
    """

    sender: int
    message: Message
    share: float


class Mixer(ABC):
    """Turns what a client hears in one round into the one message that it receives at the start of its next."""

    own: bool = True
    """Whether the client's own message is in what it receives, so that both must be of one round."""

    @property
    def takes_shares(self) -> bool:
        """Whether results depend on the exchange's shares, so that a push-sum weight must travel along.

        If not, all that is mixed counts alike.
        """
        return True

    @abstractmethod
    def mix(self, own: Heard | None, neighbours: Sequence[Heard], previous: Message | None) -> Message:
        """The message for one client.

        Args:
            own: what it sent itself, None if it never took part or `self.own` is false.
            neighbours: what it hears from others, in any order; the result must not depend on it.
            previous: what this gave the client last time, None if it is the first; of a sequential ring its artifacts.
        """


class MeanMixer(Mixer):
    """Mean of the own and the neighbours' weights by their shares; artifacts by their rules.

    Args:
        rules: artifact name -> factory of its rule, as for `Server`.
        own: whether the client's own message is in the mean. A method that merges what it hears with its own state by
            itself leaves it out: then the message of an only neighbour comes as it was sent, and all neighbours count
            alike, because the method's own merge would lose what the exchange's shares conserve.
    """

    def __init__(self, rules: Mapping[str, RuleFactory] | None = None, own: bool = True) -> None:
        self.rules = dict(rules or {})
        self.own = own

    @property
    @override
    def takes_shares(self) -> bool:
        return self.own

    @override
    def mix(self, own: Heard | None, neighbours: Sequence[Heard], previous: Message | None) -> Message:
        own = own if self.own else None
        heard = sorted([*neighbours, *([] if own is None else [own])], key=lambda part: part.sender)
        before = {} if previous is None else previous.artifacts
        names = dict.fromkeys(name for part in heard for name in part.message.artifacts)
        merged = {name: self._merged(name, heard, own, before.get(name)) for name in names}
        artifacts = {name: value for name, value in merged.items() if value is not None}
        return Message(_mean(heard), artifacts, sum(part.message.num_samples for part in heard))

    def _merged(
        self, name: str, heard: Sequence[Heard], own: Heard | None, previous: Artifact | None
    ) -> Artifact | None:
        """The artifact of all that is heard, by its rule."""
        having = [part for part in heard if name in part.message.artifacts]
        value = having[0].message.artifacts[name]
        rule = self.rules.get(name, default_rule(kind_of(value)))()
        if len(heard) == 1 and rule.passes_one and not (self.own and rule.fills_alone):
            return value
        for part in having:
            if rule.takes_own or part is not own:
                rule.add(part.message.artifacts[name], part.message.num_samples if self.takes_shares else 1)
        return rule.result(previous)


def _mean(heard: Sequence[Heard]) -> dict[str, Tensor]:
    """The weights' mean by shares; the only ones as they are."""
    if len(heard) == 1:
        return heard[0].message.weights
    mean = WeightedMean()
    for _, message, share in heard:
        if message.weights:
            mean.add(message.weights, share)
    return {} if mean.empty else mean.result()
