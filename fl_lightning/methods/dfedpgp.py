"""DFedPGP: bodies collaborate over directed graphs by push-sum, heads stay at home.

Liu, Shi, Li, Wu, Wang, Shen, "Decentralized Directed Collaboration for Personalized Federated Learning", CVPR 2024. A
fit trains the head under the de-biased body z = u/μ, then the body under that head. The exchange (`DirectedGraph`)
keeps μ and mixes (u, μ); the authors' code has no push-sum but the plain mean over drawn in-neighbours, which is
`DirectedGraph` with ``mixing: uniform``. On a ring both are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from fl_lightning.core.alternation import check_alternation
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method, Phase
from fl_lightning.core.mixing import PUSH_WEIGHT
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData


class DFedPGP(Method):
    """Private heads over bodies that are averaged by push-sum among directed neighbours.

        z = u/μ,  u ← u − η ∇_z L(z, h),  (u, μ)_i ← Σ_j P_ij (u, μ)_j

    The gradient is taken at the de-biased body z and applied to the numerator u, which is SGD on z with its rate over μ
    (weight decay then is of z). Optimizers that scale gradients by themselves, like Adam, step on z at their own rate.

    Args:
        head_epochs: K_v, epochs of the head phase under the received body, >= 0.
        body_epochs: K_u, epochs of the body phase under the new head, >= 0; null takes `federation.local_epochs`.
        head_lr: learning rate of the head phase, > 0; null takes the optimizer's. The authors' code: 0.001 beside 0.1.
        chain_rule: take the gradient with respect to u itself, ∇_u = ∇_z / μ, which divides once more by μ.
        extra_terms: terms added to the loss.
    """

    shared = ("model.body",)
    exchange = "DirectedGraph"
    paper = "Liu et al., CVPR 2024"

    def __init__(
        self,
        model: SplitModel,
        head_epochs: int = 1,
        body_epochs: int | None = None,
        head_lr: float | None = None,
        chain_rule: bool = False,
        extra_terms: list[Term] | None = None,
    ) -> None:
        check_alternation(head_epochs, body_epochs, head_lr)
        super().__init__(model, extra_terms=extra_terms)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.head_lr = head_lr
        self.chain_rule = chain_rule
        self.register_buffer("mass", torch.ones(()))

    mass: Tensor  # μ

    @override
    def phases(self) -> list[Phase]:
        trained = [name for name, own in self.terms.named_parameters(prefix="terms") if own.requires_grad]
        owners = dict(self.terms.named_modules(prefix="terms"))
        sent = [name for name in trained if self.is_shared(name, owners[name.rpartition(".")[0]])]
        parts = {"body": ("model.body", *sent), "terms": tuple(name for name in trained if name not in sent)}
        own = {name: names for name, names in parts.items() if names}
        return [
            Phase("head", trains=("model.head",), epochs=self.head_epochs, lr=self.head_lr),
            Phase("body", ("model.body", "terms"), self.body_epochs, parts=own, tune=self._divide_by_mass),
        ]

    def _divide_by_mass(self, optimizer: Optimizer) -> None:
        """The body's rate over μ, and that of what terms send beside it; what they keep is no numerator."""
        body = {id(own) for own in self.model.body.parameters()}
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            if any(id(own) in body for own in group["params"]):
                group["lr"] /= float(self.mass) ** (2 if self.chain_rule else 1)

    @record_safe()
    def receive(self, message: Message, data: OwnData) -> None:
        """Take the mixed body z and the own push-sum weight μ."""
        self.mass.copy_(message.artifacts.get(PUSH_WEIGHT, torch.ones(())))  # type: ignore[arg-type]
        super().receive(message, data)
