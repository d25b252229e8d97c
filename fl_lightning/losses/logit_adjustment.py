"""Cross-entropies that take a client's class frequencies out of what its logits learn.

Ren, Yu, Sheng, Ma, Zhao, Yi, Li, "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020, equation 3,
as FedRoD trains its generic head (ICLR 2022, equation 10).
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.precision import widened
from fl_lightning.shapes import checked


@checked
def balanced_softmax_loss(
    logits: Float[Tensor, "B C"], y: Int[Tensor, " B"], counts: Int[Tensor, " C"], gamma: float = 1.0
) -> Float[Tensor, ""]:
    """Cross-entropy of logits to which the classes' log-frequencies are added: a balanced softmax.

    L = −1/B Σ_b log( n_{y_b}^γ exp(g_{b,y_b}) / Σ_c n_c^γ exp(g_{b,c}) ). A class of which the client has no sample is
    no rival, and its logit gets no gradient, but for γ = 0, which is the cross-entropy.

    Args:
        logits: g, [B, C].
        y: [B] int64 classes, of which the client has samples.
        counts: n, [C] int64, the client's training samples of each class.
        gamma: γ, >= 0.

    Returns:
        Scalar, float32.

    >>> import torch
    >>> round(float(balanced_softmax_loss(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([3, 1, 0]))), 4)
    0.2877
    """
    return F.cross_entropy(widened(logits) + (widened(counts) ** gamma).log(), y)
