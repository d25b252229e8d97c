"""FedDyn: every client's risk is regularised anew each round, so that the local optima agree with the global one.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1. Checked against the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.method import Facts, Message, Method, OwnData, Server, Step, Term
from fl_lightning.core.optimizing import OptimizingServer
from fl_lightning.core.precision import widened_vector
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel


class FedDyn(Method):
    """FedAvg with a linear and a quadratic penalty, of which the linear one stays with the client.

        θ_k = argmin L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − θ^{t−1}‖²,  g_k ← g_k − α (θ_k − θ^{t−1})
        h ← h − α/m Σ_k (θ_k − θ^{t−1}),  θ^t = mean(θ_k) − h/α

    Sum and mean are over the participants, all alike; m counts all clients that have joined. The message is the model.
    Batch norm's statistics are averaged plainly. (Public codes clip gradients to a norm of 10, for which there is
    `trainer.gradient_clip_val`; the authors' divides α by a client's number of samples over the mean one.)

    Args:
        alpha: α, > 0; the paper chooses it from 0.1, 0.01 and 0.001.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Acar et al., ICLR 2021"

    def __init__(self, model: SplitModel, alpha: float = 0.01, extra_terms: list[Term] | None = None) -> None:
        require(alpha > 0, "method.alpha", "must be > 0 (FedAvg is without it)", alpha)
        super().__init__(model, extra_terms=extra_terms)
        self.alpha = alpha

    moved: Tensor  # −g_k/α, [P] as the model's parameters: how far all fits together have gone
    start: Tensor  # θ^{t−1}

    @override
    def setup(self) -> None:
        like = widened_vector(self.model.parameters()).detach()
        self.register_buffer("moved", torch.zeros_like(like))
        self.register_buffer("start", torch.zeros_like(like), persistent=False)

    @override
    @torch.no_grad()
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.start.copy_(widened_vector(self.model.parameters()))

    @override
    def losses(self) -> dict[str, float]:
        return {"dynamic": self.alpha}

    @override
    @record_safe("dynamic")
    def local_step(self, step: Step) -> None:
        out, theta = step.forward(), widened_vector(self.model.parameters())
        dynamic = 0.5 * (theta - self.start).square().sum() + self.moved @ theta
        step.descend({**step.values(out), "dynamic": dynamic})
        step.observe(out)

    @override
    @torch.no_grad()
    def on_fit_end(self) -> None:
        self.moved += widened_vector(self.model.parameters()) - self.start

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        held = [f"model.{name}" for name, _ in self.model.named_parameters()]  # what terms share has no penalties
        return OptimizingServer(initial, DynamicMean(lr=1.0), held, weighting="uniform")


class DynamicMean(ServerOptimizer):
    """Adds to the mean how far all clients have moved on average in all rounds, −h/α.

    Who has joined since has moved nowhere.
    """

    @override
    def direction(self, name: str, delta: Tensor) -> Tensor:
        moved, of = self.remembered("moved", name, delta), self.state.setdefault("of", {})
        if name in of and of[name] != self.joined:
            moved.mul_(of[name].to(moved) / self.joined)
        of[name] = torch.tensor(self.joined)
        return delta + moved.add_(delta, alpha=self.share)
