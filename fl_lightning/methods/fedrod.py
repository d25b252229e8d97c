"""FedRoD: a generic head that is trained as if classes were balanced, and a personal one on top of it.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022, Algorithm 1,
with a linear personal head. The authors' repository holds no code.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from fl_lightning.core.method import Method, Phase, Predictor, Seen, Step, Term
from fl_lightning.errors import require
from fl_lightning.losses.logit_adjustment import BalancedSoftmax
from fl_lightning.models.copying import copied
from fl_lightning.models.split import SplitModel


class FedRoD(Method):
    """Two predictors: body f and head g are shared and learn a balanced risk, head p stays and learns the client's own.

        min_{f,g} −log( n_y^γ e^{g_y} / Σ_c n_c^γ e^{g_c} ),  min_p CE(sg[g] + p(sg[f(x)]), y),  g = g(f(x))

    n_c is how many samples of class c the client has; sg[·] lets no gradient through, so that p does not reach what is
    shared, and its gradients are clipped apart. `Local-T` and `Global-T` are the personal predictor's, g + p,
    `Server-T` is the generic one's, g; both are logged. The loss that is named cross_entropy is the personal
    predictor's. All p start as g does; to draw them from a hypernetwork of the class frequencies, the paper's other
    form, is left out.

    (Of public codes one is this; another trains f on p's loss, too, and predicts by p alone.)

    Args:
        gamma: γ, >= 0; the paper's is 1, and 0 gives FedAvg's generic predictor.
        extra_terms: terms added to the loss of body and generic head.
    """

    shared = ("model",)
    paper = "Chen and Chao, ICLR 2022"

    def __init__(self, model: SplitModel, gamma: float = 1.0, extra_terms: list[Term] | None = None) -> None:
        require(gamma >= 0, "method.gamma", "must be >= 0 (0 is FedAvg's generic model)", gamma)
        super().__init__(model, extra_terms=extra_terms, instead=BalancedSoftmax(gamma=gamma))

    @override
    def setup(self) -> None:
        self.personal_head = copied(self.model.head)  # p

    @override
    def phases(self) -> list[Phase]:
        return [Phase("all", parts={"generic": ("model", "terms"), "personal": ("personal_head",)})]

    @override
    def term_weights(self) -> dict[str, float]:
        return {**super().term_weights(), "cross_entropy": 1.0}  # the personal predictor's

    @override
    def local_step(self, step: Step) -> None:
        out, task = step.forward(), self.terms.cross_entropy
        personal = step.through(self.personal_head, out.z.detach()) + out.logits.detach()
        values = step.values(out.predicting(personal), [task])
        values |= step.values(out, [term for term in step.terms if term is not task])
        step.descend(values)
        step.observe(out)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return {
            "personal": Predictor(self._personal, ("Local-T", "Global-T")),
            "generic": Predictor(lambda seen: seen.logits(self.model), ("Server-T",)),
        }

    def _personal(self, seen: Seen) -> Tensor:
        """The sum of both heads' logits."""
        return seen.logits(self.model) + self.personal_head(seen.z(self.model))
