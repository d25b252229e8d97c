"""APFL: every client predicts by a mixture of its own model and the global one, and learns how much of each.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020, Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.freezing import keeping_statistics
from fl_lightning.core.method import Forward, Method, Phase, Predictor, Seen, Step, Term, uniform_mean
from fl_lightning.core.personal import personal_and_global, personal_copy
from fl_lightning.errors import require, require_choices
from fl_lightning.models.mixture import Mixed, mixed_logits, mixed_weights, with_parameters
from fl_lightning.models.split import SplitModel


class APFL(Method):
    """FedAvg for w, and a personal v that is trained where the mixture v̄ = αv + (1 − α)w stands.

        w ← w − η ∇f(w),  v ← v − η ∇_v f(v̄),  α ← α − η ⟨v − w, ∇f(v̄)⟩,  w^{t+1} = mean_i w_i

    A mini-batch finds all gradients before it steps. α moves with the first one of a fit, by a plain step, and stays in
    [0, 1]. v and α stay with the client. In the mean all participants count alike. `Local-T` and `Global-T` are v̄'s,
    `Server-T` is w's.

    Args:
        alpha: α at first, in [0, 1]; 0 is the plain mean's model, 1 Local's.
        adaptive: whether α is learnt.
        mixed: ``weights`` (the paper), or ``logits``, as in the authors' code, which steps w first, and α along an
            inner product of other gradients and towards 0.
        extra_terms: terms added to the loss of w.
    """

    shared = ("model",)
    paper = "Deng et al., arXiv:2003.13461, 2020"
    setup = personal_copy
    make_server = uniform_mean
    personal: SplitModel  # v
    alpha: Tensor  # []

    def __init__(
        self,
        model: SplitModel,
        alpha: float = 0.5,
        adaptive: bool = True,
        mixed: Mixed = "weights",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(0 <= alpha <= 1, "method.alpha", "must be in [0, 1]", alpha)
        require_choices("method", mixed=(mixed, Mixed))
        super().__init__(model, extra_terms=extra_terms)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.adaptive, self.mixed = adaptive, mixed

    @override
    def phases(self) -> list[Phase]:
        return [Phase("all", parts={"global": ("model", "terms"), "personal": ("personal",)})]

    @override
    def losses(self) -> dict[str, float]:
        return {"personal": 1.0}

    @override
    def local_step(self, step: Step) -> None:
        out, alpha = step.forward(), self.alpha.clone()
        values = step.values(out)
        if self.adaptive and step.is_first and step.epoch == 0:
            with keeping_statistics(self.personal):
                (slope,) = step.gradients(self._risk(step, out, alpha.requires_grad_()), [alpha])
            self.alpha.sub_(self.fit.lr * slope).clamp_(0, 1)
        step.observe(out)
        if self.mixed == "weights":
            step.descend({**values, "personal": self._risk(step, out, alpha.detach())})
        else:
            step.descend(values, "global")
            step.descend({"personal": self._risk(step, step.forward(), alpha.detach())}, "personal")

    def _risk(self, step: Step, out: Forward, alpha: Tensor) -> Tensor:
        """F(v̄), where w makes `out`."""
        logits = step.through(mixed_logits, self.personal, self.model, alpha, step.x, out.logits.detach(), self.mixed)
        return step.task_loss(out.predicting(logits))

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self._predict, self.model, self._merged if self.mixed == "weights" else None)

    def _predict(self, seen: Seen) -> Tensor:
        return mixed_logits(self.personal, self.model, self.alpha, seen.x, seen.logits(self.model), self.mixed)

    def _merged(self) -> SplitModel:
        return with_parameters(self.personal, mixed_weights(self.personal, self.model, self.alpha))
