"""A step's losses through torch.compile: made once for a phase and a batch size, kept for all clients and rounds.

What is compiled is a method's default step up to its losses, with the way back: the model's pass and the terms. The
resident module is the same for every client, so one compilation serves all; smaller last mini-batches run as they are.
Before anything is counted on, values and gradients are compared with those of the same mini-batch as it is.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.method import Method
from fl_lightning.core.precision import widened
from fl_lightning.core.step import Bench, Step
from fl_lightning.core.written import refill
from fl_lightning.models.own_training import OwnTraining

CLOSE = 1e-3
"""Relative difference of losses and gradients up to which they are the same; thirty times that in half precision."""


def why_not(method: Method) -> str:
    """What stands against compiling a method's steps; empty where nothing does."""
    if type(method).local_step is not Method.local_step:
        return "its step is its own"
    return "the model trains by itself" if type(method.model.own) is not OwnTraining else ""


def _losses(
    method: Any, model: Any, terms: Sequence[Any], x: Tensor, y: Tensor, precision: Any, keeps: bool
) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    """The terms' values of a mini-batch, and the pass that they are of where somebody looks at it afterwards."""
    with precision():
        features, z = model.forward_features(x)
        logits = model.head(z)
    out = Forward(x, y, features, z, logits, precision=precision).wide()
    return {t.name: widened(t(method, out)) for t in terms}, (features, z, logits) if keeps else ()


class _NoContext:
    """A context that does nothing, which torch.compile knows how to pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class CompiledLosses:
    """The compiled steps of one resident module.

    Args:
        batch_size: of the mini-batches that are compiled, >= 2.
        tell: is told why steps run as they are, if they do.
    """

    def __init__(self, batch_size: int, tell: Callable[[str], None]) -> None:
        self.batch_size = batch_size
        self.tell = tell
        self.reason = ""
        """Why steps run as they are; empty where they are compiled."""
        self._checked: set[tuple[str, ...]] = set()
        # A copy of the code has a cache of its own, so that another module's phases do not use this one's up.
        own = types.FunctionType(_losses.__code__.replace(), _losses.__globals__)
        options: dict[str, Any] = {"fallback_random": True}  # dropout draws what it draws uncompiled
        self._run = torch.compile(own, dynamic=False, options=options)

    def step(self, *details: Any) -> Step:
        """A step that takes its losses from here; what `Step` takes."""
        return CompiledStep(self, *details)

    def of(self, bench: Bench, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Forward] | None:
        """Values and pass of a mini-batch; None if it runs as it is."""
        if self.reason or y.shape[0] != self.batch_size or self.batch_size < 2:
            return None
        phase = (bench.phase.name, *(term.name for term in bench.terms))
        if phase not in self._checked:
            self._checked.add(phase)
            self.reason = self._wrong(bench, x, y)
        if not self.reason:
            try:
                values, seen = self._run(*_arguments(bench, x, y))
            except Exception as error:  # of a later compilation, or of the step itself, which then raises it again
                self.reason = _said(error)
        if self.reason:
            self.tell(self.reason)
            return None
        features, z, logits = seen or ([], x, x)
        return values, Forward(x, y, features, z, logits, precision=bench.machine.precision)

    def _wrong(self, bench: Bench, x: Tensor, y: Tensor) -> str:
        """Try a mini-batch both ways, and leave everything as it was; what is wrong with it, empty if nothing is."""
        given, narrow = _arguments(bench, x, y), bench.machine.autocasts or x.dtype in (torch.float16, torch.bfloat16)
        try:
            with _undone(bench.method, x.device):
                expected = _with_gradients(_losses, bench, given)
            with _undone(bench.method, x.device):
                found = _with_gradients(self._run, bench, given)
        except Exception as error:  # compilers raise dozens of types
            return _said(error)
        close = CLOSE * (30 if narrow else 1)
        for one, other in zip(expected, found, strict=True):
            if not float((one - other).abs().max()) <= close * max(1.0, float(one.abs().max())):
                return "compiled, its losses or gradients are others"
        return ""


def _said(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"it cannot be compiled ({type(error).__name__}: {first[:120]})"


class CompiledStep(Step):
    """A local mini-batch whose losses are compiled where they can be."""

    def __init__(self, losses: CompiledLosses, *details: Any) -> None:
        super().__init__(*details)
        self._losses = losses

    @override
    def act(self) -> None:
        found = self._losses.of(self._bench, self.x, self.y)
        if found is None:
            super().act()
            return
        values, out = found
        self.descend(values)
        self.observe(out)


def _arguments(bench: Bench, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """What `_losses` takes."""
    machine, precision = bench.machine, _NoContext
    if machine.autocasts:
        dtype = torch.float16 if machine.narrows else torch.bfloat16
        precision = partial(torch.autocast, machine.device, dtype)  # type: ignore[assignment]
    return bench.method, bench.model, tuple(bench.terms), x, y, precision, bool(bench.observers)


def _with_gradients(run: Callable[..., Any], bench: Bench, given: tuple[Any, ...]) -> list[Tensor]:
    """The values of a mini-batch, and the gradient of their weighted sum as one vector."""
    values = run(*given)[0]
    total = sum(bench.weights.get(name, 0.0) * value for name, value in values.items())
    parameters = [p for p in bench.method.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)  # type: ignore[arg-type]
    whole = torch.cat([g.detach().flatten().float() for g in gradients if g is not None])
    return [*(value.detach().float() for value in values.values()), whole]


@contextmanager
def _undone(method: Method, device: torch.device) -> Iterator[None]:
    """Draw from a stream of its own, and take back what becomes of buffers and attributes."""
    buffers = [(buffer, buffer.clone()) for buffer in method.buffers()]
    attributes = [(vars(part), dict(vars(part))) for part in method.modules()]
    values = [own for _, before in attributes for own in before.values()]  # buffers that are set anew, too
    held = [(own, copy.copy(own)) for own in values if type(own) in (dict, list, set)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for home, were in (*attributes, *held):
                refill(home, were)
