"""LG-FedAvg: every client learns a representation of its own, and all share what stands on it.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", arXiv:2001.01523, 2020, Algorithm 1.
"""

from __future__ import annotations

from typing_extensions import override

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel


class LGFedAvg(Method):
    """Private body, shared head: FedPer turned around; every fit trains both with one optimizer.

        h^{t+1} = Σ_i n_i/n h_i,  (b_i, h_i) the local fit of CE(h(b(x)), y) from (b_i, h^t)

    The message is the head alone, and clients' bodies may differ in all but the embedding's size. The authors' runs
    start from a model that FedAvg has trained, and take the plain mean; here all start from one draw, and samples
    weigh. (One public code shares the first layers instead, which is FedPer.)

    Args:
        global_layers: how many of the model's last layers are shared, >= 1; null takes the model's head. A layer is a
            module with parameters of its own; a normalisation counts with the layer before it.
        extra_terms: terms added to the loss.
    """

    shared: tuple[str, ...] = ("model.head",)
    paper = "Liang et al., arXiv:2001.01523, 2020"

    def __init__(
        self, model: SplitModel, global_layers: int | None = None, extra_terms: list[Term] | None = None
    ) -> None:
        some = global_layers is None or global_layers >= 1
        require(some, "method.global_layers", "must be >= 1 or null (Local shares nothing)", global_layers)
        super().__init__(model, extra_terms=extra_terms)
        self.global_layers = global_layers
        if global_layers is not None:
            model.last_layers(global_layers, "method.global_layers")  # now, because it refuses what the model has not

    @override
    def setup(self) -> None:
        if self.global_layers is not None:
            layers = self.model.last_layers(self.global_layers, "method.global_layers")
            self.shared = tuple(f"model.{layer}" for layer in layers)
