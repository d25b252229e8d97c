"""Training heads on embeddings that a server generates, and keeping embeddings near the class prototypes meanwhile.

Jiang, Wang, Yang, Shu, Lin, Yi, "FedPA: Generator-Based Heterogeneous Federated Prototype Adversarial Learning", IEEE
TDSC 22(2), 2025, as its public code has it: both terms fade from round to round and count in a fit's first steps only.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.generating import DECAY
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.precision import widened
from fl_lightning.errors import require
from fl_lightning.losses.prototype import Collection, PrototypeTerm, prototype_alignment_loss
from fl_lightning.models.generator import generate, num_generator_values
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.facts import Facts
    from fl_lightning.core.host import Host

SMALLEST_GENERATED, SMALLEST_ALIGNED = 1e-4, 0.15


@dataclass(frozen=True)
class Generator:
    """Sizes of the generator; FedPA's public code has 64 and 512 for CIFAR-100.

    Args:
        noise_size: E, the size of ε, >= 1; FedPA draws it from U(0, 1), FedGen from N(0, 1).
        hidden: H, the generator's width, >= 1.
    """

    noise_size: int = 32
    hidden: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"Generator.{name}", "must be >= 1", value)


def faded(weight: float, smallest: float, round: int) -> float:
    """A weight that fades from round to round, max(smallest, weight · 0.98^(round − 1)); 0 stays 0.

    >>> faded(25.0, 1e-4, round=1), round(faded(25.0, 1e-4, round=11), 4), faded(5.0, 0.15, round=900)
    (25.0, 20.4268, 0.15)
    """
    return max(smallest, weight * DECAY ** (round - 1)) if weight > 0 else 0.0


@checked
def diversity_loss(
    features: Float[Tensor, "B D"], noise: Float[Tensor, "B E"], y: Int[Tensor, " B"] | None = None
) -> Float[Tensor, ""]:
    """Small where different noise gives different embeddings of different classes, 1 where nothing differs.

    L = exp( −1/B² Σ_{a,b} [y_a ≠ y_b] ‖G_a − G_b‖₁/D · ‖ε_a − ε_b‖₂²/E ). Pairs of one class add nothing and stay in
    the denominator.

    Args:
        features: [B, D] G, generated embeddings.
        noise: [B, E] ε, what they were generated from.
        y: [B] int64 their classes; None lets pairs of one class count like all others.

    Returns:
        Scalar in (0, 1].

    >>> one = torch.tensor([[0.], [1.]])
    >>> round(float(diversity_loss(one, one, torch.tensor([0, 1]))), 5)
    0.60653
    """
    features, noise = widened(features), widened(noise)
    apart = (features[:, None] - features[None]).abs().mean(2)
    noises_apart = (noise[:, None] - noise[None]).square().mean(2)
    both = apart * noises_apart
    return torch.exp(-(both if y is None else both * (y[:, None] != y[None])).mean())


@checked
def mistaken_loss(
    logits: Float[Tensor, "N B C"], y: Int[Tensor, " B"], shares: Float[Tensor, "N C"]
) -> Float[Tensor, ""]:
    """How wrong N clients are about generated embeddings: Σ_i mean_b w_{i,y_b} CE(g_{i,b}, y_b).

    Args:
        logits: [N, B, C] g.
        y: [B] int64 classes.
        shares: [N, C] w, what each client's word counts for on each class.

    >>> one = torch.zeros(2, 1, 2)
    >>> round(float(mistaken_loss(one, torch.tensor([0]), torch.tensor([[0.8, 0.5], [0.2, 0.5]]))), 4)
    0.6931
    """
    losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(len(logits), -1)
    return (shares[:, y] * losses).mean(1).sum()


class FirstSteps(PrototypeTerm, ABC):
    """A term that fades from round to round and counts in the first steps of a phase of the local fit only.

    Sends the client's class prototypes, receives the federation's.

    Args:
        weight: factor of the term in the first round, >= 0.
        steps: first local steps of a phase in which the term counts, >= 1.
        collection: how prototypes are made, ``post`` (after the fit) or ``running`` (over its last epoch).
    """

    paper = "Jiang et al., TDSC 2025"
    smallest = 0.0

    def __init__(self, weight: float, steps: int = 20, collection: Collection = "post") -> None:
        super().__init__(weight, collection)
        require(steps >= 1, f"{type(self).__name__}.steps", "must be >= 1", steps)
        self.steps = steps
        self._num_valid = 0

    @override
    def weight_at(self, facts: Facts) -> float:
        return faded(self.weight, self.smallest, max(facts.round, 1))

    @override
    def receive(self, host: Host, message: Message) -> None:
        super().receive(host, message)
        self._num_valid = int(self.valid.sum())  # once a round: reading it in every step would wait for the device

    def counts(self, host: Host) -> bool:
        """Whether there is something to compare with, and the fit is in its first steps."""
        return self._num_valid > 0 and host.fit.num_batches < self.steps


class EarlyAlignment(FirstSteps):
    """Pull embeddings towards the class prototypes in a fit's first steps: b_t MSE(f(x), V_y).

    b_t = max(0.15, weight · 0.98^(t − 1)) in round t; mean over features and over the samples whose class has a
    prototype.

    Args:
        weight: b_1, >= 0.
        steps: first local steps of a phase in which the term counts, >= 1.
        collection: how prototypes are made, ``post`` (after the fit) or ``running`` (over its last epoch).
    """

    smallest = SMALLEST_ALIGNED

    def __init__(self, weight: float = 5.0, steps: int = 20, collection: Collection = "post") -> None:
        super().__init__(weight, steps, collection)

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self.counts(host):
            return torch.zeros((), dtype=torch.float32, device=out.z.device)
        return prototype_alignment_loss(out.z, out.y, self.prototypes, self.valid, average="valid")


class GeneratedFeatures(FirstSteps):
    """Train the head on generated embeddings in a fit's first steps: a_t r CE(g(G(ε, y)), y), ε ~ U(0, 1).

    a_t = max(1e-4, weight · 0.98^(t − 1)) in round t; classes are drawn evenly among those that have a prototype; r is
    generated over own samples. The generator comes from the server, as one vector, and is a constant: the gradient
    reaches the head alone. Without a generator the term is 0.

    Args:
        weight: a_1, >= 0.
        steps: first local steps of a phase in which the term counts, >= 1.
        collection: how prototypes are made, ``post`` (after the fit) or ``running`` (over its last epoch).
        generator: the generator's sizes.
        batch_size: generated embeddings a step, >= 1; null takes as many as the mini-batch has samples (r = 1).
    """

    reaches = ("model.head",)
    smallest = SMALLEST_GENERATED

    def __init__(
        self,
        weight: float = 25.0,
        steps: int = 20,
        collection: Collection = "post",
        generator: Generator = Generator(),
        batch_size: int | None = None,
    ) -> None:
        super().__init__(weight, steps, collection)
        require(
            batch_size is None or batch_size >= 1, "GeneratedFeatures.batch_size", "must be >= 1 or null", batch_size
        )
        self.sizes = generator
        self.batch_size = batch_size
        self._has_generator = False

    generator: Tensor  # [P_G], as received
    classes: Tensor  # [K] int64, that have a prototype

    @override
    def setup(self, host: Host) -> None:
        super().setup(host)
        sizes = host.model.num_classes, host.model.embedding_size, self.sizes.noise_size, self.sizes.hidden
        self.register_buffer("generator", torch.zeros(num_generator_values(*sizes)), persistent=False)

    @override
    def receive(self, host: Host, message: Message) -> None:
        super().receive(host, message)
        received = message.artifacts.get("generator")
        self._has_generator = isinstance(received, Tensor)
        self.generator.copy_(received) if isinstance(received, Tensor) else self.generator.zero_()
        self.classes = self.valid.nonzero().flatten()

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self._has_generator or not self.counts(host):
            return torch.zeros((), dtype=torch.float32, device=out.z.device)
        size = self.batch_size or len(out.y)
        y = self.classes[torch.randint(len(self.classes), (size,), device=out.z.device)]
        noise = torch.rand(size, self.sizes.noise_size, device=out.z.device).to(self.generator.dtype)
        with torch.no_grad():
            z = generate(self.generator, noise, y, *self.prototypes.shape)
        ratio = size / len(out.y)
        return ratio * F.cross_entropy(widened(out.through(host.network().head, z)), y)

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        return {**super().interface(host), "generator": tuple(self.generator.shape)}


def received_prototypes(message: Message) -> ClassMeans | None:
    """The prototypes in a message, where there are any."""
    prototypes = message.artifacts.get("prototypes")
    return prototypes if isinstance(prototypes, ClassMeans) else None
