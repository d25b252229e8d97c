"""FedKD: a model that stays and a model that travels teach each other; what has changed travels in low rank.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature Communications,
2022. Checked against the authors' code.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from fl_lightning.core.facts import PlansRounds
from fl_lightning.core.low_rank import Energy, LowRankServer, ReceivedModel
from fl_lightning.core.method import Facts, Message, Method, OwnData, Phase, Predictor, Step, Term
from fl_lightning.core.personal import personal_and_global, personal_copy
from fl_lightning.errors import require_choices
from fl_lightning.losses.mutual_distillation import Gradients, View, mutual_distillation
from fl_lightning.models.split import SplitModel


class FedKD(PlansRounds, Method):
    """Mutual distillation of a private teacher t and a shared student s, each weighed by how wrong both are.

        L_t = CE_t + (KL(p_s ‖ p_t) + MSE) / (CE_t + CE_s),  L_s = CE_s + (KL(p_t ‖ p_s) + MSE) / (CE_t + CE_s)

    The MSE is that of z_t and W z_s; W [D, D] stays with the client, t and s start alike. Up go the changes of s, down
    their plain mean, both with the fewest singular values whose squares exceed a share T of the sum, T = T_0 + (T_1 −
    T_0) · round/rounds; a kernel is a matrix by its first axis. Who sat out gets s whole. `Local-T` and `Global-T` are
    t's, `Server-T` is s's. Where both are nearly right CE_t + CE_s is tiny: clip (`trainer.gradient_clip_val`, 10 in
    one public code), the gradients of t apart from those of s and W. (Public codes take KL over C, and send nothing of
    a matrix that needs all its values.)

    Args:
        energy_start: T_0, in [0, 1].
        energy_end: T_1, in [0, 1]; where both are 1 all is sent as it is.
        gradients: ``joint`` trains both by L_t + L_s, as public codes do; ``own`` lets each loss reach its own model
            and, the student's, W, as the paper's gradients have it.
        extra_terms: terms added to L_s.
    """

    shared = ("model",)
    paper = "Wu et al., Nature Communications 2022"
    personal: SplitModel  # t

    def __init__(
        self,
        model: SplitModel,
        energy_start: float = 0.95,
        energy_end: float = 0.98,
        gradients: Gradients = "joint",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_choices("method", gradients=(gradients, Gradients))
        super().__init__(model, extra_terms=extra_terms)
        self.energy, self.gradients = Energy(energy_start, energy_end), gradients

    @override
    def setup(self) -> None:
        personal_copy(self)
        self.transform = nn.Linear(self.model.embedding_size, self.model.embedding_size, bias=False)  # W
        self.received = ReceivedModel(self.model)

    @override
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.received.take(self.model.parameters())

    @override
    def phases(self) -> list[Phase]:
        return [Phase("all", parts={"student": ("model", "terms", "transform"), "teacher": ("personal",)})]

    @override
    def losses(self) -> dict[str, float]:
        return dict.fromkeys(("personal", "taught", "teaching", "hidden", "matched"), 1.0)

    @override
    def local_step(self, step: Step) -> None:
        out, own = step.forward(), step.forward(through=self.personal)
        values = {**step.values(out), "personal": step.task_loss(own)}
        teacher = View(own.logits, own.z, values["personal"])
        student = View(out.logits, step.through(self.transform, out.z), values["cross_entropy"])
        step.descend({**values, **mutual_distillation(teacher, student, self.gradients)})
        step.observe(out)

    @override
    def send(self, data: OwnData) -> Message:
        return self.received.changes(super().send(data), self.energy.at(self.facts.round, self.facts.rounds))

    @override
    def predictors(self) -> dict[str, Predictor]:
        return personal_and_global(self.personal, self.model)

    @override
    def make_server(self, initial: Message, facts: Facts) -> LowRankServer:
        return LowRankServer(initial, self.energy.over(facts.rounds))
