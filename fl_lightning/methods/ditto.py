"""Ditto: the global model is trained as ever, and every client keeps one of its own near it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.method import Method, Phase, Predictor, Step, Term, personal_and_global, personal_copy
from fl_lightning.core.private_steps import record_safe
from fl_lightning.errors import require
from fl_lightning.losses.proximal import proximal_loss
from fl_lightning.models.split import SplitModel


class Ditto(Method):
    """FedAvg for the global model w, and a personal model v_k that minimises F_k(v) + λ/2 ‖v − w^t‖² beside it.

        v_k ← v_k − η ∇(F_k(v_k) + λ/2 ‖v_k − w^t‖²),  w^{t+1} = Σ_k n_k/n w_k

    The two fits do not depend on each other; v_k goes first, while w is still the one that came in. At λ = 0 v_k is
    Local's model. `Local-T` and `Global-T` are v_k's, `Server-T` is w's.

    Args:
        weight: λ, >= 0; the paper chooses it from 0.1, 1 and 2.
        personal_epochs: epochs of v_k's fit, >= 0; null takes `federation.local_epochs`.
        extra_terms: terms added to the loss of the global model.
    """

    shared = ("model",)
    paper = "Li et al., ICML 2021"
    setup = personal_copy
    personal: SplitModel  # v_k

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        personal_epochs: int | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0 (0 is Local beside FedAvg)", weight)
        some = personal_epochs is None or personal_epochs >= 0
        require(some, "method.personal_epochs", "must be >= 0 or null", personal_epochs)
        super().__init__(model, extra_terms=extra_terms)
        self.weight = weight
        self.personal_epochs = personal_epochs

    @override
    def phases(self) -> list[Phase]:
        own = Phase("personal", ("personal",), self.personal_epochs, terms=("cross_entropy",), through="personal")
        return [own, Phase("global", trains=("model", "terms"))]

    @override
    def losses(self) -> dict[str, float]:
        return {"pull": self.weight}

    @override
    @record_safe("pull")
    def local_step(self, step: Step) -> None:
        out = step.forward()
        values = step.values(out)
        if step.phase.name == "personal" and self.weight:
            values["pull"] = self._pull()
        step.descend(values)
        if step.phase.name == "global":  # v's predictions stay with the client
            step.observe(out)

    def _pull(self) -> Tensor:
        """½ ‖v − w^t‖²."""
        return proximal_loss(self.personal.parameters(), self.model.parameters())

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self.personal, self.model)
