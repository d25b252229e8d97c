"""(ε, δ) of Gaussian mechanisms, by Opacus' accountants."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fl_lightning.errors import importing

Accountant = Literal["rdp", "prv"]
ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 384, 512, 1024)
"""Orders of the Rényi divergence that are looked at first: whole ones, whose moments are finite sums."""
LAST_FINE = 16
"""Up to this best whole order the tenths beside it are looked at, too; from there on they gain next to nothing."""
FINE_ORDERS = tuple(sorted({*ORDERS, *(1 + tenth / 10 for tenth in range(1, 170))}))
"""All of them, at once where nothing is sampled: there every order's moment is α / (2 σ²)."""
PRV_ERROR, PRV_SHARE = 2e-4, 2e-5
"""Largest error of ε by privacy-loss random variables: at least, and of what ``rdp`` says. It is added, so that ε is
never too small; time and memory grow with its inverse."""
LOOSE = 1000.0
"""From there on an ε says nothing, and is not worth the time."""


class Mechanism(NamedTuple):
    """A Gaussian mechanism of sensitivity 1, on a Poisson sample, so many times over.

    Args:
        noise_multiplier: standard deviation of the noise, >= 0.
        sampling_rate: with what chance one is in the sample, in (0, 1]; 1 samples nothing.
        times: how often, >= 0.
    """

    noise_multiplier: float
    sampling_rate: float
    times: int


@lru_cache(4096)
def epsilon(mechanism: Mechanism, delta: float, accountant: Accountant = "rdp") -> float:
    """ε at δ, with one more or one less as neighbours; infinite without noise, 0 where nothing happened.

    Args:
        mechanism: what happened.
        delta: δ in (0, 1).
        accountant: how it is composed.

    Raises:
        ConfigError: if Opacus is not installed.
    """
    accountants, _ = _opacus()
    if mechanism.times == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    if accountant == "prv":
        prv = accountants.PRVAccountant()
        prv.history = [tuple(mechanism)]
        loose = epsilon(mechanism, delta)
        if not loose <= LOOSE:
            return loose
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, of logarithms that are not taken
            try:  # its error is part of what it says, so that both are bounds
                return min(loose, float(prv.get_epsilon(delta, eps_error=max(PRV_ERROR, PRV_SHARE * loose))))
            except MemoryError:
                return loose
    if mechanism.sampling_rate == 1:
        return max(0.0, _best(mechanism, delta, FINE_ORDERS)[0])
    spent, best = _best(mechanism, delta, ORDERS)
    for way in (-1, 1) if best <= LAST_FINE else ():
        for tenth in range(1, 10):  # to both sides as long as it becomes less
            near, _ = _best(mechanism, delta, (best + way * tenth / 10,))
            if not near < spent:
                break
            spent = near
    return max(0.0, spent)


def _best(mechanism: Mechanism, delta: float, orders: tuple[float, ...]) -> tuple[float, float]:
    """ε at δ by the best of some orders, and that order."""
    _, analysis = _opacus()
    moments = _moments(mechanism.noise_multiplier, mechanism.sampling_rate, orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the first or the last
        spent = [mechanism.times * one for one in moments]
        found, best = analysis.get_privacy_spent(orders=list(orders), rdp=spent, delta=delta)
    return float(found), float(best)


@lru_cache(4096)
def _moments(noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...]) -> list[float]:
    _, analysis = _opacus()
    found = analysis.compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(orders))
    return [float(one) for one in found]


def _opacus() -> tuple[Any, Any]:
    absent = "privacy is accounted for by Opacus, which is not installed: pip install 'fl-lightning[privacy]'"
    with importing("opacus", "federation.wire", absent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import accountants
        from opacus.accountants.analysis import rdp
    return accountants, rdp
