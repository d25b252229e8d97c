"""FedAMP: every client is drawn towards a mixture of all models, in which those like its own count most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.combining import CombiningServer
from fl_lightning.core.division import load_entries
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Predictor
from fl_lightning.core.precision import widened
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.proximal import proximal_loss
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step


class FedAMP(Method):
    """Personal models w_i, each trained near a mixture u_i of all that the server makes for its client.

        u_i = (1 − Σ_{j≠i} ξ_ij) w_i + Σ_{j≠i} ξ_ij w_j,  ξ_ij = α/σ · exp(−‖w_i − w_j‖²/σ)
        w_i ← argmin F_i(w) + λ/2α ‖w − u_i‖²

    A fit starts from the client's own last w_i; there is no global model. Sums are over the participants of a round,
    and who sits out keeps its u_i. Where Σ ξ_ij would exceed 1, they are scaled to 1. (One public code
    takes the distance outside the graph, so that nothing is pulled.)

    Args:
        weight: λ/α, >= 0; 0 is Local.
        alpha: α, > 0.
        sigma: σ, > 0, in units of ‖w_i − w_j‖², which grows with the model.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Huang et al., AAAI 2021"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        alpha: float = 1.0,
        sigma: float = 1.0,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0 (0 is Local)", weight)
        require(alpha > 0, "method.alpha", "must be > 0", alpha)
        require(sigma > 0, "method.sigma", "must be > 0", sigma)
        super().__init__(model, extra_terms=extra_terms)
        self.weight, self.alpha, self.sigma = weight, alpha, sigma

    @override
    def setup(self) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            like = torch.zeros_like(widened(parameter.detach()))
            self.register_buffer(f"mixture_{index}", like, persistent=False)  # u_i

    @override
    def is_kept(self, name: str, module: nn.Module) -> bool:
        return True

    @override
    @torch.no_grad()
    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        own = {name: tensor.clone() for name, tensor in self.state_dict().items() if name.startswith("model.")}
        super().receive(message, data)
        for index, parameter in enumerate(self.model.parameters()):
            self.get_buffer(f"mixture_{index}").copy_(parameter)
        load_entries(self, own)

    @override
    def losses(self) -> dict[str, float]:
        return {"pull": self.weight}

    @override
    @record_safe("pull")
    def local_step(self, step: Step) -> None:
        out = step.forward()
        w = list(self.model.parameters())
        pull = proximal_loss(w, [self.get_buffer(f"mixture_{index}") for index in range(len(w))])
        step.descend({**step.values(out), "pull": pull})
        step.observe(out)

    @override
    def predictors(self) -> dict[str, Predictor]:
        return {"": Predictor(lambda seen: seen.logits(self.model), ("Local-T", "Global-T"))}

    @override
    def make_server(self, initial: Message, facts: Facts) -> CombiningServer:
        names = [f"model.{name}" for name, _ in self.model.named_parameters()]
        return AttentiveServer(initial, list(initial.weights), names, self.alpha, self.sigma)


class AttentiveServer(CombiningServer):
    """Mixes models by how near they are to each other.

    Args:
        initial: as the base's.
        combined: as the base's.
        compared: names of the weights whose distance counts.
        alpha: α.
        sigma: σ.
    """

    def __init__(self, initial: Message, combined: list[str], compared: list[str], alpha: float, sigma: float) -> None:
        super().__init__(initial, combined)
        self.compared, self.alpha, self.sigma = compared, alpha, sigma

    @override
    def shares(self, messages: Mapping[int, Message]) -> Tensor:
        models = [torch.cat([m.weights[name].reshape(-1) for name in self.compared]) for m in messages.values()]
        points = torch.stack(models).cpu().double()
        squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
        xi = self.alpha / self.sigma * torch.exp(-squares / self.sigma)
        xi.fill_diagonal_(0)
        xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
        return xi + (1 - xi.sum(1)).diag()
