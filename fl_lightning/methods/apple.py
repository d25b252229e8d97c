"""APPLE: every client predicts by a sum of all clients' core models, and learns how much of each it takes.

Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022. Checked against
the authors' code.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.division import keeps_all
from fl_lightning.core.facts import PlansRounds
from fl_lightning.core.lending import AllModels, lending_all
from fl_lightning.core.method import Message, Method, OwnData, Parts, Phase, Predictor, Step, Term
from fl_lightning.core.personal import personal_only
from fl_lightning.errors import require
from fl_lightning.losses.relations import FadingWeight, Schedule, anchor_loss
from fl_lightning.models.mixture import Lent, head_with, pass_with, with_parameters
from fl_lightning.models.split import SplitModel


class APPLE(PlansRounds, Method):
    """A core model w_i goes up, those of all come down; the client's relations p_i [N] to them stay.

        min_{w_i, p_i} F_i(Σ_j p_ij w_j) + λ_t μ/2 ‖p_i − p⁰‖²,  p⁰_j = n_j/n,  all p_ij = 1/N at first

    λ_t falls from 1 in round 1, (cos(π(t − 1)/L) + 1)/2 or 10^{−3(t − 1)/L}, and is 0 after round L. In the
    first round p⁰ is 1/N; later, who has sent nothing yet counts with the others' mean n_j. Batch norm's statistics are
    the client's own. (The authors' code has μ, and starts at p⁰.)

    Args:
        weight: μ, >= 0.
        relation_lr: learning rate of p_i, > 0.
        share: L as a share of the run's rounds, in (0, 1].
        schedule: of λ_t.
        extra_terms: terms added to F_i.
    """

    shared = ("model",)
    paper = "Luo and Wu, IJCAI 2022"
    is_kept = keeps_all
    make_server = lending_all
    takes_weights: ClassVar[bool] = False  # w_i goes on from where it was; what comes in are the others' models
    whole_model: ClassVar[bool] = False  # samples pass through a sum of models
    others: Tensor  # Σ_{j ≠ i} p_ij w_j, [P]

    def __init__(
        self,
        model: SplitModel,
        weight: float = 0.1,
        relation_lr: float = 0.001,
        share: float = 0.1,
        schedule: Schedule = "exponential",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(relation_lr > 0, "method.relation_lr", "must be > 0", relation_lr)
        super().__init__(model, extra_terms=extra_terms)
        self.relation_lr, self.anchoring = relation_lr, FadingWeight(weight, schedule, share)

    @override
    def setup(self) -> None:
        self.cores = AllModels(self)  # w_j, and p⁰
        self.relations = nn.Parameter(self.cores.shares.clone())  # p_i
        self.register_buffer("others", self.cores.initial * (1 - 1 / self.facts.num_clients))

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message.without_weights(), data)
        if self.cores.take(message, self, data):
            self.others.copy_(self.relations.detach() @ self.cores.rows)

    @override
    def phases(self) -> list[Phase]:
        parts = {"core": ("model", "terms"), "relations": ("relations",)}
        return [Phase("all", parts=parts, settings={"relations": {"lr": self.relation_lr}})]

    @override
    def losses(self) -> dict[str, float]:
        return {"anchor": self.anchoring.at(self.facts.round, self.facts.rounds)}

    @override
    def local_step(self, step: Step) -> None:
        out = step.forward(through=Lent(self.model, self._mixture(True)))
        step.descend({**step.values(out), "anchor": anchor_loss(self.relations, self.cores.shares)})
        step.observe(out)

    @override
    def on_fit_end(self) -> None:
        self.others.copy_(self.relations.detach() @ self.cores.rows)

    def _mixture(self, learns: bool) -> dict[str, Tensor]:
        """Parameters of Σ_j p_ij w_j, by name; while p_i learns, the rest of the sum is anew what it makes of it."""
        others = self.relations @ self.cores.rows if learns else self.others
        return self.cores.mixture(self.model, self.relations, others)

    @override
    def network(self) -> Parts:
        mixture = self._mixture(self.training)
        return Parts(lambda x: pass_with(self.model, mixture, x)[1], partial(head_with, self.model, mixture))

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_only(lambda seen: pass_with(self.model, self._mixture(False), seen.x)[2], self._merged)

    def _merged(self) -> SplitModel:
        return with_parameters(self.model, self._mixture(False))
