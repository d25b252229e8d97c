"""Changes of weights sent as the few largest singular values of each matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.message import Message, Size, accumulation_dtype
from fl_lightning.core.server import Server
from fl_lightning.core.snapshot import Snapshot
from fl_lightning.errors import require


def low_rank(matrix: Tensor, energy: float) -> tuple[Tensor, int]:
    """The best approximation of least rank K with Σ_{k <= K} σ_k² > energy · Σ σ_k², and how many values it takes.

    U, σ and V take K (m + n + 1) values for m rows and n columns, but never more than the matrix itself.

    Args:
        matrix: [m, n] float.
        energy: in [0, 1]; from 1 on all of the rank is kept.

    >>> approximation, values = low_rank(torch.diag(torch.tensor([3.0, 1.0, 0.0])), 0.8)
    >>> approximation.diag().tolist(), values
    ([3.0, 0.0, 0.0], 7)
    """
    u, sigma, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = sigma.square().cumsum(0)
    rank = min(int((kept <= energy * kept[-1]).sum()) + 1, len(sigma)) if kept[-1] > 0 else 0
    rows, columns = matrix.shape
    return (u[:, :rank] * sigma[:rank]) @ v[:rank], min(rank * (rows + columns + 1), rows * columns)


@torch.no_grad()
def approximated(message: Message, before: Mapping[str, Tensor], energy: float) -> Message:
    """A message whose weights have changed by low-rank matrices, with what that takes to send.

    The change of an entry of two axes or more is approximated as the matrix of its first axis by all others; the rest
    travels as it is, and so does all at an energy of 1.

    Args:
        message: what is to be sent.
        before: weights that sender and receiver have already.
        energy: as in `low_rank`.
    """
    if energy >= 1:
        return message
    weights, saved = dict(message.weights), Size(0, 0)
    for name, tensor in message.weights.items():
        if tensor.ndim >= 2 and tensor.is_floating_point() and name in before:
            wide = accumulation_dtype(tensor.device)
            old = before[name].to(wide)
            change, values = low_rank((tensor.to(wide) - old).flatten(1), energy)
            weights[name] = (old + change.view_as(old)).to(tensor.dtype)
            fewer = tensor.numel() - values
            saved = Size(saved.num_params + fewer, saved.num_bytes + fewer * tensor.element_size())
    size = message.size
    sent = Size(size.num_params - saved.num_params, size.num_bytes - saved.num_bytes)
    return replace(message, weights=weights, sent=sent)


@dataclass(frozen=True)
class Energy:
    """Which share of the squares of singular values is kept: from `start` on evenly to `end` in the run's last round.

    Args:
        start: T_0, in [0, 1].
        end: T_1, in [0, 1].

    Raises:
        ConfigError: naming the method's option, `energy_start` or `energy_end`.
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        require(0 <= self.start <= 1, "method.energy_start", "must be in [0, 1]", self.start)
        require(0 <= self.end <= 1, "method.energy_end", "must be in [0, 1]", self.end)

    def at(self, round: int, rounds: int) -> float:
        """T of a round, 1-based, of so many."""
        return self.start + (self.end - self.start) * round / rounds

    def over(self, rounds: int) -> Callable[[int], float]:
        """T of a round in a run of so many."""
        return partial(self.at, rounds=rounds)


class ReceivedModel(Snapshot):
    """What a client has received of its model, against which it sends changes.

    Args:
        model: the client's, of which the parameters count.
        prefix: before their names in messages.
    """

    def __init__(self, model: nn.Module, prefix: str = "model.") -> None:
        super().__init__(model.parameters())
        self._names = [prefix + name for name, _ in model.named_parameters()]

    def changes(self, message: Message, energy: float) -> Message:
        """A message of the client's, `approximated`."""
        return approximated(message, dict(zip(self._names, self, strict=True)), energy)


class LowRankServer(Server):
    """Averages all alike, and sends the mean's change in low rank to those that have the message before.

    Args:
        initial: as the base's.
        energy: of a round, by its number.
    """

    in_parts = True

    def __init__(self, initial: Message, energy: Callable[[int], float]) -> None:
        super().__init__(initial, weighting="uniform")
        self.energy = energy
        self.current: list[int] = []
        """Who has the message before the present one."""

    def message_for(self, client: int) -> Message:
        """The same weights for all; who has sat out gets them whole."""
        return self.message if client in self.current else replace(self.message, sent=None)

    def close_round(self) -> None:
        """Average, then approximate what has changed."""
        before, came = self.started.weights, not self._weights.empty
        super().close_round()
        if came:
            self.message = approximated(self.message, before, self.energy(self.round))
            self.current = list(self.facts.participants)

    def state_dict(self) -> dict[str, Any]:
        """The base's state, and who is up to date."""
        return {**super().state_dict(), "current": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.current = list(state["current"])
