"""FedNTD: FedAvg whose clients remember what the global model says of the classes that a sample is not of.

Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022.
"""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Message, Method, OwnData, Step, Term
from fl_lightning.errors import require
from fl_lightning.losses.not_true import not_true_distillation_loss
from fl_lightning.models.split import SplitModel


class FedNTD(Method):
    """FedAvg with a distillation from the model that came in, over the classes that are not the true one.

        L = L_ce + β τ² KL( q̃_global ‖ q̃ ),  q̃ = softmax over c ≠ y of logits / τ

    The global model is frozen for the fit, in eval mode. With two classes, or at β = 0, it is FedAvg.

    Args:
        beta: β, >= 0.
        temperature: τ, > 0.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Lee et al., NeurIPS 2022"

    def __init__(
        self, model: SplitModel, beta: float = 1.0, temperature: float = 1.0, extra_terms: list[Term] | None = None
    ) -> None:
        require(beta >= 0, "method.beta", "must be >= 0 (0 is FedAvg)", beta)
        require(temperature > 0, "method.temperature", "must be > 0", temperature)
        super().__init__(model, extra_terms=extra_terms)
        self.beta, self.temperature = beta, temperature

    @override
    def setup(self) -> None:
        self.teacher = frozen_copy(self.model)

    @override
    def is_kept(self, name: str, module: nn.Module) -> bool:
        return super().is_kept(name, module) and not name.startswith("teacher.")

    @override
    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.teacher.load_state_dict(self.model.state_dict())

    @override
    def losses(self) -> dict[str, float]:
        return {"not_true": self.beta}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward()
        values = step.values(out)
        if self.beta:
            told = step.told_by(self.teacher)
            values["not_true"] = not_true_distillation_loss(out.logits, told.logits, step.y, self.temperature)
        step.descend(values)
        step.observe(out)
