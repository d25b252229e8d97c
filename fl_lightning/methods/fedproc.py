"""FedProc: FedAvg whose clients learn, at first, mostly to tell the federation's class centres apart.

Mu, Shen, Cheng, Geng, Fu, Zhang, Zhang, "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", Future
Generation Computer Systems 143, 2023, Algorithm 1; checked against the authors' code, whose averages weigh clients by
their place in the round and divide by all clients' data: under partial participation those weights do not sum to one.
"""

from __future__ import annotations

from fl_lightning.core.facts import PlansRounds
from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.prototype import PrototypeContrast
from fl_lightning.models.projection import add_projection
from fl_lightning.models.split import SplitModel


class FedProc(PlansRounds, Method):
    """FedAvg of a network with a projection to the unit sphere, and a contrast with the global class centres.

        L = α L_ce + (1 − α) · mean of −log( exp(z · v_y) / Σ_k exp(z · v_k) ),  α = min(t / T_α, 1)

    t = 0, 1, … is the round, v_k the centre of class k over its length, z = g(f(x)) / ‖g(f(x))‖ with g = Linear →
    ReLU → Linear, on which the classifier sits. Centres are means of z over all samples of a class. Classes without
    a centre are left out; in the first round there is none, and α = 1. From round T_α on it is FedAvg of that
    network, for T_α = 0 in all.

    Args:
        anneal_rounds: T_α, >= 0; null takes all rounds of the run.
        projection_size: size of z, >= 1.
        extra_terms: terms added to the loss; their weights do not change with α.
    """

    shared = ("model",)
    paper = "Mu et al., FGCS 2023"

    def __init__(
        self,
        model: SplitModel,
        anneal_rounds: int | None = None,
        projection_size: int = 256,
        extra_terms: list[Term] | None = None,
    ) -> None:
        some = anneal_rounds is None or anneal_rounds >= 0
        require(some, "method.anneal_rounds", "must be >= 0 or null", anneal_rounds)
        require(projection_size >= 1, "method.projection_size", "must be >= 1", projection_size)
        contrast = PrototypeContrast(0.0 if anneal_rounds == 0 else 1.0, temperature=1.0, average="valid")
        super().__init__(add_projection(model, projection_size), terms=[contrast], extra_terms=extra_terms)
        self.anneal_rounds, self.plans_rounds = anneal_rounds, anneal_rounds is None
        self.contrast = [contrast]  # in a list, so that it is not registered a second time

    def term_weights(self) -> dict[str, float]:
        """α for the cross-entropy, 1 − α for the contrast."""
        t, until = self.facts.round - 1, self.facts.rounds if self.anneal_rounds is None else self.anneal_rounds
        alpha = min(t / until, 1.0) if t > 0 and until else 1.0
        own = self.contrast[0]  # one of `extra_terms` may stand in its place, whose weight does not change
        contrast = {own.name: 1.0 - alpha} if any(term is own for term in self.terms) else {}
        return {**super().term_weights(), "cross_entropy": alpha, **contrast}
