"""APFL: every client predicts by a mixture of its own model and the global one, and learns how much of each.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020, Algorithm 1.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.freezing import keeping_statistics
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase, Predictor
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.models.mixture import through_mixture
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.step import Step

Mixed = Literal["weights", "logits"]


class APFL(Method):
    """FedAvg for w, and a personal v that is trained where the mixture v̄ = αv + (1 − α)w stands.

        w ← w − η ∇f(w),  v ← v − η ∇_v f(v̄),  α ← α − η ⟨v − w, ∇f(v̄)⟩,  w^{t+1} = mean_i w_i

    A mini-batch finds all gradients before it steps. α moves with the first one of a fit, by a plain step, and stays in
    [0, 1]. v and α stay with the client. `Local-T` and `Global-T` are v̄'s, `Server-T` is w's.

    Args:
        alpha: α at first, in [0, 1]; 0 is FedAvg's model, 1 Local's.
        adaptive: whether α is learnt.
        mixed: ``weights`` (the paper), or ``logits``, as in the authors' code, which steps w first, and α along an
            inner product of other gradients and towards 0.
        extra_terms: terms added to the loss of w.
    """

    shared = ("model",)
    paper = "Deng et al., arXiv:2003.13461, 2020"

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

    alpha: Tensor  # []

    @override
    def setup(self) -> None:
        self.personal = copy.deepcopy(self.model)  # v

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

        def risk(alpha: Tensor) -> Tensor:
            """Of v̄; its gradient does not reach w."""
            logits = step.through(self._mixture, alpha, step.x, out.logits.detach())
            return step.values(replace(out, logits=logits, loss=None), [self.terms.cross_entropy])["cross_entropy"]

        if self.adaptive and step.is_first and step.epoch == 0:
            with keeping_statistics(self.personal):
                (slope,) = step.gradients(risk(alpha.requires_grad_()), [alpha])
            self.alpha.sub_(self.fit.lr * slope).clamp_(0, 1)
        step.observe(out)
        if self.mixed == "weights":
            step.descend({**values, "personal": risk(alpha.detach())})
        else:
            step.descend(values, "global")
            out = step.forward()
            step.descend({"personal": risk(alpha.detach())}, "personal")

    def _mixture(self, alpha: Tensor, x: Tensor, others: Tensor) -> Tensor:
        """What v̄ makes of inputs [B, …], of which w makes `others`, [B, C]."""
        if self.mixed == "logits":
            return torch.lerp(others, self.personal(x), alpha.to(others.dtype))
        return through_mixture(self.personal, self.model, alpha, x)

    @override
    def predictors(self) -> dict[str, Predictor]:
        mixture = lambda seen: self._mixture(self.alpha, seen.x, seen.logits(self.model))  # noqa: E731
        return {
            "personal": Predictor(mixture, ("Local-T", "Global-T")),
            "global": Predictor(lambda seen: seen.logits(self.model), ("Server-T",)),
        }

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        return Server(initial, weighting="uniform")
