"""Pulling embeddings towards the federation's class prototypes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022
(local objective L_S + λ L_R); FedCPD (IJCAI 2025) uses the same term as L_align.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fl_lightning.core.aggregation import ClassMeanRule, ClassWeighting, MissingClass
from fl_lightning.core.message import Artifact, ClassMeans, Message
from fl_lightning.core.term import Forward, Term
from fl_lightning.errors import require

if TYPE_CHECKING:
    from fl_lightning.core.client import ClientModule
    from fl_lightning.core.server import RuleFactory
    from fl_lightning.data.store import ClientData as LocalData

Distance = Literal["sample_mse", "sample_sq", "batch_proto_l2"]
Collection = Literal["post", "running"]


def prototype_alignment_loss(
    z: Tensor, y: Tensor, prototypes: Tensor, valid: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Squared distance of each embedding to its class prototype, FedProto's L_R and FedCPD's L_align.

    L = 1/(B·D) Σ_b [class y_b is valid] ‖z_b − P_{y_b}‖²  for ``mean``; ``sum`` leaves out 1/D.
    Samples of an invalid class add nothing and stay in the denominator.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        prototypes: [C, D], constants.
        valid: [C] bool, which prototypes exist; None means all.
        reduction: ``mean`` over batch and features, or ``sum`` over features and mean over the batch.

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
    return squares / (z.numel() if reduction == "mean" else max(len(z), 1))


def batch_prototype_distance(z: Tensor, y: Tensor, prototypes: Tensor, valid: Tensor | None = None) -> Tensor:
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
    z = z.float()
    count = torch.zeros(len(prototypes), device=z.device).index_add_(0, y, torch.ones(len(y), device=z.device))
    sums = torch.zeros_like(prototypes, dtype=z.dtype).index_add(0, y, z)
    used = count > 0 if valid is None else (count > 0) & valid
    means = sums / count.clamp(min=1)[:, None]
    squares = torch.where(used[:, None], means - prototypes.float(), 0.0).square().sum(1)
    return torch.where(used, (squares + 1e-12).sqrt(), 0.0).sum()


def prototype_distances(z: Tensor, prototypes: Tensor, candidates: Tensor) -> Tensor:
    """Euclidean distance of each embedding to each candidate prototype; +inf for the others.

    Args:
        z: [B, D] embeddings.
        prototypes: [C, D].
        candidates: [C] bool, classes that may be predicted.

    Returns:
        [B, C] float32; ``argmin`` gives the nearest prototype, the lowest index in a tie.
    """
    with torch.autocast(z.device.type, enabled=False):
        distances = torch.cdist(z.float(), prototypes.float(), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(~candidates, torch.inf)


def _check_sizes(name: str, z: Tensor, prototypes: Tensor) -> None:
    if z.shape[-1] != prototypes.shape[-1]:
        raise ValueError(
            f"{name}: `z` is {tuple(z.shape)} but `prototypes` is {tuple(prototypes.shape)}; "
            "both need the same last size."
        )


def _masked_difference(z: Tensor, y: Tensor, prototypes: Tensor, valid: Tensor | None) -> Tensor:
    difference = z.float() - prototypes.float()[y]
    return difference if valid is None else torch.where(valid[y][:, None], difference, 0.0)


class PrototypeAlignment(Term):
    """Pull embeddings towards the global prototypes of their classes (FedProto's L_R, FedCPD's L_align).

    Sends the client's class prototypes (mean embeddings of its own training data), receives the global ones.

    Args:
        weight: λ, >= 0; 0 is local training without the pull (prototypes still travel).
        distance: ``sample_mse`` is the mean over batch and features, ``sample_sq`` sums over features,
            ``batch_proto_l2`` is the distance of the batch's class means (FedProto's main text).
        collection: ``post`` averages over the whole training part in eval mode after the fit; ``running`` averages
            the embeddings seen during the last epoch, as the public codes do.
        weighting: how the server weighs clients' prototypes; ``uniform`` needs no counts on the wire.
        missing: what becomes of a class that no participant held this round.
    """

    paper = "Tan et al., AAAI 2022"

    def __init__(
        self,
        weight: float = 1.0,
        distance: Distance = "sample_mse",
        collection: Collection = "post",
        weighting: ClassWeighting = "count",
        missing: MissingClass = "keep",
    ) -> None:
        super().__init__(weight)
        for key, value, allowed in (
            ("distance", distance, get_args(Distance)),
            ("collection", collection, get_args(Collection)),
            ("weighting", weighting, get_args(ClassWeighting)),
            ("missing", missing, get_args(MissingClass)),
        ):
            require(value in allowed, f"PrototypeAlignment.{key}", f"must be one of {', '.join(allowed)}", value)
        self.distance = distance
        self.collection = collection
        self.weighting = weighting
        self.missing = missing

    prototypes: Tensor  # [C, D], as received
    valid: Tensor  # [C] bool
    sums: Tensor  # [C, D], of the last epoch's embeddings
    seen: Tensor  # [C] int64

    def setup(self, client: ClientModule) -> None:  # noqa: D102
        classes, size = client.model.num_classes, client.model.embedding_size
        self.register_buffer("prototypes", torch.zeros(classes, size), persistent=False)
        self.register_buffer("valid", torch.zeros(classes, dtype=torch.bool), persistent=False)
        self.register_buffer("sums", torch.zeros(classes, size), persistent=False)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.long), persistent=False)

    def forward(self, client: ClientModule, out: Forward) -> Tensor:  # noqa: D102
        if self.distance == "batch_proto_l2":
            return batch_prototype_distance(out.z, out.y, self.prototypes, self.valid)
        reduction = "mean" if self.distance == "sample_mse" else "sum"
        return prototype_alignment_loss(out.z, out.y, self.prototypes, self.valid, reduction)

    def observe(self, client: ClientModule, out: Forward) -> None:  # noqa: D102
        if self.collection == "running" and client.last_epoch:
            self.sums.index_add_(0, out.y, out.z.detach().float())
            self.seen += torch.bincount(out.y, minlength=len(self.seen))

    def receive(self, client: ClientModule, message: Message) -> None:  # noqa: D102
        received = message.artifacts.get("prototypes")
        self.sums.zero_()
        self.seen.zero_()
        if isinstance(received, ClassMeans):
            self.prototypes.copy_(received.mean)
            self.valid.copy_(received.valid)
        else:
            self.prototypes.zero_()
            self.valid.zero_()

    def send(self, client: ClientModule, data: LocalData) -> Mapping[str, Artifact]:  # noqa: D102
        if self.collection == "running":
            means = ClassMeans(self.sums / self.seen.clamp(min=1)[:, None], self.seen.clone())
        else:
            seen = client.collect(data)
            means = ClassMeans.from_samples(seen.z, seen.y, len(self.valid))
        return {"prototypes": means.without_counts() if self.weighting == "uniform" else means}

    def rules(self) -> Mapping[str, RuleFactory]:  # noqa: D102
        return {"prototypes": lambda: ClassMeanRule(self.weighting, self.missing)}
