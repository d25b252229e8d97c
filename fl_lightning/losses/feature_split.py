"""Splitting images into what a classifier needs and the rest, and the two augmentations that the split is learnt with.

Yang, Zhang, Zheng, Tian, Peng, Liu, Han, "FedFed: Feature Distillation against Data Heterogeneity in Federated
Learning", NeurIPS 2023: x = x_r + x_s, with x_r = q(x) an autoencoder's reconstruction and x_s what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.precision import widened
from fl_lightning.shapes import checked


def protected_copies(
    x: Tensor, robust: Tensor, noise_stds: Sequence[float], pixel_std: Tensor | float = 1.0
) -> list[Tensor]:
    """Noisy copies of the sensitive part of images, x_p^j = x_s + n_j with x_s = x − x_r and n_j ~ N(0, σ_j²).

    Every pixel of every image has a draw of its own: one noise image for a whole batch would cancel in the difference
    of two of its copies. For images normalised by a mean and a standard deviation s, x_r and σ_j stay on the [0, 1]
    scale and the copies come out normalised like the images: x_p = x − (x_r − n)/s.

    Args:
        x: [B, C, H, W] images.
        robust: [B, C, H, W] x_r, differentiable.
        noise_stds: σ_j of each copy.
        pixel_std: s, which divides the pixels of `x`; 1 for images in [0, 1].

    Returns:
        One [B, C, H, W] a copy; with x_r = 0 and σ = 0 it is `x`.

    >>> x, robust = torch.tensor([[[[0.75, 0.5]]]]), torch.tensor([[[[0.25, 0.5]]]])
    >>> protected_copies(x, robust, noise_stds=[0.0])[0].tolist()
    [[[[0.5, 0.0]]]]
    """
    robust = widened(robust)
    return [x - (robust - std * torch.randn_like(robust)) / pixel_std for std in noise_stds]


@checked
def mixup_cross_entropy(
    logits: Float[Tensor, "B C"], y: Int[Tensor, " B"], other: Int[Tensor, " B"], share: Tensor | float
) -> Float[Tensor, ""]:
    """Cross-entropy of mixed inputs, λ CE(y) + (1 − λ) CE(y').

    Args:
        logits: [B, C] of λ x + (1 − λ) x'.
        y: [B] int64 classes of x.
        other: [B] int64 classes of x'.
        share: λ in [0, 1].

    Returns:
        Scalar, float32.

    >>> logits = torch.tensor([[0., 0.]])
    >>> round(float(mixup_cross_entropy(logits, torch.tensor([0]), torch.tensor([1]), 0.25)), 4)
    0.6931
    """
    logits = widened(logits)
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, other)


@checked
def mosaic(x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """As many images as there are, each of four quarters cut out of four images of the batch.

    The four are drawn without replacement where there are so many; the quarters are cut at one random place.

    Args:
        x: [B, C, H, W] images.

    Returns:
        [B, C, H, W] images.

    >>> mosaic(torch.full((5, 1, 8, 8), 0.5)).unique().tolist()
    [0.5]
    """
    count, _, height, width = x.shape
    tall, wide = height // 2, width // 2
    enough = count >= 4
    order = torch.rand(count, count, dtype=torch.float32).argsort(1)
    sources = order[:, :4] if enough else torch.randint(count, (count, 4))
    rows = torch.randint(height - tall + 1, (count, 1)) + torch.arange(tall)  # [B, H/2]
    columns = torch.randint(width - wide + 1, (count, 1)) + torch.arange(wide)  # [B, W/2]
    # Drawn on the CPU, on every device alike; moved once, without waiting.
    sources, rows, columns = (drawn.to(x.device, non_blocking=True) for drawn in (sources, rows, columns))
    out = x.clone()
    for quarter, (top, left) in enumerate(((0, 0), (0, wide), (tall, 0), (tall, wide))):
        cut = x[sources[:, quarter, None, None], :, rows[:, :, None], columns[:, None, :]]
        out[:, :, top : top + tall, left : left + wide] = cut.permute(0, 3, 1, 2)  # [B, H/2, W/2, C] before
    return out
