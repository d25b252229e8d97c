"""How clients' figures are spread: means, the worst, and how evenly they are shared out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.data.module import is_recorded
from fl_lightning.errors import ConfigError, require
from fl_lightning.report.record import ever_trained, read_packed
from fl_lightning.report.recorded_run import read_run
from fl_lightning.sealed import read_json

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData

KEY = "federation.evaluate.reference"
_BEGAN = "clients are compared with the figures that this run began with"
_COMPARED = ("model", "optimizer", "federation.local_epochs", "federation.local_steps", "data.batch_size")
"""What a client that trains alone does as it does in this run."""


def spread(values: np.ndarray, num_samples: np.ndarray) -> dict[str, float]:
    """Mean over clients and how they are spread around it; clients without a value are left out.

    Args:
        values: [N] accuracies of clients, or another measure, NaN where a client has none.
        num_samples: [N] their samples.

    Returns:
        ``""`` the unweighted mean, ``_std`` the population standard deviation, ``_min`` the worst client,
        ``_worst10`` the mean over the worst tenth (at least one client), ``_weighted`` the mean weighted by samples,
        ``_gini`` and ``_jain``.
    """
    there = ~np.isnan(values)
    if not there.any():
        return {}
    known, weights = values[there], num_samples[there]
    worst = np.sort(known)[: max(1, math.ceil(len(known) / 10))]
    weighted = {"_weighted": float((known * weights).sum() / weights.sum())} if weights.sum() else {}
    return {
        "": float(known.mean()),
        "_std": float(known.std()),
        "_min": float(known.min()),
        "_worst10": float(worst.mean()),
        **weighted,
        "_gini": gini(known),
        "_jain": jain(known),
    }


def gini(values: np.ndarray) -> float:
    """Gini coefficient of [N] values >= 0: Σ|x_i − x_j| / (2 N² mean), 0 where all are equal.

    >>> gini(np.array([0.5, 0.5])), gini(np.array([0.0, 1.0])), gini(np.array([0.0, 0.0]))
    (0.0, 0.5, 0.0)
    """
    ordered, count = np.sort(values), len(values)
    total = float(ordered.sum())
    if total == 0:
        return 0.0
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return max(0.0, float((ranks * ordered).sum()) / (count * total))


def jain(values: np.ndarray) -> float:
    """Jain's index of [N] values: (Σx)² / (N Σx²), from 1/N (one has all) to 1 (all are equal).

    Jain, Chiu and Hawe, "A Quantitative Measure of Fairness and Discrimination", DEC-TR-301, 1984.

    >>> jain(np.array([0.5, 0.5])), jain(np.array([0.0, 1.0])), jain(np.array([0.0, 0.0]))
    (1.0, 0.5, 1.0)
    """
    squares = float(np.square(values).sum())
    return 1.0 if squares == 0 else min(1.0, float(values.sum() ** 2 / (len(values) * squares)))


def hurt(values: np.ndarray, alone: np.ndarray) -> float | None:
    """The share of clients that do worse than alone, of those of whom both are known; None where there are none.

    Args:
        values: [N] accuracies.
        alone: [N] accuracies that clients reach by themselves.
    """
    known = ~(np.isnan(values) | np.isnan(alone))
    return float((values[known] < alone[known]).mean()) if known.any() else None


def read_reference(folder: str, data: FederatedData) -> np.ndarray:
    """Each client's last Local-T in another run, [N], NaN where it never trained there: what clients reach alone.

    Args:
        folder: of a run of `Local`, mostly.
        data: this run's, set up: its clients, their samples as they see them and the parts that they are tested on must
            be that run's. (Runs of earlier versions did not write all of that down.)

    Raises:
        ConfigError: if it is no such run, or not finished.
    """
    there = Path(folder)
    require((there / "partition.json").is_file(), KEY, "there is no run in that folder", folder)
    other = read_json(there / "partition.json", KEY)
    require(
        is_recorded(other, data),
        KEY,
        "that run's clients hold other samples: take the same data, shift and seed",
        folder,
    )
    parts = other.get("evaluate_on", data.evaluate_on)
    rule = f"that run was evaluated on {parts} parts, and data.evaluate_on is {data.evaluate_on}"
    require(parts == data.evaluate_on, KEY, rule, folder)
    left = read_run(there, KEY).unfinished if (there / "metrics.csv").is_file() else ""
    require(not left, KEY, f"must name a run that is over: {left}", folder)
    written = read_packed(there / "clients.csv")
    rows = written.where(lambda own: own is not None, "Local-T")
    require(bool(rows), KEY, "that run has no Local-T", folder)
    trained = ever_trained(written)
    num_clients = len(data.clients)
    alone = np.full(num_clients, np.nan)
    for row in rows:  # the last round's come last
        if not isinstance(client := row.get("client"), int) or not 0 <= client < num_clients:
            raise ConfigError(KEY, "that run's clients.csv is damaged", folder)
        if client in trained:  # others were tested with what they started from
            alone[client] = row["Local-T"]
    require(not np.isnan(alone).all(), KEY, "nobody came through a local fit in that run", folder)
    return alone


def remarks_on(folder: str, data: FederatedData, alone: np.ndarray, identity: Mapping[str, Any]) -> str:
    """What makes a reference another thing than this run's clients alone; empty where nothing does.

    Args:
        folder: as `read_reference` takes it.
        data: likewise.
        alone: [N] what clients reach alone, as the run has it.
        identity: what makes the run this run: every key, dotted; empty where it has no configuration.
    """
    try:
        now = read_reference(folder, data)
    except ConfigError:
        return f"{folder} cannot be read any more; {_BEGAN}"
    if not np.array_equal(now, alone, equal_nan=True):
        return f"{folder} has other figures now; {_BEGAN}"
    if not (Path(folder) / "metrics.csv").is_file():
        return ""
    other = read_run(Path(folder), KEY)
    travelled = any(row.get("uplink_params") for row in other.rows)
    said = [f"is of {other.method}, whose clients do not train alone"] if travelled else []
    known = identity and other.identity
    differ = [name for name in _COMPARED if known and _section(identity, name) != _section(other.identity, name)]
    said += [f"differs in {', '.join(differ)}"] if differ else []
    return f"{folder} {' and '.join(said)}" if said else ""


def _section(identity: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What an identity says under a key, without what files hold."""
    return {key: own for key, own in identity.items() if f"{key}.".startswith(f"{name}.") and " (" not in key}
