"""FedAvgM: FedAvg whose server has momentum.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv:1909.06335, 2019, where it treats server momentum.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.optimizing import optimizing_server, server_step
from fl_lightning.core.server_optimizer import ServerMomentum
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel


class FedAvgM(Method):
    """The mean of the clients' changes is a gradient, on which the server steps with momentum.

        v ← βv + Δ,  θ ← θ + ηv,  Δ = mean_i θ_i − θ

    The mean is by samples. The same after the mean of any other method: `federation.server_optimizer: ServerMomentum`.
    At β = 0 and η = 1 it is FedAvg. Batch norm's statistics become their mean.

    Args:
        lr: η, > 0.
        momentum: β, in [0, 1).
        nesterov: step along βv + Δ instead.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Hsu et al., arXiv:1909.06335, 2019"
    make_server = optimizing_server

    def __init__(
        self,
        model: SplitModel,
        lr: float = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        extra_terms: list[Term] | None = None,
    ) -> None:
        super().__init__(model, extra_terms=extra_terms)
        self.server_step = server_step(ServerMomentum, lr=lr, momentum=momentum, nesterov=nesterov)
