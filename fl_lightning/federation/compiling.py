"""Which resident modules' steps are compiled, under `federation.compile`."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from fl_lightning.core.compiled import CompiledLosses, why_not
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.federation.runner import Runner


def compile_steps(runner: Runner, is_main: bool) -> None:
    """Let the local steps of all architectures be compiled, or of none.

    Args:
        runner: the resident modules.
        is_main: whether this process says what is not.
    """
    method = type(runner.modules[0].method).__name__

    def tell(reason: str) -> None:
        if is_main:
            say(f"fl-lightning: federation.compile: {method} runs as it is: {reason}")

    size, reason = runner.data.batch_size, next(filter(None, (why_not(module.method) for module in runner.modules)), "")
    if not reason and (size < 2 or size > int(runner.data.num_train.max())):
        reason = "mini-batches of one are not compiled" if size < 2 else f"no client has a mini-batch of {size} samples"
    if not runner.single_device:
        reason = "several devices share a fit, each with a part of every mini-batch"
    if reason:
        tell(reason)
        return
    if runner.device.type == "cpu":  # one compilation at a time: a pool of processes for it starts slower
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Where torch.compile leaves a function, in the middle of a term, it looks at gradients that nobody has.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    for module in runner.modules:
        module.compiled = CompiledLosses(size, tell)
