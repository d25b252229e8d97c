"""FedDBE: what biases a client's representations stays with it as a vector, and the rest is held to one mean.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation Space",
NeurIPS 2023. Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.method import Facts, Message, Method, OwnData, Parts, Predictor, Server, Step, Term
from fl_lightning.core.personal import personal_and_global
from fl_lightning.core.precision import widened
from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel


class FedDBE(Method):
    """FedAvg with a private vector m_i on the embeddings, and a pull of their mean towards the federation's.

        L = CE(g(f(x) + m_i), y) + κ/2D ‖r − r̄‖²,  r ← (1 − μ) r + μ mean f(x)

    r follows the mini-batches of a fit from 0 on; r̄ is the clients' mean r, by samples, in the first round, which is
    FedAvg's and sends it; it does not change any more. (The authors' code takes it before that, of all clients.)
    `Local-T` and `Global-T` are with m_i, `Server-T` is without.

    Args:
        weight: κ, >= 0; the paper's: 50 for a small CNN, 1 for ResNet-18.
        momentum: μ, in (0, 1]; the paper's: 1 and 0.1.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Zhang et al., NeurIPS 2023"

    def __init__(
        self, model: SplitModel, weight: float = 50.0, momentum: float = 1.0, extra_terms: list[Term] | None = None
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        require(0 < momentum <= 1, "method.momentum", "must be in (0, 1]", momentum)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.momentum = weight, momentum
        self.bias = nn.Parameter(torch.zeros(model.embedding_size))  # m_i
        self.register_buffer("consensus", torch.zeros(model.embedding_size))
        self.register_buffer("knows", torch.zeros((), dtype=torch.bool))

    mean: Tensor  # r, [D]
    consensus: Tensor  # r̄, [D]
    _knows = True  # the same for steps, which must not wait for a device

    @override
    def setup(self) -> None:
        self.register_buffer("mean", torch.zeros(self.model.embedding_size), persistent=False)

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self._knows = bool(self.get_buffer("knows")) or message.copy_to(self.consensus, "mean")  # once and for all
        self.get_buffer("knows").fill_(self._knows)
        self.mean.zero_()

    @override
    def losses(self) -> dict[str, float]:
        return {"mean": self.weight}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        mean = torch.lerp(self.mean, widened(out.z).mean(0).to(self.mean), self.momentum)
        out = out.predicting(step.through(self._classify, out.z)) if self._knows else out
        values = step.values(out)
        if self._knows:
            values["mean"] = 0.5 * (mean - self.consensus).square().mean()
        self.mean.copy_(mean.detach())
        step.descend(values)
        step.observe(out)

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        if not self._knows:
            message.artifacts["mean"] = self.mean.clone()
        return message

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        server = super().make_server(initial, facts)
        server.varies = True
        return server

    @override
    def network(self) -> Parts:
        return Parts(self.model.embed, self._classify)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(lambda seen: self._classify(seen.z(self.model)), self.model)

    def _classify(self, z: Tensor) -> Tensor:
        """The logits [B, C] of embeddings [B, D] and m_i, from when r̄ is known, as a model from a file says, too."""
        return self.model.head(z + (self.bias * self.get_buffer("knows")).to(z.dtype))
