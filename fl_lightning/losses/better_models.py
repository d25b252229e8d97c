"""Moving towards the models that do better than one's own.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization" (FedFomo),
ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fl_lightning.core.lending import put_vector
from fl_lightning.core.precision import widened_vector
from fl_lightning.shapes import checked

Baseline = Literal["start", "last"]
"""θ⁰: the model from which the last fit started, or the one with which it ended."""


@checked
def first_order_gain(
    risk: Float[Tensor, ""], other: Float[Tensor, ""], place: Float[Tensor, " P"], there: Float[Tensor, " P"]
) -> Float[Tensor, ""]:
    """By how much the risk falls from a place to another model, for each unit of the way, (L(θ⁰) − L(θ)) / ‖θ − θ⁰‖.

    1e-5 is added to the way, as public code does: the paper does not say what a model gains that is θ⁰ itself.

    Args:
        risk: L(θ⁰).
        other: L(θ).
        place: θ⁰, [P] parameters.
        there: θ, [P] parameters.

    Returns:
        Scalar; 0 where the model predicts nothing.

    >>> gain = first_order_gain(torch.tensor(3.0), torch.tensor(1.0), torch.zeros(2), torch.tensor([3.0, 4.0]))
    >>> round(float(gain), 4)
    0.4
    """
    return ((risk - other) / ((there - place).norm() + 1e-5)).nan_to_num(0, 0, 0)


def towards_better(base: Tensor, models: Mapping[int, Tensor], gains: Tensor) -> Tensor:
    """θ⁰ + Σ_n w_n (θ_n − θ⁰) with w_n ∝ max(0, g_n) and Σ w_n = 1; θ⁰ where no g_n is positive.

    Args:
        base: θ⁰, [P].
        models: θ_n, [P] each, by client.
        gains: g, [N].

    >>> towards_better(torch.zeros(1), {0: torch.ones(1), 2: torch.full((1,), 4.0)}, torch.tensor([1.0, 9.0, -1.0]))
    tensor([0.1000])
    """
    w = gains.clamp(min=0)
    w = w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    return base + torch.stack([w[client] * (values - base) for client, values in models.items()]).sum(0)


@torch.no_grad()
def move_towards_better(
    weights: Mapping[str, Tensor],
    base: Tensor,
    models: Mapping[int, Tensor],
    risk: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    gains: Tensor,
) -> None:
    """Try models out, and put what `towards_better` makes of them into a client's weights.

    Args:
        weights: the client's, by name; they change.
        base: θ⁰, [P] as vectors of `weights` are.
        models: θ_n, [P] each, by client.
        risk: of the client's model as it is at the moment.
        parameters: what of the model counts in distances.
        gains: g, [N]; those of the models are put in.
    """
    own = list(parameters)

    def look(values: Tensor) -> tuple[Tensor, Tensor]:
        put_vector(values, weights)
        return risk(), widened_vector(own)

    here, place = look(base)
    for client, values in models.items():
        other, there = look(values)
        gains[client] = first_order_gain(here, other, place, there)
    put_vector(towards_better(base, models, gains), weights)
