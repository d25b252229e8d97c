"""Networks that take apart what an embedding says, by what they are told beside it."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.models.split import SplitModel


class ConditionalValve(nn.Module):
    """ReLU((γ + 1) ⊙ z + β), where γ and β are Linear(D, D), ReLU, layer norm of a condition.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))
        self.beta = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        """What passes, [B, D], of embeddings z [B, D] under one condition [D]."""
        condition = condition.to(z.dtype)
        return F.relu(z * (self.gamma(condition) + 1) + self.beta(condition))


class ConditionalPolicy(nn.Module):
    """Which part of each feature is the client's own and which is everybody's: r + s = 1, both [B, D].

    Linear(D, 2D), layer norm and ReLU of z ⊙ v/‖v‖, then a softmax over the two halves, of logits with Gumbel noise
    while training.

    Args:
        size: D.
        noisy: whether there is noise.
    """

    def __init__(self, size: int, noisy: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        self.noisy = noisy

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """R and s of embeddings z [B, D] of a client that v [D] describes."""
        scores = self.layers(z * F.normalize(context, dim=0).to(z.dtype)).unflatten(1, (2, -1))
        if self.training and self.noisy:
            scores = scores - torch.empty_like(scores).exponential_().log()
        r, s = scores.softmax(1).unbind(1)
        return r, s


def class_direction(model: SplitModel) -> Tensor:
    """The sum [D] of the classes' weight vectors in a model's head; of several linear layers' product."""
    last = model.classification_layer
    layers = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)]
    assert layers[-1] is last
    return reduce(torch.matmul, [layer.weight.detach() for layer in reversed(layers)]).sum(0)
