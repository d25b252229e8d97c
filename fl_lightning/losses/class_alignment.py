"""Drawing a model that came in to a client's own features, and how much a client still has to learn.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024. Checked against the
authors' code.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.freezing import trainable, training
from fl_lightning.core.method import Method, OwnData
from fl_lightning.core.precision import widened
from fl_lightning.shapes import checked

Aligned = Literal["samples", "means"]


@checked
def class_alignment_loss(
    z: Float[Tensor, "B D"], y: Int[Tensor, " B"], means: Float[Tensor, "C D"], aligned: Aligned = "samples"
) -> Float[Tensor, ""]:
    """How far a mini-batch's classes are from their means, Σ_{c in batch} mean_{b: y_b = c} ‖z_b − μ_c‖²/D.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        means: μ, [C, D], constants.
        aligned: ``samples``, or ``means`` for Σ_c ‖mean_{b: y_b = c} z_b − μ_c‖²/D.

    Returns:
        Scalar, float32.

    >>> z, y = torch.tensor([[0.0], [2.0]]), torch.tensor([1, 1])
    >>> [float(class_alignment_loss(z, y, torch.zeros(2, 1), aligned)) for aligned in ("samples", "means")]
    [2.0, 1.0]
    """
    z = widened(z)
    means = means.to(z.dtype)
    of_class = F.one_hot(y, len(means)).to(z.dtype)
    of_class = of_class / of_class.sum(0).clamp(min=1)  # [B, C], columns sum to 1 where there is a sample
    if aligned == "samples":
        return (of_class.sum(1) * (z - means[y]).square().mean(1)).sum()
    here = of_class.sum(0) > 0
    return (of_class.T @ z - means).square().mean(1)[here].sum()


def fisher_trace(method: Method, data: OwnData) -> Tensor:
    """T = Σ_batches ‖∇ −log p(y|x)‖², the mean over the batch, of the method's model in eval mode: [].

    It is in float32, or in float64 where the model is.
    """
    parameters = trainable(method.model)
    trace = torch.zeros((), dtype=torch.float32, device=method.facts.device)
    with training(method, False), torch.enable_grad():
        for step in data.steps():
            slopes = step.gradients(step.task_loss(step.forward()), parameters)
            trace = trace + sum(widened(slope).square().sum() for slope in slopes)
    return trace
