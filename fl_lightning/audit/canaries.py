"""A one-shot audit: clients that send a random direction, and how much of it is found in what leaves the server.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, "One-shot Empirical Privacy Estimation for Federated Learning", ICLR
2024: k canaries take part in one run; the cosine of a canary that did not take part with what was released is N(0, ν²),
that of one that did is N(μ, σ²), and ε is that of telling the two apart. In the paper ν² is 1/d, of d values. Where a
message is clipped in G groups g of d_g values, canaries are as long in each of them, but what was released, f, is not,
and ν² = Σ_g (|f_g|² / d_g) / (G |f|²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import chi2, norm
from torch import Tensor

from fl_lightning.core.coding import Coding, deviations, of_groups
from fl_lightning.core.message import Message
from fl_lightning.core.private_mean import ANYONE, CLIPPED, Clipped, PrivateMean
from fl_lightning.errors import ConfigError, require
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.privacy import Account, ClipAndNoise
from fl_lightning.seeding import numpy_generator, torch_generator

CONFIDENCE = 0.999
NOBODY = "nobody takes part in any round"
LARGEST = 200.0  # no ε above it is told apart from it


@dataclass(frozen=True)
class Estimate:
    """What canaries say of a run.

    Args:
        canaries: k.
        dimensions: d.
        mean: of the canaries' cosines.
        std: of them.
        null: ν, of those that did not take part.
        rounds: the run's.
        epsilon_point: ε of N(0, ν²) against N(mean, std²), Andrew et al.'s estimate.
        epsilon_at_least: the same at the end of the 99.9 % confidence intervals of mean and std that gives the least:
            what the audit claims.
        epsilon_accounted: what the accountant says that it is at most; None without noise.
        delta: δ of all three.
    """

    canaries: int
    dimensions: int
    mean: float
    std: float
    null: float
    rounds: int
    epsilon_point: float
    epsilon_at_least: float
    epsilon_accounted: float | None
    delta: float

    def as_dict(self) -> dict[str, Any]:
        """In plain containers."""
        return asdict(self)


class Canaries(FederationCallback):
    """Adds canaries to the private mean of every round in which they are due.

    Args:
        number: k.
        seed: of their directions, and of when they take part.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.seed = seed
        self.coding: Coding | None = None
        """How messages are laid out, once one has come."""
        self.directions: Tensor | None = None
        self.found: Tensor | None = None
        """[P] what was released so far, every coordinate over its clipping norm."""

    def on_run_start(self, loop: FederatedLoop) -> None:
        """Stand before the server: what closes a round adds the canaries first, and looks at what is released."""
        exchange, account = loop.exchange, loop.account
        assert account is not None
        assert isinstance(exchange, Star)
        close, mean = exchange.close, exchange.door
        assert isinstance(mean, PrivateMean)
        expected = mean.expected
        rate = account.mechanism(1).sampling_rate
        mean.expected = lambda round: expected(round) + rate * self.number  # they are clients like the others

        def closing() -> None:
            round = exchange.server.round
            taking = self._taking_part(account, round, rate)
            coding = mean.coding
            if coding is None:  # nobody has sent anything so far, so that nobody knows how canaries are laid out
                close()
                return
            self.coding, scale = coding, _scale(coding, mean.norms)
            directions = self._drawn(coding)
            for index in taking:
                packed = Clipped.of(directions[index] * scale, coding)
                mean.add(ANYONE, Message({}, {CLIPPED: packed}, 1))
            close()
            assert mean.released is not None
            moved = mean.released * mean.expected(round) / scale
            self.found = moved if self.found is None else self.found + moved

        exchange.close = closing  # type: ignore[method-assign]

    def _taking_part(self, account: Account, round: int, rate: float) -> list[int]:
        if rate < 1:
            chances = numpy_generator(self.seed, "canaries", round).random(self.number)
            return np.flatnonzero(chances < rate).tolist()
        due = account.mechanism(round).times > account.mechanism(round - 1).times
        return list(range(self.number)) if due else []

    def _drawn(self, coding: Coding) -> Tensor:
        if self.directions is None:
            self.directions = directions(coding, self.number, self.seed)
        return self.directions


def directions(coding: Coding, number: int, seed: int) -> Tensor:
    """[k, P] float32 random directions: in each of the coding's groups of norm 1."""
    drawn = torch.randn(number, coding.size, generator=torch_generator(seed, "canaries"))
    for part in coding.groups:
        drawn[:, part] /= drawn[:, part].norm(dim=1, keepdim=True) * (1 + 1e-5)  # within the norm in float32, too
    return drawn


def _scale(coding: Coding, norms: tuple[float, float]) -> Tensor:
    scale = torch.ones(coding.size, dtype=torch.float64)
    for part, own in zip(coding.groups, of_groups(coding, norms), strict=True):
        scale[part] = own
    return scale


def null_deviation(coding: Coding, released: Tensor) -> float:
    """ν: how the cosine of a direction that did not take part spreads.

    Args:
        coding: how messages are laid out.
        released: [P] what was released, every coordinate over its clipping norm.
    """
    sizes = [(float(released[part].square().sum()), len(released[part])) for part in coding.groups]
    whole = sum(size for size, _ in sizes) * len(sizes)
    if not whole:  # nothing was, not even noise
        return float(coding.size**-0.5)
    return math.sqrt(sum(size / values for size, values in sizes) / whole)


def audit_canaries(
    experiment: BuiltExperiment, number: int, tell: Callable[[str], None], rounds: int | None = None
) -> Estimate | None:
    """Run a federation again, in memory, with canaries among its clients; None where no `ClipAndNoise` is in its wire.

    Noise at the server: what the mean of all rounds says of a canary. Noise at the client: what all its messages say.

    Args:
        experiment: not yet set up.
        number: k.
        tell: is told what happens.
        rounds: that the run has made; None takes all that it is to make.

    Raises:
        ConfigError: for too few canaries to say anything.
    """
    private = [own for own in experiment.loop.settings.wire or () if isinstance(own, ClipAndNoise)]
    require(number >= 20, "audit --canaries", "must be >= 20, or 0 for no such audit", number)
    if not private:
        return None
    settings = private[0]
    experiment.setup(in_memory=True)
    loop, watch = experiment.loop, Canaries(number, experiment.seed)
    loop.callbacks = [watch] if settings.where == "server" else []
    rounds = loop.settings.rounds if rounds is None else min(rounds, loop.settings.rounds)
    tell(f"{experiment.name}: {rounds} rounds with {number} canaries")
    assert loop.account is not None
    if settings.where == "server":
        _run(loop, rounds)
        found, drawn = watch.found, watch.directions
        if found is None or drawn is None:
            raise ConfigError("audit --canaries", NOBODY)
        assert watch.coding is not None
        coding, null = watch.coding, null_deviation(watch.coding, found)
        cosines = (drawn.double() @ found) / (drawn.double().norm(dim=1) * found.norm())
    else:
        _run(loop, rounds, lambda: settings.coding is not None)  # how a message is laid out, the first one tells
        if settings.coding is None:
            raise ConfigError("audit --canaries", NOBODY)
        coding = settings.coding
        noise = deviations(coding, settings.norms, settings.noise_multiplier) / _scale(coding, settings.norms)
        null = null_deviation(coding, noise)
        cosines = _messages(
            loop.account.mechanism(rounds).times, noise, directions(coding, number, loop.seed), loop.seed
        )
    accounted = loop.account.epsilon(rounds)
    return estimate(cosines.numpy(), coding.size, accounted, settings.delta, null, rounds)


def _run(loop: FederatedLoop, rounds: int, until: Callable[[], bool] = lambda: False) -> None:
    loop._call("on_run_start")
    while loop.round < rounds and not until():
        loop.advance()


def _messages(times: int, noise: Tensor, drawn: Tensor, seed: int) -> Tensor:
    """[k] cosines of canaries with the sum of their own messages, each under its own noise."""
    drawn = drawn.double()
    stream = torch_generator(seed, "canaries/noise")
    sums = times * drawn + times**0.5 * noise * torch.randn(drawn.shape, generator=stream, dtype=torch.float64)
    return torch.nn.functional.cosine_similarity(drawn, sums)


def estimate(
    cosines: np.ndarray, dimensions: int, accounted: float, delta: float, null: float | None = None, rounds: int = 1
) -> Estimate:
    """ε from the canaries' cosines.

    Args:
        cosines: [k].
        dimensions: d.
        accounted: the accountant's ε.
        delta: δ.
        null: ν; None takes that of one group.
        rounds: of the run.
    """
    number, null = len(cosines), dimensions**-0.5 if null is None else null
    mean, std = float(cosines.mean()), float(cosines.std(ddof=1))
    tail = (1 - CONFIDENCE) / 2
    least_mean = max(0.0, mean - float(norm.isf(tail)) * std / math.sqrt(number))
    spread = [std * math.sqrt((number - 1) / float(chi2.ppf(q, number - 1))) for q in (1 - tail, tail)]
    least_std = min(max(null, spread[0]), spread[1])  # as near to the other's as it may be
    return Estimate(
        number,
        dimensions,
        mean,
        std,
        null,
        rounds,
        told_apart(mean, std, null, delta),
        told_apart(least_mean, least_std, null, delta),
        accounted if math.isfinite(accounted) else None,
        delta,
    )


def told_apart(mean: float, std: float, null: float, delta: float) -> float:
    """ε of N(0, null²) against N(mean, std²) at δ, whichever way round is larger; between 0 and 200.

    >>> round(told_apart(1.0, 1.0, 1.0, 1e-5), 2)  # one Gaussian mechanism of z = 1
    4.38
    """

    def excess(epsilon: float) -> float:
        one = _hockey_stick(mean, std, 0.0, null, epsilon)
        other = _hockey_stick(0.0, null, mean, std, epsilon)
        return max(one, other) - delta

    if excess(0.0) <= 0:
        return 0.0
    if excess(LARGEST) >= 0:
        return LARGEST
    return float(brentq(excess, 0.0, LARGEST, xtol=1e-6))


def _hockey_stick(mean: float, std: float, other: float, spread: float, epsilon: float) -> float:
    """∫ max(0, p − e^ε q) of p = N(mean, std²) and q = N(other, spread²): p(A) − e^ε q(A) on A = {p > e^ε q}."""
    # log p − log q − ε = a x² + b x + c
    a = 0.5 / spread**2 - 0.5 / std**2
    b = mean / std**2 - other / spread**2
    c = other**2 / (2 * spread**2) - mean**2 / (2 * std**2) + math.log(spread / std) - epsilon
    if abs(a) < 1e-12 / std**2:
        if b == 0:
            return max(0.0, 1 - math.exp(epsilon)) if c > 0 else 0.0
        edges = [(-c / b, math.inf)] if b > 0 else [(-math.inf, -c / b)]
    else:
        root = b * b - 4 * a * c
        if root <= 0:
            edges = [(-math.inf, math.inf)] if a > 0 else []
        else:
            low, high = sorted(((-b - math.sqrt(root)) / (2 * a), (-b + math.sqrt(root)) / (2 * a)))
            edges = [(low, high)] if a < 0 else [(-math.inf, low), (high, math.inf)]
    return sum(_mass(e, mean, std, 0.0) - _mass(e, other, spread, epsilon) for e in edges)


def _mass(edge: tuple[float, float], mean: float, std: float, epsilon: float) -> float:
    """e^ε times the probability between two values."""
    low, high = ((value - mean) / std for value in edge)
    if low > 0:  # the upper tail, where differences of values near 1 would be lost
        low, high = -high, -low
    return math.exp(min(float(log_ndtr(high)) + epsilon, 700.0)) - math.exp(min(float(log_ndtr(low)) + epsilon, 700.0))
