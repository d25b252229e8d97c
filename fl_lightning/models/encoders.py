"""Torch's own transformer encoders, which predict by another way than they train by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def attention_step_by_step() -> Iterator[None]:
    """Let their layers do what they do in training when they predict, too.

    The one operation that they predict by knows no autocast on a CPU, is none of ONNX', and hands nested tensors from
    layer to layer.
    """
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
