"""A message as it crosses: of every floating-point tensor the values that are sent, and what they cost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.core.message import Artifact, Message, Size, Structured

INDEX_BYTES = 4
"""Bytes of one place among a tensor's entries (int32)."""


@dataclass(frozen=True)
class Packed:
    """One tensor of n entries on its way: the k values that are sent, as they arrive, and where they belong.

    Args:
        values: [k] float.
        size: n.
        known: [n] what both ends have of it already, and what stands where nothing is sent; None if nothing.
        places: [k] int64, ascending, the values' places; None where all n are sent.
        bits: what one value takes.
        extra: bytes that travel beside values and places.
        adds_up: whether its changes add up over rounds, as a trained weight's do, and what a server adds to what it
            has. A running statistic goes where the client's data are, wherever it starts, and so does a weight that a
            client does not begin its fit from as it came (FedAMP's): of them nothing is owed.
    """

    values: Tensor
    size: int
    known: Tensor | None
    places: Tensor | None
    bits: int
    extra: int = 0
    adds_up: bool = False

    @classmethod
    def whole(cls, tensor: Tensor, known: Tensor | None = None, adds_up: bool = False) -> Packed:
        """A tensor as it is."""
        at_both_ends = None if known is None else known.to(tensor).reshape(-1)
        return cls(tensor.detach().reshape(-1), tensor.numel(), at_both_ends, None, _bits(tensor), adds_up=adds_up)

    @property
    def num_params(self) -> int:
        """Values really sent: k."""
        return self.values.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values, of what is beside them, and of their places: as int32 or as one bit an entry."""
        places = 0 if self.places is None else min(INDEX_BYTES * self.num_params, -(-self.size // 8))
        return -(-self.num_params * self.bits // 8) + self.extra + places

    @property
    def known_there(self) -> Tensor:
        """[k] what both ends have already where values are sent."""
        assert self.known is not None, "nothing is known at both ends"
        return self.known if self.places is None else self.known[self.places]

    def carrying(self, values: Tensor, bits: int | None = None, extra: int = 0) -> Packed:
        """Other values in the same places.

        Args:
            values: [k]; they take the type of those before.
            bits: what one of them takes; None for the type's own.
            extra: bytes that travel beside.
        """
        values = values.to(self.values.dtype)
        return replace(self, values=values, bits=_bits(values) if bits is None else bits, extra=extra)

    def only(self, kept: Tensor) -> Packed:
        """Some of the values; elsewhere what is known stays.

        Args:
            kept: [k] bool.
        """
        assert self.known is not None, "nothing is known at both ends"
        if bool(kept.all()):
            return self
        places = kept.nonzero().reshape(-1) if self.places is None else self.places[kept]
        return replace(self, values=self.values[kept], places=places)

    def unpacked(self) -> Tensor:
        """[n] what arrives."""
        if self.places is None:
            return self.values
        assert self.known is not None
        return self.known.index_copy(0, self.places, self.values)


def _bits(tensor: Tensor) -> int:
    return 8 * tensor.element_size()


@dataclass(frozen=True)
class Packet:
    """A message's floating-point tensors, packed; what else is in it crosses as it is.

    Args:
        weights: by name. What the receiver of a round's message sent with it is known at both ends.
        artifacts: by name and field, which is empty for a plain tensor: of the others the `lossy` fields, and of those
            the entries that are `crossing`.
    """

    weights: dict[str, Packed]
    artifacts: dict[tuple[str, str], Packed]

    @classmethod
    def of(
        cls,
        message: Message,
        received: Message | None = None,
        trained: Collection[str] | None = None,
        increments: Collection[str] = (),
    ) -> Packet:
        """Pack a message.

        Args:
            message: on its way.
            received: what its sender has received from where it goes; None if that is not remembered there.
            trained: names of the weights whose changes add up; None for all.
            increments: names of the artifacts that the server adds to what it has.
        """
        known = {} if received is None else received.weights
        weights = {
            name: Packed.whole(
                tensor, known[name] if _alike(tensor, known.get(name)) else None, trained is None or name in trained
            )
            for name, tensor in message.weights.items()
            if tensor.is_floating_point()
        }
        artifacts = {
            (name, field): Packed.whole(values, adds_up=name in increments)
            for name, value in message.artifacts.items()
            for field, values in _lossy(value).items()
        }
        return cls(weights, artifacts)

    def unpacked(self, message: Message) -> Message:
        """What arrives of the message that was packed, with what it cost.

        A method may have made its weights of fewer numbers (FedKD's factors): of those none is what arrives once a
        filter has changed a weight, and all of the weights count.
        """
        here = Packet.of(message)
        self._require_all_of(here)
        weights = {name: self._weight(name, tensor) for name, tensor in message.weights.items()}
        artifacts = {name: self._artifact(name, value) for name, value in message.artifacts.items()}
        if message.sent is not None and any(not torch.equal(weights[n], t) for n, t in message.weights.items()):
            message = replace(message, sent=None)
        there, plain, whole = self._size, here._size, message.size
        saved = Size(plain.num_params - there.num_params, plain.num_bytes - there.num_bytes)
        sent = Size(whole.num_params - saved.num_params, whole.num_bytes - saved.num_bytes)
        unchanged = message.sent if sent == whole else sent
        return Message(weights, artifacts, message.num_samples, unchanged)

    def _require_all_of(self, whole: Packet) -> None:
        """Refuse to lack what is in a message: it would cross as it is, and count as nothing."""
        lost = next((name for name in whole.weights if name not in self.weights), None)
        if lost is not None:
            raise ValueError(f"a filter leaves weight {lost} out of its packet: send none of its values (Packed.only)")
        lost = next((name for name, field in whole.artifacts if (name, field) not in self.artifacts), None)
        if lost is not None:
            raise ValueError(f"a filter leaves artifact {lost} out of its packet: hand it on, as it is or changed")

    def _weight(self, name: str, tensor: Tensor) -> Tensor:
        return _shaped(self.weights[name], tensor) if name in self.weights else tensor

    def _artifact(self, name: str, value: Artifact) -> Artifact:
        if isinstance(value, Tensor):
            return _shaped(self.artifacts[name, ""], value) if (name, "") in self.artifacts else value
        fields = {field: _filled(value, field, self.artifacts[name, field]) for field in _lossy(value)}
        return replace(value, **fields) if fields else value  # type: ignore[type-var]

    @property
    def _size(self) -> Size:
        packed = [*self.weights.values(), *self.artifacts.values()]
        return Size(sum(own.num_params for own in packed), sum(own.num_bytes for own in packed))


def _alike(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and other.shape == tensor.shape and other.is_floating_point()


def _lossy(value: Artifact) -> dict[str, Tensor]:
    """The values of an artifact that may be narrowed, by field."""
    if isinstance(value, Tensor):
        return {"": value} if value.is_floating_point() else {}
    fields = {field: tensor for field, tensor in value.tensors().items() if field in value.lossy}
    floats = {field: tensor for field, tensor in fields.items() if tensor.is_floating_point()}
    return {
        field: tensor if (rows := value.crossing(field)) is None else tensor[rows] for field, tensor in floats.items()
    }


def _shaped(packed: Packed, like: Tensor) -> Tensor:
    return packed.unpacked().view(like.shape)


def _filled(value: Structured, field: str, packed: Packed) -> Tensor:
    tensor, rows = value.tensors()[field], value.crossing(field)
    if rows is None:
        return _shaped(packed, tensor)
    whole = tensor.clone()
    whole[rows] = _shaped(packed, tensor[rows])
    return whole
