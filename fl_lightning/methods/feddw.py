"""FedDW: FedAvg whose classification layer is tied to the federation's mean soft labels.

Liu, Wang, Wang, Yang, Tao, "FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated
Learning", arXiv:2412.04521, 2024, Algorithm 1. Where the paper and its public code differ, each form is a switch; the
defaults are the paper's equations.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.losses.class_relation import (
    ClassRelation,
    History,
    InitialSoftLabels,
    LastBias,
    MissingSoftLabels,
    Source,
)
from fl_lightning.models.split import SplitModel


class FedDW(Method):
    """FedAvg and, on the classification layer alone, L = L_cla + μ L_reg (equation 12).

    Each client also sends, for the classes that it holds, its mean soft labels; the global ones regularise every
    client's class relation, also for classes that it lacks. The last layer loses its bias. At μ = 0 it is FedAvg
    without that bias.

    The authors' public code is `soft_labels_init: identity`, `momentum: 0.5`, `history: all`, `missing: one_hot`,
    `decay_rounds: [9, 18, 27, 36, 45]`, `bias: keep`.

    Args:
        weight: μ, >= 0; chosen in the paper from 0.01, 0.1, 1, 10, 100: 0.1 for CIFAR-10, 10 for CIFAR-100; on MNIST
            and IMDB it mattered little.
        soft_labels_init: the global soft labels of the first round: ``none`` (no regulariser yet), ``identity`` or
            ``uniform``.
        momentum: share of a soft label's last value in its next one, in [0, 1).
        history: ``round`` averages the participants' soft labels of the round, ``all`` all that were ever sent.
        missing: a class that no participant held keeps its soft label (``keep``), has none (``drop``), or has a one-hot
            one until somebody holds it (``one_hot``).
        decay_rounds: rounds (1-based) at whose start μ is divided by 10; none by default.
        source: ``post`` averages predictions over the training part after the fit (Algorithm 1, line 9), ``running``
            over the last epoch's own forward passes.
        temperature: divides W Wᵀ, > 0; 1 is the paper's.
        exclude_diagonal: compare relations to the other classes only; not the paper's.
        bias: ``remove`` takes the bias off the last layer (the paper), ``keep`` leaves it.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Liu et al., arXiv:2412.04521, 2024"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 0.1,
        soft_labels_init: InitialSoftLabels = "none",
        momentum: float = 0.0,
        history: History = "round",
        missing: MissingSoftLabels = "keep",
        decay_rounds: list[int] | None = None,
        source: Source = "post",
        temperature: float = 1.0,
        exclude_diagonal: bool = False,
        bias: LastBias = "remove",
        extra_terms: list[Term] | None = None,
    ) -> None:
        relation = ClassRelation(
            weight,
            soft_labels_init,
            momentum,
            history,
            missing,
            decay_rounds,
            source,
            temperature,
            exclude_diagonal,
            bias,
        )
        super().__init__(model, terms=[relation], extra_terms=extra_terms)
