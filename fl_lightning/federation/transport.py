"""Nested containers of tensors from one process to another: one small pickle, and one buffer for all tensors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ENVELOPE = 4096
"""Bytes of a first message between two processes, which small things fit into with their size."""
_HEAD = 8  # of them, for the size


class WorkerLost(RuntimeError):
    """Another process of the run is gone."""


class Waiting:
    """What to do while this process waits for others; set by whoever watches it."""

    context: Callable[[], AbstractContextManager[None]] = nullcontext


def in_a_run() -> bool:
    """Whether a run of several processes is under way in this one: what somebody's code begins there is its own."""
    return Waiting.context is not nullcontext


def has_others() -> bool:
    """Whether what this process begins now is done together with others."""
    return dist.is_available() and dist.is_initialized() and not in_a_run()


class Wire:
    """How tensors travel; set by whoever starts the processes."""

    by_cpu = False
    """Whether by way of the CPU, as they must where processes share a GPU: NCCL refuses that."""

    @classmethod
    def device(cls, device: torch.device) -> torch.device:
        """Where a message's buffer is on its way to or from `device`; gloo knows no Apple GPU."""
        return device if device.type in dist.get_backend_config() and not cls.by_cpu else torch.device("cpu")


@contextmanager
def together() -> Iterator[None]:
    """A stretch that needs the other processes.

    Raises:
        WorkerLost: if one of them is gone.
    """
    with Waiting.context(), _noticing():
        yield


@contextmanager
def _noticing(rank: int | None = None) -> Iterator[None]:
    """Say who is gone where a message fails: the process that it is from, or for, if that is one."""
    try:
        yield
    except WorkerLost:
        raise
    except RuntimeError as error:  # gloo's own type, NCCL's is one of its children
        who = "a worker" if rank is None else f"worker {rank} of {dist.get_world_size()}"
        why = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0])  # without the line of gloo's own code
        raise WorkerLost(f"{who} is gone ({why[:120]})") from error


@dataclass(frozen=True)
class Slot:
    """Where a tensor stood: its place in the buffer, its type and shape. One without values (meta) has no place."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_meta: bool

    @property
    def num_bytes(self) -> int:
        """Bytes in the buffer."""
        return 0 if self.is_meta else self.dtype.itemsize * torch.Size(self.shape).numel()


def pack(state: Any) -> tuple[Any, list[Tensor], int]:
    """Take the tensors out of nested dictionaries, lists and tuples.

    Returns:
        The containers with a `Slot` for every tensor, the tensors in order, and the size of their buffer in bytes.
    """
    tensors: list[Tensor] = []
    size = 0

    def visit(node: Any) -> Any:
        nonlocal size
        if isinstance(node, Tensor):
            slot = Slot(size, node.dtype, tuple(node.shape), node.is_meta)
            size += slot.num_bytes
            if not node.is_meta:
                tensors.append(node)
            return slot
        if isinstance(node, Mapping):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return _like(node, [visit(value) for value in node])
        return node

    return visit(state), tensors, size


def unpack(skeleton: Any, buffer: Tensor) -> Any:
    """The inverse of `pack`; tensors are on the buffer's device."""
    if isinstance(skeleton, Slot):
        if skeleton.is_meta:
            return torch.empty(skeleton.shape, dtype=skeleton.dtype, device="meta")
        part = buffer[skeleton.start : skeleton.start + skeleton.num_bytes].clone()  # a clone is aligned
        return part.view(skeleton.dtype).reshape(skeleton.shape)
    if isinstance(skeleton, Mapping):
        return {key: unpack(value, buffer) for key, value in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        return _like(skeleton, [unpack(value, buffer) for value in skeleton])
    return skeleton


def _like(node: Any, values: Sequence[Any]) -> Any:
    """A list or a tuple, one with names too, of other values."""
    return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)


def _buffer(tensors: list[Tensor], device: torch.device) -> Tensor:
    flat = [tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def send(state: Any, target: int, device: torch.device) -> None:
    """Send a nested state to one process, its tensors by way of `device`, or of the CPU (`Wire`)."""
    skeleton, tensors, size = pack(state)
    with together(), _noticing(target):
        _say((skeleton, size), target)
        if size:
            dist.send(_buffer(tensors, Wire.device(device)), target)


def receive(source: int, device: torch.device) -> Any:
    """Take what `source` sends; its tensors are on `device`."""
    with together(), _noticing(source):
        skeleton, size = _hear(source)
        buffer = torch.empty(size, dtype=torch.uint8, device=Wire.device(device))
        if size:
            dist.recv(buffer, source)
    return unpack(skeleton, buffer.to(device))


def broadcast(state: Any, device: torch.device) -> Any:
    """Give the main process's state to all, with tensors on `device`; the main one gets its own back, not a copy."""
    is_main = dist.get_rank() == 0
    skeleton, tensors, size = pack(state) if is_main else (None, [], 0)
    skeleton, size = tell((skeleton, size))
    with together():
        way = Wire.device(device)
        buffer = _buffer(tensors, way) if is_main else torch.empty(size, dtype=torch.uint8, device=way)
        if size:
            dist.broadcast(buffer, 0)
    return state if is_main else unpack(skeleton, buffer.to(device))


def tell(value: Any) -> Any:
    """The main process's value, on every process; for small things. Nobody waits for anybody but the main process."""
    is_main = dist.get_rank() == 0
    with together():
        if not _speaks_cpu():
            values = [value]
            dist.broadcast_object_list(values, 0)
            return value if is_main else values[0]
        if not is_main:
            return _hear(0)
        for target in range(1, dist.get_world_size()):
            _say(value, target)
    return value


def gather(value: Any) -> list[Any]:
    """Every process's value, by rank, on every process, which waits for all; for small things.

    By way of the main process, where that can be: gloo's own way round takes six times as long.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [value] * size
    with together():
        if not _speaks_cpu():
            dist.all_gather_object(values, value)
            return values
        if rank == 0:
            values[1:] = [_hear(source) for source in range(1, size)]
        else:
            _say(value, 0)
    return tell(values)


def _say(value: Any, target: int) -> None:
    """Send something small to one process."""
    with _noticing(target):
        if not _speaks_cpu():
            dist.send_object_list([value], target)
            return
        content = pickle.dumps(value)
        letter = len(content).to_bytes(_HEAD, "little") + content
        buffer = torch.frombuffer(bytearray(letter.ljust(_ENVELOPE, b"\0")), dtype=torch.uint8)
        dist.send(buffer[:_ENVELOPE], target)
        if len(buffer) > _ENVELOPE:
            dist.send(buffer[_ENVELOPE:], target)


def _hear(source: int) -> Any:
    """Take something small that `source` says."""
    with _noticing(source):
        if not _speaks_cpu():
            values: list[Any] = [None]
            dist.recv_object_list(values, source)
            return values[0]
        first = torch.empty(_ENVELOPE, dtype=torch.uint8)
        dist.recv(first, source)
        letter = first.numpy().tobytes()
        size = int.from_bytes(letter[:_HEAD], "little")
        left = _HEAD + size - _ENVELOPE
        if left > 0:
            rest = torch.empty(left, dtype=torch.uint8)
            dist.recv(rest, source)
            letter += rest.numpy().tobytes()
    return pickle.loads(letter[_HEAD : _HEAD + size])


def _speaks_cpu() -> bool:
    """Whether the processes can send each other what is on the CPU; NCCL alone cannot."""
    return "cpu" in dist.get_backend_config()
