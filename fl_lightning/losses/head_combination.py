"""How much of whose classifier head helps a client: a bound on its loss, from class means of all clients.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration" (FedPAC), ICLR
2023, where it estimates the weights that classifiers are combined by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fl_lightning.core.message import Message
from fl_lightning.core.simplex import least_on_simplex
from fl_lightning.shapes import checked


@checked
def scaled_means(means: Float[Tensor, "C D"], counts: Int[Tensor, " C"]) -> Float[Tensor, "C D"]:
    """h: class means, each times its share p_c of the client's samples.

    Args:
        means: μ, [C, D].
        counts: [C] int64.
    """
    return means * (counts.to(means) / counts.sum().clamp(min=1))[:, None]


@checked
def feature_variance(
    z: Float[Tensor, "N D"], means: Float[Tensor, "C D"], counts: Int[Tensor, " C"]
) -> Float[Tensor, ""]:
    """V = 1/n (Σ_c p_c E[‖z‖² | c] − Σ_c p_c² ‖μ_c‖²), of a client's n embeddings.

    Args:
        z: [N, D] embeddings of all samples.
        means: μ, [C, D], their class means.
        counts: [C] int64.

    >>> z = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    >>> float(feature_variance(z, torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([2, 2])))
    0.625
    """
    return (z.square().sum(1).mean() - scaled_means(means, counts).square().sum()) / len(z)


@checked
def head_combination(h: Float[Tensor, "N C D"], variances: Float[Tensor, " N"]) -> Float[Tensor, "N N"]:
    """How much each client takes of every head.

    Row i is argmin over the simplex of Σ_j α_j² V_j + ‖Σ_j α_j (h_i − h_j)‖²: variance and bias of the combination.

    Args:
        h: scaled class means of N clients.
        variances: V of each.

    Returns:
        α, [N, N] float64 on the CPU; rows sum to 1.

    >>> head_combination(torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([1.0, 1.0]))
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]], dtype=torch.float64)
    """
    flat, spread = h.cpu().double().flatten(1), variances.cpu().double().clamp(min=0).diag()
    return torch.stack([least_on_simplex(spread + (own - flat) @ (own - flat).T) for own in flat])


STATISTICS, VARIANCE = "statistics", "variance"
"""The artifacts by which clients say what they know of their embeddings: the class means, with counts, and V."""


def combination_of(messages: Mapping[int, Message]) -> Tensor:
    """`head_combination` by what the clients say of their embeddings, [N, N].

    Args:
        messages: by client.
    """
    own: list[Any] = [message.artifacts for message in messages.values()]
    h = [scaled_means(artifacts[STATISTICS].mean, artifacts[STATISTICS].count) for artifacts in own]
    return head_combination(torch.stack(h), torch.stack([artifacts[VARIANCE] for artifacts in own]))
