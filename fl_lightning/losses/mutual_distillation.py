"""Two models that teach each other, by their predictions and their embeddings, the less the surer neither is.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation" (FedKD), Nature
Communications, 2022: adaptive mutual distillation.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fl_lightning.core.precision import widened
from fl_lightning.losses.divergence import divergence

Gradients = Literal["joint", "own"]
"""Whether a loss reaches both models, or the one alone whose loss it is."""


class View(NamedTuple):
    """What one of the models makes of a mini-batch.

    Args:
        logits: [B, C].
        z: [B, D] embeddings, one model's as they are compared with the other's.
        task: [], its cross-entropy.
    """

    logits: Tensor
    z: Tensor
    task: Tensor


def mutual_losses(own: View, other: View, gradients: Gradients = "joint") -> tuple[Tensor, Tensor]:
    """What a model learns from another: KL(p_other ‖ p) / (CE + CE_other), and MSE(z, z_other) / (CE + CE_other).

    Args:
        own: of the model whose losses they are.
        other: of the other.
        gradients: ``joint``, or ``own`` for constants of the other.

    Returns:
        Two scalars, float32.

    >>> import torch
    >>> one = View(torch.zeros(1, 2), torch.zeros(1, 1), torch.tensor(0.5))
    >>> other = View(torch.tensor([[0.0, 1.0]]), torch.ones(1, 1), torch.tensor(1.5))
    >>> [round(float(loss), 4) for loss in mutual_losses(one, other)]
    [0.0555, 0.5]
    """
    told = other if gradients == "joint" else View(*(tensor.detach() for tensor in other))
    wrong = own.task + told.task
    return divergence(told.logits, own.logits) / wrong, F.mse_loss(own.z, told.z) / wrong


def mutual_distillation(teacher: View, student: View, gradients: Gradients = "joint") -> dict[str, Tensor]:
    """What both learn from each other (`mutual_losses`), by name.

    Args:
        teacher: one of the models.
        student: the other.
        gradients: as in `mutual_losses`.

    Returns:
        The teacher's divergence, ``taught``, and distance, ``hidden``; the student's, ``teaching`` and ``matched``.
    """
    teacher, student = (view._replace(z=widened(view.z)) for view in (teacher, student))
    taught, hidden = mutual_losses(teacher, student, gradients)
    teaching, matched = mutual_losses(student, teacher, gradients)
    return {"taught": taught, "hidden": hidden, "teaching": teaching, "matched": matched}
