"""Writes a federation's numbers: files of the run's folder, and the loggers of the configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.files import write_text
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.report.record import MetricsFile, read_rows, summarise


class Recorder(FederationCallback):
    """Keeps `metrics.csv`, `clients.csv` and `summary.json`, and hands every row to the loggers.

    Args:
        folder: the run's folder.
        about: what `summary.json` says of the run beside its numbers.
        loggers: Lightning's loggers; they receive the values of `metrics.csv` with the round as step.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], loggers: Sequence[Logger] = ()) -> None:
        self.folder = folder
        self.about = dict(about)
        self.loggers = list(loggers)

    def on_run_start(self, loop: FederatedLoop) -> None:  # noqa: D102
        self.metrics = MetricsFile(self.folder / "metrics.csv", loop.row_columns)
        ahead = ["round", "client", "participated", "num_train", "num_test"]
        self.clients = MetricsFile(self.folder / "clients.csv", [*ahead, *loop.columns, "loss"])
        self.metrics.start(loop.round)
        self.clients.start(loop.round)

    def on_round_end(self, loop: FederatedLoop, row: dict[str, Any]) -> None:  # noqa: D102
        self.metrics.append([row])
        self.clients.append(self._client_rows(loop))
        values = {
            name: value for name, value in row.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for logger in self.loggers:
            logger.log_metrics({name: value for name, value in values.items() if name != "round"}, step=row["round"])
            logger.save()

    def _client_rows(self, loop: FederatedLoop) -> list[dict[str, Any]]:
        evaluated, taking_part = loop.is_evaluated(loop.round), set(loop.participants)
        rows = []
        for client in range(loop.num_clients):
            row: dict[str, Any] = {"round": loop.round, "client": client, "participated": int(client in taking_part)}
            row |= {"num_train": int(loop.num_train[client]), "num_test": int(loop.num_test[client])}
            row |= {name: _known(values[client]) for name, values in loop.scores.items() if evaluated}
            rows.append({**row, "loss": float(loop.board.losses[client]) if client in taking_part else None})
        return rows

    def on_run_end(self, loop: FederatedLoop, summary: dict[str, Any]) -> None:  # noqa: D102
        self.write_summary(loop, summary, finished=True)
        for logger in self.loggers:
            logger.log_metrics({f"final/{name}": value for name, value in summary.items()}, step=loop.round)
            logger.finalize("success")

    def write_summary(self, loop: FederatedLoop, final_received: Mapping[str, float], finished: bool) -> dict[str, Any]:
        """Write `summary.json` and return what it says."""
        rows = read_rows(self.folder / "metrics.csv")
        without_test = [
            client for client in range(loop.num_clients) if loop.data.local_test and not loop.num_test[client]
        ]
        summary = {
            **self.about,
            "finished": finished,
            "rounds": loop.round,
            "clients": loop.num_clients,
            "participants_per_round": sum(row["participants"] for row in rows) / max(len(rows), 1),
            "partition_hash": loop.data.partition_hash,
            "seconds": loop.seconds,
            **summarise(rows),
            "final_received": dict(final_received),
            "communication": communication(loop.traffic, rows),
            "clients_without_test": without_test,
        }
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def communication(traffic: Mapping[str, int], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was sent in all, by one client in one round, and under the convention of published tables.

    Args:
        traffic: values and bytes sent up and down in the whole run.
        rows: rows of `metrics.csv`, with the number of participants of each round.

    Returns:
        `traffic`; ``…_params_per_client``, the mean over rounds and participants; ``…_params_Mi_per_round``, the values
        that all participants send in one round and one direction over 2^20, which tables print as "# Comm. Params (M)".
    """
    messages, rounds = sum(row["participants"] for row in rows), len(rows)
    figures: dict[str, float] = dict(traffic)
    for direction in ("uplink", "downlink"):
        values = traffic[f"{direction}_params"]
        figures[f"{direction}_params_per_client"] = values / max(messages, 1)
        figures[f"{direction}_params_Mi_per_round"] = values / max(rounds, 1) / 2**20
    return figures


def _known(value: float) -> float | None:
    """A client's accuracy; None where it has none."""
    return None if math.isnan(value) else float(value)
