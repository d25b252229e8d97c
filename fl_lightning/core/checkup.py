"""What is wrong with a message or a model: values that are no numbers or absurd, names and shapes nobody expects."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.message import Artifact, ClassMeans, Flat, Message, tensors_in
from fl_lightning.core.moving import together

Shapes = Mapping[str, tuple[int, ...]]


class Unsound(ValueError):
    """Something is not what it was meant to be; the text says which entry, and what is wrong with it."""


class Expected:
    """What a client's messages are made of.

    Args:
        weights: the entries that may travel, as the client's own module has them.
        artifacts: names and shapes of the artifacts that the method tells of (`Method.interface`); others may come.
        parameters: names of the entries that are trained. Others (running statistics) and artifacts are in units of the
            data, or of their square.
    """

    def __init__(self, weights: Mapping[str, Tensor], artifacts: Shapes, parameters: Container[str]) -> None:
        self.weights = weights
        self.artifacts = artifacts
        self.parameters = parameters
        self.forms = _forms(weights)


def check_message(message: Message, expected: Expected, num_train: int, received: Message, growth: float) -> None:
    """Refuse what a client sends if it cannot be what its method means to send.

    A method may leave out a whole submodule that it shares (or send it as artifacts), but no part of one. The message
    gets its weights as one vector, in which they are looked at. An artifact that the client did not receive has grown
    from nothing, and may be a count of steps or samples: of it a bound that is tighter than the usual one says nothing.

    Args:
        message: as it arrives.
        expected: what it should be made of.
        num_train: training samples of the client.
        received: what the client was sent in this round, with the weights that it began from.
        growth: see `check_values`.

    Raises:
        Unsound: naming the first entry that is wrong.
    """
    if _forms(message.weights) != expected.forms:
        _check_weights(message, expected)
    for name, value in message.artifacts.items():
        _check_artifact(name, value, expected, num_train)
    if not (isinstance(message.num_samples, int) and 0 <= message.num_samples <= num_train):
        raise Unsound(f"num_samples is {message.num_samples!r}, and it has {num_train} training samples")
    message.flat = Flat(message.weights)  # the sum that it goes into will take it, too
    if not (message.flat.square <= _bound(growth) and _all_small(_of_artifacts(message), growth)):
        sent, before = tensors_of(message), tensors_of(received)
        trained = {f"weight {name}" for name in message.weights if name in expected.parameters}
        weights = tensors_of(Message(message.weights, {}))
        new = {name: sent.pop(name) for name in [*sent] if name not in weights and name not in before}
        check_values(sent, before, growth, trained)
        check_new(new, growth)


def check_new(tensors: Mapping[str, Tensor], growth: float) -> None:
    """Refuse values as `check_values` does, of entries that nobody had before: a count may be among them.

    Args:
        tensors: by name.
        growth: > 1.

    Raises:
        Unsound: naming the first entry that is wrong, and the value.
    """
    check_values(tensors, {}, max(growth, _USUAL), ())


def check_values(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], growth: float, parameters: Container[str]
) -> None:
    """Refuse values that are NaN, infinite, or so large that no training can have made them.

    A parameter's largest magnitude may be `growth` times that of what it started the round from, or of 1 where that is
    less; that of a statistic or an artifact growth³ times, because it may be the square of something in the data's
    units. One pass over all values together says that all are small, as nearly always; single entries, and what they
    started from, are looked at only where it does not.

    Args:
        tensors: by name; those without floating-point values are passed over.
        before: what the entries were before, by the same names, where there is such a thing.
        growth: > 1.
        parameters: names of those that are trained.

    Raises:
        Unsound: naming the first entry that is wrong, and the value.
    """
    if _all_small(tensors.values(), growth):
        return
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    for name, most in zip(floats, _largest(floats.values()), strict=True):
        if most <= growth:
            continue
        _require(math.isfinite(most), f"{name} holds {_first_broken(floats[name])}")
        factor = growth if name in parameters else growth**3
        start = before.get(name)
        bound = factor * max([1.0, *_largest([start] if start is not None and start.numel() else [])])
        rule = f"above {bound:g} (federation.max_growth is {growth:g})"
        _require(most <= bound, f"{name} holds {most:g}, {rule}")


_USUAL = 1e4  # `federation.max_growth` where nothing is said
_SMALL = 1 << 20  # values that are copied together faster than they are looked at one tensor after another


def _all_small(tensors: Iterable[Tensor], growth: float) -> bool:
    """Whether the sum of all squares says that no magnitude is above `growth`.

    It is NaN or infinite where a value is, which is not small; nor is a sum that only overflows or has many terms, of
    which `_largest` then says more. Half of growth² leaves room for the rounding of narrow types, because a sum of
    squares never rounds to less than its largest term by that much.
    """
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    size = sum(map(Tensor.numel, floats))
    if size == 0:
        return True
    parts = [together(floats)] if size <= _SMALL else [tensor.detach().reshape(-1) for tensor in floats]
    squares = [part.dot(part) for part in parts]
    total = squares[0] if len(squares) == 1 else torch.stack([square.float() for square in squares]).sum()
    return total.item() <= _bound(growth)


def _bound(growth: float) -> float:
    return min(growth * growth / 2, _LARGE)


_LARGE = 1e30  # a bound on sums that no growth lifts to infinity


def _largest(tensors: Iterable[Tensor]) -> list[float]:
    """The largest magnitude of each, NaN where one is in it; one wait for the device."""
    ends = [torch.stack(torch.aminmax(tensor.detach())).float() for tensor in tensors]
    both = torch.stack(ends).tolist() if ends else []
    return [math.nan if math.isnan(low) else max(-low, high) for low, high in both]


def _first_broken(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1)
    broken = flat[~torch.isfinite(flat)]
    return float(broken[0]) if len(broken) else math.inf


def _of_artifacts(message: Message) -> Iterator[Tensor]:
    for value in message.artifacts.values():
        yield from tensors_in(value).values()


def tensors_of(message: Message) -> dict[str, Tensor]:
    """All tensors of a message, by a name that a user understands."""
    found = {f"weight {name}": tensor for name, tensor in message.weights.items()}
    for name, value in message.artifacts.items():
        fields = tensors_in(value).items()
        found |= {f"artifact {name}.{field}".removesuffix("."): tensor for field, tensor in fields}
    return found


# --- names and shapes -------------------------------------------------------------------------------------------------


def _forms(weights: Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    return {name: (own.shape, own.dtype) if isinstance(own, Tensor) else None for name, own in weights.items()}


def _check_weights(message: Message, expected: Expected) -> None:
    for name in message.weights:
        _require(name in expected.weights, f"weight {name!r} is none of those that travel")
    there = {_top(name) for name in message.weights}
    for name in expected.weights:
        missing = name not in message.weights and name not in message.artifacts and _top(name) in there
        _require(not missing, f"weight {name!r} is missing; what only some send is no weight, but an artifact")
    for name, tensor in message.weights.items():
        _check_weight(name, tensor, expected.weights[name])


def _top(name: str) -> str:
    return name.partition(".")[0]


def _check_weight(name: str, tensor: Any, own: Tensor) -> None:
    what = f"weight {name}"
    _require(isinstance(tensor, Tensor), f"{what} is {type(tensor).__name__}, no tensor")
    _require(tensor.shape == own.shape, f"{what} is {list(tensor.shape)} and should be {list(own.shape)}")
    _require(tensor.dtype == own.dtype, f"{what} is {_kind(tensor)} and should be {_kind(own)}")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_artifact(name: str, value: Artifact, expected: Expected, num_train: int) -> None:
    what = f"artifact {name}"
    shape = expected.artifacts.get(name)
    if shape is not None:
        own = [tensor.shape for tensor in tensors_in(value).values()]
        fits = any(tuple(found) == shape for found in own)
        _require(fits, f"{what} is {list(own[0]) if own else 'empty'} and should be {list(shape)}")
    if isinstance(value, ClassMeans):
        allowed = 10**6 * max(1, num_train)  # a running mean may have seen a sample several times
        for count in value.counts:
            _require(0 <= count <= allowed, f"{what} counts {count:.0f} samples of a class")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unsound(otherwise)
