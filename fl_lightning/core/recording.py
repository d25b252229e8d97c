"""Work that a GPU is told once and does again at one call: CUDA graphs.

A small step is made of hundreds of operations that the CPU starts one by one; recorded, they start at once, on the same
addresses. So whatever a recording reads must stand still: `record` refuses work that reads memory nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.errors import shortened


class Unrecordable(Exception):
    """Why work cannot be recorded, in one line."""


class Recording(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again."""


def can_record(device: torch.device) -> bool:
    """Whether work on a device can be recorded."""
    return device.type == "cuda"


def record(work: Callable[[], None], known: Sequence[Tensor]) -> Recording:
    """Record what a function asks of the GPU; nothing of it is done yet.

    Args:
        work: on the present device; it was done a few times before, so that nothing in it is new to the GPU.
        known: the tensors that it may read and write; whoever replays it keeps them where they are.

    Raises:
        Unrecordable: if it waits for the device, reads tensors that are not known, or fails.
    """
    recording, failed = torch.cuda.CUDAGraph(), []
    reads = Reads(known)
    try:
        torch._C._cuda_clearCublasWorkspaces()  # else it keeps one that a later recording lets go
        with torch.cuda.graph(recording, capture_error_mode="thread_local"):
            try:
                with reads:
                    work()
            except Exception as error:  # the recording has to be ended before anything else
                failed.append(error)
    except Exception as error:  # torch's own types, by version
        failed.append(error)
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    if failed:
        raise Unrecordable(_said(failed[0])) from failed[0]
    reads.check()
    return recording


class Aside:
    """A stream of its own for recorded work: meanwhile the CPU brings in who comes next, and takes leave of who was.

    On a CPU it is no other.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do what a block asks for there, after all that was asked for until now; `waiting` says when it is done."""
        if self._stream is None:
            yield
            return
        present = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(present)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            present.wait_stream(self._stream)
            raise
        finally:
            self._done = self._stream.record_event()

    def wait(self) -> None:
        """Let the present stream wait for the work until now: the CPU does not."""
        self.waiting()()

    def waiting(self) -> Callable[[], None]:
        """What does so later, whatever work comes until then."""
        done = self._done
        return (lambda: None) if done is None else (lambda: torch.cuda.current_stream().wait_event(done))


def _said(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return "its step waits for the device" if "captur" in text else shortened(text, 120)


class Reads(TorchDispatchMode):
    """Sees what tensors operations read.

    Args:
        known: those that they may.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {_memory(tensor) for tensor in known}
        self._strange: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            # Numbers are tensors without dimensions on the CPU here; they are part of the recording.
            if tensor.numel() and (tensor.dim() or tensor.is_cuda) and _memory(tensor) not in self._known:
                self._strange.append(tensor)
        made = func(*args, **kwargs)
        self._known.update(map(_memory, tensors_in(made)))
        return made

    def check(self) -> None:
        """Refuse what was read and is not known.

        Raises:
            Unrecordable: naming the shape of the first such tensor.
        """
        if self._strange:
            shape = list(self._strange[0].shape)
            raise Unrecordable(f"its step reads a tensor {shape} that is no parameter, buffer or attribute")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from tensors_in(own)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
