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
class Fading:
    """λ_t, which falls from 1 in round 1 to 0 in round L, and stays there.

    Args:
        schedule: ``cosine`` is (cos(π(t − 1)/L) + 1)/2, ``exponential`` 10^{−3(t − 1)/L}.
        share: L as a share of the run's rounds, in (0, 1].

    Raises:
        ConfigError: naming the method's option of that name.

    >>> [round(Fading("cosine", 0.5).at(t, 8), 4) for t in (1, 2, 3, 5)], round(Fading("exponential", 0.5).at(3, 8), 4)
    ([1.0, 0.8536, 0.5, 0.0], 0.0316)
    """

    schedule: Schedule
    share: float

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "method.share", "must be in (0, 1]", self.share)
        require_choices("method", schedule=(self.schedule, Schedule))

    def at(self, round: int, rounds: int) -> float:
        """λ_t of a round t, 1-based, of so many; 1 before the first."""
        before, last = max(round, 1) - 1, int(self.share * rounds)
        if before >= last:
            return 0.0
        part = before / last
        return (math.cos(math.pi * part) + 1) / 2 if self.schedule == "cosine" else 10 ** (-3 * part)
