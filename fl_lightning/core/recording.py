"""Work that a device is told once and does again at one call: CUDA graphs, and a CPU's tapes.

A small step is made of hundreds of operations that the CPU starts one by one; recorded, a GPU starts them at once. They
are done on the same addresses, so whatever a recording reads must stand still: `record` refuses work that reads memory
nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.core.reads import Reads, Unrecordable
from fl_lightning.core.tape import taped
from fl_lightning.errors import shortened


class Recording(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again."""


def can_record(device: torch.device) -> bool:
    """Whether work on a device can be recorded."""
    return device.type in ("cpu", "cuda")


def has_room(device: torch.device) -> bool:
    """Whether a GPU has as much memory left as this process has taken so far: for as much again to be recorded."""
    free, _ = torch.cuda.mem_get_info(device)
    return free > torch.cuda.memory_reserved(device)


def record(work: Callable[[], Sequence[Tensor]], known: Sequence[Tensor]) -> Recording:
    """Record what a function asks of the device; nothing of it is done yet.

    Args:
        work: on the present device; it was done a few times before, so that nothing in it is new to a GPU. It returns
            tensors that are read after a replay.
        known: the tensors that it may read and write; whoever replays it keeps them where they are.

    Raises:
        Unrecordable: if it waits for the device, reads tensors that are not known, or fails.
    """
    if known[0].device.type == "cpu":
        return taped(work, known)
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

    @property
    def is_aside(self) -> bool:
        """Whether there is such a stream."""
        return self._stream is not None

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
