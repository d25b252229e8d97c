"""What recorded work reads: it must stand still, so whatever reads memory that nobody has named is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Unrecordable(Exception):
    """Why work cannot be recorded, in one line."""


class Reads(TorchDispatchMode):
    """Sees what tensors operations read.

    Args:
        known: those that they may.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {address(tensor) for tensor in known}
        self._strange: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            # Numbers are tensors without dimensions on the CPU here; they are part of the recording.
            if tensor.numel() and (tensor.dim() or tensor.is_cuda) and address(tensor) not in self._known:
                self._strange.append(tensor)
        made = func(*args, **kwargs)
        self._known.update(map(address, tensors_in(made)))
        return made

    def check(self) -> None:
        """Refuse what was read and is not known.

        Raises:
            Unrecordable: naming the shape of the first such tensor.
        """
        if self._strange:
            shape = list(self._strange[0].shape)
            raise Unrecordable(f"its step reads a tensor {shape} that is no parameter, buffer or attribute")


def address(tensor: Tensor) -> int:
    """Of the memory that a tensor shows some of."""
    return tensor.untyped_storage().data_ptr()


def flat(value: Any) -> Iterator[Any]:
    """What lists and tuples hold, and those in them, in order; of anything else, itself."""
    if type(value) not in (list, tuple):
        yield value
        return
    for own in value:
        yield from flat(own)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from tensors_in(own)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
