"""Holding a client's relations to the others' models near what their sizes say, for a while.

Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning" (APPLE), IJCAI 2022. Checked
against the authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

Schedule = Literal["cosine", "exponential"]


@checked
def anchor_loss(relations: Float[Tensor, " N"], anchor: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """½ ‖p − p⁰‖².

    Args:
        relations: p, [N], to every client.
        anchor: p⁰, [N], constants.

    >>> import torch
    >>> float(anchor_loss(torch.tensor([1.0, 2.0]), torch.zeros(2)))
    2.5
    """
    return 0.5 * (relations - anchor).square().sum()


@dataclass(frozen=True)
class FadingWeight:
    """λ_t μ, where λ_t falls from 1 in round 1 and is 0 after round L.

    Args:
        weight: μ, >= 0.
        schedule: λ_t: ``cosine`` is (cos(π(t − 1)/L) + 1)/2, ``exponential`` 10^{−3(t − 1)/L}.
        share: L as a share of the run's rounds, in (0, 1]; L is at least 1.

    Raises:
        ConfigError: naming the method's option of that name.

    >>> cosine, exponential = (FadingWeight(2.0, schedule, 0.5) for schedule in ("cosine", "exponential"))
    >>> [round(cosine.at(t, 8), 4) for t in (1, 2, 3, 5)], round(exponential.at(3, 8), 4)
    ([2.0, 1.7071, 1.0, 0.0], 0.0632)
    """

    weight: float
    schedule: Schedule
    share: float

    def __post_init__(self) -> None:
        require(self.weight >= 0, "method.weight", "must be >= 0", self.weight)
        require(0 < self.share <= 1, "method.share", "must be in (0, 1]", self.share)
        require_choices("method", schedule=(self.schedule, Schedule))

    def at(self, round: int, rounds: int) -> float:
        """λ_t μ of a round t, 1-based, of so many; μ before the first."""
        before, last = max(round, 1) - 1, max(1, int(self.share * rounds + 1e-9))
        if before >= last:
            return 0.0
        part = before / last
        faded = (math.cos(math.pi * part) + 1) / 2 if self.schedule == "cosine" else 10 ** (-3 * part)
        return self.weight * faded
