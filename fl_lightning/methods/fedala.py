"""FedALA: before a fit, every client learns how much of the global model's last layers to take, value by value.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, Algorithm 1. Checked against the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.freezing import keeping_statistics, only, training
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.step import Step


class FedALA(Method):
    """FedAvg whose clients start each fit from their own mixture of the global and their own last model.

    In the last p layers θ̂ = θ_i + (θ − θ_i) ⊙ W with W in [0, 1], below them θ̂ = θ. W is learnt right after the
    receive, on a random share of the training part, by plain steps of its own:

        W ← clip(W − η_w ∇CE(θ̂) ⊙ (θ − θ_i), 0, 1).

    A client's first participation is FedAvg's. In its second W starts at 1 and is learnt until the loss has settled
    (the spread of the last ones, one an epoch, is below the threshold); later by one epoch each time. W, and θ_i of the
    last p layers, stay at home. At p = 0 or η_w = 0 it is FedAvg.

    Only participants learn W; the authors' code lets all clients do so in every round, and draws its sample as a
    window of consecutive ones. Its figures are `Local-T_received`.

    Args:
        layers: p, layers from the end that are mixed, >= 0; a layer is its weight and bias together (two tensors in the
            authors' counting), and a normalisation counts with the layer before it.
        share: part of the training samples that W is learnt on, in (0, 1].
        mixing_lr: η_w, >= 0.
        threshold: spread (standard deviation) of the losses that ends the first learning, > 0; 0.1 in the authors'
            code, 0.01 in the paper.
        num_losses: losses that the spread is taken over, >= 2.
        max_epochs: longest first learning, >= 1; the authors' code has no end.
        extra_terms: terms added to the loss of the local fits.
    """

    shared = ("model",)
    paper = "Zhang et al., AAAI 2023"

    def __init__(
        self,
        model: SplitModel,
        layers: int = 1,
        share: float = 0.8,
        mixing_lr: float = 1.0,
        threshold: float = 0.1,
        num_losses: int = 10,
        max_epochs: int = 100,
        extra_terms: list[Term] | None = None,
    ) -> None:
        require(0 < share <= 1, "method.share", "must be in (0, 1]", share)
        require(mixing_lr >= 0, "method.mixing_lr", "must be >= 0 (0 is FedAvg)", mixing_lr)
        require(threshold > 0, "method.threshold", "must be > 0", threshold)
        require(num_losses >= 2, "method.num_losses", "must be >= 2", num_losses)
        require(max_epochs >= 1, "method.max_epochs", "must be >= 1", max_epochs)
        model.last_layers(layers, "method.layers")  # now, because it refuses what the model has not
        super().__init__(model, extra_terms=extra_terms)
        self.layers = layers
        self.share = share
        self.mixing_lr = mixing_lr
        self.threshold = threshold
        self.num_losses = num_losses
        self.max_epochs = max_epochs

    has_own_model: Tensor  # bool, whether the client has finished a fit, so that its last layers are θ_i
    has_mixing: Tensor  # bool, whether W was learnt once

    @override
    def setup(self) -> None:
        self.mixed_names = [
            f"model.{layer}.{name}"
            for layer in self.model.last_layers(self.layers, "method.layers")
            for name, parameter in self.model.get_submodule(layer).named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        for index, name in enumerate(self.mixed_names):
            self.register_buffer(f"mixing_{index}", torch.ones_like(self.get_parameter(name).detach()))
        self.register_buffer("has_own_model", torch.zeros((), dtype=torch.bool))
        self.register_buffer("has_mixing", torch.zeros((), dtype=torch.bool))

    @property
    def mixed(self) -> list[nn.Parameter]:
        """The parameters that are mixed."""
        return [self.get_parameter(name) for name in self.mixed_names]

    @property
    def mixing(self) -> list[Tensor]:
        """W of each of them, in [0, 1]."""
        return [self.get_buffer(f"mixing_{index}") for index in range(len(self.mixed_names))]

    def is_kept(self, name: str, module: nn.Module) -> bool:
        """What is not received, and θ_i of the mixed layers, which the next receive reads before it overwrites it."""
        return super().is_kept(name, module) or name in self.mixed_names

    def receive(self, message: Message, data: OwnData) -> None:
        """Take the global model, then learn how much of its last layers to keep."""
        own = [parameter.detach().clone() for parameter in self.mixed]  # θ_i
        super().receive(message, data)
        if not self.mixed_names or self.mixing_lr == 0 or not self.has_own_model:
            return
        steps = data.steps(self.share)
        received = [parameter.detach().clone() for parameter in self.mixed]  # θ
        with training(self), torch.enable_grad(), only(self, self.mixed), keeping_statistics(self):
            self._mix(own, received)
            if self.has_mixing:
                self._learn_mixing(own, received, steps)
            else:
                self._learn_first_mixing(own, received, steps)

    def _learn_first_mixing(self, own: Sequence[Tensor], received: Sequence[Tensor], steps: Sequence[Step]) -> None:
        """The start phase: epochs until the loss of their last batches has settled."""
        losses: list[Tensor] = []
        while len(losses) < self.max_epochs:
            losses.append(self._learn_mixing(own, received, steps))
            last = torch.stack(losses[-self.num_losses :])
            if len(losses) > self.num_losses and last.std(correction=0) < self.threshold:
                break
        self.has_mixing.fill_(True)

    def _learn_mixing(self, own: Sequence[Tensor], received: Sequence[Tensor], steps: Sequence[Step]) -> Tensor:
        """One epoch of W, with θ̂ mixed anew after every batch. Returns the last batch's loss."""
        for step in steps:
            loss = step.values(step.forward(), [self.terms.cross_entropy])["cross_entropy"]
            gradients = step.gradients(loss, self.mixed)
            for w, gradient, old, new in zip(self.mixing, gradients, own, received, strict=True):
                w.sub_(self.mixing_lr * gradient * (new - old)).clamp_(0, 1)
            self._mix(own, received)
        return loss.detach()

    @torch.no_grad()
    def _mix(self, own: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """θ̂ = θ_i + (θ − θ_i) ⊙ W; `lerp`, because that is θ itself at W = 1."""
        for parameter, old, new, w in zip(self.mixed, own, received, self.mixing, strict=True):
            parameter.copy_(torch.lerp(widened(old), widened(new), w))

    def on_fit_end(self) -> None:
        """From now on there is an own model."""
        self.has_own_model.fill_(True)
