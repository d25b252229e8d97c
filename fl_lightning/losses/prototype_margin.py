"""Prototypes that are trained to be near their own class's uploads and, by a margin, far from the others'.

Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024. Used on the server.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.precision import widened
from fl_lightning.shapes import checked

Gap = Literal["nearest", "pairwise"]


@checked
def prototype_margin_loss(
    u: Float[Tensor, "M D"], y: Int[Tensor, " M"], prototypes: Float[Tensor, "C D"], margin: float
) -> Float[Tensor, ""]:
    """Cross-entropy of negative distances, with a margin that the own class must overcome.

    L = mean over b of −log softmax_k( −(‖u_b − T_k‖₂ + δ [k = y_b]) )_{y_b}. A distance of 0 has gradient 0.

    Args:
        u: [B, D] uploaded class means; constants.
        y: [B] int64 their classes.
        prototypes: [C, D], T.
        margin: δ >= 0; 0 leaves the plain cross-entropy.

    Returns:
        Scalar, float32.

    Raises:
        ValueError: if sizes do not fit.

    >>> prototypes = torch.tensor([[0., 0.], [3., 4.]])
    >>> round(float(prototype_margin_loss(torch.zeros(1, 2), torch.tensor([0]), prototypes, margin=5.0)), 4)
    0.6931
    """
    if u.shape[-1] != prototypes.shape[-1]:
        raise ValueError(
            f"prototype_margin_loss: `u` is {tuple(u.shape)} but `prototypes` is {tuple(prototypes.shape)}; "
            "both need the same last size."
        )
    with torch.autocast(u.device.type, enabled=False):
        # Not by expanding the square, which rounds below 0 where a root has no value and at 0 an infinite slope.
        distances = torch.cdist(widened(u), widened(prototypes), compute_mode="donot_use_mm_for_euclid_dist")
        return F.cross_entropy(-(distances + margin * F.one_hot(y, len(prototypes))), y)


@checked
def prototype_gap(means: Float[Tensor, "M D"], kind: Gap = "nearest") -> float:
    """How far classes are apart, at the most.

    Args:
        means: [M, D], one mean for each class that was uploaded.
        kind: ``nearest`` takes the largest distance of a class to its nearest other class (the authors' code),
            ``pairwise`` the largest distance between any two.

    Returns:
        The gap; 0 for fewer than two classes.

    >>> means = torch.tensor([[0.], [3.], [10.]])
    >>> prototype_gap(means), prototype_gap(means, "pairwise")
    (7.0, 10.0)
    """
    if len(means) < 2:
        return 0.0
    distances = torch.cdist(widened(means), widened(means), compute_mode="donot_use_mm_for_euclid_dist")
    if kind == "pairwise":
        return float(distances.max())
    return float(distances.fill_diagonal_(torch.inf).min(1).values.max())
