"""How much clients take of each other's models: more of those that are like their own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data" (FedAMP), AAAI
2021: attentive message passing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fl_lightning.core.message import Message
from fl_lightning.shapes import checked


@checked
def attentive_shares(points: Float[Tensor, "N P"], alpha: float = 1.0, sigma: float = 1.0) -> Float[Tensor, "N N"]:
    """ξ_ij = α/σ · exp(−‖w_i − w_j‖²/σ) for j ≠ i, and ξ_ii = 1 − Σ_j ξ_ij.

    Where Σ_{j≠i} ξ_ij would exceed 1, they are scaled to 1.

    Args:
        points: w, [N, P], each client's weights.
        alpha: α, > 0.
        sigma: σ, > 0, in units of squared distances.

    Returns:
        ξ, [N, N] float64 on the CPU; rows sum to 1.

    >>> attentive_shares(torch.tensor([[0.0], [0.0], [99.0]]), alpha=0.25)
    tensor([[0.7500, 0.2500, 0.0000],
            [0.2500, 0.7500, 0.0000],
            [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    points = points.cpu().double()
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    xi = alpha / sigma * torch.exp(-squares / sigma)
    xi.fill_diagonal_(0)
    xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
    return xi + (1 - xi.sum(1)).diag()


@dataclass(frozen=True)
class AttentiveShares:
    """`attentive_shares` of the models in messages, by which a server can combine them.

    Args:
        compared: names of the weights whose distance counts.
        alpha: α, > 0.
        sigma: σ, > 0.
    """

    compared: Sequence[str]
    alpha: float
    sigma: float

    def __call__(self, messages: Mapping[int, Message]) -> Tensor:
        """ξ, [N, N], of messages by client."""
        models = [torch.cat([m.weights[name].reshape(-1) for name in self.compared]) for m in messages.values()]
        return attentive_shares(torch.stack(models), self.alpha, self.sigma)
