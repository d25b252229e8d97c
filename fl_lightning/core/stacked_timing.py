"""How long a step takes alone and stacked: what `federation.cohort: auto` chooses by."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fl_lightning.core.client import ClientModule
from fl_lightning.core.descent import Descent, Machine
from fl_lightning.core.devices import Part
from fl_lightning.core.freezing import batch_norms
from fl_lightning.core.rows import Rows
from fl_lightning.core.stacked_fit import Batches, Entered, Epoch, StackedFit
from fl_lightning.core.step import Bench, Step

STEPS, PASSES = 6, 2
"""Steps that are made of each kind, so many times over; the fastest counts, the first ones warm up."""
GAIN = 0.9
"""Stacking is chosen where it takes less than so much of the time: more clients wait for the longest."""


class Timing(NamedTuple):
    """Seconds of one client's step in each phase together.

    Args:
        alone: one by one.
        stacked: of a stacked step, divided by its clients.
    """

    alone: float
    stacked: float

    @property
    def pays(self) -> bool:
        """Whether stacking is worth it."""
        return self.stacked < GAIN * self.alone


def measured(
    make: Callable[[Rows, Epoch], StackedFit],
    module: ClientModule,
    rows: Rows,
    entered: Sequence[Entered],
    epoch: Epoch,
) -> Timing:
    """Time a few steps of clients that could be stacked, on copies; the resident module is left as it happens to be.

    Args:
        make: makes a stacked fit of them.
        module: the resident module of their architecture.
        rows: the clients as their fits begin.
        entered: the clients.
        epoch: gives the steps of an epoch.
    """
    stamps: list[list[float]] = []

    def some(number: int, limits: Sequence[int | None]) -> Iterable[Batches]:
        own: list[float] = []
        stamps.append(own)
        for batches in itertools.islice(epoch(number, limits), STEPS):
            own.append(_now(module))
            yield batches
        own.append(_now(module))

    ends = list(itertools.accumulate(planned.epochs for planned in entered[0].plan))
    passes = []
    for _ in range(PASSES):
        stamps.clear()
        fit = make(rows.clone(), some)
        fit.run(lambda phase: False)
        first = [stamps[epoch] for epoch in (0, *ends[:-1])]
        passes.append(sum(min(b - a for a, b in itertools.pairwise(own)) for own in first))
    stacked = min(passes) / len(entered)
    rows.load(0)
    return Timing(_alone(module, fit, epoch), stacked)


def _alone(module: ClientModule, fit: StackedFit, epoch: Epoch) -> float:
    """The fastest of a few steps of the first client, in all phases together."""
    method, entered, total = module.method, fit.entered, 0.0
    templates = iter(entered[0].templates)
    machine = Machine(module.device.type, fit.plugin, None, lambda loss, **options: loss.backward(**options))
    machine.careful = None  # it scales nothing where clients are stacked, and knows Lightning's optimizers alone
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert module.settings is not None, "`settings` is set by the runner"
    try:
        for planned in entered[0].plan:
            trained = {id(parameter) for parameter in planned.parameters}
            for parameter in trainable:
                parameter.requires_grad_(id(parameter) in trained)
            descent = Descent(machine, {name: next(templates) for name in planned.parts}, module.settings)
            bench = Bench.of(method, machine, batch_norms(method), planned.phase, entered[0].weights, descent)
            batches = next(iter(epoch(0, [None] * len(entered))))
            step = Step(bench, Part.whole(batches.x[0], batches.y[0]))
            with fit.context():
                total += min(_timed(module, step.take) for _ in range(STEPS * PASSES))
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
            parameter.grad = None
    return total


def _timed(module: ClientModule, call: Callable[[], None]) -> float:
    start = _now(module)
    call()
    return _now(module) - start


def _now(module: ClientModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
