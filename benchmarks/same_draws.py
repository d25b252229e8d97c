"""The same random numbers on a GPU as on the CPU: drawn on the CPU, and moved to where they were asked for.

A GPU's generator draws other numbers from the same seed, so that a method with noise in it would differ from itself on
the CPU. It is for comparing alone: everything waits for the device. What draws inside one of torch's own functions is
not seen where it is none of `_WHOLE` (dropout between the layers of an LSTM, or in fused attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MADE = {"rand", "randn", "randint", "randperm", "normal"}  # by their sizes
_LIKE = {"rand_like", "randn_like", "randint_like"}
_FILLED = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
_FILLED |= {"kaiming_uniform_"}
_WHOLE = {"bernoulli", "multinomial", "poisson", "binomial", "normal", "_standard_gamma", "_sample_dirichlet"}
_WHOLE |= {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "rrelu"}
_WHOLE |= {"feature_alpha_dropout", "gumbel_softmax"}
"""What is worked out on the CPU as a whole, gradients and all."""
_CHANGING = {f"{name}_" for name in _WHOLE if "dropout" in name or name == "rrelu"}


class SameDraws(TorchFunctionMode):
    """Within it whatever is drawn is drawn on the CPU: from its global stream, or from a twin of a given generator.

    A twin starts where its generator was last seeded, and anew where that is seeded otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self._twins: dict[int, tuple[torch.Generator, int, torch.Generator]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _FILLED:
            return self._fill(func, args, kwargs)
        if name in _LIKE and kwargs.get("device") is None:
            kwargs["device"] = args[0].device
        if name in _MADE | _LIKE and kwargs.get("device") is not None:
            return self._make(func, name, args, kwargs)
        if name in _WHOLE or name in _CHANGING:
            return self._work_out(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _make(self, func: Callable[..., Tensor], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """A new tensor of numbers."""
        device = torch.device(kwargs.pop("device"))
        if device.type in ("cpu", "meta"):
            return func(*args, **kwargs, device=device)
        graded = kwargs.pop("requires_grad", False)
        like = (torch.empty_like(args[0], device="cpu"),) if name in _LIKE else args[:1]
        args, kwargs = self._here(((*like, *args[1:]), kwargs))
        made = func(*args, **kwargs, device="cpu").to(device)
        return made.requires_grad_() if graded else made

    def _fill(self, func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """A tensor whose numbers are drawn anew, laid out as it is."""
        own = kwargs["tensor"] if "tensor" in kwargs else args[0]
        if own.device.type in ("cpu", "meta"):
            return func(*args, **kwargs)
        drawn = torch.empty_like(own, device="cpu")
        args, kwargs = self._here((args[1:], kwargs))
        func(**{**kwargs, "tensor": drawn}) if "tensor" in kwargs else func(drawn, *args, **kwargs)
        with torch.no_grad():
            own.copy_(drawn)
        return own

    def _work_out(self, func: Callable[..., Tensor], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """What a function makes of tensors on the CPU, moved to where they are."""
        there = [own for own in (*args, *kwargs.values()) if isinstance(own, Tensor) and own.device.type != "cpu"]
        if not there:
            return func(*args, **kwargs)
        args, kwargs = self._here((args, kwargs))
        made = func(*args, **kwargs).to(there[0].device)
        return there[0].copy_(made) if name in _CHANGING or kwargs.get("inplace") else made

    def _here(self, value: Any) -> Any:
        """Arguments with tensors and generators on the CPU."""
        if isinstance(value, Tensor):
            return value.cpu()
        if isinstance(value, torch._C.Generator):
            return value if value.device.type == "cpu" else self._twin(value)
        if isinstance(value, dict):
            return {name: self._here(own) for name, own in value.items()}
        return type(value)(map(self._here, value)) if type(value) in (list, tuple) else value

    def _twin(self, generator: torch.Generator) -> torch.Generator:
        seed = generator.initial_seed()
        known = self._twins.get(id(generator))  # held with its generator, so that no other one takes the id
        if known is None or known[1] != seed:
            known = self._twins[id(generator)] = generator, seed, torch.Generator("cpu").manual_seed(seed)
        return known[2]
