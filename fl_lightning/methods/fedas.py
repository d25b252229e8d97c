"""FedAS: what came in is first drawn to the client's own last features, and who has more to learn counts more.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024. Checked against the
authors' code.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.division import keeps_all
from fl_lightning.core.finetuning import train_outside
from fl_lightning.core.freezing import trainable
from fl_lightning.core.method import Facts, Message, Method, OwnData, Predictor, Step, Term, personal_only
from fl_lightning.core.weighing import SelfWeighingServer
from fl_lightning.errors import require_at_least, require_choices
from fl_lightning.losses.class_alignment import Aligned, class_alignment_loss, fisher_trace
from fl_lightning.models.split import SplitModel


class FedAS(Method):
    """FedPer whose received body is aligned before the fit, and whose server weighs bodies by Fisher information.

        f ← f − η ∇ Σ_{c in batch} mean_{b: y_b = c} ‖f(x_b) − μ_c‖²/D,  f^{t+1} = Σ_i T_i f_i / Σ_i T_i

    μ_c are the class means of the embeddings by the body with which the client's last fit ended, over its training part
    (in its first fit by the initial body, as in the authors' code); T_i = Σ_batches ‖∇ −log p(y|x)‖², the mean over the
    batch, of the trained model in eval mode. Up go body and T_i, down the body. `Local-T_received` is of the aligned
    body. (The authors' code aligns the server's model in place, so that each client of a round hears what the ones
    before it have made; other public codes copy it.)

    Args:
        alignment_lr: η, >= 0; 0 leaves the alignment out.
        alignment_epochs: epochs of it, >= 0.
        aligned: each sample's embedding (``samples``, the authors' code), or a mini-batch's class means (``means``, as
            one public code has it).
        extra_terms: terms added to the loss of the fit.
    """

    shared = ("model.body",)
    paper = "Yang et al., CVPR 2024"
    is_kept = keeps_all

    def __init__(
        self,
        model: SplitModel,
        alignment_lr: float = 0.01,
        alignment_epochs: int = 1,
        aligned: Aligned = "samples",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_at_least("method", 0, alignment_lr=alignment_lr, alignment_epochs=alignment_epochs)
        require_choices("method", aligned=(aligned, Aligned))
        super().__init__(model, extra_terms=extra_terms)
        self.alignment_lr, self.alignment_epochs, self.aligned = alignment_lr, alignment_epochs, aligned

    @override
    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        if not self.alignment_lr or not self.alignment_epochs or not message.weights:
            return super().receive(message, data)
        means = data.collected().class_means().mean  # μ, by the last own body
        super().receive(message, data)

        def loss(step: Step) -> Tensor:
            return class_alignment_loss(step.forward().z, step.y, means, self.aligned)

        step = partial(torch.optim.SGD, lr=self.alignment_lr)
        train_outside(self, data, trainable(self.model.body), self.alignment_epochs, loss, step)
        return None

    @override
    def send(self, data: OwnData) -> Message:
        message = super().send(data)
        message.artifacts["trace"] = fisher_trace(self, data)
        return message

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(self.model)

    @override
    def make_server(self, initial: Message, facts: Facts) -> SelfWeighingServer:
        return SelfWeighingServer(initial, weighed_by="trace")
