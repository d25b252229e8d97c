"""FedGen: a generator of embeddings, which the server trains to please all heads, tells every client of the others'.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021. Checked against the
authors' code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Facts, Message, Method, OwnData, Step, Term
from fl_lightning.core.precision import widened
from fl_lightning.errors import require, require_at_least
from fl_lightning.losses.divergence import divergence
from fl_lightning.losses.generated_features import SMALLEST_GENERATED, Generator, faded
from fl_lightning.losses.generator_consensus import ConsensusServer, Training
from fl_lightning.models.generator import generate, num_generator_values
from fl_lightning.models.split import SplitModel


class FedGen(Method):
    """FedAvg with a generator G(ε, y), ε ~ N(0, I), on which heads learn what other clients' heads agree on.

        L = CE + α_t CE(g(G(ε, ŷ)), ŷ) + β_t KL(g(G(ε, y)) ‖ g(f(x))),  α_t = α 0.98^{t−1}, β_t likewise
        L_G = CE(mean_k g_k(G), y) + η exp(−mean pairwise difference),  or  Σ_k w_{k,y} CE(g_k(G), y) + …

    The ŷ are drawn evenly among the classes that somebody holds; the divergence's first side is a constant, and G, too.
    The first round is FedAvg's. w_k are the participants' shares of a class, n + 1 over their sum. Up go model and
    class counts, down model, generator and mean counts. (The paper has β = 0 and α constant. The authors' code draws ε
    from [0, 1] and lets a step's samples all have their mean w; of other public codes one asks the old global head in
    the clients' place, and one leaves β and η out.)

    Args:
        weight: α, >= 0.
        latent_weight: β, >= 0.
        generated_batch: generated embeddings a step, >= 1; null takes as many as the mini-batch has samples.
        generator: the generator's sizes.
        training: how the server trains it.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Zhu et al., ICML 2021"
    generator: Tensor  # [P_G]
    held: Tensor  # [C], 1 for a class that somebody holds

    def __init__(
        self,
        model: SplitModel,
        weight: float = 10.0,
        latent_weight: float = 10.0,
        generated_batch: int | None = None,
        generator: Generator = Generator(),
        training: Training = Training(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_at_least("method", 0, weight=weight, latent_weight=latent_weight)
        some = generated_batch is None or generated_batch >= 1
        require(some, "method.generated_batch", "must be >= 1 or null", generated_batch)
        super().__init__(model, extra_terms=extra_terms)
        self.weights, self.generated_batch = (weight, latent_weight), generated_batch
        self.sizes = (model.num_classes, model.embedding_size, generator.noise_size, generator.hidden)
        self.training_options = training

    @override
    def setup(self) -> None:
        self.register_buffer("generator", torch.zeros(num_generator_values(*self.sizes)), persistent=False)
        self.register_buffer("held", torch.ones(self.sizes[0]), persistent=False)
        self._knows = False

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self._knows = message.copy_to(self.generator, "generator")  # once a round: the same for all clients
        message.copy_to(self.held, "class_counts")
        self.held.copy_(self.held > 0)

    @override
    def losses(self) -> dict[str, float]:
        alpha, beta = (faded(weight, SMALLEST_GENERATED, max(self.facts.round, 1)) for weight in self.weights)
        return {"generated": alpha, "latent": beta}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        values = step.values(out)
        if self._knows:
            size = self.generated_batch or len(step.y)
            y = torch.multinomial(self.held, size, replacement=True)
            told = widened(self._told(step, step.y, out.z.dtype).detach())
            values["latent"] = divergence(told, out.logits)
            values["generated"] = size / len(step.y) * F.cross_entropy(widened(self._told(step, y, out.z.dtype)), y)
        step.descend(values)
        step.observe(out)

    def _told(self, step: Step, y: Tensor, dtype: torch.dtype) -> Tensor:
        """What the client's head makes of embeddings that are generated for classes [B]."""
        noise = torch.randn(len(y), self.sizes[2], device=y.device).to(self.generator.dtype)
        return step.through(self.model.head, generate(self.generator, noise, y, *self.sizes[:2]).to(dtype))

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        message.artifacts["class_counts"] = data.class_counts.float()
        return message

    @override
    def make_server(self, initial: Message, facts: Facts) -> ConsensusServer:
        return ConsensusServer(initial, frozen_copy(self.model.head).eval(), self.sizes, self.training_options)
