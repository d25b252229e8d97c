"""FedPA: FedAvg whose heads also learn from a generator that all heads agree with, and that avoids the prototypes.

Jiang, Wang, Yang, Shu, Lin, Yi, "FedPA: Generator-Based Heterogeneous Federated Prototype Adversarial Learning", IEEE
TDSC 22(2):939-949, 2025. (Others of that name are other methods.) The paper's text was not at hand: this follows the
public code, less its errors. There a class that a client owns but did not sample is sent as a zero prototype with its
full weight, classes that nobody sampled attract to zero, and batch norm's statistics are never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.generating import GeneratorTraining, HeadsServer
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.generated_features import (
    SMALLEST_GENERATED,
    EarlyAlignment,
    GeneratedFeatures,
    Generator,
    diversity_loss,
    faded,
    mistaken_loss,
    received_prototypes,
)
from fl_lightning.losses.prototype import Collection, prototype_alignment_loss
from fl_lightning.models.copying import copied
from fl_lightning.models.split import SplitModel


@dataclass(frozen=True)
class Training(GeneratorTraining):
    """How the server trains the generator.

    Args:
        server_steps: steps of the generator a round, >= 1.
        server_batch: generated embeddings a step, >= 2.
        server_lr: learning rate of the generator's Adam in the first round, >= 0, times 0.98 a round; 1e-4 for CIFAR.
        server_weight_decay: its weight decay, >= 0.
        repulsion: ρ, >= 0.
    """

    repulsion: float = 0.15


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
        head = copied(self.model.head).eval().requires_grad_(False)
        return GeneratorServer(initial, head, self.generator_sizes, self.generator_weight, self.training_options)


class GeneratorServer(HeadsServer):
    """Trains the generator on the round's heads, then averages models and prototypes."""

    hears_mean = True
    trains_on = ("prototypes",)
    options: Training

    def __init__(
        self,
        initial: Message,
        head: nn.Module,
        sizes: tuple[int, int, int, int],
        weight: float,
        options: Training,
    ) -> None:
        super().__init__(initial, head, sizes, options)
        self.weight = weight

    @override
    def counts(self, messages: Mapping[int, Message]) -> Tensor:
        prototypes = [received_prototypes(message) for message in messages.values()]
        return torch.stack([own.count for own in prototypes if own is not None])

    @override
    def generator_loss(
        self, features: Tensor, noise: Tensor, y: Tensor, heads: Mapping[str, Tensor], shares: Tensor
    ) -> Tensor:
        """L_G on a batch of generated embeddings [B, D]."""
        weight = faded(self.weight, SMALLEST_GENERATED, self.round)
        loss = weight * mistaken_loss(self.logits(features, heads), y, shares)
        old = received_prototypes(self.message)
        if old is not None:
            distance = prototype_alignment_loss(features, y, old.mean, old.valid, average="valid")
            loss = loss - self.options.repulsion * distance
        return loss + diversity_loss(features, noise, y)
