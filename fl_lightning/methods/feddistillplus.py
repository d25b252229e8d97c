"""FedDistill+: federated distillation on top of an averaged model.

Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", arXiv:1811.11479, 2018, with all weights averaged as well: the form that
FedDW's Table IV compares with (Liu et al., arXiv:2412.04521).
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.label_distillation import Averages, LabelDistillation, Stale
from fl_lightning.models.split import SplitModel


class FedDistillPlus(Method):
    """FedAvg whose clients also learn from the mean soft labels that the others give their samples' classes.

        L = L_ce + λ · mean over samples of KL(q_y ‖ softmax(z / T))

    q_c is the mean prediction for class c of the other participants that hold it. Message: all weights and, for
    each class held, its soft label and count. At λ = 0 it is FedAvg.

    Args:
        weight: λ, >= 0.
        temperature: T of the student's softmax in the loss, > 0.
        averages: ``post`` averages predictions over the training part after the fit, in eval mode; ``running`` over
            the fit's own forward passes, which costs no pass.
        include_self: leave a client's own soft labels in its teacher (some public codes).
        stale: a class that no participant held in the last round keeps its older soft labels (``keep``) or has no
            teacher (``drop``).
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Jeong et al., arXiv:1811.11479, 2018; Liu et al., arXiv:2412.04521, 2024"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        temperature: float = 1.0,
        averages: Averages = "post",
        include_self: bool = False,
        stale: Stale = "keep",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        require(temperature > 0, "method.temperature", "must be > 0", temperature)
        require_choices("method", averages=(averages, Averages), stale=(stale, Stale))
        distillation = LabelDistillation(weight, temperature, averages, include_self, stale)
        super().__init__(model, terms=[distillation], extra_terms=extra_terms)
