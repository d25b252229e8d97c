"""The least value of a quadratic form over weights that are not negative and sum to one."""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-10  # of the mean of the diagonal: makes the solution the only one


def least_on_simplex(matrix: Tensor) -> Tensor:
    """Find argmin αᵀPα over α >= 0, Σα = 1.

    α is x / Σx for x = argmin ½ xᵀPx − Σx over x >= 0, because both have the same conditions of optimality up to a
    factor; x is found by the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).

    Args:
        matrix: P, [N, N], symmetric and positive semidefinite.

    Returns:
        α, [N] float64 on the CPU. Where several are optimal, one of them; all alike where P is 0.

    >>> least_on_simplex(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    wide = matrix.detach().double().cpu()
    scale = wide.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    wide = wide / scale + _RIDGE * torch.eye(len(wide), dtype=torch.float64)
    x = torch.zeros(len(wide), dtype=torch.float64)
    free = torch.zeros(len(wide), dtype=torch.bool)
    for _ in range(3 * len(wide)):
        slope = torch.where(free, -torch.inf, 1 - wide @ x)
        if slope.max() <= 1e-9:
            break
        free[slope.argmax()] = True
        while True:
            best = torch.zeros_like(x)
            best[free] = torch.linalg.solve(wide[free][:, free], torch.ones(int(free.sum()), dtype=torch.float64))
            falling = free & (best <= 0)
            if not falling.any():
                break
            x = x + (x / (x - best))[falling].min() * (best - x)
            free &= x > 1e-12 * x.max()
            x = torch.where(free, x, 0.0)
        x = best
    return x / x.sum()
