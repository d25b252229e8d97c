"""FedCPD: a shared extractor that remembers its client and agrees with the others on where classes lie.

Jin, Xu, Wang, Hsieh, Wu, Lin, "FedCPD: Personalized Federated Learning with Prototype-Enhanced Representation and
Memory Distillation", IJCAI 2025, Algorithm 1. Without the three terms it is FedRep (whose batch norm does not rest
while the head is trained). The paper gives neither the loss weights nor the temperature; the defaults are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fl_lightning.core.alternation import check_alternation
from fl_lightning.core.division import overlap
from fl_lightning.core.freezing import frozen
from fl_lightning.core.method import Method, Phase
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.losses.distillation import Distillation, FeatureDistillation, Reduction
from fl_lightning.losses.prototype import Distance, PrototypeAlignment, PrototypeContrast, Prototypes
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.step import Step

Alternation = Literal["epoch", "batch"]


@dataclass(frozen=True)
class Reading:
    """How the paper is read where it leaves something open.

    Args:
        temperature: τ of the contrast, > 0.
        alternation: ``epoch`` trains all head epochs, then all body epochs; ``batch`` takes a head step and a body step
            on every batch, for `body_epochs` epochs.
        align_reduction: ``mean`` over the embedding's features; ``sum`` is the printed form, D times as much.
    """

    temperature: float = 0.5
    alternation: Alternation = "epoch"
    align_reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        require(self.temperature > 0, "method.reading.temperature", "must be > 0", self.temperature)
        require_choices(
            "method.reading",
            alternation=(self.alternation, Alternation),
            align_reduction=(self.align_reduction, Reduction),
        )


class FedCPD(Method):
    """Private heads on a shared body; each fit distils the client's last own body and follows global prototypes.

        L = L_ce + α L_align + β L_pcl + γ L_fd

    L trains the body; the head sees L_ce alone. Message: body and class
    prototypes. In a client's first round there is no teacher, in the first round of all there are no prototypes: that
    round has FedRep's losses.

    Args:
        alpha: weight of the prototype alignment, >= 0.
        beta: weight of the prototype contrast, >= 0. Its gradient grows as 1/‖z‖; on CIFAR-10 1 and
            10 do better than the 0.01 of our files (`experiments/fedcpd/results/weights.md`).
        gamma: weight of the feature distillation, >= 0.
        head_epochs: epochs of the head phase, >= 0.
        body_epochs: epochs of the body phase, >= 0; null takes `federation.local_epochs`.
        prototypes: how prototypes are made and averaged.
        distillation: how feature maps are attended to, fused and compared.
        reading: how the paper is read where it leaves something open.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body",)
    paper = "Jin et al., IJCAI 2025"

    def __init__(
        self,
        model: SplitModel,
        alpha: float = 1.0,
        beta: float = 0.01,
        gamma: float = 1.0,
        head_epochs: int = 1,
        body_epochs: int | None = None,
        prototypes: Prototypes = Prototypes(),
        distillation: Distillation = Distillation(),
        reading: Reading = Reading(),
        extra_terms: list[Term] | None = None,
    ) -> None:
        for key, weight in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
            require(weight >= 0, f"method.{key}", "must be >= 0", weight)
        check_alternation(head_epochs, body_epochs)
        distance: Distance = "sample_mse" if reading.align_reduction == "mean" else "sample_sq"
        own: list[Term] = [
            PrototypeAlignment(alpha, distance, **vars(prototypes)),
            PrototypeContrast(beta, reading.temperature, **vars(prototypes)),
            FeatureDistillation(gamma, distillation),
        ]
        super().__init__(model, terms=own, extra_terms=extra_terms)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.alternation = reading.alternation

    def phases(self) -> list[Phase]:
        """The head under a body that rests, then the body; or both in turn on every batch."""
        body = ("model.body", "terms")
        if self.alternation == "batch":
            parts = {"head": ("model.head",), "body": body}
            return [Phase("head and body", trains=("model", "terms"), epochs=self.body_epochs, parts=parts)]
        return [
            Phase("head", trains=("model.head",), epochs=self.head_epochs, resting=("model.body",)),
            Phase("body", trains=body, epochs=self.body_epochs),
        ]

    def local_step(self, step: Step) -> None:
        """One batch: a step of the phase's part; under ``batch`` alternation a step of the head, then of the body."""
        if self.alternation == "epoch":
            super().local_step(step)
            return
        with frozen(self.model.body):
            out = step.forward()
        terms = [term for term in step.terms if any(overlap(part, "model.head") for part in term.reaches)]
        step.descend(step.values(out, terms), "head")
        out = step.forward()
        step.descend(step.values(out), "body")
        step.observe(out)
