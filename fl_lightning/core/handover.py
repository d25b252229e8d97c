"""What a client is handed and what it hands over: nobody else's tensors are its to change, and nobody changes its."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_lightning.core.checkup import Unsound, tensors_of
from fl_lightning.core.message import ClassMeans, Message, Structured, writes_to
from fl_lightning.core.moving import copies
from fl_lightning.core.walking import parts_of
from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData
    from fl_lightning.core.method import Method


class Heard:
    """A message that a method takes, whose tensors the server and other clients hold, too.

    Args:
        message: what came in.
        by_bits: whether a write by `.data`, which has no version, is looked for, too: where code is somebody's own.
    """

    def __init__(self, message: Message, by_bits: bool = False) -> None:
        self._message = message
        self._tensors = tensors_of(message)
        self._by_bits = by_bits
        self._were = writes_to(self._tensors, by_bits)

    def give(self, method: Method, data: OwnData) -> None:
        """Let a method take it, in containers of its own: what it takes out of them stays with the others.

        Raises:
            Unsound: if it changes tensors of the message.
        """
        weights, artifacts = dict(self._message.weights), dict(self._message.artifacts)
        method.receive(replace(self._message, weights=weights, artifacts=artifacts), data)
        _cut_off(method)
        self._part_from(method)
        self.check()

    @torch.no_grad()
    def _part_from(self, method: nn.Module) -> None:
        """Give copies to the parameters and buffers of a method that were set to tensors of the message.

        A step, or the state of the next client, would change them for all.
        """
        places = _places(self._tensors.values())
        for part in parts_of(method):
            for parameter in part._parameters.values():
                if parameter is not None and _place(parameter) in places:
                    parameter.data = parameter.data.clone()
            for name, buffer in part._buffers.items():
                if buffer is not None and _place(buffer) in places:
                    part._buffers[name] = buffer.detach().clone()

    def check(self, who: str = "") -> None:
        """Refuse a change in place.

        Args:
            who: has made it, where the error says no more of that.

        Raises:
            Unsound: naming the first tensor.
        """
        for name, now in writes_to(self._tensors, self._by_bits).items():
            if now != self._were[name]:
                said = f"{who} changes the {name} that it received in place, and others hear it, too: clone it first"
                raise Unsound(said.lstrip())


@contextmanager
def unchanged(messages: Iterable[Message], who: str, by_bits: bool = False) -> Iterator[None]:
    """A stretch in which nobody may change messages that others hear, too.

    Args:
        messages: the messages.
        who: may look at them.
        by_bits: see `Heard`.

    Raises:
        Unsound: naming `who` and the first tensor.
    """
    heard = [Heard(message, by_bits) for message in messages]
    yield
    for own in heard:
        own.check(who)


@torch.no_grad()
def handed_over(message: Message, method: nn.Module, num_train: int) -> Message:
    """What a method sends, without a graph and in memory of its own.

    A tensor that is sent as it stands, be it a buffer or in an attribute, would hold the next client's values by the
    time that a server, or a neighbour, looks at it.

    Args:
        message: what the method made.
        method: the method.
        num_train: training samples of the client.

    Raises:
        Unsound: if it is none, or one that would count in no mean.
    """
    kind = type(method).__name__
    _require(isinstance(message, Message), f"{kind}.send() gives {_kind(message)}, and must give a Message")
    counts = message.num_samples != 0 or num_train == 0 or not (message.weights or message.artifacts)
    _require(counts, f"{kind}.send() gives no num_samples, so that it counts in no mean: Message(…, …, data.num_train)")
    for name, tensor in message.weights.items():
        _require(isinstance(tensor, Tensor), f"weight {name} is {_kind(tensor)}, no tensor")
    for name, value in message.artifacts.items():
        known = isinstance(value, (Tensor, Structured))
        rule = "send a tensor, a ClassMeans or a kind of your own (@artifact)"
        _require(known, f"artifact {name} is {_kind(value)}: {rule}")
        whole = not isinstance(value, ClassMeans) or not value.count.is_floating_point()
        _require(whole, f"artifact {name}: a ClassMeans counts samples in whole numbers: count.long()")
        _require_fields(name, value)
    artifacts = {
        name: _laid_out(value) if isinstance(value, Tensor) else value.map(_laid_out)
        for name, value in message.artifacts.items()
    }
    return replace(message, weights=copies(message.weights), artifacts=artifacts)


def begin_fit(method: Method) -> None:
    """Let a method prepare a local fit.

    Raises:
        ConfigError: if it makes a parameter that learns, for which its optimizers have been made already.
    """
    known = {id(own) for part in parts_of(method) for own in part._parameters.values()}
    method.on_fit_start()
    learn = (own for part in parts_of(method) for own in part._parameters.values() if own is not None)
    made = {id(own) for own in learn if own.requires_grad} - known
    if made:
        name = next(name for name, own in method.named_parameters() if id(own) in made)
        rule = f"{type(method).__name__}.on_fit_start() makes {name} anew, which no optimizer has: copy into it instead"
        raise ConfigError("method", f"{rule}, under torch.no_grad()")
    _cut_off(method)


def _cut_off(method: nn.Module) -> None:
    """Make buffers constants that were set from parameters outside `torch.no_grad`.

    The gradient of what they are compared with would go through both: of a distance from where one begins it is 0.
    """
    for part in parts_of(method):
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.requires_grad:
                part._buffers[name] = buffer.detach()


def _require_fields(name: str, value: object) -> None:
    """Refuse a kind of artifact that holds tensors where nobody looks: they would be neither copied nor counted."""
    for field, own in vars(value).items() if isinstance(value, Structured) else ():
        if field.startswith("_") and not isinstance(own, Tensor):
            continue  # what it has read off its fields and remembers: it stays here
        plain = own is None or isinstance(own, (Tensor, bool, int, float, str))
        rule = "its fields are tensors, numbers, texts and truths; make one tensor of several, with their lengths"
        _require(plain, f"artifact {name}.{field} is {_kind(own)}: {rule}")


def _laid_out(tensor: Tensor) -> Tensor:
    """A copy in the order in which it arrives from another worker: sums over another one round otherwise."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _places(tensors: Iterable[Tensor]) -> set[int]:
    return {_place(tensor) for tensor in tensors} - {0}


def _place(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 for one that has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _kind(value: object) -> str:
    return type(value).__name__


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unsound(otherwise)
