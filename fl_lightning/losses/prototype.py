"""Pulling embeddings towards the federation's class prototypes, and away from those of other classes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022
(local objective L_S + λ L_R); FedCPD (IJCAI 2025), section 3.4, uses the same term as L_align and adds the contrast
L_pcl.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import ClassMeanRule, ClassWeighting, MissingClass
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Artifact, ClassMeans, Message
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.aggregation import RuleFactory
    from fl_lightning.core.host import Host, OwnData

Distance = Literal["sample_mse", "sample_sq", "batch_proto_l2"]
Collection = Literal["post", "running"]
Average = Literal["batch", "valid"]
SMALLEST_NORM = 1e-6  # below it a vector has no direction: its cosine with everything is 0


@checked
def prototype_alignment_loss(
    z: Float[Tensor, "B D"],
    y: Int[Tensor, " B"],
    prototypes: Float[Tensor, "C D"],
    valid: Bool[Tensor, " C"] | None = None,
    reduction: str = "mean",
    average: Average = "batch",
) -> Float[Tensor, ""]:
    """Squared distance of each embedding to its class prototype, FedProto's L_R and FedCPD's L_align.

    L = 1/(B·D) Σ_b [class y_b is valid] ‖z_b − P_{y_b}‖²  for ``mean``; ``sum`` leaves out 1/D.
    Samples of an invalid class add nothing; they stay in the denominator, unless the average is over the valid ones.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        prototypes: [C, D], constants.
        valid: [C] bool, which prototypes exist; None means all.
        reduction: ``mean`` over batch and features, or ``sum`` over features and mean over the batch.
        average: B is the whole ``batch``, or only its samples of ``valid`` classes.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no sample's class is valid.

    Raises:
        ValueError: if sizes do not fit, or for an unknown reduction.

    >>> z = torch.tensor([[1., 2.], [3., 4.], [0., 0.], [5., 1.]])
    >>> P = torch.tensor([[1., 1.], [2., -2.], [0., 0.]])
    >>> float(prototype_alignment_loss(z, torch.tensor([0, 0, 1, 2]), P, torch.tensor([True, True, False])))
    2.75
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"prototype_alignment_loss: `reduction` must be 'mean' or 'sum', got {reduction!r}")
    _check_sizes("prototype_alignment_loss", z, prototypes)
    squares = _masked_difference(z, y, prototypes, valid).square().sum()
    return squares / ((z.shape[-1] if reduction == "mean" else 1) * _num_averaged(y, valid, average))


@checked
def batch_prototype_distance(
    z: Float[Tensor, "B D"],
    y: Int[Tensor, " B"],
    prototypes: Float[Tensor, "C D"],
    valid: Bool[Tensor, " C"] | None = None,
) -> Float[Tensor, ""]:
    """Distance of the batch's class means to the prototypes, summed over classes (FedProto's main text).

    L = Σ_{j in batch, valid} ‖mean_{b: y_b = j} z_b − P_j‖₂, with 1e-12 under the root.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        prototypes: [C, D], constants.
        valid: [C] bool; None means all.

    Returns:
        Scalar, float32.

    >>> z = torch.tensor([[1., 2.], [3., 4.], [0., 0.], [5., 1.]])
    >>> P = torch.tensor([[1., 1.], [2., -2.], [0., 0.]])
    >>> round(float(batch_prototype_distance(z, torch.tensor([0, 0, 1, 2]), P, torch.tensor([True, True, False]))), 4)
    5.0645
    """
    _check_sizes("batch_prototype_distance", z, prototypes)
    z = widened(z)
    count = y.new_zeros(len(prototypes)).index_add(0, y, torch.ones_like(y))  # bincount waits for the device
    sums = torch.zeros_like(prototypes, dtype=z.dtype).index_add(0, y, z)
    used = count > 0 if valid is None else (count > 0) & valid
    means = sums / count.clamp(min=1)[:, None]
    squares = torch.where(used[:, None], means - widened(prototypes), 0.0).square().sum(1)
    return torch.where(used, (squares + 1e-12).sqrt(), 0.0).sum()


@checked
def prototype_contrast_loss(
    z: Float[Tensor, "B D"],
    y: Int[Tensor, " B"],
    prototypes: Float[Tensor, "C D"],
    temperature: float,
    valid: Bool[Tensor, " C"] | None = None,
    average: Average = "batch",
) -> Float[Tensor, ""]:
    """Cross-entropy of the cosine similarities to all prototypes, FedCPD's L_pcl.

    L = 1/B Σ_b [class y_b is valid] −log( exp(s_{b,y_b}/τ) / Σ_{c valid} exp(s_{b,c}/τ) ), s_{b,c} = cos(z_b, P_c).
    Samples of an invalid class add nothing; they stay in the denominator, unless the average is over the valid ones.
    Invalid classes are no negatives. A vector shorter than 1e-6 has similarity 0 with everything and no gradient: such
    a z costs log(number of valid classes).

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        prototypes: [C, D], constants.
        temperature: τ > 0.
        valid: [C] bool, which prototypes exist; None means all.
        average: B is the whole ``batch``, or only its samples of ``valid`` classes.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no sample's class is valid, or only one class is.

    Raises:
        ValueError: if sizes do not fit, or for a temperature that is not positive.

    >>> P = torch.tensor([[1., 0.], [0., 2.], [-1., -1.]])
    >>> round(float(prototype_contrast_loss(torch.tensor([[3., 4.]]), torch.tensor([1]), P, temperature=0.5)), 4)
    0.5296
    """
    if not temperature > 0:
        raise ValueError(f"prototype_contrast_loss: `temperature` must be > 0, got {temperature}")
    _check_sizes("prototype_contrast_loss", z, prototypes)
    with torch.autocast(z.device.type, enabled=False):
        similarity = directions(widened(z)) @ directions(widened(prototypes).to(widened(z).dtype)).T
        scores = similarity / temperature
        if valid is None:
            own, counts = scores.logsumexp(1), torch.ones_like(y, dtype=torch.bool)
        else:
            counts = valid[y]
            # Where nothing is valid the row would be all -inf, whose gradient is NaN: such samples do not count anyway.
            kept = valid | ~counts[:, None]
            own = scores.masked_fill(~kept, -torch.inf).logsumexp(1)
        losses = own - scores.gather(1, y[:, None]).squeeze(1)
        return torch.where(counts, losses, 0.0).sum() / _num_averaged(y, valid, average)


@checked
def directions(vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Rows over their norms; zeros, without a gradient, for rows too short to have a direction."""
    long_enough = vectors.detach().square().sum(1, keepdim=True) >= SMALLEST_NORM**2
    safe = torch.where(long_enough, vectors, 1.0)
    return torch.where(long_enough, safe / safe.square().sum(1, keepdim=True).sqrt(), 0.0)


@checked
def prototype_distances(
    z: Float[Tensor, "B D"], prototypes: Float[Tensor, "C D"], candidates: Bool[Tensor, " C"]
) -> Float[Tensor, "B C"]:
    """Euclidean distance of each embedding to each candidate prototype; +inf for the others.

    Args:
        z: [B, D] embeddings.
        prototypes: [C, D].
        candidates: [C] bool, classes that may be predicted.

    Returns:
        [B, C] float32, or float64 of such embeddings; ``argmin`` gives the nearest prototype, the lowest of a tie.
    """
    with torch.autocast(z.device.type, enabled=False):
        wide = widened(z)
        distances = torch.cdist(wide, prototypes.to(wide.dtype), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(~candidates, torch.inf)


def _num_averaged(y: Tensor, valid: Tensor | None, average: Average) -> int | Tensor:
    """Samples that a mean is taken over, at least 1."""
    return max(len(y), 1) if valid is None or average == "batch" else valid[y].sum().clamp(min=1)


def _check_sizes(name: str, z: Tensor, prototypes: Tensor) -> None:
    if z.shape[-1] != prototypes.shape[-1]:
        raise ValueError(
            f"{name}: `z` is {tuple(z.shape)} but `prototypes` is {tuple(prototypes.shape)}; "
            "both need the same last size."
        )


def _masked_difference(z: Tensor, y: Tensor, prototypes: Tensor, valid: Tensor | None) -> Tensor:
    difference = widened(z) - widened(prototypes)[y]
    return difference if valid is None else torch.where(valid[y][:, None], difference, 0.0)


@dataclass(frozen=True)
class Prototypes:
    """How class prototypes are made and averaged.

    Args:
        collection: ``post`` averages embeddings over the training part in eval mode after the fit, ``running`` over the
            last epoch's own forward passes (the public codes).
        weighting: ``count`` weighs clients' prototypes by samples, ``uniform`` is the plain mean of FedProto's public
            code, ``count_over_holders`` its printed formula, which shrinks prototypes by the number of holders.
        missing: a class that no participant held keeps its prototype (``keep``) or becomes invalid (``drop``).
    """

    collection: Collection = "post"
    weighting: ClassWeighting = "count"
    missing: MissingClass = "keep"

    def __post_init__(self) -> None:
        require_choices(
            "Prototypes",
            collection=(self.collection, Collection),
            weighting=(self.weighting, ClassWeighting),
            missing=(self.missing, MissingClass),
        )


class PrototypeTerm(Term, ABC):
    """A term that compares embeddings with the federation's class prototypes.

    Sends the client's class prototypes (mean embeddings of its own training data), receives the global ones. Several
    such terms of one client share the artifact, and so must agree on how it is made.

    Args:
        weight: factor of the term in the loss, >= 0.
        collection: ``post`` averages over the whole training part in eval mode after the fit; ``running`` averages
            the embeddings seen during the last epoch, as the public codes do.
        weighting: how the server weighs clients' prototypes; ``uniform`` needs no counts on the wire.
        missing: what becomes of a class that no participant held this round.
    """

    reaches = ("model.body",)

    def __init__(
        self,
        weight: float = 1.0,
        collection: Collection = "post",
        weighting: ClassWeighting = "count",
        missing: MissingClass = "keep",
    ) -> None:
        super().__init__(weight)
        require_choices(
            type(self).__name__,
            collection=(collection, Collection),
            weighting=(weighting, ClassWeighting),
            missing=(missing, MissingClass),
        )
        self.collection = collection
        self.weighting = weighting
        self.missing = missing
        self.predicts = False
        """Whether the method predicts with the prototypes, and so needs them at weight 0, too."""
        self.whole_fit = False
        """Whether ``running`` averages over all epochs of the fit; terms that share the artifact follow each other."""

    accumulates: ClassVar[tuple[str, ...]] = ("sums", "seen")
    prototypes: Tensor  # [C, D], as received
    valid: Tensor  # [C] bool
    sums: Tensor  # [C, D], of the embeddings that ``running`` averages
    seen: Tensor  # [C] int64

    @property
    @override
    def exchanges(self) -> bool:
        return self.weight > 0 or self.predicts

    @property
    @override
    def needs_whole_epochs(self) -> bool:
        return self.exchanges and self.collection == "running" and not self.whole_fit

    @override
    def setup(self, host: Host) -> None:
        for other in host.terms:
            if isinstance(other, PrototypeTerm) and other.exchanges and self.exchanges:
                rule = f"{self.name} and {other.name} share their prototypes; give both the same"
                for key in ("collection", "weighting", "missing"):
                    same = getattr(self, key) == getattr(other, key)
                    require(same, f"method.extra_terms.{key}", rule, getattr(self, key))
                self.whole_fit = self.whole_fit or other.whole_fit
        classes, size = host.model.num_classes, host.model.embedding_size
        self.register_buffer("prototypes", torch.zeros(classes, size), persistent=False)
        self.register_buffer("valid", torch.zeros(classes, dtype=torch.bool), persistent=False)
        self.register_buffer("sums", torch.zeros(classes, size), persistent=False)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.long), persistent=False)

    @override
    def observe(self, host: Host, out: Forward) -> None:
        if self.collection == "running" and (self.whole_fit or host.fit.in_last_epoch):
            self.sums.index_add_(0, out.y, out.z.detach().to(self.sums.dtype))
            self.seen.index_add_(0, out.y, torch.ones_like(out.y))  # bincount waits for the device

    @override
    def receive(self, host: Host, message: Message) -> None:
        received = message.artifacts.get("prototypes")
        self.sums.zero_()
        self.seen.zero_()
        if isinstance(received, ClassMeans):
            self.prototypes.copy_(received.mean)
            self.valid.copy_(received.valid)
        else:
            self.prototypes.zero_()
            self.valid.zero_()

    @override
    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        if self.collection == "running":
            means = ClassMeans(self.sums / self.seen.clamp(min=1)[:, None], self.seen.clone())
        else:
            seen = data.collected()
            means = ClassMeans.from_samples(seen.z, seen.y, len(self.valid))
        return {"prototypes": means.without_counts() if self.weighting == "uniform" else means}

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        return {"prototypes": tuple(self.prototypes.shape)}

    @override
    def rules(self) -> Mapping[str, RuleFactory]:
        return {"prototypes": lambda: ClassMeanRule(self.weighting, self.missing)}


class PrototypeAlignment(PrototypeTerm):
    """Pull embeddings towards the global prototypes of their classes (FedProto's L_R, FedCPD's L_align).

    Sends the client's class prototypes (mean embeddings of its own training data), receives the global ones.

    Args:
        weight: λ (FedProto) or α (FedCPD), >= 0.
        distance: ``sample_mse`` (per sample, mean over features: what λ was tuned with), ``sample_sq`` (per sample, sum
            over features) or ``batch_proto_l2`` (distance of the batch's class means: FedProto's main text).
        collection: ``post`` averages over the whole training part in eval mode after the fit; ``running`` averages
            the embeddings seen during the last epoch, as the public codes do.
        weighting: how the server weighs clients' prototypes; ``uniform`` needs no counts on the wire.
        missing: what becomes of a class that no participant held this round.
        average: mean over the whole ``batch``, or over its samples of classes whose prototype is ``valid``;
            ``batch_proto_l2`` is a sum over classes either way.
    """

    paper = "Tan et al., AAAI 2022"

    def __init__(
        self,
        weight: float = 1.0,
        distance: Distance = "sample_mse",
        collection: Collection = "post",
        weighting: ClassWeighting = "count",
        missing: MissingClass = "keep",
        average: Average = "batch",
    ) -> None:
        super().__init__(weight, collection, weighting, missing)
        require_choices("PrototypeAlignment", distance=(distance, Distance), average=(average, Average))
        self.distance = distance
        self.average = average

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if self.distance == "batch_proto_l2":
            return batch_prototype_distance(out.z, out.y, self.prototypes, self.valid)
        reduction = "mean" if self.distance == "sample_mse" else "sum"
        return prototype_alignment_loss(out.z, out.y, self.prototypes, self.valid, reduction, self.average)


class PrototypeContrast(PrototypeTerm):
    """Pull embeddings towards the direction of their class's prototype and away from the others' (FedCPD's L_pcl).

    Sends the client's class prototypes (mean embeddings of its own training data), receives the global ones.

    Args:
        weight: β, >= 0. The gradient of a cosine grows as 1/‖z‖.
        temperature: τ, > 0.
        collection: ``post`` averages over the whole training part in eval mode after the fit; ``running`` averages
            the embeddings seen during the last epoch.
        weighting: how the server weighs clients' prototypes; ``uniform`` needs no counts on the wire.
        missing: what becomes of a class that no participant held this round.
        average: mean over the whole ``batch``, or over its samples of classes whose prototype is ``valid``.
    """

    paper = "Jin et al., IJCAI 2025"

    def __init__(
        self,
        weight: float = 1.0,
        temperature: float = 0.5,
        collection: Collection = "post",
        weighting: ClassWeighting = "count",
        missing: MissingClass = "keep",
        average: Average = "batch",
    ) -> None:
        super().__init__(weight, collection, weighting, missing)
        require(temperature > 0, "PrototypeContrast.temperature", "must be > 0", temperature)
        require_choices("PrototypeContrast", average=(average, Average))
        self.temperature = temperature
        self.average = average

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return prototype_contrast_loss(out.z, out.y, self.prototypes, self.temperature, self.valid, self.average)
