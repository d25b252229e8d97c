"""A term: one weighted part of a composite loss, with the artifact that it needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.core.precision import widened
from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.core.client import ClientModule
    from fl_lightning.core.message import Artifact, Message
    from fl_lightning.core.server import RuleFactory
    from fl_lightning.data.store import ClientData as LocalData


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
class Forward:
    """One forward pass of a local mini-batch, shared by all terms.

    Args:
        x: [B, …] inputs.
        y: [B] int64 classes.
        features: feature maps of the body, first to last.
        z: [B, D] embedding.
        logits: [B, C].
        latent: of methods with a variational part; None for the others.
    """

    x: Tensor
    y: Tensor
    features: list[Tensor]
    z: Tensor
    logits: Tensor
    latent: Latent | None = None


class Term(nn.Module):
    """One weighted part of a composite loss.

    What a term received lives in non-persistent buffers that every `receive` overwrites; what a client must keep from
    round to round lives in persistent buffers or parameters.

    Args:
        weight: factor of the term in the loss, >= 0; 0 leaves the method as it is without the term.
    """

    paper: str = ""
    keeps_float32: ClassVar[bool] = True
    """The term's own tensors are statistics, no layers (core/precision.py)."""
    reaches: ClassVar[tuple[str, ...]] = ("",)
    """Submodules of the client (dotted names, ``""`` the whole) that the term's gradient can reach, beside the term's
    own parameters: it is left out of a phase that trains none of them."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Submodules of the term whose weights are exchanged; the others stay with the client."""
    accumulates: ClassVar[tuple[str, ...]] = ()
    """Buffers in which `observe` adds samples up: where several devices share a fit, their sums are added."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        if not weight >= 0:
            raise ConfigError(f"{type(self).__name__}.weight", "must be >= 0 (0 switches the term off)", weight)
        self.weight = weight

    @property
    def name(self) -> str:
        """The term's name in metrics: its class in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def exchanges(self) -> bool:
        """Whether the term receives and sends: not while its weight is 0."""
        return self.weight > 0

    def weight_at(self, round: int) -> float:
        """The weight in a round (1-based); `weight` unless the term has a schedule."""
        return self.weight

    def setup(self, client: ClientModule) -> None:
        """Make buffers and parameters whose size depends on the client's model; called once, at construction."""

    def forward(self, client: ClientModule, out: Forward) -> Tensor:
        """The unweighted scalar."""
        raise NotImplementedError

    def observe(self, client: ClientModule, out: Forward) -> None:
        """See a forward pass after its step, to average artifacts while training runs."""

    def after_fit(self, client: ClientModule) -> None:
        """Keep what the next round needs, at the end of a local fit."""

    def receive(self, client: ClientModule, message: Message) -> None:
        """Take the term's artifact out of what came in."""

    def send(self, client: ClientModule, data: LocalData) -> Mapping[str, Artifact]:
        """The term's artifacts, computed from the client's own training data after the fit."""
        return {}

    def interface(self, client: ClientModule) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the artifacts, which must be the same on clients whose models differ."""
        return {}

    def rules(self) -> Mapping[str, RuleFactory]:
        """How the server merges the term's artifacts, where it is not the default rule."""
        return {}

    def extra_repr(self) -> str:
        """Show the weight in the module's printout."""
        return f"weight={self.weight}"


class CrossEntropy(Term):
    """Cross-entropy of the logits, mean over the batch: the task's own loss, in float32 (float64 stays)."""

    def forward(self, client: ClientModule, out: Forward) -> Tensor:  # noqa: D102
        return F.cross_entropy(widened(out.logits), out.y)


def term_sum(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Σ weight · value, where a weight of 1 multiplies nothing (so that it changes no bit)."""
    total: Any = None
    for name, value in values.items():
        weighted = value if weights[name] == 1 else weights[name] * value
        total = weighted if total is None else total + weighted
    return torch.zeros((), dtype=torch.float32) if total is None else total
