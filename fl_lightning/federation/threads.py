"""How many threads a process computes with on the CPU, where nobody has said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.federation.team import num_cores
from fl_lightning.seeding import isolated_streams

if TYPE_CHECKING:
    from fl_lightning.core.client import ClientModule
    from fl_lightning.data.store import TensorStore

SMALL = 4e6
"""Floating-point operations of a mini-batch up to which a second thread gains nothing (measured: at most 5 %)."""


def choose_threads(modules: Sequence[ClientModule], store: TensorStore, batch_size: int) -> None:
    """One thread for models so small that more of them wait for each other most of the time, else no more than cores.

    Threads that wait do so in a loop: where another program runs beside them, a small model's round takes many times
    as long as with one. The choice rests on the model and the batch alone, so that it is the same on every machine.

    Args:
        modules: the resident clients; training on another device than the CPU leaves everything as it is.
        store: the data.
        batch_size: samples in a mini-batch.
    """
    if any(module.device.type != "cpu" for module in modules):
        return
    few = max(operations(module, store, batch_size) for module in modules) <= SMALL
    torch.set_num_threads(1 if few else min(torch.get_num_threads(), num_cores()))


def operations(module: ClientModule, store: TensorStore, batch_size: int) -> float:
    """Floating-point operations of a forward pass of a mini-batch; infinite for a model that cannot be tried so.

    At least a product and a sum for each parameter and sample: what torch counts leaves recurrent layers out.
    """
    model = module.method.model
    least = 2.0 * batch_size * sum(parameter.numel() for parameter in model.parameters())
    modes = {part: part.training for part in model.modules()}
    x, _ = store.gather(torch.zeros(batch_size, dtype=torch.int64))
    model.eval()
    try:
        with isolated_streams(0, "threads"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
    except Exception:  # the model is a user's, and its forward pass may want more than inputs
        return float("inf")
    finally:
        for part, mode in modes.items():
            part.training = mode
    return max(least, float(counter.get_total_flops()))
