"""FedPA: FedAvg whose heads also learn from a generator that all heads agree with, and that avoids the prototypes.

Jiang, Wang, Yang, Shu, Lin, Yi, "FedPA: Generator-Based Heterogeneous Federated Prototype Adversarial Learning", IEEE
TDSC 22(2):939-949, 2025. (Others of that name are other methods.) The paper's text was not at hand: this follows the
public code, less its errors. There a class that a client owns but did not sample is sent as a zero prototype with its
full weight, classes that nobody sampled attract to zero, and batch norm's statistics are never averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam, Optimizer
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server, TrainingServer
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.generated_features import (
    DECAY,
    SMALLEST_GENERATED,
    EarlyAlignment,
    GeneratedFeatures,
    Generator,
    diversity_loss,
    faded,
    label_shares,
    received_prototypes,
)
from fl_lightning.losses.prototype import Collection, prototype_alignment_loss
from fl_lightning.models.generator import FeatureGenerator
from fl_lightning.models.split import SplitModel


@dataclass(frozen=True)
class Training:
    """How the server trains the generator.

    Args:
        server_steps: steps of the generator a round, >= 1.
        server_batch: generated embeddings a step, >= 2.
        server_lr: learning rate of the generator's Adam in the first round, >= 0, times 0.98 a round; 1e-4 for CIFAR.
        server_weight_decay: its weight decay, >= 0.
        repulsion: ρ, >= 0.
    """

    server_steps: int = 50
    server_batch: int = 32
    server_lr: float = 3e-4
    server_weight_decay: float = 1e-2
    repulsion: float = 0.15

    def __post_init__(self) -> None:
        least = {"server_steps": 1, "server_batch": 2}
        for name, value in vars(self).items():
            smallest = least.get(name, 0)
            require(value >= smallest, f"method.training.{name}", f"must be >= {smallest}", value)


class FedPA(Method):
    """FedAvg with class prototypes V and a generator G(ε, y) of embeddings, which the server trains.

        L = L_ce + a_t r CE(g(G(ε, ŷ)), ŷ) + b_t MSE(f(x), V_y)

    L is the clients' loss, with a_t and b_t fading by 0.98 a round, in the first steps of a fit only; the first round
    is FedAvg's, and with both weights 0 every round is. L_G is the server's, before it averages, on the heads g_i that
    came in and the old prototypes:

        L_G = a_t Σ_i mean_b w_{i,y_b} CE(g_i(G_b), y_b) − ρ MSE(G_b, V_{y_b}) + exp(−mean pairwise difference).

    The adversary is the generator: it leaves the prototypes to which clients pull their embeddings, as far as all heads
    still tell its classes. Message: model and prototypes, with counts, up; model, prototypes and generator down.

    Args:
        generator_weight: a_1, >= 0; with 0 the server trains nothing. Tuned for embeddings of 32 values.
        prototype_weight: b_1, >= 0.
        steps: local steps of a fit in which the two terms count, >= 1.
        generated_batch: generated embeddings a local step, >= 1; null takes as many as the mini-batch has samples.
        collection: ``post`` averages embeddings over the training part after the fit, ``running`` over the fit's own
            forward passes, of all its epochs (the public code).
        generator: the generator's sizes.
        training: how the server trains it.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Jiang et al., TDSC 2025"

    def __init__(
        self,
        model: SplitModel,
        generator_weight: float = 25.0,
        prototype_weight: float = 5.0,
        steps: int = 20,
        generated_batch: int | None = None,
        collection: Collection = "post",
        generator: Generator = Generator(),
        training: Training = Training(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        for key, value, least in (
            ("generator_weight", generator_weight, 0),
            ("prototype_weight", prototype_weight, 0),
            ("steps", steps, 1),
        ):
            require(value >= least, f"method.{key}", f"must be >= {least}", value)
        some = generated_batch is None or generated_batch >= 1
        require(some, "method.generated_batch", "must be >= 1 or null", generated_batch)
        require_choices("method", collection=(collection, Collection))
        generated = GeneratedFeatures(generator_weight, steps, collection, generator, generated_batch)
        align = EarlyAlignment(prototype_weight, steps, collection)
        generated.whole_fit = align.whole_fit = True
        super().__init__(model, terms=[generated, align], extra_terms=extra_terms)
        self.generator_weight = generator_weight
        self.generator_sizes = (model.num_classes, model.embedding_size, generator.noise_size, generator.hidden)
        self.training_options = training

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        if not self.generator_weight:
            return super().make_server(initial, facts)
        head = copy.deepcopy(self.model.head).eval().requires_grad_(False)
        return GeneratorServer(initial, head, self.generator_sizes, self.generator_weight, self.training_options)


class GeneratorServer(TrainingServer):
    """Trains the generator on the round's heads, then averages models and prototypes."""

    hears_mean = True
    network: FeatureGenerator

    def __init__(
        self,
        initial: Message,
        head: nn.Module,
        sizes: tuple[int, int, int, int],
        weight: float,
        options: Training,
    ) -> None:
        super().__init__(initial)
        self.head = head
        self.sizes = sizes
        self.weight = weight
        self.options = options

    @override
    def build(self) -> nn.Module:
        return FeatureGenerator(*self.sizes)

    @override
    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Adam(parameters, lr=self.options.server_lr, weight_decay=self.options.server_weight_decay)

    def train(self, messages: Mapping[int, Message]) -> None:
        """The generator's steps of one round, on frozen heads in eval mode."""
        prototypes = {client: received_prototypes(message) for client, message in messages.items()}
        counts = torch.stack([own.count for own in prototypes.values() if own is not None])
        shares, classes = label_shares(counts), counts.sum(0).nonzero().flatten()
        heads = stacked_heads(messages)
        self.head.to(self.device, torch.float32)
        size = self.options.server_batch
        for group in self.network_optimizer.param_groups:
            group["lr"] = self.options.server_lr * DECAY ** (self.round - 1)
        self.network.train()
        for _ in range(self.options.server_steps):
            y = classes[torch.randint(len(classes), (size,), device=self.device)]
            noise = torch.rand(size, self.sizes[2], device=self.device)
            self.network_optimizer.zero_grad()
            self.generator_loss(self.network(noise, y), noise, y, heads, shares).backward()
            self.network_optimizer.step()

    def generator_loss(
        self, features: Tensor, noise: Tensor, y: Tensor, heads: Mapping[str, Tensor], shares: Tensor
    ) -> Tensor:
        """L_G on a batch of generated embeddings [B, D].

        Args:
            features: [B, D] G.
            noise: [B, E] ε.
            y: [B] int64 classes.
            heads: the N participants' heads, each entry stacked [N, …].
            shares: [N, C] w.
        """
        logits = torch.vmap(lambda head: functional_call(self.head, head, (features,)))(heads)  # [N, B, C]
        losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(len(logits), -1)
        loss = faded(self.weight, SMALLEST_GENERATED, self.round) * (shares[:, y] * losses).mean(1).sum()
        old = received_prototypes(self.message)
        if old is not None:
            distance = prototype_alignment_loss(features, y, old.mean, old.valid, average="valid")
            loss = loss - self.options.repulsion * distance
        return loss + diversity_loss(features, noise, y)

    def publish(self, message: Message) -> Message:
        """The generator as one vector, from the first time on that it was trained."""
        if self.round == 0:
            return message
        return replace(message, artifacts={**message.artifacts, "generator": self.network.flattened()})


def stacked_heads(messages: Mapping[int, Message]) -> dict[str, Tensor]:
    """The heads in N messages: each entry of the head's state, [N, …]."""
    prefix = "model.head."
    names = [name for name in next(iter(messages.values())).weights if name.startswith(prefix)]
    weights = [message.weights for message in messages.values()]
    return {name.removeprefix(prefix): torch.stack([own[name].float() for own in weights]) for name in names}
