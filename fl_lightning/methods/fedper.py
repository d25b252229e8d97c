"""FedPer: a shared body under private last layers, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019,
Algorithm 1.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel


class FedPer(Method):
    """Shared base layers, private personalisation layers; every fit trains both with one optimizer.

        b^{t+1} = Σ_i n_i/n b_i,  (b_i, h_i) the local fit of CE(h(b(x)), y) from (b^t, h_i)

    All heads start from one draw, as in public codes; the paper draws each client's own: `federation.init: own`.

    Args:
        head_layers: K_P, how many of the model's last layers are private, >= 0; null takes the model's head, 0 none
            (which is FedAvg). A layer is a module with parameters of its own; a normalisation counts with the layer
            before it.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Arivazhagan et al., arXiv:1912.00818, 2019"

    def __init__(
        self, model: SplitModel, head_layers: int | None = None, extra_terms: list[Term] | None = None
    ) -> None:
        super().__init__(model, extra_terms=extra_terms)
        self.head_layers = head_layers
        if head_layers is not None:
            model.last_layers(head_layers, "method.head_layers")  # now, because it refuses what the model has not

    @override
    def setup(self) -> None:
        count = self.head_layers
        self.private_layers = ("head",) if count is None else self.model.last_layers(count, "method.head_layers")

    @override
    def is_shared(self, name: str, module: nn.Module) -> bool:
        return super().is_shared(name, module) and not any(
            name.startswith(f"model.{layer}.") for layer in self.private_layers
        )
