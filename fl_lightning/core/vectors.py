"""A round's messages taken apart into vectors that belong together, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.message import Artifact, ClassMeans, Message, Structured, accumulation_dtype, tensors_in

WEIGHTS = "weights"
"""Name of the vectors of trained weights."""
_BLOCK = 1 << 16  # coordinates that are widened to double precision at a time


@dataclass(frozen=True)
class Vectors:
    """What several clients sent of one thing.

    Args:
        name: what it is: `WEIGHTS`, ``statistics`` (of batch norm), or the artifact's with its field or class.
        points: [k, P] float, one row a client that sent it, in the order of clients.
        reference: [P] what the clients had received of it, in the accumulation's dtype; None where that was nothing.
    """

    name: str
    points: Tensor
    reference: Tensor | None = None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Some coordinates at a time, [k, ≤ P] in the accumulation's dtype."""
        wide = accumulation_dtype(self.points.device)
        for start in range(0, self.points.shape[1], _BLOCK):
            part = slice(start, start + _BLOCK)
            yield part, self.points[:, part].to(wide)

    def each(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """[P] what `change` makes of [k, ≤ P], block after block."""
        parts = [change(block) for _, block in self.blocks()]
        return torch.cat(parts) if parts else self.points.new_zeros(0, dtype=accumulation_dtype(self.points.device))

    def weighted(self, shares: Tensor) -> Tensor:
        """[P] Σ_i share_i x_i.

        Args:
            shares: [k].
        """
        return self.each(lambda block: (block * shares.to(block)[:, None]).sum(0))

    def lengths(self, centre: Tensor) -> Tensor:
        """[k] ‖x_i − centre‖, float64 on the CPU."""
        squares = torch.zeros(len(self.points), dtype=torch.float64)
        for part, block in self.blocks():
            squares += (block - centre[part].to(block)).square().sum(1).cpu().double()
        return squares.sqrt()

    def squared_distances(self) -> Tensor:
        """[k, k] ‖x_i − x_j‖², float64 on the CPU; 0 exactly between equal ones."""
        squares = torch.zeros(len(self.points), len(self.points), dtype=torch.float64)
        for _, block in self.blocks():
            for i, own in enumerate(block):
                squares[i] += (block - own).square().sum(1).cpu().double()
        return squares

    def products(self, centre: Tensor) -> Tensor:
        """[k, k] (x_i − centre)ᵀ(x_j − centre), float64 on the CPU.

        Args:
            centre: [P].
        """
        found = torch.zeros(len(self.points), len(self.points), dtype=torch.float64)
        for part, block in self.blocks():
            moved = block - centre[part].to(block)
            for i, own in enumerate(moved):
                found[i] += (moved * own).sum(1).cpu().double()
        return found


Combine = Callable[[Vectors], Tensor]
"""Vectors -> [P] what becomes of them."""


class Unsuited(TypeError):
    """An artifact of which no vectors can be made; the text says which."""


def combined(
    messages: Sequence[Message], previous: Message, trained: Collection[str] | None, combine: Combine, copies: int
) -> list[Message]:
    """So many messages, all alike in what they say: `combine` of every thing's vectors.

    So the mean of them is what was combined, and sums are right, too. Trained weights are one vector, batch norm's
    statistics another, every tensor and every field of an artifact one, and of class means every class's row over those
    who hold it; as many messages hold the class afterwards. Integer weights take the maximum, as in the mean. All
    count alike: a number of samples is easily made up.

    Args:
        messages: in the order of clients; not empty.
        previous: what the clients had received.
        trained: names of the weights that are parameters; None for all that are floating-point.
        combine: makes one vector of several.
        copies: how many messages are made, at least as many as there are.

    Raises:
        Unsuited: for an artifact of which no vectors can be made.
        ValueError: if names or shapes differ between clients.
    """
    weights = _weights([message.weights for message in messages if message.weights], previous.weights, trained, combine)
    made = [Message(weights, {}, 1) for _ in range(copies)]
    for name in dict.fromkeys(name for message in messages for name in message.artifacts):
        values = [message.artifacts[name] for message in messages if name in message.artifacts]
        artifact, before = f"artifact {name}", previous.artifacts.get(name)
        if isinstance(values[0], ClassMeans):
            means = _class_means(artifact, values, before, combine, copies)
            for message, own in zip(made, means, strict=True):
                message.artifacts[name] = own
        else:
            value = _whole(artifact, values, before, combine)
            for message in made[: -(-len(values) * copies // len(messages))]:  # a sum has as many terms as without
                message.artifacts[name] = value
    return made


def _weights(
    sent: list[dict[str, Tensor]], received: Mapping[str, Tensor], trained: Collection[str] | None, combine: Combine
) -> dict[str, Tensor]:
    if not sent:
        return {}
    first = sent[0]
    for other in sent:
        _same(first.keys(), other.keys(), "weights", "names")
    floats = [name for name, tensor in first.items() if tensor.is_floating_point()]
    known = floats if trained is None else trained
    made: dict[str, Tensor] = {}
    for unit, names in (
        (WEIGHTS, [name for name in floats if name in known]),
        ("statistics", [name for name in floats if name not in known]),
    ):
        if names:
            made |= _one_vector(unit, [{name: own[name] for name in names} for own in sent], received, combine)
    counters = {n: torch.stack([own[n] for own in sent]).amax(0) for n in first if n not in made}
    return {name: made[name] if name in made else counters[name] for name in first}


def _one_vector(
    unit: str, sent: list[dict[str, Tensor]], received: Mapping[str, Tensor], combine: Combine
) -> dict[str, Tensor]:
    first = sent[0]
    for name, tensor in first.items():
        for other in sent:
            _same(tensor.shape, other[name].shape, f"weight {name}", "shapes")
    points = torch.stack([_flat(own.values()) for own in sent])
    reference = _flat(received[name] for name in first) if all(name in received for name in first) else None
    merged = _made(combine, Vectors(unit, points, None if reference is None else _wide(reference)))
    parts = merged.split([tensor.numel() for tensor in first.values()])
    return {n: part.view(t.shape).to(t.dtype) for (n, t), part in zip(first.items(), parts, strict=True)}


def _made(combine: Combine, vectors: Vectors) -> Tensor:
    """What a rule makes of some vectors: one of their length, of numbers with a point."""
    made, size = combine(vectors), vectors.points.shape[1]
    if not isinstance(made, Tensor) or not made.is_floating_point() or made.shape != (size,):
        kind = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        who = type(getattr(combine, "__self__", combine)).__name__
        raise ValueError(f"{who}.combine() must give a floating-point tensor [{size}], gives {kind}")
    return made


def _class_means(name: str, values: Sequence[Any], before: Any, combine: Combine, copies: int) -> list[ClassMeans]:
    """The means of `copies` clients, all alike, of which as many hold a class as really do."""
    first = values[0]
    for value in values:
        _same(first.mean.shape, value.mean.shape, name, "shapes")
    mean, holders = torch.zeros_like(first.mean), torch.stack([value.valid for value in values]).sum(0)
    same = isinstance(before, ClassMeans) and before.mean.shape == mean.shape
    for row in holders.nonzero()[:, 0].tolist():
        points = torch.stack([value.mean[row].reshape(-1) for value in values if value.valid[row]])
        known = _wide(before.mean[row].reshape(-1)).to(points.device) if same and before.valid[row] else None
        mean[row] = _made(combine, Vectors(f"{name}, class {row}", points, known)).view(mean[row].shape).to(mean.dtype)
    return [replace(first, mean=mean, count=(holders > copy).long()) for copy in range(copies)]


def _whole(name: str, values: Sequence[Any], before: Any, combine: Combine) -> Any:
    """One value of a tensor's or a registered kind's."""
    first = values[0]
    if isinstance(first, Tensor):
        return _tensor(name, [value for value in values if isinstance(value, Tensor)], before, combine)
    fields = fields_of(name, first)
    for value in values:
        _same(_settings(first), _settings(value), name, "settings")
    merged = {
        field: _tensor(
            f"{name}.{field}", [getattr(value, field) for value in values], getattr(before, field, None), combine
        )
        for field in fields
    }
    return replace(first, **merged)


def fields_of(name: str, value: Artifact) -> dict[str, Tensor]:
    """The tensors of an artifact that is no `ClassMeans`, all of them floating-point.

    Raises:
        Unsuited: if one is not.
    """
    found = tensors_in(value)
    if not found or not all(tensor.is_floating_point() for tensor in found.values()):
        raise Unsuited(f"{name} ({type(value).__name__})")
    return found


def _tensor(name: str, values: Sequence[Tensor], before: Any, combine: Combine) -> Tensor:
    first = values[0]
    fields_of(name, first)
    for value in values:
        _same(first.shape, value.shape, name, "shapes")
    known = isinstance(before, Tensor) and before.shape == first.shape
    reference = _wide(before.reshape(-1)).to(first.device) if known else None
    points = torch.stack([value.detach().reshape(-1) for value in values])
    return _made(combine, Vectors(name, points, reference)).view(first.shape).to(first.dtype)


def _settings(value: Structured) -> dict[str, Any]:
    every = {own.name: getattr(value, own.name) for own in fields(value)}  # type: ignore[arg-type]
    return {name: setting for name, setting in every.items() if not isinstance(setting, Tensor)}


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(accumulation_dtype(tensor.device))


def _same(own: Any, other: Any, what: str, of: str) -> None:
    if own != other:
        raise ValueError(f"{what}: clients' {of} differ, and a robust rule needs the same: {own} and {other}"[:250])


# --- how far clients are from one another -----------------------------------------------------------------------------


def squared_distances(messages: Sequence[Message]) -> Tensor:
    """[n, n] squared distances between clients, float64 on the CPU: of their weights, where all send some.

    Else of their artifacts, over what both sent: the mean square difference of a value. Two that have nothing in common
    (prototypes of other classes) are as far apart as any two are.

    Raises:
        Unsuited: for an artifact of which no vectors can be made.
        ValueError: if names or shapes differ between clients.
    """
    if all(message.weights for message in messages):
        floats = [name for name, tensor in messages[0].weights.items() if tensor.is_floating_point()]
        for message in messages:
            _same(messages[0].weights.keys(), message.weights.keys(), "weights", "names")
        return Vectors(
            WEIGHTS, torch.stack([_flat(m.weights[name] for name in floats) for m in messages])
        ).squared_distances()
    size = len(messages)
    squares, shared = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for name in sorted({name for message in messages for name in message.artifacts}):
        rows = [_rows(name, message.artifacts.get(name)) for message in messages]
        for i in range(size):
            for j in range(i):
                both = [key for key in rows[i] if key in rows[j]]
                squares[i, j] += sum(float((rows[i][key] - rows[j][key]).square().sum()) for key in both)
                shared[i, j] += sum(rows[i][key].numel() for key in both)
    means = squares / shared.clamp(min=1)
    means = torch.where(shared > 0, means, means.max())
    means = means.tril(-1)
    return means + means.T


def _rows(name: str, value: Artifact | None) -> dict[Any, Tensor]:
    """What a client sent of an artifact, piece by piece, in double precision on the CPU."""
    if value is None:
        return {}
    if isinstance(value, ClassMeans):
        return {row: value.mean[row].detach().cpu().double() for row in value.valid.nonzero()[:, 0].tolist()}
    return {field: tensor.detach().cpu().double() for field, tensor in fields_of(f"artifact {name}", value).items()}
