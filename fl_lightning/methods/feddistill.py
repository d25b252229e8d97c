"""FedDistill (FD): clients exchange their mean prediction for each class, and nothing else.

Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", arXiv:1811.11479, 2018, Algorithm 1. The paper's other half (augmentation by a
server's generative network) is left out. No code of the authors is known. Public implementations average raw logits,
use them as if they were probabilities, keep a client's own contribution in its teacher, or count classes that a client
lacks as zeros; here a teacher is a mean of probabilities over the other clients that hold the class.
"""

from __future__ import annotations

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.label_distillation import Averages, LabelDistillation, Stale
from fl_lightning.models.split import SplitModel


class FedDistill(Method):
    """Private models; each learns from the mean soft labels that the other clients give its samples' classes.

        L = L_ce + λ · mean over samples of KL(q_y ‖ softmax(z / T))

    q_c is the mean over the other participants j that hold class c of F_{j,c}, client j's mean prediction for it. A
    class that no other client holds adds nothing; in the first round there is no teacher. Clients' models may
    differ. At λ = 0 it is Local.

    Args:
        weight: λ, >= 0; the paper gives no value.
        temperature: T of the student's softmax in the loss, > 0.
        averages: ``post`` averages predictions over the training part after the fit, in eval mode; ``running`` over
            the fit's own forward passes (the paper), which costs no pass.
        include_self: leave a client's own soft labels in its teacher (some public codes).
        stale: a class that no participant held in the last round keeps its older soft labels (``keep``) or has no
            teacher (``drop``).
        extra_terms: terms added to the loss.
    """

    shared = ()
    paper = "Jeong et al., arXiv:1811.11479, 2018"

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
