"""FedHKD: FedAvg with hyper-knowledge, a mean feature and a mean soft prediction per class.

Chen, Wang, Vikalo, "The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation", ICLR 2023. Public copies of the code differ from the paper and from each other:
one overwrites a class by the last client's instead of averaging it, draws one noise vector for all classes and gives
probabilities where a divergence asks for their logarithms; another squares the norms and adds noise to absent classes,
too. Here it is as the paper's equations say.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.hyper_knowledge import HyperFeatures, HyperPredictions
from fl_lightning.models.split import SplitModel


class FedHKD(Method):
    """FedAvg in which head and body follow the federation's mean soft prediction and mean feature of each class.

        L = L_ce + λ 1/|K| Σ_{c in K} ‖softmax(g(H_c)/T) − Q_c‖₂ + γ 1/|V| Σ_{b in V} ‖f(x_b) − H_{y_b}‖₂

    H_c and Q_c are the federation's mean feature and mean soft prediction of class c, weighted by samples over the
    clients that sent the class; a class that nobody sent keeps its last pair. K are the classes that have a pair, V the
    mini-batch's samples of these. The λ term trains the head alone, the γ term the body alone. The first round has no
    hyper-knowledge and is FedAvg's; with λ = γ = 0, or with ν above 1, every round is. Message: model, and D + C + 1
    values for each class sent (D + C down).

    Args:
        prediction_weight: λ, >= 0.
        feature_weight: γ, >= 0.
        temperature: T of the soft predictions, > 0.
        min_share: ν, smallest share of a client's samples that a class must have to be sent, >= 0.
        noise_std: standard deviation σ of the Gaussian noise on sent mean features, >= 0.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Chen et al., ICLR 2023"

    def __init__(
        self,
        model: SplitModel,
        prediction_weight: float = 0.05,
        feature_weight: float = 0.05,
        temperature: float = 0.5,
        min_share: float = 0.25,
        noise_std: float = 0.02,
        extra_terms: list[Term] | None = None,
    ) -> None:
        for key, value in (
            ("prediction_weight", prediction_weight),
            ("feature_weight", feature_weight),
            ("min_share", min_share),
            ("noise_std", noise_std),
        ):
            require(value >= 0, f"method.{key}", "must be >= 0", value)
        require(temperature > 0, "method.temperature", "must be > 0", temperature)
        knowledge = {"temperature": temperature, "noise_std": noise_std, "min_share": min_share}
        terms = [HyperPredictions(prediction_weight, **knowledge), HyperFeatures(feature_weight, **knowledge)]
        super().__init__(model, terms=terms, extra_terms=extra_terms)
