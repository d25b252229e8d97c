"""Features held to class embeddings that all clients share: by their angle, and by their length.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized Feature Information
for Personalized Federated Learning", ICCV 2023. Checked against the authors' code.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.precision import widened
from fl_lightning.shapes import checked


@checked
def angle_loss(v: Float[Tensor, "B D"], y: Int[Tensor, " B"], embeddings: Float[Tensor, "C D"]) -> Float[Tensor, ""]:
    """Cross-entropy of cosines to class embeddings, −log( exp cos(v, e_y) / Σ_c exp cos(v, e_c) ), mean over the batch.

    Args:
        v: [B, D] features.
        y: [B] int64 classes.
        embeddings: e, [C, D].

    Returns:
        Scalar, float32; its gradient reaches both.

    >>> import torch
    >>> round(float(angle_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.eye(2))), 4)
    0.3133
    """
    return F.cross_entropy(F.normalize(widened(v)) @ F.normalize(widened(embeddings)).T, y)


@checked
def magnitude_loss(v: Float[Tensor, "B D"], y: Int[Tensor, " B"], targets: Float[Tensor, "C D"]) -> Float[Tensor, ""]:
    """‖v − ē_y‖, the norm of the mini-batch's matrix [B, D].

    Args:
        v: [B, D] features.
        y: [B] int64 classes.
        targets: ē, [C, D], constants.

    Returns:
        Scalar, float32.

    >>> import torch
    >>> float(magnitude_loss(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 0]), torch.zeros(1, 2)))
    5.0
    """
    return (widened(v) - targets[y]).norm()


def guidance_losses(v: Tensor, y: Tensor, embeddings: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Both losses by their names, ``angle`` and ``magnitude``, with the arguments of each."""
    v = widened(v)  # once, so that both gradients are summed before they are narrowed
    return {"angle": angle_loss(v, y, embeddings), "magnitude": magnitude_loss(v, y, targets)}
