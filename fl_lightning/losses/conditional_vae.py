"""What a conditional variational autoencoder adds to a plain one: a Gaussian prior for every class.

Sohn, Lee, Yan, "Learning Structured Output Representation using Deep Conditional Generative Models", NeurIPS 2015, has
priors that depend on a condition. Here the condition is the class, and its prior the moments of another network's
features of that class (Guo et al., DRDFL, 2025, appendix VII-B3, which gives no formula).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.message import ClassMeans, accumulation_dtype
from fl_lightning.core.precision import widened
from fl_lightning.losses.variational import clamped
from fl_lightning.shapes import checked


@checked
def kl_to_normal(
    mean: Float[Tensor, "B D"],
    log_variance: Float[Tensor, "B D"],
    prior_mean: Float[Tensor, "B D"],
    prior_variance: Float[Tensor, "B D"],
) -> Float[Tensor, ""]:
    """Divergence of diagonal Gaussian posteriors N(μ, σ²) from priors N(m, s²) of their own.

    L = 1/B Σ_b ½ Σ_j [ log(s²/σ²) + (σ² + (μ − m)²)/s² − 1 ], with log σ² = `log_variance` in [−10, 10]. Zero iff μ = m
    and σ² = s².

    Args:
        mean: [B, D] μ.
        log_variance: [B, D] log σ²; clamped to [−10, 10], without a gradient outside.
        prior_mean: [B, D] m.
        prior_variance: [B, D] s² > 0.

    Returns:
        Scalar, float32 under every precision (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes differ.

    >>> one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    >>> float(kl_to_normal(mean=one, log_variance=zero, prior_mean=zero, prior_variance=one))
    0.5
    """
    shapes = [tuple(tensor.shape) for tensor in (mean, log_variance, prior_mean, prior_variance)]
    if len(set(shapes)) > 1:
        raise ValueError(
            "kl_to_normal: `mean` is {}, `log_variance` {}, `prior_mean` {} and `prior_variance` {}; "
            "all need the same shape.".format(*shapes)
        )
    with torch.autocast(mean.device.type, enabled=False):
        log_ratio = clamped(log_variance) - widened(prior_variance).log()
        distance = (widened(mean) - widened(prior_mean)).square() / widened(prior_variance)
        return 0.5 * (log_ratio.exp() - log_ratio + distance - 1).sum(1).mean()


@checked
def class_moments(
    features: Float[Tensor, "N D"], y: Int[Tensor, " N"], num_classes: int, variance_floor: float
) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C D"]]:
    """Mean and variance of the features of every class, at every coordinate by itself.

    Args:
        features: [N, D].
        y: [N] int64 classes in [0, C).
        num_classes: C.
        variance_floor: least variance of a class that occurs, > 0; that of a single sample would be 0.

    Returns:
        Means and (population) variances, [C, D] float32 each (float64 for float64 features); 0 and 1 for a class that
        does not occur.

    >>> mean, variance = class_moments(torch.tensor([[1.], [3.], [5.]]), torch.tensor([0, 0, 1]), 3, 0.01)
    >>> mean.flatten().tolist(), [round(value, 2) for value in variance.flatten().tolist()]
    ([2.0, 5.0, 0.0], [1.0, 0.01, 1.0])
    """
    means = ClassMeans.from_samples(features, y, num_classes)
    dtype = accumulation_dtype(features.device)
    deviations = features.to(dtype) - means.mean.to(dtype)[y]
    variance = (
        ClassMeans.from_samples(deviations.square(), y, num_classes).mean.to(means.mean).clamp(min=variance_floor)
    )
    return means.mean, torch.where(means.valid[:, None], variance, 1.0)
