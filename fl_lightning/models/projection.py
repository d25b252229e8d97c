"""A projection between body and classifier, as contrastive methods put there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.split import SplitModel

_SMALLEST_NORM = 1e-6  # a shorter vector is not blown up to length 1


class UnitLength(nn.Module):
    """Vectors [B, S] over their lengths, computed in float32 or wider."""

    def forward(self, z: Tensor) -> Tensor:
        """Return vectors [B, S] of length 1."""
        with torch.autocast(z.device.type, enabled=False):
            wide = z if z.dtype == torch.float64 else z.float()
            return F.normalize(wide, eps=_SMALLEST_NORM).to(z.dtype)


def add_projection(
    model: SplitModel, size: int, unit_length: bool = True, key: str = "method.projection_size"
) -> SplitModel:
    """Give a model z = g(f(x)) [B, size], g = Linear(D, D) → ReLU → Linear(D, size), and a linear head on it.

    In place; the new layers are drawn from the global streams. Returns `model`.

    Args:
        model: its head must be one linear layer, which gives way to a new one.
        size: of the projection.
        unit_length: put z on the unit sphere, z = g(f(x)) / ‖g(f(x))‖.
        key: what asks for the projection, for the error.

    Raises:
        ConfigError: if the head is more than one linear layer.
    """
    width, layer = model.embedding_size, model.classification_layer
    require(layer is model.head, key, "needs a head of one linear layer")
    on_sphere = [UnitLength()] if unit_length else []
    model.body.append(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size), *on_sphere)
    model.head = nn.Linear(size, model.num_classes, bias=layer.bias is not None)
    model.embedding_size = size
    return model
