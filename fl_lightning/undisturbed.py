"""A run inside somebody's Python process leaves the process as it found it."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fl_lightning.heap import give_back
from fl_lightning.seeding import isolated_streams

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "MASTER_PORT")
_LOGS = [
    f"lightning.{package}.utilities.{part}"
    for package in ("pytorch", "fabric")
    for part in ("rank_zero", "distributed")
] + ["lightning.pytorch.accelerators.cuda", "torch.multiprocessing.spawn"]


_TURN = threading.RLock()
"""Random streams, threads and warnings are the whole process's: of runs in several threads one waits for another."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block as in a process of its own, and put back what runs change for a whole process.

    That is: random streams, torch's threads, deterministic algorithms and default type, filters of warnings, levels of
    Lightning's logs, and variables of the environment. Signals are put back by who takes them. Memory that a run has
    freed goes back to the system. Gradients, autocast, torch's default type and device, and how exact its products are,
    are torch's own in the block: of what somebody has made of them the run's configuration says nothing.
    """
    with _TURN:
        yield from _undisturbed()


def _undisturbed() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _LOGS}
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        with warnings.catch_warnings(), isolated_streams(0, "undisturbed"), _plain_torch():
            warnings.filterwarnings(
                "ignore", message=r".*isinstance\(treespec, LeafSpec\)"
            )  # lightning 2.6, torch 2.15
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # which imports for seconds
            torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        give_back()


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Gradients, no autocast, whole float32, and tensors on the CPU; what there was comes back with the grad mode."""
    with ExitStack() as stack:
        stack.callback(_whole_products())
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.empty(0).device.type != "cpu":  # a context of its own takes time at every call
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        yield


def _whole_products() -> Callable[[], None]:
    """Let products of float32 be of float32 (`torch.set_float32_matmul_precision`), and return what puts it back.

    Torch keeps one setting for all, or one a backend, and refuses to say the one where it has the others.
    """
    backends: list[Any] = []
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        named: Any = torch.backends
        backends, before = [named.cuda.matmul, named.mkldnn.matmul], ""
    each = [own.fp32_precision for own in backends]

    def back() -> None:
        if before:
            torch.set_float32_matmul_precision(before)
        for own, value in zip(backends, each, strict=True):
            own.fp32_precision = value

    torch.set_float32_matmul_precision("highest")
    return back
