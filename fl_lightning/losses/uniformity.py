"""Keeping a client's classifier and embeddings as spread out as they would be on balanced data.

Son, Kim, Chung, Huang, Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024. Checked
against the authors' code, which neither normalises embeddings nor holds the kernel's width constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host


@checked
def prediction_variance_loss(logits: Float[Tensor, "B C"]) -> Float[Tensor, ""]:
    """How far the spread of each class's probability over the batch falls short of that of balanced one-hot outputs.

    L_V = 1/C Σ_c max(0, γ − σ_c), where σ_c is the standard deviation of softmax(logits)[:, c] over the batch (divisor
    B − 1) and γ = 1/√C that of a column of the CxC identity. It lies in [0, γ]; γ is a collapsed batch.

    Args:
        logits: [B, C], C being all classes of the federation.

    Returns:
        Scalar, float32; 0 (attached to the graph) for a batch of one, which has no spread.

    >>> one_hot = 50. * torch.eye(4)[[1, 2, 1, 2]]
    >>> round(float(prediction_variance_loss(one_hot)), 4)
    0.25
    """
    with torch.autocast(logits.device.type, enabled=False):
        probabilities = widened(logits).softmax(1)
        if len(logits) < 2:
            return probabilities.sum() * 0
        centred = probabilities - probabilities.mean(0)
        variance = centred.square().sum(0) / (len(logits) - 1)
        # The root has no gradient at 0, where a class's probability is the same for all.
        spread = torch.where(variance > 0, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt(), 0.0)
        return (logits.shape[1] ** -0.5 - spread).clamp(min=0).mean()


@checked
def uniformity_loss(z: Float[Tensor, "B D"], detach_bandwidth: bool = False) -> Float[Tensor, ""]:
    """Mean Gaussian potential of all pairs of embeddings: small where they are evenly spread.

    L_U = mean over pairs j < k of exp(−d²_jk / m), d²_jk = ‖z_j − z_k‖², m the median of the d² that are not 0 (the
    lower one of two). It does not change with the scale of z: with m in the graph, its gradient is orthogonal to z.

    Args:
        z: [B, D] embeddings, not normalised.
        detach_bandwidth: hold m constant in the gradient; not the paper's code.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no pair differs.

    >>> round(float(uniformity_loss(torch.tensor([[0.], [1.], [3.]]))), 4)
    0.4174
    """
    with torch.autocast(z.device.type, enabled=False):
        if len(z) < 2:
            return widened(z).sum() * 0
        squares = torch.pdist(widened(z)).square()  # [B(B − 1)/2]; in float32, it knows nothing narrower
        differ = squares > 0
        width = torch.where(differ, squares, torch.nan).nanmedian()
        width = torch.where(differ.any(), width.detach() if detach_bandwidth else width, 1.0)
        return torch.where(differ.any(), (-squares / width).exp().mean(), 0.0)


class PredictionVariance(Term):
    """Keep the variance of every class's probability over the batch (FedUV's L_V, λ).

    Args:
        weight: λ, >= 0. L_V is a mean over classes, so a weight tuned for 10 of them is weaker on 100.
    """

    paper = "Son et al., CVPR 2024"

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return prediction_variance_loss(out.logits)


class Uniformity(Term):
    """Spread embeddings evenly over their space (FedUV's L_U, μ).

    Args:
        weight: μ, >= 0.
        detach_bandwidth: hold the kernel's width constant in the gradient.
    """

    paper = "Son et al., CVPR 2024"
    reaches = ("model.body",)

    def __init__(self, weight: float = 1.0, detach_bandwidth: bool = False) -> None:
        super().__init__(weight)
        self.detach_bandwidth = detach_bandwidth

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return uniformity_loss(out.z, self.detach_bandwidth)
