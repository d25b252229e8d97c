"""FedETF: all clients learn towards one fixed classifier, whose classes are the vertices of a simplex.

Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023. Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.finetuning import train_copy
from fl_lightning.core.method import Message, Method, OwnData, Predictor, Term
from fl_lightning.errors import require
from fl_lightning.losses.logit_adjustment import BalancedSoftmax
from fl_lightning.models.equiangular import EquiangularHead
from fl_lightning.models.split import SplitModel


class FedETF(Method):
    """FedAvg of body, projection P and temperature β under a simplex frame V in the place of the model's head.

        min −log( n_y e^{β v_yᵀμ} / Σ_c n_c e^{β v_cᵀμ} ),  μ = P(f(x)) / ‖P(f(x))‖,  VᵀV = C/(C − 1) (I − 11ᵀ/C)

    n_c is how many samples of class c the client has; V is the same for all and never moves or travels. For an
    evaluation a throw-away copy is personalised by R times E epochs of V, then of P, on the cross-entropy: `Local-T`
    and `Global-T` are its figures, `Server-T` is the averaged model's. (The authors' code counts a class that a client
    has not as one sample, so that it is a rival; here it is none, as the equation has it.)

    Args:
        projection_size: of P(f(x)), at least the number of classes C; null is C.
        finetune_rounds: R, >= 0; 20 in the authors' code. 0 leaves personalisation out.
        finetune_epochs: E, >= 1.
        finetune_lr: learning rate of the personalisation, > 0; null takes the optimizer's own, before any decay. The
            authors' code has 0.1 for V and 0.05 for P.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body", "model.head.projection", "model.head.scale")
    paper = "Li et al., ICCV 2023"

    def __init__(
        self,
        model: SplitModel,
        projection_size: int | None = None,
        finetune_rounds: int = 1,
        finetune_epochs: int = 3,
        finetune_lr: float | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(finetune_rounds >= 0, "method.finetune_rounds", "must be >= 0", finetune_rounds)
        require(finetune_epochs >= 1, "method.finetune_epochs", "must be >= 1", finetune_epochs)
        require(finetune_lr is None or finetune_lr > 0, "method.finetune_lr", "must be > 0 or null", finetune_lr)
        require(not model.own.has_loss, "model", "FedETF replaces the head, which a module's own step would not use")
        model.head = EquiangularHead(model.embedding_size, model.num_classes, projection_size)
        super().__init__(model, extra_terms=extra_terms, instead=BalancedSoftmax())
        self.rounds, self.epochs, self.lr = finetune_rounds, finetune_epochs, finetune_lr

    frame: Tensor  # V, [size, C]

    @override
    def setup(self) -> None:
        self.register_buffer("frame", self.model.get_parameter("head.frame").detach().clone(), persistent=False)

    @override
    def is_kept(self, name: str, module: nn.Module) -> bool:
        return super().is_kept(name, module) and name != "model.head.frame"

    @override
    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.model.get_parameter("head.frame").copy_(self.frame)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return {"": Predictor(lambda seen: seen.logits(self.model), adapts=self.rounds > 0)}

    @override
    def adapt(self, data: OwnData) -> None:
        head = self.model.head
        frame, projection = head.get_parameter("frame"), list(head.get_submodule("projection").parameters())
        frame.requires_grad_(True)
        try:
            for _ in range(self.rounds):
                train_copy(self, data, [frame], self.epochs, self.lr)
                train_copy(self, data, projection, self.epochs, self.lr)
        finally:
            frame.requires_grad_(False)
