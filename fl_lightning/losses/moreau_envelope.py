"""The Moreau envelope of a client's risk, and its gradient by a personal model that is found on the way.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_lightning.core.steps import HALF
from fl_lightning.losses.proximal import proximal_loss

if TYPE_CHECKING:
    from fl_lightning.core.step import Step

PULL = "pull"
"""The name of ½ ‖θ − w‖² among a step's losses; its weight is λ."""


class MoreauEnvelope:
    """F(w) = min_θ f(θ) + λ/2 ‖θ − w‖², whose gradient is λ(w − θ) where θ is the minimum.

    Args:
        weight: λ, > 0, as the step has it for `PULL`.
        lr: rate of the plain steps on θ, > 0.
        num_steps: how many a mini-batch, >= 1.
    """

    def __init__(self, weight: float, lr: float, num_steps: int) -> None:
        self.weight = weight
        self.lr = lr
        self.num_steps = num_steps
        self._wide: dict[int, Tensor] = {}

    def begin(self, theta: Sequence[nn.Parameter]) -> None:
        """Begin a fit: what is in half precision of θ steps on float32 copies, or small steps would be lost."""
        self._wide = {place: own.detach().float() for place, own in enumerate(theta) if own.dtype in HALF}

    def gradients(
        self,
        step: Step,
        theta: Sequence[nn.Parameter],
        w: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter] = (),
    ) -> list[Tensor]:
        """∇F on a mini-batch, after θ, through which the phase passes, has gone on from where it was.

        Logs the losses of the last step on θ, and shows its pass to the terms.

        Args:
            step: the mini-batch.
            theta: θ's parameters, which move.
            w: parameters, in θ's order.
            others: more parameters that the step's terms reach.

        Returns:
            λ(w − θ) and what terms that see w add to it, and the gradients with respect to `others`.
        """
        for _ in range(self.num_steps):
            out = step.forward()
            values = {**step.values(out), PULL: proximal_loss(theta, w)}
            slopes = step.gradients(step.total(values), [*theta, *w, *others])
            self._descend(theta, slopes[: len(theta)])
        step.log(values)
        step.observe(out)
        with torch.no_grad():
            slopes = slopes[len(theta) :]
            for slope, own, near in zip(slopes, w, theta, strict=False):
                slope += self.weight * (own - near)
        return slopes

    @torch.no_grad()
    def _descend(self, theta: Sequence[nn.Parameter], slopes: Sequence[Tensor]) -> None:
        for place, (own, slope) in enumerate(zip(theta, slopes, strict=True)):
            wide = self._wide.get(place, own)
            wide.add_(slope.to(wide.dtype), alpha=-self.lr)
            if wide is not own:
                own.copy_(wide)
