"""An adversary that reads classes off a latent, and an encoder that leaves it nothing to read.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning"
(DRDFL), 2025, equations 9 and 10. The paper adds both losses; they ask the encoder for opposite things, so that the
first trains the adversary alone and the second the encoder alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.losses.variational import LatentTerm
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host


@checked
def adversarial_loss(
    logits: Float[Tensor, "B K"], y: Int[Tensor, " B"], classes: Bool[Tensor, " K"] | None = None
) -> Float[Tensor, ""]:
    """Cross-entropy of the adversary, L_adv (Eq. 9).

    L = 1/B Σ_b −log softmax(logits_b)_{y_b}.

    Args:
        logits: [B, K] of the adversary.
        y: [B] int64 classes.
        classes: [K] bool, which classes the softmax is over, those of `y` among them; None means all.

    Returns:
        Scalar, float32 under every precision (float64 for float64 inputs); 0 if `classes` is a single one.

    Raises:
        ValueError: if sizes do not fit.

    >>> round(float(adversarial_loss(torch.tensor([[1., 0., 0.]]), torch.tensor([0]))), 4)
    0.5514
    """
    _check_classes("adversarial_loss", logits, classes)
    with torch.autocast(logits.device.type, enabled=False):
        scores = widened(logits)
        return F.cross_entropy(scores if classes is None else scores.masked_fill(~classes, -torch.inf), y)


@checked
def uniform_adversarial_loss(
    logits: Float[Tensor, "B K"], classes: Bool[Tensor, " K"] | None = None
) -> Float[Tensor, ""]:
    """Cross-entropy of the adversary's answer with the uniform distribution, L_adv^u (Eq. 10).

    L = 1/B Σ_b −1/K Σ_k log softmax(logits_b)_k >= log K, with equality for uniform answers.

    Args:
        logits: [B, K] of the adversary.
        classes: [K] bool, which classes count, at least one; None means all. K is their number.

    Returns:
        Scalar, float32 under every precision (float64 for float64 inputs).

    Raises:
        ValueError: if sizes do not fit.

    >>> round(float(uniform_adversarial_loss(torch.tensor([[1., 0., 0.]]))), 4)
    1.2181
    """
    _check_classes("uniform_adversarial_loss", logits, classes)
    with torch.autocast(logits.device.type, enabled=False):
        scores = widened(logits)
        if classes is None:
            return -F.log_softmax(scores, 1).mean()
        log_shares = F.log_softmax(scores.masked_fill(~classes, -torch.inf), 1)
        return -torch.where(classes, log_shares, 0.0).sum(1).mean() / classes.sum().clamp(min=1)


def _check_classes(name: str, logits: Tensor, classes: Tensor | None) -> None:
    if classes is not None and classes.shape != logits.shape[1:]:
        shapes = f"`logits` is {tuple(logits.shape)} but `classes` is {tuple(classes.shape)}"
        raise ValueError(f"{name}: {shapes}; they must be [B, K] and [K].")


class Adversarial(LatentTerm):
    """Let an adversary read the class off the latent (DRDFL's L_adv); trains the adversary only.

    Args:
        weight: factor of the term, >= 0.
    """

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        latent = self.latent(out)
        assert latent.adversary_logits is not None, "the forward pass has no adversary"
        return adversarial_loss(latent.adversary_logits, out.y, latent.adversary_classes)


class UniformAdversarial(LatentTerm):
    """Make the adversary's answer uniform (DRDFL's L_adv^u); trains the encoder only.

    Args:
        weight: factor of the term, >= 0.
    """

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        latent = self.latent(out)
        assert latent.uniform_logits is not None, "the forward pass has no adversary"
        return uniform_adversarial_loss(latent.uniform_logits, latent.adversary_classes)
