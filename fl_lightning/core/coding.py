"""A message as one vector of bounded length, and back: what privacy clips, adds up and blurs.

Everything that depends on a client's samples must be in the vector or be left out: of weights the update against what
the client received, of class means the rows and which classes stand behind them. Counts of samples, integer entries
(batch norm's counter of batches) and the number of samples behind the message are never in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.message import Artifact, ClassMeans, Message, accumulation_dtype


@dataclass(frozen=True)
class Entry:
    """One entry of a message, and where it lies in the vector.

    Args:
        name: the weight's or the artifact's.
        kind: ``weight``, ``Tensor`` or ``ClassMeans``.
        shape: of the tensor, or of the class means [C, …].
        relates_classes: as `ClassMeans`'.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    relates_classes: bool = False

    @property
    def size(self) -> int:
        """Coordinates that it takes: of class means one more a class, for whether the class is held."""
        return math.prod(self.shape) + (self.shape[0] if self.kind == "ClassMeans" else 0)


class Coding:
    """Which entries a message has, in the order of the vector: weights first, then artifacts, each by name.

    Args:
        entries: in that order.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    @classmethod
    def of(cls, message: Message) -> Coding:
        """The coding of messages like this one.

        Raises:
            TypeError: for an artifact of which no vector of bounded length can be made.
        """
        floats = {name: tensor for name, tensor in sorted(message.weights.items()) if tensor.is_floating_point()}
        return cls(
            [Entry(name, "weight", tuple(tensor.shape)) for name, tensor in floats.items()]
            + [_artifact_entry(name, value) for name, value in sorted(message.artifacts.items())]
        )

    @property
    def num_weights(self) -> int:
        """Coordinates of the weights, which come first."""
        return sum(entry.size for entry in self.entries if entry.kind == "weight")

    @property
    def size(self) -> int:
        """Coordinates of the vector."""
        return sum(entry.size for entry in self.entries)

    @property
    def groups(self) -> list[slice]:
        """Where the weights lie and where the artifacts lie, as far as there are any."""
        parts = [slice(0, self.num_weights), slice(self.num_weights, self.size)]
        return [part for part in parts if part.stop > part.start]

    def encoded(self, message: Message, reference: Mapping[str, Tensor]) -> Tensor:
        """[P] the message as a vector, in the accumulation's dtype.

        Args:
            message: one that this is the coding of.
            reference: weights that all ends know; an update is the difference to them. A weight that is not among them
                is taken whole.
        """
        parts = [torch.zeros(0, dtype=torch.float64)]
        for entry in self.entries:
            value = message.weights[entry.name] if entry.kind == "weight" else message.artifacts[entry.name]
            parts += _parts(entry, value, reference.get(entry.name))
        return torch.cat([part.to(parts[-1]) for part in parts])

    def decoded(self, vector: Tensor, reference: Mapping[str, Tensor], noise: Tensor) -> Message:
        """A message out of a vector; nothing but the vector and what is public goes into it.

        Args:
            vector: [P].
            reference: as for `encoded`; its integer entries are taken as they are.
            noise: [P] the standard deviation of what the vector was blurred by. A class counts as held where its
                coordinate is above twice that; the largest always does.
        """
        weights = {name: tensor for name, tensor in reference.items() if not tensor.is_floating_point()}
        artifacts: dict[str, Artifact] = {}
        start = 0
        for entry in self.entries:
            part = slice(start, start := start + entry.size)
            if entry.kind == "weight":
                like, moved = reference.get(entry.name), vector[part].view(entry.shape)
                dtype = torch.float32 if like is None else like.dtype
                weights[entry.name] = (moved if like is None else like.to(moved) + moved).to(dtype)
            elif entry.kind == "Tensor":
                artifacts[entry.name] = vector[part].view(entry.shape).float()
            else:
                artifacts[entry.name] = _class_means(entry, vector[part], noise[part])
        return Message({name: weights[name] for name in {**reference, **weights} if name in weights}, artifacts, 1)

    def state(self) -> list[list[Any]]:
        """The entries in plain containers."""
        return [[e.name, e.kind, list(e.shape), e.relates_classes] for e in self.entries]

    @classmethod
    def from_state(cls, state: list[list[Any]]) -> Coding:
        """The inverse of `state`."""
        return cls([Entry(name, kind, tuple(shape), relates) for name, kind, shape, relates in state])


def clipped(vector: Tensor, coding: Coding, norms: tuple[float, float]) -> Tensor:
    """[P] the vector with weights and artifacts each scaled down to a norm of at most C.

    v ← v · min(1, C / ‖v‖), a millionth shorter where it is scaled, so that the bound holds in float32, too. A vector
    that is not finite becomes zeros: nothing escapes the bound.

    Args:
        vector: [P].
        coding: of the vector.
        norms: C of the weights and C of the artifacts, > 0.
    """
    bounded = vector.clone()
    for part, norm in zip(coding.groups, of_groups(coding, norms), strict=True):
        length = float(torch.linalg.vector_norm(vector[part]))
        if not length < float("inf"):  # NaN, too
            bounded[part] = 0
        elif length > norm:
            bounded[part] *= norm * (1 - 1e-6) / length
    return bounded


def of_groups(coding: Coding, norms: tuple[float, float]) -> list[float]:
    """The clipping norm of each of the coding's groups."""
    weights, artifacts = norms
    return [weights if part.start == 0 and coding.num_weights else artifacts for part in coding.groups]


def deviations(coding: Coding, norms: tuple[float, float], multiplier: float) -> Tensor:
    """[P] the standard deviation of noise that is `multiplier` times the length of a clipped vector.

    With G groups of norms C_g the vector, each group over its C_g, is no longer than √G; so the noise of a group has
    standard deviation z C_g √G (McMahan et al. 2018, section 3).
    """
    deviation = torch.zeros(coding.size, dtype=torch.float64)
    for part, norm in zip(coding.groups, of_groups(coding, norms), strict=True):
        deviation[part] = multiplier * norm * len(coding.groups) ** 0.5
    return deviation


def _artifact_entry(name: str, value: Artifact) -> Entry:
    if isinstance(value, ClassMeans):
        return Entry(name, "ClassMeans", tuple(value.mean.shape), value.relates_classes)
    if isinstance(value, Tensor) and value.is_floating_point():
        return Entry(name, "Tensor", tuple(value.shape))
    what = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"artifact {name!r} is a {what}, of which no vector of bounded length can be made")


def _parts(entry: Entry, value: Any, known: Tensor | None) -> list[Tensor]:
    if entry.kind == "ClassMeans":
        held = value.valid.to(accumulation_dtype(value.mean.device))
        rows = torch.where(value.valid.view(-1, *(1,) * (value.mean.ndim - 1)), value.mean.to(held), 0.0)
        return [held, rows.reshape(-1)]
    wide = value.detach().to(accumulation_dtype(value.device)).reshape(-1)
    return [wide if known is None else wide - known.to(wide).reshape(-1)]


def _class_means(entry: Entry, vector: Tensor, noise: Tensor) -> ClassMeans:
    """Rows over how much of them there is: both are sums over the same clients, each scaled as it was clipped."""
    num_classes = entry.shape[0]
    held, rows = vector[:num_classes], vector[num_classes:].view(entry.shape)
    floor = (2 * noise[:num_classes]).to(held)
    valid = held > floor
    if not valid.any():
        valid = valid.clone()
        valid[held.argmax()] = True
    divisor = held.clamp(min=1e-12).maximum(floor).view(-1, *(1,) * (rows.ndim - 1))
    mean = torch.where(valid.view_as(divisor), rows / divisor, 0.0).float()
    return replace(ClassMeans(mean, valid.long(), False), relates_classes=entry.relates_classes)
