"""FedDyn: every client's risk is regularised anew each round, so that the local optima agree with the global one.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1. Checked against the authors' code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.optimizing import OptimizingServer
from fl_lightning.core.precision import widened
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step


class FedDyn(Method):
    """FedAvg with a linear and a quadratic penalty, of which the linear one stays with the client.

        θ_k = argmin L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − θ^{t−1}‖²,  g_k ← g_k − α (θ_k − θ^{t−1})
        h ← h − α/m Σ_k (θ_k − θ^{t−1}),  θ^t = mean(θ_k) − h/α

    Sum and mean are over the participants, all alike; m counts all clients. The message is the model. Batch norm's
    statistics are averaged plainly. (Public codes clip gradients to a norm of 10, for which there is
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
        for name in ("moved", "start"):
            self.register_buffer(name, torch.zeros_like(self._theta().detach()), persistent=name == "moved")

    def _theta(self) -> Tensor:
        return torch.cat([widened(p).reshape(-1) for p in self.model.parameters()])

    @override
    @torch.no_grad()
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        super().receive(message, data)
        self.start.copy_(self._theta())

    @override
    def losses(self) -> dict[str, float]:
        return {"dynamic": self.alpha}

    @override
    @record_safe("dynamic")
    def local_step(self, step: Step) -> None:
        out, theta = step.forward(), self._theta()
        dynamic = 0.5 * (theta - self.start).square().sum() + self.moved @ theta
        step.descend({**step.values(out), "dynamic": dynamic})
        step.observe(out)

    @override
    @torch.no_grad()
    def on_fit_end(self) -> None:
        self.moved += self._theta() - self.start

    @override
    def make_server(self, initial: Message, facts: Facts) -> Server:
        trained = [name for name, _ in self.named_parameters()]
        return DynamicServer(initial, DynamicMean(lr=1.0), trained, weighting="uniform")


class DynamicMean(ServerOptimizer):
    """Adds to the mean how far all clients have moved on average in all rounds, −h/α."""

    share = 1.0  # of all clients, those that took part

    @override
    def direction(self, name: str, delta: Tensor) -> Tensor:
        return delta + self.remembered("moved", name, delta).add_(delta, alpha=self.share)


class DynamicServer(OptimizingServer):
    """Tells the step after the mean how many have taken part."""

    hears_mean = True
    optimizer: DynamicMean

    @override
    def close_round(self) -> None:
        self.optimizer.share = len(self.facts.participants) / self.facts.num_clients
        super().close_round()
