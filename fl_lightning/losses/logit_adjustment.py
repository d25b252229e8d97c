"""Cross-entropies that take a client's class frequencies out of what its logits learn.

Ren, Yu, Sheng, Ma, Zhao, Yi, Li, "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020, equation 3,
as FedRoD (ICLR 2022) trains its generic head; Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label
Distribution Skew via Logits Calibration" (FedLC), ICML 2022.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host, OwnData

Form = Literal["code", "paper"]


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
        Scalar, float32; float64 for float64 logits.

    >>> import torch
    >>> round(float(balanced_softmax_loss(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([3, 1, 0]))), 4)
    0.2877
    """
    logits = widened(logits)
    own = counts.to(logits.dtype)
    offsets = gamma * own.log() if gamma > 0 else torch.zeros_like(own)  # n^γ is soon infinite
    return F.cross_entropy(logits + offsets, y)


@checked
def calibrated_loss(
    logits: Float[Tensor, "B C"], y: Int[Tensor, " B"], counts: Int[Tensor, " C"], tau: float = 1.0, form: Form = "code"
) -> Float[Tensor, ""]:
    """Cross-entropy of logits less τ n_c^{−1/4}: a margin for the client's rare classes.

    With f_c the logits less their margins: ``code`` is −log( e^{f_y} / Σ_c e^{f_c} ), ``paper`` leaves c = y out of the
    sum, so that the loss has no lower bound. A class of which the client has no sample is no rival.

    Args:
        logits: [B, C].
        y: [B] int64 classes, of which the client has samples.
        counts: n, [C] int64, the client's training samples of each class.
        tau: τ, >= 0.
        form: ``code`` or ``paper``.

    Returns:
        Scalar, float32, or float64 for float64 logits; under ``paper`` 0 where there is no rival.

    >>> import torch
    >>> y, counts = torch.tensor([1]), torch.tensor([16, 1, 0])
    >>> [round(float(calibrated_loss(torch.zeros(1, 3), y, counts, 1.0, form)), 4) for form in ("code", "paper")]
    [0.9741, 0.5]
    """
    held, logits = counts > 0, widened(logits)
    margins = tau * counts.clamp(min=1).to(logits.dtype) ** -0.25
    adjusted = (logits - margins).masked_fill(~held, -torch.inf)
    if form == "code" or int(held.sum()) < 2:
        return F.cross_entropy(adjusted, y) * (form == "code")
    own = adjusted.gather(1, y[:, None])
    return (adjusted.scatter(1, y[:, None], -torch.inf).logsumexp(1) - own[:, 0]).mean()


class OfFrequencies(Term, ABC):
    """A loss that knows how many training samples of each class the client has."""

    class_counts: Tensor  # n, [C] int64

    @override
    def setup(self, host: Host) -> None:
        self.register_buffer("class_counts", torch.ones(host.model.num_classes, dtype=torch.long), persistent=False)

    @override
    def prepare(self, host: Host, data: OwnData) -> None:
        self.class_counts.copy_(data.class_counts)


class BalancedSoftmax(OfFrequencies):
    """The cross-entropy of a balanced softmax, −log( n_y^γ e^{g_y} / Σ_c n_c^γ e^{g_c} ).

    Args:
        weight: factor of the loss, >= 0.
        gamma: γ, >= 0; 0 is the cross-entropy.
    """

    paper = "Ren et al., NeurIPS 2020"

    def __init__(self, weight: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__(weight)
        require(gamma >= 0, "BalancedSoftmax.gamma", "must be >= 0", gamma)
        self.gamma = gamma

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return balanced_softmax_loss(out.logits, out.y, self.class_counts, self.gamma)


class Calibrated(OfFrequencies):
    """The cross-entropy of calibrated logits, f_c = g_c − τ n_c^{−1/4}.

    Args:
        weight: factor of the loss, >= 0.
        tau: τ, >= 0.
        form: ``code``, as all public codes have it, or ``paper``, which leaves c = y out of the sum.
    """

    paper = "Zhang et al., ICML 2022"

    def __init__(self, weight: float = 1.0, tau: float = 1.0, form: Form = "code") -> None:
        super().__init__(weight)
        require(tau >= 0, "Calibrated.tau", "must be >= 0", tau)
        require_choices("Calibrated", form=(form, Form))
        self.tau, self.form = tau, form

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return calibrated_loss(out.logits, out.y, self.class_counts, self.tau, self.form)
