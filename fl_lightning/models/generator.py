"""A conditional generator of embeddings: noise and a class in, an embedding of that class out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fl_lightning.models.checks import require_size
from fl_lightning.shapes import checked


class FeatureGenerator(nn.Module):
    """G(ε, y): Linear(E + C → H), batch norm, ReLU, Linear(H → D); (E + C)H + 3H + (H + 1)D parameters.

    Args:
        num_classes: C.
        embedding_size: D, of the embeddings that it makes.
        noise_size: E.
        hidden: H.

    Raises:
        ConfigError: if a size is below 1.
    """

    def __init__(self, num_classes: int, embedding_size: int, noise_size: int = 32, hidden: int = 256) -> None:
        super().__init__()
        sizes = (("num_classes", num_classes), ("embedding_size", embedding_size), ("noise_size", noise_size))
        for name, size in (*sizes, ("hidden", hidden)):
            require_size(name, size)
        self.num_classes = num_classes
        self.first = nn.Linear(noise_size + num_classes, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, embedding_size)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Embeddings [B, D] of noise [B, E] and classes [B]."""
        condition = F.one_hot(y, self.num_classes).to(noise.dtype)
        return self.last(F.relu(self.norm(self.first(torch.cat([noise, condition], 1)))))

    @torch.no_grad()
    def flattened(self) -> Tensor:
        """The generator in eval mode as one vector of as many values as it has parameters.

        Batch norm's running statistics go into its scale and shift, so that they need not travel apart.
        """
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        shift = norm.bias - norm.running_mean * scale
        parts = (self.first.weight, self.first.bias, scale, shift, self.last.weight, self.last.bias)
        return torch.cat([part.reshape(-1) for part in parts])


def num_generator_values(num_classes: int, embedding_size: int, noise_size: int, hidden: int) -> int:
    """Values of a `FeatureGenerator` as it travels.

    >>> num_generator_values(num_classes=10, embedding_size=32, noise_size=32, hidden=256)
    19744
    """
    return (noise_size + num_classes) * hidden + 3 * hidden + (hidden + 1) * embedding_size


@checked
def generate(
    values: Float[Tensor, " P"],
    noise: Float[Tensor, "B E"],
    y: Int[Tensor, " B"],
    num_classes: int,
    embedding_size: int,
) -> Float[Tensor, "B D"]:
    """Embeddings [B, D] by a generator that came as one vector (`FeatureGenerator.flattened`).

    Args:
        values: [P] the generator.
        noise: [B, E].
        y: [B] int64 classes.
        num_classes: C.
        embedding_size: D.
    """
    wide = noise.shape[1] + num_classes
    hidden = (len(values) - embedding_size) // (wide + 3 + embedding_size)
    first, bias, scale, shift, last, last_bias = values.split(
        [wide * hidden, hidden, hidden, hidden, hidden * embedding_size, embedding_size]
    )
    condition = F.one_hot(y, num_classes).to(noise.dtype)
    h = F.linear(torch.cat([noise, condition], 1), first.view(hidden, wide), bias)
    return F.linear(F.relu(h * scale + shift), last.view(embedding_size, hidden), last_bias)
