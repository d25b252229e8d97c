"""FedLC: FedAvg whose clients give margins to their rare classes.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.
"""

from __future__ import annotations

from fl_lightning.core.method import Method, Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.logit_adjustment import Calibrated, Form
from fl_lightning.models.split import SplitModel


class FedLC(Method):
    """FedAvg of the cross-entropy of calibrated logits.

        L = −log( e^{f_y} / Σ_c e^{f_c} ),  f_c = g_c − τ n_c^{−1/4}

    n_c is how many samples of class c the client has; a class that it has not is no rival, so that nothing is learnt
    about it. Predictions are by g. At τ = 0 it is FedAvg on the client's own classes.

    Args:
        tau: τ, >= 0.
        form: ``code``, as all public codes have it, or ``paper``, which leaves c = y out of the sum.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Zhang et al., ICML 2022"

    def __init__(
        self, model: SplitModel, tau: float = 1.0, form: Form = "code", extra_terms: list[Term] | None = None
    ) -> None:
        require(tau >= 0, "method.tau", "must be >= 0", tau)
        require_choices("method", form=(form, Form))
        super().__init__(model, extra_terms=extra_terms, instead=Calibrated(tau=tau, form=form))
