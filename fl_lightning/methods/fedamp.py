"""FedAMP: every client is drawn towards a mixture of all models, in which those like its own count most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
Algorithm 1.
"""

from __future__ import annotations

from typing_extensions import override

from fl_lightning.core.combining import CombiningServer
from fl_lightning.core.division import keeps_all
from fl_lightning.core.freezing import keeping_state
from fl_lightning.core.method import Facts, Message, Method, OwnData, Predictor, Step, Term, personal_only
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.snapshot import Snapshot
from fl_lightning.errors import require, require_positive
from fl_lightning.losses.message_passing import AttentiveShares
from fl_lightning.losses.proximal import proximal_loss
from fl_lightning.models.split import SplitModel


class FedAMP(Method):
    """Personal models w_i, each trained near a mixture u_i of all that the server makes for its client.

        u_i = (1 − Σ_{j≠i} ξ_ij) w_i + Σ_{j≠i} ξ_ij w_j,  ξ_ij = α/σ · exp(−‖w_i − w_j‖²/σ)
        w_i ← argmin F_i(w) + λ/2α ‖w − u_i‖²

    A fit starts from the client's own last w_i; there is no global model. Sums are over the participants of a round,
    and who sits out keeps its u_i; who has never taken part is pulled to the mean of the last round's models. Where Σ
    ξ_ij would exceed 1, they are scaled to 1. (One public code takes the distance outside the graph, so that nothing is
    pulled.)

    Args:
        weight: λ/α, >= 0; 0 is Local.
        alpha: α, > 0.
        sigma: σ, > 0, in units of ‖w_i − w_j‖², which grows with the model.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Huang et al., AAAI 2021"
    is_kept = keeps_all

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        alpha: float = 1.0,
        sigma: float = 1.0,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0 (0 is Local)", weight)
        require_positive("method", alpha=alpha, sigma=sigma)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.alpha, self.sigma = weight, alpha, sigma

    @override
    def setup(self) -> None:
        self.mixture = Snapshot(self.model.parameters())  # u_i

    @override
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        with keeping_state(self.model):
            super().receive(message, data)
            self.mixture.take(self.model.parameters())

    @override
    def losses(self) -> dict[str, float]:
        return {"pull": self.weight}

    @override
    @record_safe("pull")
    def local_step(self, step: Step) -> None:
        out = step.forward()
        step.descend({**step.values(out), "pull": proximal_loss(self.model.parameters(), self.mixture)})
        step.observe(out)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(self.model)

    @override
    def make_server(self, initial: Message, facts: Facts) -> CombiningServer:
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters()}
        compared = [name for name in initial.weights if name in parameters]
        return CombiningServer(initial, list(initial.weights), AttentiveShares(compared, self.alpha, self.sigma))
