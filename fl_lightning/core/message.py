"""What crosses the wire: named weights, named artifacts, and the number of samples behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

Artifact = Union["ClassMeans", "KeptRows", "MaskedWeights", Tensor]


@dataclass(frozen=True)
class ClassMeans:
    """One mean per class and the number of samples behind each.

    Serves prototypes [C, D], soft labels [C, C], class logits [C, C] and both halves of class Gaussians.

    Args:
        mean: [C, …] float; rows of absent classes are zero and mean nothing.
        count: [C] int64, samples behind each row; 0 marks an absent class.
        sends_count: whether the counts travel with the rows. If not, the receiver only learns which rows are valid.
    """

    mean: Tensor
    count: Tensor
    sends_count: bool = True

    def __post_init__(self) -> None:
        if self.count.ndim != 1 or self.mean.shape[:1] != self.count.shape:
            raise ValueError(
                f"ClassMeans: `mean` is {tuple(self.mean.shape)} but `count` is {tuple(self.count.shape)}; "
                "both need the same first size, the number of classes."
            )

    @classmethod
    def from_samples(cls, values: Tensor, y: Tensor, num_classes: int) -> ClassMeans:
        """Average samples by class; sums in float64, divided once.

        Args:
            values: [N, …] one value a sample.
            y: [N] int64 classes in [0, C).
            num_classes: C.

        >>> means = ClassMeans.from_samples(torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([1, 1]), num_classes=2)
        >>> means.mean.tolist(), means.count.tolist()
        ([[0.0, 0.0], [2.0, 3.0]], [0, 2])
        """
        sums = values.new_zeros((num_classes, *values.shape[1:]), dtype=accumulation_dtype(values.device))
        sums.index_add_(0, y, values.to(sums.dtype))
        count = torch.bincount(y, minlength=num_classes)
        return cls((sums / _rows(count.clamp(min=1), sums)).float(), count)

    @property
    def valid(self) -> Tensor:
        """[C] bool, True where at least one sample stands behind the row."""
        return self.count > 0

    def without_counts(self) -> ClassMeans:
        """The same rows, sent without their counts: the receiver sees 1 for a valid row and 0 for an absent one."""
        return ClassMeans(self.mean, self.valid.long(), sends_count=False)

    def filled_from(self, previous: ClassMeans | None) -> ClassMeans:
        """Take absent rows from `previous`, so that a class that nobody held this round is not forgotten."""
        if previous is None:
            return self
        absent = ~self.valid
        mean = torch.where(_rows(absent, self.mean), previous.mean.to(self.mean), self.mean)
        return replace(self, mean=mean, count=torch.where(absent, previous.count.to(self.count), self.count))

    def to(self, device: torch.device) -> ClassMeans:
        """Move to `device`."""
        return replace(self, mean=self.mean.to(device), count=self.count.to(device))

    def clone(self) -> ClassMeans:
        """Copy, sharing no memory."""
        return replace(self, mean=self.mean.clone(), count=self.count.clone())

    @property
    def num_params(self) -> int:
        """Values really sent: the rows of classes held, and their counts where these travel."""
        held = int(self.valid.sum())
        return held * self.mean[0].numel() + (held if self.sends_count else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values counted by `num_params`, by dtype."""
        held = int(self.valid.sum())
        counts = held * self.count.element_size() if self.sends_count else 0
        return held * self.mean[0].numel() * self.mean.element_size() + counts


@dataclass(frozen=True)
class KeptRows:
    """Rows that a receiver keeps for good, of which only the new ones cross the wire now.

    For what is handed out once and used ever after (a pool of shared samples): a federation of N clients stores it
    once, not N times, and still counts what every client was sent.

    Args:
        rows: [M, …] all that the receiver holds once it has this message.
        num_new: how many of them it did not hold before, in [0, M]; these are counted.
    """

    rows: Tensor
    num_new: int

    def to(self, device: torch.device) -> KeptRows:
        """Move to `device`."""
        return replace(self, rows=self.rows.to(device))

    def clone(self) -> KeptRows:
        """Copy, sharing no memory."""
        return replace(self, rows=self.rows.clone())

    @property
    def num_params(self) -> int:
        """Values really sent: those of the new rows."""
        return self.num_new * self.rows[:1].numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values counted by `num_params`."""
        return self.num_params * self.rows.element_size()


@dataclass(frozen=True)
class MaskedWeights:
    """The active entries of one weight tensor, and where they belong: what a sparse model sends of it.

    Values are counted without the mask, because published figures of sparse methods leave it out (106.65 for DisPFL in
    DRDFL's tables); bytes are counted with it, one bit an entry.

    Args:
        values: [M] the active entries, in the mask's row-major order.
        mask: […] bool, True at the M active entries.
    """

    values: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        active = int(self.mask.sum())
        if self.values.shape != (active,):
            raise ValueError(
                f"MaskedWeights: `values` is {tuple(self.values.shape)} but `mask` has {active} active entries"
            )

    @classmethod
    def from_dense(cls, weights: Tensor, mask: Tensor) -> MaskedWeights:
        """Pick the active entries out of a tensor of the mask's shape; shares no memory with either.

        >>> mask = torch.tensor([[True, False], [False, True]])
        >>> sent = MaskedWeights.from_dense(torch.tensor([[1., 2.], [3., 4.]]), mask)
        >>> sent.values.tolist(), sent.num_params, sent.num_bytes
        ([1.0, 4.0], 2, 9)
        """
        return cls(weights.detach()[mask], mask.clone())

    def dense(self) -> Tensor:
        """The whole tensor, in a new one: 0 where the mask is False."""
        whole = torch.zeros(self.mask.shape, dtype=self.values.dtype, device=self.values.device)
        whole[self.mask] = self.values
        return whole

    def to(self, device: torch.device) -> MaskedWeights:
        """Move to `device`."""
        return replace(self, values=self.values.to(device), mask=self.mask.to(device))

    def clone(self) -> MaskedWeights:
        """Copy, sharing no memory."""
        return replace(self, values=self.values.clone(), mask=self.mask.clone())

    @property
    def num_params(self) -> int:
        """Values really sent: the active entries, without the mask."""
        return self.values.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the active entries, and of the mask at one bit an entry."""
        return self.values.nbytes + -(-self.mask.numel() // 8)


class Size(NamedTuple):
    """What a message costs."""

    num_params: int
    num_bytes: int


NOTHING = Size(0, 0)


@dataclass
class Message:
    """One message between two participants. Nothing else is ever shared.

    Args:
        weights: entries of the sender's `state_dict()` that are shared.
        artifacts: shared quantities that are no weights, by name.
        num_samples: training samples behind the message; rides along and is not counted.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    num_samples: int = 0

    @property
    def num_params(self) -> int:
        """Values in the message, weights and artifacts: the papers' "# Comm. Params"."""
        artifacts = (a.numel() if isinstance(a, Tensor) else a.num_params for a in self.artifacts.values())
        return sum(tensor.numel() for tensor in self.weights.values()) + sum(artifacts)

    @property
    def num_bytes(self) -> int:
        """Bytes of those values, by dtype."""
        artifacts = (a.nbytes if isinstance(a, Tensor) else a.num_bytes for a in self.artifacts.values())
        return sum(tensor.nbytes for tensor in self.weights.values()) + sum(artifacts)

    @property
    def size(self) -> Size:
        """Values and bytes really sent."""
        return Size(self.num_params, self.num_bytes)

    def clone(self) -> Message:
        """Copy, sharing no memory: for who keeps a message beyond the call that brought it."""
        weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        return Message(weights, {name: a.clone() for name, a in self.artifacts.items()}, self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, for a checkpoint that loads with ``weights_only=True``."""
        artifacts = {name: a if isinstance(a, Tensor) else dict(vars(a)) for name, a in self.artifacts.items()}
        return {"weights": dict(self.weights), "artifacts": artifacts, "num_samples": self.num_samples}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Message:
        """The inverse of `state_dict`."""
        artifacts = {name: _unpacked(a) if isinstance(a, Mapping) else a for name, a in state["artifacts"].items()}
        return cls(dict(state["weights"]), artifacts, state["num_samples"])


def _unpacked(fields: Mapping[str, Any]) -> ClassMeans | KeptRows | MaskedWeights:
    kinds: dict[str, type] = {"mean": ClassMeans, "rows": KeptRows, "mask": MaskedWeights}
    return next(kind for name, kind in kinds.items() if name in fields)(**fields)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _rows(per_class: Tensor, like: Tensor) -> Tensor:
    """View a [C] tensor so that it broadcasts over the rows of `like` [C, …]."""
    return per_class.view(-1, *(1,) * (like.ndim - 1))
