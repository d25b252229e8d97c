"""What a round cost and lost, and the row of numbers that is written of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.core.message import NOTHING, Size
from fl_lightning.federation.privacy import Account
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.scores import loss_column, mean_losses


class Ledger:
    """Adds up what a run sends and how long it takes.

    Args:
        num_founders: clients that are there from the start, the first ones.
        has_newcomers: whether others join later.
        account: of what privacy is spent; None where there is none.
    """

    def __init__(self, num_founders: int, has_newcomers: bool, account: Account | None = None) -> None:
        self.account = account
        self.num_founders = num_founders
        self.has_newcomers = has_newcomers
        self.traffic = _traffic([])
        """Values and bytes that were sent so far, by column."""
        self.seconds = 0.0

    def columns(self, accuracies: Sequence[str], losses: Sequence[str]) -> list[str]:
        """The columns of a round's row, in their order in `metrics.csv`.

        Args:
            accuracies: columns that evaluations of clients fill.
            losses: names of the losses that are taken down.
        """
        suffixes = ("", "_std", "_min", "_worst10", "_weighted", *(["_newcomers"] if self.has_newcomers else ()))
        spread = [name + suffix for name in accuracies for suffix in suffixes]
        lost = [*map(loss_column, losses), *(["loss_newcomers"] if self.has_newcomers else ())]
        present = ("participants", "missing")
        spent = () if self.account is None else ("epsilon",)
        return ["round", *spread, "Server-T", "receive_drop", *spent, *self.traffic, *present, "seconds", *lost]

    def write(
        self,
        round: int,
        reports: Sequence[ClientReport],
        pulled: Size,
        missing: int,
        figures: Mapping[str, Any],
        start: float,
    ) -> dict[str, Any]:
        """Enter a round, and return its row.

        Args:
            round: 1-based.
            reports: of its participants.
            pulled: what was sent beyond what they posted.
            missing: how many should have taken part and failed.
            figures: its accuracies, by column.
            start: when it began, by `time.perf_counter`.
        """
        traffic = _traffic(reports, pulled)
        row: dict[str, Any] = {"round": round, **traffic, "participants": len(reports), "missing": missing, **figures}
        row |= mean_losses([report.losses for report in reports if report.client < self.num_founders])
        later = mean_losses([report.losses for report in reports if report.client >= self.num_founders])
        row |= {"loss_newcomers": later["loss"]} if "loss" in later else {}
        row |= {} if self.account is None else {"epsilon": self.account.epsilon(round)}
        row["seconds"] = time.perf_counter() - start
        self.seconds += row["seconds"]
        for name, value in traffic.items():
            self.traffic[name] += value
        return row

    def state_dict(self) -> dict[str, Any]:
        """What was added up."""
        return {"traffic": dict(self.traffic), "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.traffic, self.seconds = dict(state["traffic"]), state["seconds"]


def _traffic(reports: Sequence[ClientReport], pulled: Size = NOTHING) -> dict[str, int]:
    """Values and bytes sent down and up in a round, by column; who sends to a client that joins has no report of it."""
    sizes = {"uplink": [*(r.uplink for r in reports), pulled], "downlink": [report.downlink for report in reports]}
    return {
        f"{direction}_{unit}": sum(getattr(size, f"num_{unit}") for size in own)
        for unit in ("params", "bytes")
        for direction, own in sizes.items()
    }
