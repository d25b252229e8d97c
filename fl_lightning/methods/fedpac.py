"""FedPAC: features are aligned with global class means, and every client gets its best combination of all heads.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.
Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.alternation import check_alternation
from fl_lightning.core.combining import CombiningServer
from fl_lightning.core.message import ClassMeans
from fl_lightning.core.method import Facts, Message, Method, OwnData, Phase, Predictor, Term, personal_only
from fl_lightning.core.phases import head_then_body
from fl_lightning.losses.head_combination import STATISTICS, VARIANCE, combination_of, feature_variance
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.models.split import SplitModel


class FedPAC(Method):
    """FedRep with a pull of embeddings towards global class means; the server combines heads for each participant.

        L = L_ce + λ/D · mean of ‖f(x) − c_y‖²,  c_k the mean embedding of class k over all clients
        φ_i ← Σ_j α_ij φ_j,  α_i = argmin_{α >= 0, Σα = 1} Σ_j α_j² V_j + ‖Σ_j α_j (h_i − h_j)‖²

    h_j [C, D] are client j's class means, each times its class's share p of the n samples, V_j = (E‖f(x)‖² −
    Σ_c p_c² ‖μ_c‖²)/n, both of the body that came in. Each fit trains the head, then the body, and the means c are
    taken after it. Who has not taken part yet hears the mean head. (The authors' code takes α below 0.001 for 0.)

    Args:
        weight: λ, >= 0; the paper's: 1.
        head_epochs: epochs of the head phase, >= 0.
        body_epochs: epochs of the body phase, >= 0; null takes `federation.local_epochs`.
        head_lr: learning rate of the head, > 0, 0.1 in the authors' code; null takes the optimizer's own.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Xu et al., ICLR 2023"
    means: Tensor  # μ, [C, D]
    variance: Tensor  # V, []

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        head_epochs: int = 1,
        body_epochs: int | None = None,
        head_lr: float | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        check_alternation(head_epochs, body_epochs, head_lr)
        super().__init__(model, terms=[PrototypeAlignment(weight)], extra_terms=extra_terms)
        self.head_epochs, self.body_epochs, self.head_lr = head_epochs, body_epochs, head_lr

    @override
    def setup(self) -> None:
        self.register_buffer("means", torch.zeros(self.model.num_classes, self.model.embedding_size), persistent=False)
        self.register_buffer("variance", torch.zeros(()), persistent=False)

    @override
    def phases(self) -> list[Phase]:
        return head_then_body(self.head_epochs, self.body_epochs, self.head_lr)

    @override
    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        seen = data.collected()
        self.means.copy_(seen.class_means().mean)
        self.variance.copy_(feature_variance(seen.z.to(self.means), self.means, data.class_counts))

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        message.artifacts[STATISTICS] = ClassMeans(self.means.clone(), data.class_counts.clone())
        message.artifacts[VARIANCE] = self.variance.clone()
        return message

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(self.model)

    @override
    def make_server(self, initial: Message, facts: Facts) -> CombiningServer:
        heads = [name for name in initial.weights if name.startswith("model.head.")]
        return CombiningServer(initial, heads, combination_of, private=(STATISTICS, VARIANCE))
