"""The server: takes the participants' messages in, gives one message out; one kind of it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.aggregation import ArtifactRule, Partial, RuleFactory, WeightedMean, default_rule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message, kind_of
from fl_lightning.core.mixing import MeanMixer, Mixer
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import own_code, require, require_choices
from fl_lightning.seeding import isolated_streams

Weighting = Literal["samples", "uniform"]
Heard = Callable[[Message, int], Message]
"""A message as it is sent, and the round -> the message as it arrives."""


class Server:
    """Averages weights by samples and merges every artifact by its rule.

    Messages are folded in as they arrive, so that memory does not grow with the number of clients. A method with
    another rule, or one that trains on the server, subclasses this and returns it from `Method.make_server`.

    Args:
        initial: what clients receive in the first round (the common initial weights).
        rules: artifact name -> factory of its rule, on top of the terms'. The default is the kind's own
            (`core/aggregation.py`).
        weighting: ``samples`` weighs a client's weights by its training samples, ``uniform`` all alike.
        mixer: makes of the rules what takes the server's place where there is none.
    """

    only_averages: ClassVar[bool] = True
    """Whether all that happens to weights is that they are averaged: then the method can do without a server, and its
    mean may be followed by a server optimizer. Not inherited: a subclass says so by itself."""
    hears_mean: ClassVar[bool] = True
    """Whether a round may come as one message, the mean of all: then the mean may be private
    (`core/private_mean.py`). Not inherited either."""
    varies: bool = False
    """Whether messages hold other things in other rounds."""
    takes_noise: bool = True
    """Whether messages may come clipped and blurred one by one."""
    in_parts: ClassVar[bool] = True
    """Whether what is made of a message as it is folded in rests on that message alone. What the server knows of
    earlier rounds is the main process's; who looks at it there (`weight_of`) must hear all messages. Not inherited."""
    sees_messages: ClassVar[bool] = False
    """Whether `see` is called: for a server that must see every single message, in the order of clients."""

    def __init__(
        self,
        initial: Message,
        rules: Mapping[str, RuleFactory] | None = None,
        weighting: Weighting = "samples",
        mixer: Callable[[Mapping[str, RuleFactory]], Mixer] = MeanMixer,
    ) -> None:
        require_choices("method", weighting=(weighting, Weighting))
        self._mixer = mixer
        self.mean_weighting = weighting
        self.message = initial
        self.rules = dict(rules or {})
        self.memories: dict[str, Mapping[str, Tensor]] = {}
        """What artifact rules carry from round to round."""
        self.facts = Facts()
        """What is known of the federation; set anew for every round."""
        self.optimizer: ServerOptimizer | None = None
        """What follows the mean; None takes the mean itself."""
        self.expected: Callable[[int], float] | None = None
        """Round -> clients that a private mean divides by, whoever comes; None where those who came count."""
        self.as_heard: Heard | None = None
        """What the wire makes of a message on its way down; None where what comes in is about what was sent."""
        self.open_round()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.only_averages = cls.__dict__.get("only_averages", False)
        cls.hears_mean = cls.__dict__.get("hears_mean", False)
        cls.in_parts = cls.__dict__.get("in_parts", False)
        if "collect" in cls.__dict__ or ("see" in cls.__dict__ and not cls.sees_messages):
            raise TypeError(f"{cls.__name__}: to look at messages, override `see` and say `sees_messages = True`")

    def follow(self, rules: Mapping[str, Callable[[], ArtifactRule]]) -> None:
        """Take the rules of the terms' artifacts beside its own, which come before them.

        Raises:
            ConfigError: naming a rule that makes none, or a server that was not made as `Server` is.
        """
        who = type(self).__name__
        require("rules" in vars(self), "method", f"{who}.__init__() must call super().__init__(initial, …)")
        self.rules = {**rules, **self.rules}
        for name, make in self.rules.items():
            with own_code("method", self, f"rules[{name!r}]"):
                rule, other = make(), make()
            says = f"{who}'s rule of artifact {name!r} must make an ArtifactRule whenever it is called"
            require(isinstance(rule, ArtifactRule), "method", says, type(rule).__name__)
            again = f"{says}, a new one for every round, and gives the same one twice"
            require(rule is not other, "method", again)

    def setup(self, facts: Facts) -> None:
        """Learn the federation's facts; called once, before the first round."""
        self.facts = facts

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return self.facts.device

    @property
    def round(self) -> int:
        """The present round, 1-based; 0 before the first."""
        return self.facts.round

    @property
    def started(self) -> Message:
        """The message as the round's clients have heard it, which what they send are updates of."""
        return self.message if self.as_heard is None else self.as_heard(self.message, self.round)

    def message_for(self, client: int) -> Message:
        """What `client` receives at the start of its next round. The same for all unless a method says otherwise."""
        return self.message

    def open_round(self) -> None:
        """Start the round that `facts` tell of: forget what was folded in."""
        self._weights = WeightedMean()
        self._artifacts: dict[str, ArtifactRule] = {}
        self._kinds: dict[str, str] = {}
        self.num_samples = 0
        """Training samples behind what was folded in so far."""

    @property
    def works_in_parts(self) -> bool:
        """Whether every worker may fold in its own clients, so that only sums travel."""
        return self.in_parts and not self.sees_messages and all(rule().in_parts for rule in self.rules.values())

    @property
    def increments(self) -> frozenset[str]:
        """Names of the artifacts that are added to what clients have received: updates, not values."""
        return frozenset(name for name, rule in self.rules.items() if rule().adds)

    def mixer(self) -> Mixer | None:
        """What takes the server's place where there is none; None if nothing can."""
        plain = self.only_averages and not any(rule().remembers for rule in self.rules.values())
        return self._mixer(self.rules) if plain else None

    def partial(self) -> Partial:
        """What was folded in so far, in plain containers, to be merged by another worker's server."""
        artifacts = {name: [self._kinds[name], rule.partial()] for name, rule in self._artifacts.items()}
        return {"weights": self._weights.partial(), "artifacts": artifacts, "num_samples": self.num_samples}

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Fold in what another worker's server has folded in."""
        self._weights.merge(partial["weights"])
        for name, (kind, part) in partial["artifacts"].items():
            self._rule(name, kind).merge(part)
        self.num_samples += partial["num_samples"]

    def collect(self, client: int, message: Message) -> None:
        """Fold in one client's message; subclasses `see` it first."""
        folded = self.see(client, message) if self.sees_messages else message
        if folded is None:
            return
        if folded.weights:
            self._weights.add(folded.weights, self.weight_of(folded), folded.flat)
        for name, value in folded.artifacts.items():
            rule = self._rule(name, kind_of(value))
            rule.client = client
            try:
                rule.add(value, folded.num_samples)
            except ValueError as error:
                raise ValueError(f"artifact {name}: {error}") from error
        self.num_samples += folded.num_samples

    def weight_of(self, message: Message) -> float:
        """How much a client's weights count in the mean, >= 0: by samples, or all alike."""
        return 1 if self.mean_weighting == "uniform" else message.num_samples

    def see(self, client: int, message: Message) -> Message | None:
        """Look at one client's message; what is returned is folded in, None leaves the client out."""
        return message

    def close_round(self) -> None:
        """Turn what came in into the next message. If nothing came in, the old one stays as it is."""
        if self._weights.empty and not self._artifacts:
            self.open_round()
            return
        weights = self.message.weights if self._weights.empty else self._step(self._weights.result())
        artifacts = dict(self.message.artifacts)
        for name, rule in self._artifacts.items():
            merged = rule.result(self.message.artifacts.get(name))
            if merged is not None:
                artifacts[name] = merged
            memory = rule.memory()
            if memory is not None:
                self.memories[name] = memory
        self.message = Message(weights, artifacts, self.num_samples)
        self.open_round()

    def _step(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.optimizer is None:
            return mean
        came = len(self.facts.participants) if self.expected is None else self.expected(self.round)
        self.optimizer.joined = self.facts.num_joined(self.round)
        self.optimizer.share = came / self.optimizer.joined
        return self.optimizer.step(self.started.weights, mean)

    def aggregate(self, messages: Mapping[int, Message]) -> Message:
        """One whole round at once: fold in `messages` and return what goes out."""
        self.facts = replace(self.facts, round=self.round + 1, participants=tuple(messages))
        self.open_round()
        for client, message in messages.items():
            self.collect(client, message)
        self.close_round()
        return self.message

    def _rule(self, name: str, kind: str) -> ArtifactRule:
        """The rule of an artifact in the open round."""
        if name not in self._artifacts:
            rule = self._artifacts[name] = self.rules.get(name, default_rule(kind))()
            self._kinds[name] = kind
            rule.round = self.round
            if name in self.memories:
                rule.remember(self.memories[name])
        return self._artifacts[name]

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on."""
        state = {"message": self.message.state_dict(), "memories": {n: dict(m) for n, m in self.memories.items()}}
        return state if self.optimizer is None else {**state, "server_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.message = Message.from_state_dict(state["message"])
        self.memories = dict(state["memories"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["server_optimizer"])


def uniform_mean(method: Any, initial: Message, facts: Facts) -> Server:
    """A server that weighs all participants alike: what a method can say as ``make_server = uniform_mean``."""
    return Server(initial, weighting="uniform")


class TrainingServer(Server, ABC):
    """A server with a network of its own, which it trains on what a round's participants sent.

    A round is: train on all messages (`train`, with last round's `message` still in place), average as every server
    does, put what was trained into what goes out (`publish`). A subclass takes the hyperparameters of its training in
    its constructor, from its method. Everything that the next round depends on is in the network's and the optimizer's
    states, which are saved and resumed.
    """

    sees_messages = True
    trains_on: ClassVar[tuple[str, ...]] = ()
    """Artifacts without which a message teaches nothing: noise has none where nobody has ever sent any."""
    network: nn.Module
    network_optimizer: Optimizer

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
            messages: by client, in the order of clients; not empty, and each with all of `trains_on`.
        """

    def publish(self, message: Message) -> Message:
        """Add what was trained to the round's averages, before they go out; called at setup, too. Default: nothing."""
        return message

    def setup(self, facts: Facts) -> None:
        """Make network and optimizer, and the first message."""
        super().setup(facts)
        rule = f"{type(self).__name__}.trains_on must list artifacts' names, as in ('logits',), and is one text"
        require(not isinstance(self.trains_on, str), "method", rule, self.trains_on)
        with isolated_streams(facts.seed, "server/init"):
            self.network = self.build().to(facts.device, torch.float32)
        self.network_optimizer = self.make_optimizer(self.network.parameters())
        self.message = self.publish(self.message)

    def open_round(self) -> None:
        """Start a round: forget what came in."""
        super().open_round()
        self._messages: dict[int, Message] = {}

    def see(self, client: int, message: Message) -> Message:
        """Keep a message until the round closes."""
        self._messages[client] = message
        return message

    def close_round(self) -> None:
        """Train, average, publish. If nothing came in, nothing changes."""
        came = sorted(self._messages.items())
        messages = {client: own for client, own in came if own.artifacts.keys() >= set(self.trains_on)}
        if messages:
            streams = isolated_streams(self.facts.seed, "server", self.round)
            with streams, torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                self.train(messages)
        super().close_round()
        if came:
            self.message = self.publish(self.message)

    def state_dict(self) -> dict[str, Any]:
        """The base's state, the network's and the optimizer's."""
        own = {"network": self.network.state_dict(), "optimizer": self.network_optimizer.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.network.load_state_dict(state["network"])
        self.network_optimizer.load_state_dict(state["optimizer"])
