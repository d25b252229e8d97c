"""FML: every client keeps a model of its own, and it and the global one learn from each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated Mutual Learning", arXiv:2006.16765, 2020.
"""

from __future__ import annotations

from typing_extensions import override

from fl_lightning.core.method import Method, Phase, Predictor, Step, Term, personal_and_global, personal_copy
from fl_lightning.errors import require
from fl_lightning.losses.divergence import divergence
from fl_lightning.models.split import SplitModel


class FML(Method):
    """FedAvg for a meme model w beside a personal v, each of which is taught by the data and by the other.

        L_v = α CE(v) + (1 − α) KL(p_w ‖ p_v),  L_w = β CE(w) + (1 − β) KL(p_v ‖ p_w)

    Each loss trains its own model, on the same mini-batch; gradients are clipped model by model. `Local-T` and
    `Global-T` are v's, `Server-T` is w's. (Of public codes one lets each loss train both models, and takes KL over C.)

    Args:
        alpha: α, in [0, 1]; 1 is Local.
        beta: β, in [0, 1]; 1 is FedAvg.
        extra_terms: terms added to the loss of w.
    """

    shared = ("model",)
    paper = "Shen et al., arXiv:2006.16765, 2020"
    setup = personal_copy
    personal: SplitModel  # v

    def __init__(
        self, model: SplitModel, alpha: float = 0.5, beta: float = 0.5, extra_terms: list[Term] | None = None
    ) -> None:
        require(0 <= alpha <= 1, "method.alpha", "must be in [0, 1]", alpha)
        require(0 <= beta <= 1, "method.beta", "must be in [0, 1]", beta)
        super().__init__(model, extra_terms=extra_terms)
        self.alpha, self.beta = alpha, beta

    @override
    def phases(self) -> list[Phase]:
        return [Phase("all", parts={"meme": ("model", "terms"), "personal": ("personal",)})]

    @override
    def losses(self) -> dict[str, float]:
        return {"personal": self.alpha, "taught": 1 - self.alpha, "teaching": 1 - self.beta}

    @override
    def term_weights(self) -> dict[str, float]:
        return {**super().term_weights(), "cross_entropy": self.beta}

    @override
    def local_step(self, step: Step) -> None:
        out, own = step.forward(), step.forward(through=self.personal)
        values = step.values(out)
        values["personal"] = step.task_loss(own)
        values["taught"] = divergence(out.logits.detach(), own.logits)
        values["teaching"] = divergence(own.logits.detach(), out.logits)
        step.descend(values)
        step.observe(out)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self.personal, self.model)
