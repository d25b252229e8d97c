"""FedPHP: every client keeps a personal model that inherits its local models, and teaches the next one by it.

Li, Zhan, Shao, Li, Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021, Algorithm
1. Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import PlansRounds
from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Method, Predictor, Step, Term, personal_and_global
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.inheritance import Transfer, inheritance_loss
from fl_lightning.models.mixture import move_towards
from fl_lightning.models.split import SplitModel


class FedPHP(PlansRounds, Method):
    """FedAvg beside a private mean p of the client's local models, which teaches every new one.

        L = (1 − λ) L_ce + λ R(w, p),  p ← μ p + (1 − μ) w,  μ = min(0.9, 0.9 · n/N)

    after a fit that n others went before, of N that a client makes on average: p starts as the first local model (in
    the first fit R holds to the initial model, as in the authors' code), and moves less from fit to fit. R is the
    cross-entropy of w's predictions with p's, softened by 4 (``KD``), or the mean discrepancy of embeddings (``MMD``).
    `Local-T` and `Global-T` are p's, `Server-T` is w's.

    Args:
        weight: λ, in [0, 1].
        transfer: ``KD`` or ``MMD``.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Li et al., ECML PKDD 2021"

    def __init__(
        self, model: SplitModel, weight: float = 0.1, transfer: Transfer = "MMD", extra_terms: list[Term] | None = None
    ) -> None:
        require(0 <= weight <= 1, "method.weight", "must be in [0, 1]", weight)
        require_choices("method", transfer=(transfer, Transfer))
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.transfer = weight, transfer

    num_fits: Tensor  # n, int64

    @override
    def setup(self) -> None:
        self.personal = frozen_copy(self.model)  # p
        self.register_buffer("num_fits", torch.zeros((), dtype=torch.long))

    @override
    def losses(self) -> dict[str, float]:
        return {"inherited": self.weight}

    @override
    def term_weights(self) -> dict[str, float]:
        return {**super().term_weights(), "cross_entropy": 1 - self.weight}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        values = step.values(out)
        if self.weight:
            values["inherited"] = inheritance_loss(out, step.told_by(self.personal), self.transfer)
        step.descend(values)
        step.observe(out)

    @override
    def on_fit_end(self) -> None:
        facts = self.facts
        expected = max(int(facts.rounds * facts.expected / facts.num_clients), 1)
        wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        keep = (0.9 * self.num_fits.to(wide) / expected).clamp(max=0.9)
        move_towards(self.personal, self.model, keep)
        self.num_fits += 1

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self.personal, self.model)
