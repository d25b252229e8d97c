"""FedUV: FedAvg with two regularisers that imitate balanced data.

Son, Kim, Chung, Huang, Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024. Both
terms were checked against the authors' code.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.uniformity import PredictionVariance, Uniformity
from fl_lightning.models.split import SplitModel


class FedUV(Method):
    """FedAvg on L = CE + λ L_V + μ L_U: spread-out predictions (L_V) and spread-out embeddings (L_U).

        L = CE + λ L_V + μ L_U

    Nothing but the model is exchanged, and there is no teacher. At λ = μ = 0 it is FedAvg. Both terms are 0 on a batch
    of one sample, where the authors' code gives NaN or, with its dropped last batches, makes no step. z is the input of
    the model's head, 256 values after two projection layers in the paper.

    Args:
        variance_weight: λ, >= 0. The code's 2.5 belongs to 10 classes; L_V is a mean over classes.
        uniformity_weight: μ, >= 0.
        detach_bandwidth: hold the kernel's width constant in L_U's gradient; not the authors' code.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Son et al., CVPR 2024"

    def __init__(
        self,
        model: SplitModel,
        variance_weight: float = 2.5,
        uniformity_weight: float = 0.5,
        detach_bandwidth: bool = False,
        extra_terms: list[Term] | None = None,
    ) -> None:
        for key, weight in (("variance_weight", variance_weight), ("uniformity_weight", uniformity_weight)):
            require(weight >= 0, f"method.{key}", "must be >= 0", weight)
        own = [PredictionVariance(variance_weight), Uniformity(uniformity_weight, detach_bandwidth)]
        super().__init__(model, terms=own, extra_terms=extra_terms)
