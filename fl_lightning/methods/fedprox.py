"""FedProx: FedAvg whose clients are held near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm
2. The term was checked against the authors' code.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.proximal import Proximal
from fl_lightning.models.split import SplitModel


class FedProx(Method):
    """FedAvg with h(θ) = CE + μ/2 ‖θ − θ^{t−1}‖² on every client.

        L = L_ce + μ/2 ‖θ − θ^{t−1}‖²

    At μ = 0 it is FedAvg, and so it is, for any μ, where a fit is one single step. The term is part of the loss: with
    plain SGD that is the authors' perturbed step θ ← θ − η(g + μ(θ − θ^{t−1})), and momentum and Adam see it, too.

    Participants are drawn without replacement and weighted by samples, as in the authors' code; Algorithm 2 draws them
    by their weight and takes the plain mean.

    Args:
        mu: μ, >= 0; the paper tunes it over 0.001, 0.01, 0.1 and 1. 0.01 is that of FedDW's public code.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Li et al., MLSys 2020"

    def __init__(self, model: SplitModel, mu: float = 0.01, extra_terms: list[Term] | None = None) -> None:
        require(mu >= 0, "method.mu", "must be >= 0 (0 is FedAvg)", mu)
        super().__init__(model, terms=[Proximal(mu)], extra_terms=extra_terms)
