"""Holding a new local model to what an older one of the client says: by its predictions, or by its embeddings.

Li, Zhan, Shao, Li, Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML PKDD 2021, with the
temperature of the authors' code.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.losses.discrepancy import mean_discrepancy
from fl_lightning.shapes import checked

Transfer = Literal["KD", "MMD"]


@checked
def softened_cross_entropy(
    teacher: Float[Tensor, "B C"], student: Float[Tensor, "B C"], temperature: float
) -> Float[Tensor, ""]:
    """Cross-entropy of the student's predictions with the teacher's softened ones, softmax(teacher/τ), of logits.

    Args:
        teacher: [B, C], constants.
        student: [B, C].
        temperature: τ, > 0.

    Returns:
        Scalar, float32.

    >>> import torch
    >>> round(float(softened_cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 4.0)), 4)
    0.8133
    """
    logits = widened(student)
    return F.cross_entropy(logits, (teacher / temperature).softmax(1).to(logits))


def inheritance_loss(out: Forward, told: Forward, transfer: Transfer) -> Tensor:
    """R(w, p): how far a pass by the new model w is from the same mini-batch's by the old one p.

    Args:
        out: by w.
        told: by p, constants.
        transfer: ``KD`` takes the cross-entropy with p's predictions, softened by 4, ``MMD`` the mean discrepancy of
            embeddings.

    Returns:
        Scalar, float32.
    """
    by_predictions = transfer == "KD"
    return softened_cross_entropy(told.logits, out.logits, 4) if by_predictions else mean_discrepancy(out.z, told.z)
