"""FedBABU: one body for all under one head that nobody trains; every client fine-tunes a copy before it is tested.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.
Checked against the authors' code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from typing_extensions import override

from fl_lightning.core.finetuning import train_copy
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase, Predictor
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData

FineTuned = Literal["full", "head", "body"]


class FedBABU(Method):
    """Local fits train the body through the head h⁰, which is the same random one for all clients and never moves.

        b^{t+1} = Σ_i n_i/n b_i,  b_i the local fit of min_b CE(h⁰(b(x)), y)

    For an evaluation, a throw-away copy is fine-tuned on the client's own training part: Local-T and Global-T are the
    personalised figures (from the received body right after the receive, from the own one after the fit), Server-T is
    the paper's "initial" one, the averaged body under h⁰. Without fine-tuning that is what is tested right after the
    receive, too. An evaluation costs its epochs for every client: `federation.evaluate_every` says how often.

    The head is not given to the optimizer. (Public codes zero its gradient, which weight decay and Adam undo.)

    Args:
        finetune_epochs: F, epochs of fine-tuning before an evaluation, >= 0.
        finetune: what of the copy is trained: all of it (``full``), its ``head`` or its ``body``.
        finetune_lr: learning rate of the fine-tuning, > 0; null takes the optimizer's own, before any decay. The paper
            trains with 0.1 and fine-tunes with 0.001.
        extra_terms: terms added to the loss of the local fits.
    """

    shared = ("model.body",)
    paper = "Oh et al., ICLR 2022"

    def __init__(
        self,
        model: SplitModel,
        finetune_epochs: int = 5,
        finetune: FineTuned = "full",
        finetune_lr: float | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(finetune_epochs >= 0, "method.finetune_epochs", "must be >= 0", finetune_epochs)
        require_choices("method", finetune=(finetune, FineTuned))
        positive = finetune_lr is None or finetune_lr > 0
        require(positive, "method.finetune_lr", "must be > 0 or null", finetune_lr)
        super().__init__(model, extra_terms=extra_terms)
        self.finetune_epochs = finetune_epochs
        self.finetune = finetune
        self.finetune_lr = finetune_lr

    @override
    def setup(self) -> None:
        for index, tensor in enumerate(self.model.head.state_dict().values()):  # h⁰
            self.register_buffer(f"initial_head_{index}", tensor.detach().clone(), persistent=False)

    def is_kept(self, name: str, module: nn.Module) -> bool:
        """Not the head: every receive puts h⁰ there."""
        return super().is_kept(name, module) and not name.startswith("model.head.")

    @torch.no_grad()
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        """Take the body that came in, and h⁰."""
        for index, tensor in enumerate(self.model.head.state_dict().values()):
            tensor.copy_(self.get_buffer(f"initial_head_{index}"))
        super().receive(message, data)

    @override
    def phases(self) -> list[Phase]:
        return [Phase("body", trains=("model.body", "terms"))]

    def predictors(self) -> dict[str, Predictor]:
        """One, which an evaluation fine-tunes; under h⁰ the averaged body is a complete model."""
        return {"": Predictor(lambda seen: seen.logits(self.model), adapts=self.finetune_epochs > 0)}

    def adapt(self, data: OwnData) -> None:
        """Fine-tune for F epochs on the cross-entropy; the state that this is done to is thrown away."""
        part = self.model if self.finetune == "full" else self.model.get_submodule(self.finetune)
        parameters = [p for p in part.parameters() if p.requires_grad]
        train_copy(self, data, parameters, self.finetune_epochs, self.finetune_lr)
