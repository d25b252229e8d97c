"""A generator of embeddings on whose classes all clients' heads agree, and what the server trains it by.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (FedGen), ICML 2021. Checked
against the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.generating import GeneratorTraining, HeadsServer
from fl_lightning.core.message import Message
from fl_lightning.core.precision import Wide, widened
from fl_lightning.errors import require_choices
from fl_lightning.losses.divergence import divergence
from fl_lightning.losses.generated_features import diversity_loss, mistaken_loss
from fl_lightning.models.generator import generate, num_generator_values
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.facts import Facts
    from fl_lightning.core.forward import Forward
    from fl_lightning.core.step import Step

Ensemble = Literal["logits", "losses"]


@checked
def consensus_loss(
    logits: Float[Tensor, "N B C"], y: Int[Tensor, " B"], shares: Float[Tensor, "M C"], ensemble: Ensemble = "logits"
) -> Float[Tensor, ""]:
    """How wrong N heads are together about generated embeddings, CE(mean_k g_k, y), or Σ_k w_{k,y} CE(g_k, y).

    Args:
        logits: g, [N, B, C].
        y: [B] int64 classes.
        shares: w, [N, C], what each client's word counts for on each class; the second alone looks at it.
        ensemble: ``logits`` for the first, ``losses`` for the second.

    Returns:
        Scalar, float32.

    >>> logits, shares = torch.tensor([[[4.0, 0.0]], [[0.0, 4.0]]]), torch.full((2, 2), 0.5)
    >>> [round(float(consensus_loss(logits, torch.tensor([0]), shares, how)), 4) for how in ("logits", "losses")]
    [0.6931, 2.0181]
    """
    return F.cross_entropy(logits.mean(0), y) if ensemble == "logits" else mistaken_loss(logits, y, shares)


@dataclass(frozen=True)
class Training(GeneratorTraining):
    """How the server trains the generator.

    Args:
        server_steps: steps of the generator a round, >= 1.
        server_batch: generated embeddings a step, >= 2.
        server_lr: learning rate of the generator's Adam in the first round, >= 0, times 0.98 a round.
        server_weight_decay: its weight decay, >= 0.
        diversity: η, >= 0.
        ensemble: the loss of the clients' mean ``logits`` (the paper), or all clients' ``losses`` (the authors' code).
    """

    diversity: float = 1.0
    ensemble: Ensemble = "logits"

    def __post_init__(self) -> None:
        self.check_ranges()
        require_choices("method.training", ensemble=(self.ensemble, Ensemble))


class HeardGenerator(Wide):
    """What a client has heard of the server: its generator, a constant in a fit, and which classes others hold.

    Args:
        sizes: of the generator: C, D, E, H.
    """

    values: Tensor  # [P_G]
    held: Tensor  # [C], 1 for a class that somebody has held who took part

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("values", torch.zeros(num_generator_values(*sizes)), persistent=False)
        self.register_buffer("held", torch.ones(sizes[0]), persistent=False)
        self.is_there = False

    def receive(self, message: Message) -> None:
        """Take the generator and the class counts out of a message."""
        self.is_there = message.copy_to(self.values, "generator")  # once a round: the same for all clients
        message.copy_to(self.held, "class_counts")
        self.held.copy_(self.held > 0)

    def draw_classes(self, size: int) -> Tensor:
        """[size] int64, drawn evenly among the classes that a participant has held so far."""
        return torch.multinomial(self.held, size, replacement=True)

    def draw_noise(self, y: Tensor) -> Tensor:
        """[B, E] ε for classes [B]."""
        return torch.randn(len(y), self.sizes[2], device=y.device)

    def told(self, step: Step, head: nn.Module, y: Tensor, like: Tensor) -> Tensor:
        """[B, C] what a head makes of embeddings that are generated for classes, in float32 or wider.

        Args:
            step: of the fit.
            head: the client's.
            y: [B] int64 classes.
            like: an embedding, of the dtype that the head takes.
        """
        z = generate(self.values, self.draw_noise(y).to(self.values.dtype), y, *self.sizes[:2])
        return widened(step.through(head, z.to(like.dtype)))

    def latent(self, step: Step, head: nn.Module, out: Forward) -> Tensor:
        """KL(g(G(ε, y)) ‖ g(f(x))) of a mini-batch; 0 for samples of classes that the generator has never heard of."""
        heard = self.held[step.y][:, None] > 0
        told = torch.where(heard, self.told(step, head, step.y, out.z), widened(out.logits))
        return divergence(told.detach(), out.logits)


class ConsensusServer(HeadsServer):
    """Trains the generator on what the round's heads agree on; class counts come as an artifact, ``class_counts``.

    Of a class that no participant of the round holds it passes on the last counts that it has heard.
    """

    hears_mean = True
    trains_on = ("class_counts",)
    draw = staticmethod(torch.randn)
    options: Training

    @override
    def setup(self, facts: Facts) -> None:
        self.heard = torch.zeros(self.sizes[0], device=facts.device)
        super().setup(facts)

    @override
    def counts(self, messages: Mapping[int, Message]) -> Tensor:
        own: list[Any] = [message.artifacts.get("class_counts") for message in messages.values()]
        return torch.stack([counts for counts in own if counts is not None]).round().clamp(min=0).long()

    @override
    def generator_loss(
        self, features: Tensor, noise: Tensor, y: Tensor, heads: Mapping[str, Tensor], shares: Tensor
    ) -> Tensor:
        loss = consensus_loss(self.logits(features, heads), y, shares, self.options.ensemble)
        return loss + self.options.diversity * diversity_loss(features, noise)

    @override
    def publish(self, message: Message) -> Message:
        counts = message.artifacts.get("class_counts")
        if isinstance(counts, Tensor):
            counts = self.heard = torch.where(counts > 0, counts, self.heard.to(counts))
            message = replace(message, artifacts={**message.artifacts, "class_counts": counts})
        return super().publish(message)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "heard": self.heard}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.heard = state["heard"]
