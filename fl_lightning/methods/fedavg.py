"""FedAvg: one global model, the mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel


class FedAvg(Method):
    """Federated averaging: clients train the global model, the server averages by samples.

        θ^{t+1} = Σ_i n_i/n θ_i,  θ_i the local fit of θ^t

    The weights are renormalised over the participants, so that partial participation does not shrink the model.

    Args:
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "McMahan et al., AISTATS 2017"

    def __init__(self, model: SplitModel, extra_terms: list[Term] | None = None) -> None:
        super().__init__(model, extra_terms=extra_terms)
