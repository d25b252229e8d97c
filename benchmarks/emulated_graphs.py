"""CUDA graphs that are not there: a tape of torch's operations, with a graph's rules.

What is on the tape is done again on the tensors that it was done with, whatever Python would decide or look up today;
while it is recorded nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_lightning.core.recording import Reads


class Tape(TorchDispatchMode):
    """Takes operations down, to do them again on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        """Do all of it again."""
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(work: Callable[[], None], known: Sequence[Tensor]) -> Tape:
    """As `fl_lightning.core.recording.record`."""
    before = [tensor.detach().clone() for tensor in known]
    tape, reads = Tape(), Reads(known)
    with reads, tape:
        work()
    with torch.no_grad():
        for tensor, own in zip(known, before, strict=True):
            if not torch.equal(tensor, own):
                tensor.copy_(own)
    reads.check()
    return tape
