"""FedAdam: FedAvg whose server steps by Adam.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.optimizing import optimizing_server, server_step
from fl_lightning.core.server_optimizer import ServerAdam
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel


class FedAdam(Method):
    """The mean of the clients' changes is a gradient, on which the server steps by Adam.

        m ← β₁m + (1 − β₁)Δ,  v ← β₂v + (1 − β₂)Δ²,  θ ← θ + η m / (√v + τ)

    Δ = mean_i θ_i − θ by samples; m and v are kept for every weight, v starts at τ², and there is no bias correction.
    The same after the mean of any other method: `federation.server_optimizer: ServerAdam`. Batch norm's statistics
    become their mean.

    Args:
        lr: η, > 0.
        beta1: β₁, in [0, 1).
        beta2: β₂, in [0, 1).
        tau: τ, > 0: the larger, the less adaptive.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Reddi et al., ICLR 2021"
    make_server = optimizing_server

    def __init__(
        self,
        model: SplitModel,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        extra_terms: list[Term] | None = None,
    ) -> None:
        super().__init__(model, extra_terms=extra_terms)
        self.server_step = server_step(ServerAdam, lr=lr, beta1=beta1, beta2=beta2, tau=tau)
