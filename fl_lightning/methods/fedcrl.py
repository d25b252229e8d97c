"""FedCRL: FedAvg with a contrast against class prototypes, whose loss says how much of the global model to take.

Huang, Chen, Zhang, Wang, arXiv:2404.17916, 2024 (from its second version on it is called FedCoSR and shares shallow
layers only). No code is known: this is a reconstruction from the first version's abstract, which shares the model and
the class means, pulls features towards those of their class and away from the others, and weighs the global model by
each client's contrastive loss. The formulas are ours; do not compare figures with the paper's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.losses.prototype import PrototypeContrast, PrototypeTerm
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import Host, OwnData


class FedCRL(Method):
    """A contrast against class prototypes, whose loss says how much of the global model a client takes.

        L = L_ce + λ L_con,  W_i ← θ_i W + (1 − θ_i) W_i before the fit

    L_con is the cross-entropy of cos(f(x), V_k)/τ
    over the classes k whose prototype V_k exists; θ_i = clip(l_i / log K, 0, 1), with l_i the client's mean contrastive
    loss over its last fit, of samples of those classes, and K their number: who finds its own data hard to tell apart
    takes more of the global model. Before the first such loss θ_i = 1; where one class alone has a prototype θ_i = 0.
    With λ = 0 there is no such loss, θ_i stays 1 and the method is FedAvg; with `mixing` 0 no weight comes in, and it
    is Local that exchanges prototypes.

    Args:
        weight: λ, >= 0.
        temperature: τ, > 0.
        mixing: θ in [0, 1] for every client and round; null takes it from the contrastive loss.
        extra_terms: terms added to the loss.
    """

    shared = ("model",)
    paper = "Huang et al., arXiv:2404.17916, 2024 (reconstruction)"

    def __init__(
        self,
        model: SplitModel,
        weight: float = 1.0,
        temperature: float = 0.5,
        mixing: float | None = None,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(weight >= 0, "method.weight", "must be >= 0", weight)
        require(temperature > 0, "method.temperature", "must be > 0", temperature)
        require(mixing is None or 0 <= mixing <= 1, "method.mixing", "must be in [0, 1] or null", mixing)
        contrast = MeasuredContrast(weight, temperature, average="valid")
        super().__init__(model, terms=[contrast], extra_terms=extra_terms)
        self.contrast = [contrast]  # in a list, so that it is not registered a second time
        self.mixing = mixing
        self.register_buffer("global_share", torch.ones(()))

    global_share: Tensor  # θ_i, of the next receive

    def is_kept(self, name: str, module: torch.nn.Module) -> bool:
        """Everything is kept: the next receive mixes the client's own model with the global one."""
        return True

    @torch.no_grad()
    def receive(self, message: Message, data: OwnData) -> None:
        """Local aggregation: entries between the own (θ = 0) and the global ones (θ = 1)."""
        share = float(self.global_share) if self.mixing is None else self.mixing
        own = self.state_dict()
        fits = {name for name, tensor in message.weights.items() if name in own and own[name].shape == tensor.shape}
        mixed = {n: _between(own[n], t, share) if n in fits else t for n, t in message.weights.items()}
        super().receive(Message(mixed, message.artifacts, message.num_samples), data)  # which refuses what does not fit

    def on_fit_end(self) -> None:
        """θ_i from the fit's mean contrastive loss, for the next receive."""
        contrast = self.contrast[0]
        if not any(term is contrast for term in self.terms):  # without weight it gives way to an extra one: θ stays 1
            return
        loss, num_classes = contrast.mean_loss(), int(contrast.valid.sum())
        if num_classes == 1:
            self.global_share.zero_()
        elif loss is not None:
            self.global_share.fill_(global_share(loss, num_classes))


class MeasuredContrast(PrototypeContrast):
    """The contrast, which remembers its mean over those samples of the fit whose class has a prototype.

    The logged mean is over batches, in which such samples are more or fewer.
    """

    name = "prototype_contrast"
    accumulates = (*PrototypeTerm.accumulates, "loss_sum", "num_valid")
    loss_sum: Tensor  # over the samples of the present fit
    num_valid: Tensor  # int64, how many these are

    @override
    def setup(self, host: Host) -> None:
        super().setup(host)
        self.register_buffer("loss_sum", torch.zeros(()), persistent=False)
        self.register_buffer("num_valid", torch.zeros((), dtype=torch.long), persistent=False)

    @override
    def receive(self, host: Host, message: Message) -> None:
        super().receive(host, message)
        self.loss_sum.zero_()
        self.num_valid.zero_()

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        loss = super().forward(host, out)
        self._last = loss.detach()
        return loss

    @override
    def observe(self, host: Host, out: Forward) -> None:
        super().observe(host, out)
        num_valid = self.valid[out.y].sum()
        self.loss_sum += self._last * num_valid
        self.num_valid += num_valid

    def mean_loss(self) -> float | None:
        """Mean over the fit; None where no sample's class had a prototype."""
        num_valid = int(self.num_valid)
        return float(self.loss_sum) / num_valid if num_valid else None


def _between(own: Tensor, received: Tensor, share: float) -> Tensor:
    """(1 − share) own + share received; a counter is one of the two."""
    if own.is_floating_point():
        return own.lerp(received.to(own), share)
    return received if share > 0 else own


def global_share(loss: float, num_classes: int) -> float:
    """θ = clip(loss / log K, 0, 1): 1 where similarities say nothing of the class, 0 where there is one class only.

    Args:
        loss: mean contrastive loss, >= 0.
        num_classes: K, the classes that were told apart, >= 1.

    >>> global_share(math.log(2), num_classes=4)
    0.5
    """
    return min(1.0, loss / math.log(num_classes)) if num_classes > 1 else 0.0
