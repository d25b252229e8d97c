"""FedDW: FedAvg whose classification layer is tied to the federation's mean soft labels.

Liu, Wang, Wang, Yang, Tao, "FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated
Learning", arXiv:2412.04521, 2024, Algorithm 1. Where the paper and its public code differ, each form is a switch; the
defaults are the paper's equations.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.losses.class_relation import ClassRelation, Relation, SoftLabels
from fl_lightning.models.split import SplitModel


class FedDW(Method):
    """FedAvg with a term that reaches the classification layer alone, L_reg (equations 11 and 12).

        L = L_cla + μ L_reg

    Each client also sends, for the classes that it holds, its mean soft labels; the global ones regularise every
    client's class relation, also for classes that it lacks. The last layer loses its bias. At μ = 0 it is FedAvg
    with that bias; under `relation.bias` ``always``, without.

    The authors' public code is `decay_rounds: [9, 18, 27, 36, 45]`, `soft_labels: {soft_labels_init: identity,
    momentum: 0.5, history: all, missing: one_hot}`, `relation: {bias: keep}`.

    Args:
        weight: μ, >= 0; chosen in the paper from 0.01, 0.1, 1, 10, 100: 0.1 for CIFAR-10, 10 for CIFAR-100; on MNIST
            and IMDB it mattered little.
        decay_rounds: rounds (1-based) at whose start μ is divided by 10; none by default.
        soft_labels: how soft labels are made and averaged.
        relation: what of the last layer is compared with them.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Liu et al., arXiv:2412.04521, 2024"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 0.1,
        decay_rounds: list[int] | None = None,
        soft_labels: SoftLabels = SoftLabels(),
        relation: Relation = Relation(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        term = ClassRelation(weight, decay_rounds, soft_labels, relation)
        super().__init__(model, terms=[term], extra_terms=extra_terms)
