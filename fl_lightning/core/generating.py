"""A server that trains a generator of embeddings on the heads that a round's participants have sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam, Optimizer

from fl_lightning.core.message import Message
from fl_lightning.core.server import TrainingServer
from fl_lightning.errors import require
from fl_lightning.models.generator import FeatureGenerator
from fl_lightning.shapes import checked

DECAY = 0.98  # a round


@dataclass(frozen=True)
class GeneratorTraining:
    """How the server trains the generator.

    Args:
        server_steps: steps of the generator a round, >= 1.
        server_batch: generated embeddings a step, >= 2.
        server_lr: learning rate of the generator's Adam in the first round, >= 0, times 0.98 a round.
        server_weight_decay: its weight decay, >= 0.
    """

    server_steps: int = 50
    server_batch: int = 32
    server_lr: float = 3e-4
    server_weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        self.check_ranges()

    def check_ranges(self) -> None:
        """Refuse numbers that are too small.

        Raises:
            ConfigError: naming the first one.
        """
        least = {"server_steps": 1, "server_batch": 2}
        for name, value in vars(self).items():
            smallest = least.get(name, 0)
            fits = isinstance(value, str) or value >= smallest
            require(fits, f"method.training.{name}", f"must be >= {smallest}", value)


class HeadsServer(TrainingServer, ABC):
    """Trains a generator G(ε, y) on the round's heads, then averages as every server does.

    Args:
        initial: the first message.
        head: the clients' head, as it was drawn.
        sizes: of the generator: C, D, E, H.
        options: of its training.
    """

    network: FeatureGenerator
    draw: Callable[..., Tensor] = staticmethod(torch.rand)
    """Draws the noise ε."""

    def __init__(
        self, initial: Message, head: nn.Module, sizes: tuple[int, int, int, int], options: GeneratorTraining
    ) -> None:
        super().__init__(initial)
        self.head = head
        self.sizes = sizes
        self.options = options
        self.trained = False
        """Whether the generator has been trained yet."""

    def build(self) -> nn.Module:
        """The generator."""
        return FeatureGenerator(*self.sizes)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam."""
        return Adam(parameters, lr=self.options.server_lr, weight_decay=self.options.server_weight_decay)

    @abstractmethod
    def counts(self, messages: Mapping[int, Message]) -> Tensor:
        """[N, C] int64 samples of each participant and class; classes that nobody holds are not generated."""

    @abstractmethod
    def generator_loss(
        self, features: Tensor, noise: Tensor, y: Tensor, heads: Mapping[str, Tensor], shares: Tensor
    ) -> Tensor:
        """The generator's loss on a batch of generated embeddings.

        Args:
            features: [B, D] G.
            noise: [B, E] ε.
            y: [B] int64 classes.
            heads: the N participants' heads, each entry stacked [N, …].
            shares: [N, C] what each one's word counts for on each class (`label_shares`).
        """

    def train(self, messages: Mapping[int, Message]) -> None:
        """The generator's steps of one round, on frozen heads in eval mode."""
        counts, heads = self.counts(messages), stacked_heads(messages)
        shares, classes = label_shares(counts), counts.sum(0).nonzero().flatten()
        if not len(classes):  # noise on what clients say may leave none
            return
        self.head.to(self.device, torch.float32)
        size = self.options.server_batch
        for group in self.network_optimizer.param_groups:
            group["lr"] = self.options.server_lr * DECAY ** (self.round - 1)
        self.network.train()
        for _ in range(self.options.server_steps):
            y = classes[torch.randint(len(classes), (size,), device=self.device)]
            noise = self.draw(size, self.sizes[2], device=self.device)
            self.network_optimizer.zero_grad()
            self.generator_loss(self.network(noise, y), noise, y, heads, shares).backward()
            self.network_optimizer.step()
        self.trained = True

    def logits(self, features: Tensor, heads: Mapping[str, Tensor]) -> Tensor:
        """[N, B, C] what each head makes of embeddings [B, D]."""

        def one(head: dict[str, Tensor]) -> Any:
            return functional_call(self.head, head, (features,))

        return torch.vmap(one)(dict(heads))

    def publish(self, message: Message) -> Message:
        """The generator as one vector, from the first time on that it was trained."""
        if not self.trained:
            return message
        return replace(message, artifacts={**message.artifacts, "generator": self.network.flattened()})

    def state_dict(self) -> dict[str, Any]:
        """The base's state, and whether the generator has been trained."""
        return {**super().state_dict(), "trained": self.trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; states of earlier versions are of generators that were."""
        super().load_state_dict(state)
        self.trained = state.get("trained", True)


def stacked_heads(messages: Mapping[int, Message]) -> dict[str, Tensor]:
    """The heads in N messages: each entry of the head's state, [N, …]."""
    prefix = "model.head."
    names = [name for name in next(iter(messages.values())).weights if name.startswith(prefix)]
    weights = [message.weights for message in messages.values()]
    return {name.removeprefix(prefix): torch.stack([own[name].float() for own in weights]) for name in names}


@checked
def label_shares(counts: Int[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """What each client's word counts for on each class, w_{i,c} = (m_{i,c} + 1) / Σ_j (m_{j,c} + 1).

    Args:
        counts: [N, C] m, samples of each client and class.

    Returns:
        [N, C] float32; every column sums to 1.

    >>> label_shares(torch.tensor([[3, 0], [0, 0]])).tolist()
    [[0.800000011920929, 0.5], [0.20000000298023224, 0.5]]
    """
    return (counts + 1) / (counts + 1).sum(0)
