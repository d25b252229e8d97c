"""FedRep: a shared representation under private heads.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. The alternation (all head epochs, then all body epochs, one fresh optimizer each) was checked against
the authors' code.
"""

from __future__ import annotations

from typing_extensions import override

from fl_lightning.core.alternation import check_alternation
from fl_lightning.core.method import Method, Phase, Term
from fl_lightning.core.phases import head_then_body
from fl_lightning.models.split import SplitModel


class FedRep(Method):
    """Shared body, private heads: each fit trains the head on the received body, then the body under that head.

        h_i ← min_h CE(h(b^t(x)), y),  then b_i ← min_b CE(h_i(b(x)), y),  b^{t+1} = Σ_i n_i/n b_i

    The frozen body stays in train mode while the head is trained, as in the authors' code: its batch-norm statistics
    move then.

    Args:
        head_epochs: epochs of the head phase, >= 0; 0 keeps every head as it was first drawn.
        body_epochs: epochs of the body phase, >= 0; null takes `federation.local_epochs`, 0 sends the body back as it
            came.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body",)
    paper = "Collins et al., ICML 2021"

    def __init__(
        self,
        model: SplitModel,
        head_epochs: int = 1,
        body_epochs: int | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        check_alternation(head_epochs, body_epochs)
        super().__init__(model, extra_terms=extra_terms)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs

    @override
    def phases(self) -> list[Phase]:
        return head_then_body(self.head_epochs, self.body_epochs)
