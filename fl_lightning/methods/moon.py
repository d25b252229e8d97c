"""MOON: FedAvg whose clients' embeddings stay near the global model's and leave those of their own last model.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. Checked against the authors' code.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.model_contrast import ModelContrast
from fl_lightning.models.projection import add_projection
from fl_lightning.models.split import SplitModel


class MOON(Method):
    """FedAvg on L = CE + μ ℓ_con, which compares z with the received and with the client's own last model's.

        L = CE + μ ℓ_con,  ℓ_con = −log( exp(cos(z, z_glob)/τ) / (exp(cos(z, z_glob)/τ) + exp(cos(z, z_prev)/τ)) )

    At μ = 0 it is FedAvg, and so is a client's first round, in which there is no last model yet (ℓ_con is the constant
    log 2). Both compared models are frozen and in eval mode; the last model never leaves the client.

    Args:
        mu: μ, >= 0; the authors' code has 1, the paper 5 on CIFAR-10 and 1 on CIFAR-100; FedDW's public code 5.
        temperature: τ, > 0.
        previous_models: own last models that are told apart, from 1 to 64.
        projection: size of a projection between body and head, Linear(D, D), ReLU, Linear(D, size): z is its output,
            and it is on the way to the classifier and shared. 256 in the paper; null takes the model's own z.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Li et al., CVPR 2021"

    def __init__(
        self,
        model: SplitModel,
        mu: float = 1.0,
        temperature: float = 0.5,
        previous_models: int = 1,
        projection: int | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(mu >= 0, "method.mu", "must be >= 0 (0 is FedAvg)", mu)
        require(temperature > 0, "method.temperature", "must be > 0", temperature)
        require(1 <= previous_models <= 64, "method.previous_models", "must be from 1 to 64", previous_models)
        require(projection is None or projection >= 1, "method.projection", "must be >= 1 or null", projection)
        if projection is not None:
            add_projection(model, projection, unit_length=False, key="method.projection")
        super().__init__(model, terms=[ModelContrast(mu, temperature, previous_models)], extra_terms=extra_terms)
