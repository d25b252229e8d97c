"""SCAFFOLD: control variates take out of every client's steps what pulls it away from the others.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import RunningSum
from fl_lightning.core.method import Facts, Message, Method, OwnData, Server, Step, Term
from fl_lightning.core.precision import move_by, widened_vector
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.server import Weighting
from fl_lightning.errors import require_choices
from fl_lightning.models.split import SplitModel

Correction = Literal["gradient", "step"]


class SCAFFOLD(Method):
    """FedAvg whose clients step along g − c_i + c, as if they knew everybody's gradient.

        y_i ← y_i − η (g − c_i + c),  c_i⁺ = c_i − c + (x − y_i)/(Kη)

    after K steps at rate η. Server: x ← mean(y_i), c ← c + |S|/N mean(c_i⁺ − c_i), all participants alike, N those that
    have joined; its step size η_g is `federation.server_optimizer: ServerMomentum` with that rate and momentum 0.
    Message: twice the model.

    With momentum ρ a client moves by up to 1/(1 − ρ) gradients a step, which c_i, by its equation, then holds. Where
    momentum sees the correction, too, that factor comes in twice, and what should hold clients together overshoots.

    Args:
        correction: where c − c_i comes in: ``gradient``, as a part of the loss, which momentum, Adam and clipping see,
            too; or ``step``, y_i ← y_i − η (c − c_i) after the optimizer's step, as NIID-Bench's public code has it.
            With plain SGD both are the paper's equation.
        weighting: ``uniform``, clients alike, as the paper has it; or ``samples``, models and changes of c_i by
            clients' samples, as Flower's baseline has it: both means are over the |S| that take part, by n_i/Σ_S n_j
            for 1/|S|, and |S|/N, by which c follows, counts clients, not samples.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Karimireddy et al., ICML 2020"

    def __init__(
        self,
        model: SplitModel,
        correction: Correction = "gradient",
        weighting: Weighting = "uniform",
        extra_terms: list[Term] | None = None,
    ) -> None:
        require_choices("method", correction=(correction, Correction), weighting=(weighting, Weighting))
        super().__init__(model, extra_terms=extra_terms)
        self.correction = correction
        self.weighting = weighting

    own_control: Tensor  # c_i, [P] as the model's trained parameters
    control: Tensor  # c
    start: Tensor  # x

    @override
    def setup(self) -> None:
        self.trained_names = [name for name, own in self.model.named_parameters() if own.requires_grad]
        for name in ("own_control", "control", "start"):
            self.register_buffer(name, torch.zeros_like(self._y().detach()), persistent=name == "own_control")

    def _trained(self) -> list[Tensor]:
        own = dict(self.model.named_parameters())
        return [own[name] for name in self.trained_names]

    def _y(self) -> Tensor:
        return widened_vector(self._trained())

    @override
    @torch.no_grad()
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        message.copy_to(self.control, "control")
        self.start.copy_(self._y())

    def remark(self, precision: str) -> str:
        """See `federation.remarks.Remarking`."""
        loses = self.correction == "step" and precision in ("bf16-true", "16-true")
        return f"{precision} rounds the steps of correction: step away; take gradient" if loses else ""

    @override
    def on_fit_start(self) -> None:
        self.model.own.one_optimizer()  # η stands for all of a fit, or c_i⁺ is no mean gradient

    @override
    def losses(self) -> dict[str, float]:
        return {"control": 1.0} if self.correction == "gradient" else {}

    @override
    @record_safe("control")
    def local_step(self, step: Step) -> None:
        out, pull = step.forward(), self.control - self.own_control
        own = {"control": pull @ self._y()} if self.correction == "gradient" else {}
        step.descend({**step.values(out), **own})
        if self.correction == "step" and step.steps_now:
            move_by(self._trained(), pull, -self.fit.lr)
        step.observe(out)

    @override
    @torch.no_grad()
    @record_safe()
    def send(self, data: OwnData) -> Message:
        message, steps = super().send(data), self.fit.num_steps
        moved = (self.start - self._y()) / (steps * self.fit.lr) if steps and self.fit.lr else self.control
        self.own_control += moved - self.control
        message.artifacts["control"] = moved - self.control  # c_i⁺ − c_i
        return message

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        added = partial(RunningSum, facts.num_joined, uniform=self.weighting == "uniform")
        return Server(initial, {"control": added}, weighting=self.weighting)
