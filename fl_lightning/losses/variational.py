"""The losses of a variational autoencoder: the KL divergence from the prior, and the reconstruction.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning"
(DRDFL), 2025, equations 8 and 11.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host

Reduction = Literal["sum", "mean"]
LARGEST_LOG_VARIANCE = 10.0  # and −10 the smallest


@dataclass
class Latent:
    """What a variational method adds to a forward pass; a step fills in what its losses need.

    Args:
        mean: [B, D] of the posterior q(z|x).
        log_variance: [B, D] of the posterior.
        sample: [B, D] drawn from the posterior, differentiable in `mean` and `log_variance`.
        adversary_logits: [B, C] the adversary's answer to the sample, with the sample as a constant.
        uniform_logits: [B, C] the adversary's answer to the sample, with the adversary as a constant.
        adversary_classes: [C] bool, classes that the adversary tells apart; None for all.
        reconstruction: [B, …] the inputs as the decoder gives them back.
    """

    mean: Tensor
    log_variance: Tensor
    sample: Tensor
    adversary_logits: Tensor | None = None
    uniform_logits: Tensor | None = None
    adversary_classes: Tensor | None = None
    reconstruction: Tensor | None = None


@dataclass
class LatentForward(Forward):
    """A forward pass through the latent part alone: no feature maps, and the sample as embedding.

    Args:
        latent: the latent part.
    """

    latent: Latent | None = None

    @classmethod
    def of(cls, x: Tensor, y: Tensor, latent: Latent) -> LatentForward:
        """The pass of inputs [B, …] of classes [B]."""
        return cls(x, y, [], latent.sample, latent.sample, latent=latent)


def clamped(log_variance: Tensor) -> Tensor:
    """A posterior's log-variance in float32 and within [−10, 10], where its exponential is harmless."""
    return widened(log_variance).clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)


@checked
def kl_to_standard_normal(mean: Float[Tensor, "B D"], log_variance: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
    """Divergence of a diagonal Gaussian posterior from the standard normal prior, L_kl (Eq. 8).

    L = 1/B Σ_b ½ Σ_j ( μ² + exp(s) − 1 − s ), with s = `log_variance` in [−10, 10]. Zero iff μ = 0 and s = 0.

    Args:
        mean: [B, D] posterior means μ.
        log_variance: [B, D] posterior log-variances; clamped to [−10, 10], without a gradient outside.

    Returns:
        Scalar, float32 under every precision (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes differ.

    >>> round(float(kl_to_standard_normal(torch.tensor([[1., 0.]]), torch.tensor([[1., 4.]]).log())), 4)
    1.3069
    """
    _check_shapes("kl_to_standard_normal", mean=mean, log_variance=log_variance)
    with torch.autocast(mean.device.type, enabled=False):
        s = clamped(log_variance)
        return 0.5 * (widened(mean).square() + s.exp() - 1 - s).sum(1).mean()


@checked
def reconstruction_loss(
    x: Float[Tensor, B * shape], x_rec: Float[Tensor, B * shape], reduction: str = "sum"
) -> Float[Tensor, ""]:
    """Squared error of reconstructed inputs, L_rec (Eq. 11).

    L = 1/B Σ_b Σ_pixels (x − x_rec)²  for ``sum``; ``mean`` divides by the number of values of an input as well.

    Args:
        x: [B, …] inputs.
        x_rec: [B, …] their reconstructions.
        reduction: ``sum`` or ``mean`` over the values of an input; the mean over the batch in both.

    Returns:
        Scalar, float32 under every precision (float64 for float64 inputs).

    Raises:
        ValueError: if the shapes differ, or for an unknown reduction.

    >>> x, x_rec = torch.tensor([[1., 0.], [0., 1.]]), torch.tensor([[.5, .5], [0., .5]])
    >>> float(reconstruction_loss(x, x_rec)), float(reconstruction_loss(x, x_rec, "mean"))
    (0.375, 0.1875)
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"reconstruction_loss: `reduction` must be 'sum' or 'mean', got {reduction!r}")
    _check_shapes("reconstruction_loss", x=x, x_rec=x_rec)
    with torch.autocast(x.device.type, enabled=False):
        squares = (widened(x) - widened(x_rec)).square()
        return squares.flatten(1).sum(1).mean() if reduction == "sum" else squares.mean()


def _check_shapes(name: str, **tensors: Tensor) -> None:
    (first, one), (second, other) = tensors.items()
    if one.shape != other.shape:
        shapes = f"`{first}` is {tuple(one.shape)} but `{second}` is {tuple(other.shape)}"
        raise ValueError(f"{name}: {shapes}; both need the same shape.")


class LatentTerm(Term, ABC):
    """A term on a `LatentForward`, for methods that make one; they say so with ``gives_latent = True``."""

    paper = "Guo et al., DRDFL (2025)"

    def setup(self, host: Host) -> None:
        """Refuse a method without a latent.

        Raises:
            ConfigError: naming the term and the method.
        """
        rule = f"{type(self).__name__} needs a method with a latent part, which {type(host).__name__} does not have"
        require(getattr(host, "gives_latent", False), "method.extra_terms", rule)

    def latent(self, out: Forward) -> Latent:
        """The latent part of a forward pass."""
        latent = out.latent if isinstance(out, LatentForward) else None
        assert latent is not None, f"{self.name} was given a forward pass without a latent part"
        return latent


class KLToStandardNormal(LatentTerm):
    """Keep the posterior close to the standard normal prior (DRDFL's L_kl).

    Args:
        weight: factor of the term, >= 0.
    """

    @property
    @override
    def name(self) -> str:
        return "kl"

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        latent = self.latent(out)
        return kl_to_standard_normal(latent.mean, latent.log_variance)


class Reconstruction(LatentTerm):
    """Give the inputs back (DRDFL's L_rec).

    Args:
        weight: factor of the term, >= 0.
        reduction: ``sum`` over the values of an input, as the likelihood asks, or their ``mean``.
    """

    def __init__(self, weight: float = 1.0, reduction: Reduction = "sum") -> None:
        super().__init__(weight)
        require_choices("Reconstruction", reduction=(reduction, Reduction))
        self.reduction = reduction

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        reconstruction = self.latent(out).reconstruction
        assert reconstruction is not None, "the forward pass has no reconstruction"
        return reconstruction_loss(out.x, reconstruction, self.reduction)
