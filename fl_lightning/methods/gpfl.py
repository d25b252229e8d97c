"""GPFL: a valve lets through generic features, held to shared class embeddings, and personal ones, for a private head.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized Feature Information
for Personalized Federated Learning", ICCV 2023. Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.method import Message, Method, OwnData, Parts, Phase, Predictor, Step, Term, personal_only
from fl_lightning.errors import require
from fl_lightning.losses.class_guidance import guidance_losses
from fl_lightning.models.conditional import ConditionalValve
from fl_lightning.models.split import SplitModel


class GPFL(Method):
    """Body f, class embeddings e_c [C, D] and a valve V(z, condition) are shared; the head h stays.

        L = CE(h(V(f(x), p)), y) − log( exp cos(v, e_y) / Σ_c exp cos(v, e_c) ) + λ ‖v − ē_y‖,  v = V(f(x), g)

    ē are the embeddings as they came in, g = mean_c ē_c, p = Σ_c n_c/n ē_c, over the client's n samples. Embeddings and
    valve decay by μ. `Local-T` and `Global-T` are by h(V(f(x), p)); there is no global head. (The authors' code makes g
    and p of the client's own last embeddings, and has zeros in the first round; another public code divides p by C.)

    Args:
        weight: λ, >= 0; the authors': 0.01 for small networks, 0.0001 for ResNet-18.
        weight_decay: μ, >= 0; the authors': 0.1 and 0. Null takes the optimizer's own.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body", "embeddings", "valve")
    paper = "Zhang et al., ICCV 2023"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 0.01,
        weight_decay: float | None = 0.1,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        require(weight_decay is None or weight_decay >= 0, "method.weight_decay", "must be >= 0 or null", weight_decay)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.weight_decay = weight, weight_decay

    reference: Tensor  # ē, [C, D]
    condition: Tensor  # p, [D]

    @override
    def setup(self) -> None:
        classes, size = self.model.num_classes, self.model.embedding_size
        self.embeddings = nn.Parameter(torch.randn(classes, size))  # e
        self.valve = ConditionalValve(size)
        self.register_buffer("reference", torch.zeros(classes, size), persistent=False)
        self.register_buffer("condition", torch.zeros(size), persistent=False)

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.reference.copy_(self.embeddings.detach())
        self.condition.copy_((data.class_counts / data.class_counts.sum()).to(self.reference) @ self.reference)

    @override
    def phases(self) -> list[Phase]:
        parts = {"model": ("model", "terms"), "guidance": ("embeddings", "valve")}
        return [Phase("all", parts=parts, settings={"guidance": {"weight_decay": self.weight_decay}})]

    @override
    def losses(self) -> dict[str, float]:
        return {"angle": 1.0, "magnitude": self.weight}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        out = out.predicting(step.through(self._classify, out.z))
        generic = step.through(self.valve, out.z, self.reference.mean(0))
        step.descend({**step.values(out), **guidance_losses(generic, step.y, self.embeddings, self.reference)})
        step.observe(out)

    def _classify(self, z: Tensor) -> Tensor:
        """The head's logits [B, C] of what passes of embeddings [B, D] under the client's condition, p."""
        return self.model.head(self.valve(z, self.condition))

    @override
    def network(self) -> Parts:
        return Parts(self.model.embed, self._classify)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(lambda seen: self._classify(seen.z(self.model)))
