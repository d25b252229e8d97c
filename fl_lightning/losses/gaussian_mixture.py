"""A class-conditional Gaussian mixture in the embedding space, whose Gaussians travel from client to client.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning"
(DRDFL), 2025, equations 5 to 7 and lines 6, 9 and 10 of Algorithm 1. Covariances are diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.aggregation import TensorMean
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Artifact, Message
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.seeding import torch_generator
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.aggregation import RuleFactory
    from fl_lightning.core.host import Host, OwnData

EMAWhen = Literal["round", "step"]
ClassPrior = Literal["uniform", "local"]
PosteriorClasses = Literal["all", "present"]
LARGEST_LOG_VARIANCE = 6.0  # and −6 the smallest: without a floor the likelihood has no bound
RAREST_CLASS = 1e-6  # prior of a class that the client does not hold


@dataclass(frozen=True)
class Mixture:
    """What the class Gaussians are trained for, and how they are merged.

    Args:
        likelihood_weight: λ of L_PR = L_cls + λ L_log, >= 0.
        ema: α in [0, 1], what is kept of the own class Gaussians; 1 ignores the received ones, 0 copies them.
        ema_when: move the class Gaussians once a ``round``, or before every local ``step``.
        class_prior: p(k) of L_cls (Eq. 6): ``uniform``, or the ``local`` label frequency (at least 1e-6).
        posterior_classes: classes in the denominator of L_cls: ``all``, or those ``present`` locally.
        update_absent: whether the Gaussians of classes that the client does not hold are trained, too, as line 10 of
            Algorithm 1 has it.
    """

    likelihood_weight: float = 1.0
    ema: float = 0.99
    ema_when: EMAWhen = "round"
    class_prior: ClassPrior = "uniform"
    posterior_classes: PosteriorClasses = "all"
    update_absent: bool = False

    def __post_init__(self) -> None:
        require(self.likelihood_weight >= 0, "Mixture.likelihood_weight", "must be >= 0", self.likelihood_weight)
        require(0 <= self.ema <= 1, "Mixture.ema", "must be in [0, 1]", self.ema)
        require_choices(
            "Mixture",
            ema_when=(self.ema_when, EMAWhen),
            class_prior=(self.class_prior, ClassPrior),
            posterior_classes=(self.posterior_classes, PosteriorClasses),
        )


@checked
def gaussian_log_density(
    z: Float[Tensor, "B D"], mean: Float[Tensor, "K D"], log_variance: Float[Tensor, "K D"]
) -> Float[Tensor, "B K"]:
    """Log density of every embedding under every class's diagonal Gaussian, the log N of Eq. 6 and 7.

    log N_{b,k} = −½ Σ_j [ log 2π + s_{k,j} + (z_{b,j} − μ_{k,j})² exp(−s_{k,j}) ], with s = `log_variance` in [−6, 6].

    Args:
        z: [B, D] embeddings.
        mean: [K, D] class means μ.
        log_variance: [K, D] class log-variances; clamped to [−6, 6], without a gradient outside.

    Returns:
        [B, K], float32 under every precision (float64 for float64 inputs).

    Raises:
        ValueError: if sizes do not fit.

    >>> z, mean = torch.tensor([[.5, .5]]), torch.tensor([[0., 0.], [1., 1.], [2., 0.]])
    >>> variance = torch.tensor([[1., 1.], [.25, 4.], [1., 1.]])
    >>> [round(value, 4) for value in gaussian_log_density(z, mean, variance.log())[0].tolist()]
    [-2.0879, -2.3691, -3.0879]
    """
    if z.shape[-1] != mean.shape[-1] or mean.shape != log_variance.shape:
        raise ValueError(
            f"gaussian_log_density: `z` is {tuple(z.shape)}, `mean` {tuple(mean.shape)} and `log_variance` "
            f"{tuple(log_variance.shape)}; they must be [B, D], [K, D] and [K, D]."
        )
    with torch.autocast(z.device.type, enabled=False):
        s = widened(log_variance).clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)
        squares = (widened(z)[:, None, :] - widened(mean)).square()  # (B, K, D)
        return -0.5 * (math.log(2 * math.pi) + s + squares * (-s).exp()).sum(-1)


@checked
def gaussian_mixture_loss(
    z: Float[Tensor, "B D"],
    y: Int[Tensor, " B"],
    mean: Float[Tensor, "K D"],
    log_variance: Float[Tensor, "K D"],
    log_prior: Float[Tensor, " K"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Classification and likelihood loss of a Gaussian mixture, L_cls (Eq. 6) and L_log (Eq. 7).

    L_cls = 1/B Σ_b −log( p(y_b) N_{b,y_b} / Σ_k p(k) N_{b,k} ),  L_log = 1/B Σ_b −log N_{b,y_b}.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        mean: [K, D] class means.
        log_variance: [K, D] class log-variances, clamped to [−6, 6].
        log_prior: [K] log p(k), up to a constant; −inf leaves a class out of the denominator, but never a sample's own
            class. None is uniform.

    Returns:
        The two scalars, float32 under every precision; finite for ‖z‖∞ <= 1e3.

    Raises:
        ValueError: if sizes do not fit.

    >>> z, mean = torch.tensor([[.5, .5]]), torch.tensor([[0., 0.], [1., 1.]])
    >>> losses = gaussian_mixture_loss(z, torch.tensor([0]), mean, torch.tensor([[1., 1.], [.25, 4.]]).log())
    >>> [round(float(loss), 4) for loss in losses]
    [0.5624, 2.0879]
    """
    log_density = gaussian_log_density(z, mean, log_variance)
    with torch.autocast(z.device.type, enabled=False):
        scores = log_density
        if log_prior is not None:
            own = F.one_hot(y, len(mean)).bool()
            scores = log_density + torch.where(own & log_prior.isneginf(), 0.0, log_prior)
        return F.cross_entropy(scores, y), -log_density.gather(1, y[:, None]).mean()


@checked
def moved_average(
    own: Float[Tensor, "*shape"], received: Float[Tensor, "*shape"], ema: float
) -> Float[Tensor, "*shape"]:
    """Exponential moving average with a neighbour's value, line 6 of Algorithm 1: own + (1 − α)(received − own).

    Equal values stay equal to the bit; α = 1 ignores the neighbour, α = 0 copies it.

    >>> [round(value, 4) for value in moved_average(torch.tensor([1., 2.]), torch.tensor([3., -2.]), 0.99).tolist()]
    [1.02, 1.96]
    """
    return torch.lerp(widened(own), widened(received), 1 - ema)


class GaussianMixture(Term):
    """Pull embeddings towards their class's Gaussian and away from the others': DRDFL's L_PR = L_cls + λ L_log.

    The classes' means and log-variances [K, D] are parameters that the client keeps and sends. What it receives moves
    them by an exponential moving average, means as means and variances as variances; a client that joins later copies
    instead. All clients begin with the same means, drawn from N(0, 1), and unit variances.

    Args:
        weight: factor of L_PR, >= 0.
        mixture: what the class Gaussians are trained for, and how they are merged.
        size: D; null takes the model's embedding size.
    """

    paper = "Guo et al., DRDFL (2025)"
    reaches = ("model.body",)

    def __init__(self, weight: float = 1.0, mixture: Mixture = Mixture(), size: int | None = None) -> None:
        super().__init__(weight)
        require(size is None or size >= 1, "GaussianMixture.size", "must be >= 1 or null", size)
        self.options = mixture
        self.size = size
        self._heard = False

    class_mean: nn.Parameter  # [K, D]
    class_log_variance: nn.Parameter  # [K, D]
    class_count: Tensor  # [K] int64, training samples of each class
    finished_fits: Tensor  # int64; 0 marks a client that never took part
    received_mean: Tensor  # [K, D], for `ema_when="step"`
    received_log_variance: Tensor  # [K, D]
    resting_mean: Tensor  # [K, D], of absent classes, which no optimizer may move
    resting_log_variance: Tensor  # [K, D]

    @override
    def setup(self, host: Host) -> None:
        if self.weight == 0:
            return
        mixtures = [own.name for own in host.terms if isinstance(own, GaussianMixture) and own.exchanges]
        rule = "may hold one GaussianMixture: its Gaussians travel under one name"
        require(len(mixtures) == 1, "method.extra_terms", rule, mixtures)
        shape = (host.model.num_classes, host.model.embedding_size if self.size is None else self.size)
        # A stream of its own, so that all clients begin alike even where each has initial weights of its own.
        stream = torch_generator(host.facts.seed, "class Gaussians")
        self.class_mean = nn.Parameter(torch.randn(shape, generator=stream))
        self.class_log_variance = nn.Parameter(torch.zeros(shape))
        self.register_buffer("class_count", torch.zeros(shape[0], dtype=torch.long))
        self.register_buffer("finished_fits", torch.zeros((), dtype=torch.long))
        for name, own in (("mean", self.class_mean.detach()), ("log_variance", self.class_log_variance.detach())):
            self.register_buffer(f"received_{name}", torch.zeros(shape), persistent=False)
            self.register_buffer(f"resting_{name}", own.clone(), persistent=False)

    @override
    def prepare(self, host: Host, data: OwnData) -> None:
        self.class_count.copy_(data.class_counts)

    # --- the loss -----------------------------------------------------------------------------------------------------

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return self.combined(*self.parts(out))

    def parts(self, out: Forward) -> tuple[Tensor, Tensor]:
        """L_cls and L_log of a mini-batch, on ``out.z``."""
        self._settle()
        if self.options.ema_when == "step" and self._heard and self.training:
            self._move()
        mean: Tensor = self.class_mean
        log_variance: Tensor = self.class_log_variance
        if not self.options.update_absent:
            self.resting_mean.copy_(mean.detach())
            self.resting_log_variance.copy_(log_variance.detach())
            held = (self.class_count > 0)[:, None]
            mean = torch.where(held, mean, mean.detach())
            log_variance = torch.where(held, log_variance, log_variance.detach())
        return gaussian_mixture_loss(out.z, out.y, mean, log_variance, self._log_prior())

    def combined(self, classification: Tensor, likelihood: Tensor) -> Tensor:
        """L_PR of its two parts."""
        weight = self.options.likelihood_weight
        return classification if weight == 0 else classification + weight * likelihood

    def _log_prior(self) -> Tensor | None:
        if self.options.class_prior == "uniform" and self.options.posterior_classes == "all":
            return None
        count = self.class_count.float()  # in half precision a quotient of integers would be narrow
        frequency = count / count.sum().clamp(min=1)
        prior = frequency.clamp(min=RAREST_CLASS) if self.options.class_prior == "local" else torch.ones_like(frequency)
        absent = (self.class_count == 0) & (self.options.posterior_classes == "present")
        return prior.log().masked_fill(absent, -torch.inf)

    @override
    def observe(self, host: Host, out: Forward) -> None:
        self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Clamp what is stored, so that what travels is what the density sees, and put absent classes' rows back.

        Before every pass, too, and after the fit: a method whose pass is seen before it steps would leave a step out.
        """
        self.class_log_variance.clamp_(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)
        if not self.options.update_absent:  # weight decay or momentum would move them without a gradient
            held = (self.class_count > 0)[:, None]
            self.class_mean.copy_(torch.where(held, self.class_mean, self.resting_mean))
            self.class_log_variance.copy_(torch.where(held, self.class_log_variance, self.resting_log_variance))

    @override
    def after_fit(self, host: Host) -> None:
        self._settle()
        self.finished_fits += 1

    # --- what travels -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @override
    def receive(self, host: Host, message: Message) -> None:
        mean, log_variance = message.artifacts.get("class_mean"), message.artifacts.get("class_log_variance")
        self._heard = isinstance(mean, Tensor) and isinstance(log_variance, Tensor)
        if isinstance(mean, Tensor) and isinstance(log_variance, Tensor):
            self.received_mean.copy_(mean)
            self.received_log_variance.copy_(log_variance)
            if self.finished_fits == 0 and host.facts.is_newcomer:
                self.class_mean.copy_(mean)
                self.class_log_variance.copy_(log_variance)
            elif self.options.ema_when == "round":
                self._move()
        self.resting_mean.copy_(self.class_mean)  # a phase without the term must find its own, not another client's
        self.resting_log_variance.copy_(self.class_log_variance)

    @torch.no_grad()
    def _move(self) -> None:
        """Line 6 of Algorithm 1; variances are averaged as variances, and where they are equal keep every bit."""
        own, received = self.class_log_variance, self.received_log_variance
        moved = moved_average(widened(own).exp(), widened(received).exp(), self.options.ema).log()
        unmoved = own == received if self.options.ema < 1 else torch.ones_like(own, dtype=torch.bool)
        own.copy_(torch.where(unmoved, own, received if self.options.ema == 0 else moved))
        self.class_mean.copy_(moved_average(self.class_mean, self.received_mean, self.options.ema))

    @override
    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        return {
            "class_mean": self.class_mean.detach().clone(),
            "class_log_variance": self.class_log_variance.detach().clone(),
        }

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        shape = tuple(self.class_mean.shape)
        return {"class_mean": shape, "class_log_variance": shape}

    @override
    def rules(self) -> Mapping[str, RuleFactory]:
        return {"class_log_variance": VarianceMean}


class VarianceMean(TensorMean):
    """Mean of variances that are sent as logarithms, weighted by samples."""

    in_parts = True
    hears_mean = False

    @override
    def add(self, value: Tensor, num_samples: int) -> None:
        super().add(value.exp(), num_samples)

    @override
    def result(self, previous: Tensor | None) -> Tensor | None:
        mean = super().result(None)
        return previous if mean is None else mean.log()
