"""Learning from what other clients know of a class: its mean feature and its mean soft prediction.

Chen, Wang, Vikalo, "The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation" (FedHKD), ICLR 2023. One pair of class means is a class's hyper-knowledge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Artifact, ClassMeans, Message
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host, OwnData


@checked
def soft_prediction_distance(
    logits: Float[Tensor, "C C"], predictions: Float[Tensor, "C C"], temperature: float, valid: Bool[Tensor, " C"]
) -> Float[Tensor, ""]:
    """Distance between what a head says of the classes' mean features and what the federation says of the classes.

    L = 1/|K| Σ_{c in K} ‖ softmax(g(H_c)/T) − Q_c ‖₂, with K the classes whose knowledge is valid.

    Args:
        logits: [C, C] g(H_c), a row a class.
        predictions: [C, C] Q, constants.
        temperature: T > 0.
        valid: [C] bool, which rows exist.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no row is valid.

    Raises:
        ValueError: if the shapes differ.

    >>> logits = torch.tensor([[0., 0.], [0., 0.]])
    >>> Q, valid = torch.tensor([[.8, .2], [0., 1.]]), torch.tensor([True, False])
    >>> round(float(soft_prediction_distance(logits, Q, temperature=0.5, valid=valid)), 4)
    0.4243
    """
    _check_last("soft_prediction_distance", "logits", logits, "predictions", predictions)
    difference = torch.softmax(widened(logits) / temperature, 1) - widened(predictions)
    return _mean_norm(difference, valid)


@checked
def class_feature_distance(
    z: Float[Tensor, "B D"], y: Int[Tensor, " B"], features: Float[Tensor, "C D"], valid: Bool[Tensor, " C"]
) -> Float[Tensor, ""]:
    """Distance of each embedding to the mean feature of its class.

    L = 1/|V| Σ_{b in V} ‖z_b − H_{y_b}‖₂, with V the samples whose class is valid. Not squared: the pull does not grow
    with the distance.

    Args:
        z: [B, D] embeddings.
        y: [B] int64 classes.
        features: [C, D] H, constants.
        valid: [C] bool, which rows exist.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no sample's class is valid.

    Raises:
        ValueError: if the sizes do not fit.

    >>> z, H = torch.tensor([[3., 4.], [1., 1.]]), torch.tensor([[0., 0.], [9., 9.]])
    >>> float(class_feature_distance(z, torch.tensor([0, 1]), H, torch.tensor([True, False])))
    5.0
    """
    _check_last("class_feature_distance", "z", z, "features", features)
    return _mean_norm(widened(z) - widened(features)[y], valid[y])


def _mean_norm(rows: Tensor, counts: Tensor) -> Tensor:
    """Mean Euclidean norm of the rows that count; a row of zeros has no gradient."""
    norms = torch.linalg.vector_norm(torch.where(counts[:, None], rows, 0.0), dim=1)
    return norms.sum() / counts.sum().clamp(min=1)


def _check_last(name: str, first: str, one: Tensor, second: str, other: Tensor) -> None:
    if one.shape[-1] != other.shape[-1]:
        shapes = f"`{first}` is {tuple(one.shape)} but `{second}` is {tuple(other.shape)}"
        raise ValueError(f"{name}: {shapes}; both need the same last size.")


class HyperKnowledge(Term, ABC):
    """A term that compares the client with the federation's hyper-knowledge.

    Sends, for each class that makes up a share of the client's data, its mean feature, noisy, and its mean soft
    prediction; receives the federation's. Both terms of a client share the artifact, and so must agree on how it is
    made.

    Args:
        weight: factor of the term in the loss, >= 0.
        temperature: T of the soft predictions, > 0.
        noise_std: standard deviation σ of the noise on sent mean features, >= 0; it is drawn anew for every class.
        min_share: ν, the smallest share of a client's samples that a class must have to be sent, >= 0; above 1 nothing
            is sent.
    """

    paper = "Chen et al., ICLR 2023"

    def __init__(
        self, weight: float = 0.05, temperature: float = 0.5, noise_std: float = 0.02, min_share: float = 0.25
    ) -> None:
        super().__init__(weight)
        own = type(self).__name__
        require(temperature > 0, f"{own}.temperature", "must be > 0", temperature)
        require(noise_std >= 0, f"{own}.noise_std", "must be >= 0", noise_std)
        require(min_share >= 0, f"{own}.min_share", "must be >= 0", min_share)
        self.temperature = temperature
        self.noise_std = noise_std
        self.min_share = min_share
        self._num_valid = 0

    features: Tensor  # [C, D] H, as received
    predictions: Tensor  # [C, C] Q, as received
    valid: Tensor  # [C] bool

    @override
    def setup(self, host: Host) -> None:
        for other in _sharing(host):
            rule = f"{self.name} and {other.name} share their hyper-knowledge; give both the same"
            for key in ("temperature", "noise_std", "min_share"):
                same = getattr(self, key) == getattr(other, key) or not self.exchanges
                require(same, f"method.extra_terms.{key}", rule, getattr(self, key))
        classes, size = host.model.num_classes, host.model.embedding_size
        self.register_buffer("features", torch.zeros(classes, size), persistent=False)
        self.register_buffer("predictions", torch.zeros(classes, classes), persistent=False)
        self.register_buffer("valid", torch.zeros(classes, dtype=torch.bool), persistent=False)

    @override
    def receive(self, host: Host, message: Message) -> None:
        received = message.artifacts.get("hyper_knowledge")
        if isinstance(received, ClassMeans):
            features, predictions = received.mean.split([self.features.shape[1], self.predictions.shape[1]], dim=1)
            self.features.copy_(features)
            self.predictions.copy_(predictions)
            self.valid.copy_(received.valid)
        else:
            self.valid.zero_()
        self._num_valid = int(self.valid.sum())  # once a round: reading it in every step would wait for the device

    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        """H and Q side by side, [C, D + C], of the classes with enough samples; the first of the two terms sends."""
        if next(iter(_sharing(host))) is not self:
            return {}
        seen = data.collected()
        soft = torch.softmax(widened(seen.logits) / self.temperature, 1)
        means = ClassMeans.from_samples(torch.cat([widened(seen.z), soft], 1), seen.y, len(self.valid))
        size = seen.z.shape[1]
        if self.noise_std:
            means.mean[:, :size] += self.noise_std * torch.randn(means.mean[:, :size].shape, device=seen.z.device)
        sent = means.count >= self.min_share * len(seen.y)
        count = torch.where(sent, means.count, 0)
        return {"hyper_knowledge": ClassMeans(torch.where(count[:, None] > 0, means.mean, 0.0), count)}

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self._num_valid:
            return torch.zeros((), dtype=torch.float32, device=out.z.device)
        return self.distance(host, out)

    @abstractmethod
    def distance(self, host: Host, out: Forward) -> Tensor:
        """The term's value where some class has hyper-knowledge."""

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        return {"hyper_knowledge": (len(self.valid), self.features.shape[1] + self.predictions.shape[1])}


def _sharing(host: Host) -> list[HyperKnowledge]:
    return [term for term in host.terms.exchanging if isinstance(term, HyperKnowledge)]


class HyperPredictions(HyperKnowledge):
    """Teach the head to say of every class's mean feature what the federation says of the class (FedHKD's λ term).

    The features are constants, so the gradient reaches the head alone; one forward pass of the head on C rows a step.

    Args:
        weight: λ, >= 0.
        temperature: T of the soft predictions, > 0.
        noise_std: standard deviation σ of the noise on sent mean features, >= 0.
        min_share: ν, smallest share of a client's samples that a class must have to be sent, >= 0.
    """

    reaches = ("model.head",)

    @override
    def distance(self, host: Host, out: Forward) -> Tensor:
        logits = out.through(host.network().head, self.features)
        return soft_prediction_distance(logits, self.predictions, self.temperature, self.valid)


class HyperFeatures(HyperKnowledge):
    """Pull embeddings towards the federation's mean feature of their class (FedHKD's γ term).

    Args:
        weight: γ, >= 0.
        temperature: T of the soft predictions, > 0.
        noise_std: standard deviation σ of the noise on sent mean features, >= 0.
        min_share: ν, smallest share of a client's samples that a class must have to be sent, >= 0.
    """

    reaches = ("model.body",)

    @override
    def distance(self, host: Host, out: Forward) -> Tensor:
        return class_feature_distance(out.z, out.y, self.features, self.valid)
