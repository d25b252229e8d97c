"""What a server makes of the mean: FedAvgM and FedOpt, for every method whose server averages weights.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm
2; momentum: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, 2019.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.steps import HALF
from fl_lightning.errors import require

KEY = "federation.server_optimizer"


class ServerOptimizer(ABC):
    """Steps from the old weights x along the pseudo-gradient Δ = mean − x. Sums are kept in double precision.

    Weights in half precision are sent rounded; what that leaves out counts in the next step.

    Running statistics and counters are no weights that one steps on: they become what the mean says.

    Args:
        lr: η, > 0; 1 without momentum is the mean itself.
    """

    def __init__(self, lr: float) -> None:
        require(lr > 0, f"{KEY}.lr", "must be > 0", lr)
        self.lr = lr
        self.trained: frozenset[str] | None = None
        """Names of the weights that are parameters; None for all that are floating-point."""
        self.share = 1.0
        """How many of all clients that have joined took part in the round that has just closed, in (0, 1]."""
        self.joined = 1
        """How many have joined."""
        self.state: dict[str, dict[str, Tensor]] = {}

    def start(self, trained: Iterable[str]) -> None:
        """Begin a federation: nothing is remembered.

        Args:
            trained: names of the weights that are parameters.
        """
        self.trained, self.state = frozenset(trained), {}

    def step(self, old: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new weights, in the order and the types of `mean`."""
        return {name: self._stepped(name, old[name], value) for name, value in mean.items()}

    def _stepped(self, name: str, old: Tensor, mean: Tensor) -> Tensor:
        trained = mean.is_floating_point() if self.trained is None else name in self.trained
        if not trained:
            return mean
        wide = mean.to(accumulation_dtype(mean.device))
        delta = wide - old.to(wide)
        way = self.direction(name, delta.clone())  # which may be changed in place
        if not isinstance(way, Tensor) or way.shape != delta.shape:
            said = list(way.shape) if isinstance(way, Tensor) else type(way).__name__
            rule = f"must give a tensor {list(delta.shape)} for {name}, as its Δ is, and gives {said}"
            raise TypeError(f"{type(self).__name__}.direction() {rule}")
        # From the mean and not from the old weights: a step of Δ itself is the mean then, bit for bit.
        after = wide + (self.lr * way - delta)
        return self._narrowed(name, after, mean.dtype) if mean.dtype in HALF else after.to(mean.dtype)

    def _narrowed(self, name: str, after: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight as it is sent, and what that leaves out kept for the next step: small steps add up."""
        kept = self.state.setdefault("rest", {})
        after = after + kept[name] if name in kept else after
        sent = after.to(dtype)
        kept[name] = after - sent.to(after)
        return sent

    @abstractmethod
    def direction(self, name: str, delta: Tensor) -> Tensor:
        """Where to step, in units of the learning rate, given one weight's Δ; of the same shape."""

    def remembered(self, slot: str, name: str, like: Tensor) -> Tensor:
        """What is kept of one weight from round to round; zeros at first."""
        return self.state.setdefault(slot, {}).setdefault(name, torch.zeros_like(like))

    def state_dict(self) -> dict[str, Any]:
        """All that is kept from round to round."""
        return {slot: dict(kept) for slot, kept in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.state = {slot: dict(kept) for slot, kept in state.items()}


class ServerMomentum(ServerOptimizer):
    """FedAvgM: v ← βv + Δ, x ← x + ηv.

    Args:
        lr: η, > 0.
        momentum: β, in [0, 1); 0 at η = 1 is the mean itself.
        nesterov: step along βv + Δ instead.
    """

    paper = "Hsu et al., arXiv:1909.06335, 2019"

    def __init__(self, lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(lr)
        require(0 <= momentum < 1, f"{KEY}.momentum", "must be in [0, 1)", momentum)
        self.momentum = momentum
        self.nesterov = nesterov

    @override
    def direction(self, name: str, delta: Tensor) -> Tensor:
        velocity = self.remembered("velocity", name, delta).mul_(self.momentum).add_(delta)
        return self.momentum * velocity + delta if self.nesterov else velocity.clone()


class AdaptiveServer(ServerOptimizer, ABC):
    """m ← β₁m + (1 − β₁)Δ, v as the method says, x ← x + η m / (√v + τ); no bias correction, as in the paper.

    Args:
        lr: η, > 0.
        beta1: β₁, in [0, 1).
        tau: τ, > 0, how adaptive: the larger, the less; v starts at τ².
    """

    paper = "Reddi et al., ICLR 2021"

    def __init__(self, lr: float = 0.1, beta1: float = 0.9, tau: float = 1e-3) -> None:
        super().__init__(lr)
        require(0 <= beta1 < 1, f"{KEY}.beta1", "must be in [0, 1)", beta1)
        require(tau > 0, f"{KEY}.tau", "must be > 0", tau)
        self.beta1 = beta1
        self.tau = tau

    @override
    def direction(self, name: str, delta: Tensor) -> Tensor:
        first = self.remembered("first", name, delta).mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        kept = self.state.setdefault("second", {})
        second = kept.setdefault(name, torch.full_like(delta, self.tau**2))
        kept[name] = second = self.second_moment(second, delta.square())
        return first / (second.sqrt() + self.tau)

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, of the old one and Δ²."""


class ServerAdagrad(AdaptiveServer):
    """FedAdagrad: v ← v + Δ².

    Args:
        lr: η, > 0.
        beta1: β₁, in [0, 1); 0 in the paper.
        tau: τ, > 0.
    """

    def __init__(self, lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(lr, beta1, tau)

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


class ServerAdam(AdaptiveServer):
    """FedAdam: v ← β₂v + (1 − β₂)Δ².

    Args:
        lr: η, > 0.
        beta1: β₁, in [0, 1).
        beta2: β₂, in [0, 1).
        tau: τ, > 0.
    """

    def __init__(self, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        super().__init__(lr, beta1, tau)
        require(0 <= beta2 < 1, f"{KEY}.beta2", "must be in [0, 1)", beta2)
        self.beta2 = beta2

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


class ServerYogi(ServerAdam):
    """FedYogi: v ← v − (1 − β₂) Δ² sign(v − Δ²).

    Args:
        lr: η, > 0.
        beta1: β₁, in [0, 1).
        beta2: β₂, in [0, 1).
        tau: τ, > 0.
    """

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
