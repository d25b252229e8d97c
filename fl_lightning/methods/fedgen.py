"""FedGen: a generator of embeddings, which the server trains to please all heads, tells every client of the others'.

Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021. Checked against the
authors' code.
"""

from __future__ import annotations

import torch.nn.functional as F
from typing_extensions import override

from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Facts, Message, Method, OwnData, Step, Term
from fl_lightning.errors import require, require_at_least
from fl_lightning.losses.generated_features import SMALLEST_GENERATED, Generator, faded
from fl_lightning.losses.generator_consensus import ConsensusServer, HeardGenerator, Training
from fl_lightning.models.split import SplitModel


class FedGen(Method):
    """FedAvg with a generator G(ε, y), ε ~ N(0, I), on which heads learn what other clients' heads agree on.

        L = CE + α_t r CE(g(G(ε, ŷ)), ŷ) + β_t KL(g(G(ε, y)) ‖ g(f(x))),
        α_t = max(1e-4, α 0.98^{t−1}), β_t likewise (0 stays 0), r = generated over own samples of the step
        L_G = CE(mean_k g_k(G), y) + η exp(−mean pairwise difference),  or  Σ_k w_{k,y} CE(g_k(G), y) + …

    The ŷ are drawn evenly among the classes that a participant has held so far, and samples of others diverge from
    nothing; the divergence's first side is a constant, and G, too. The first round is FedAvg's. w_k are the
    participants' shares of a class, n + 1 over their sum. Up go model and class counts, down model, generator and mean
    counts. (The paper has β = 0 and α constant. The authors' code draws ε from [0, 1] and lets a step's samples all
    have their mean w; another public code leaves β and η out.)

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
        self.weights = {"generated": weight, "latent": latent_weight}
        self.generated_batch, self.training_options = generated_batch, training
        self.heard = HeardGenerator((model.num_classes, model.embedding_size, generator.noise_size, generator.hidden))

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.heard.receive(message)

    @override
    def losses(self) -> dict[str, float]:
        return {name: faded(own, SMALLEST_GENERATED, max(self.facts.round, 1)) for name, own in self.weights.items()}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        values = step.values(out)
        if self.heard.is_there:
            head, y = self.model.head, self.heard.draw_classes(self.generated_batch or len(step.y))
            values["latent"] = self.heard.latent(step, head, out)
            values["generated"] = len(y) / len(step.y) * F.cross_entropy(self.heard.told(step, head, y, out.z), y)
        step.descend(values)
        step.observe(out)

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        message.artifacts["class_counts"] = data.class_counts.float()
        return message

    @override
    def make_server(self, initial: Message, facts: Facts) -> ConsensusServer:
        return ConsensusServer(initial, frozen_copy(self.model.head).eval(), self.heard.sizes, self.training_options)
