"""What a round cost and lost, and the row of numbers that is written of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fl_lightning.core.message import NOTHING, Size
from fl_lightning.core.meter import loss_column
from fl_lightning.federation.privacy import Account
from fl_lightning.federation.record_privacy import RecordAccount
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.scores import mean_logged, mean_losses
from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.report.columns import SECONDS, is_measure, spreads_of


class Absent(NamedTuple):
    """How many clients should have taken part in a round and did not.

    Args:
        missing: because `federation.failures` keeps them out.
        skipped: because they fell sick in it (`federation.on_client_error`).
        heard: what those were sent by a server nevertheless.
    """

    missing: int
    skipped: int
    heard: Size = NOTHING


class Ledger:
    """Adds up what a run sends and how long it takes.

    Args:
        num_founders: clients that are there from the start, the first ones.
        has_newcomers: whether others join later.
        account: of what privacy is spent; None where there is none.
        records: likewise, of single samples.
        skips: whether clients that fall sick are left out of their round; if not there are none to be counted.
        hostile: clients that attack: their losses count in no mean.
    """

    def __init__(
        self,
        num_founders: int,
        has_newcomers: bool,
        account: Account | None = None,
        records: RecordAccount | None = None,
        skips: bool = False,
        hostile: Collection[int] = (),
    ) -> None:
        self.hostile = hostile
        self.account = account
        self.records = records
        self.skips = skips
        self.num_founders = num_founders
        self.has_newcomers = has_newcomers
        self.traffic = _traffic([])
        """Values and bytes that were sent so far, by column."""
        self.seconds = 0.0

    def columns(self, scores: Sequence[str], servers: Sequence[str], losses: Sequence[str]) -> list[str]:
        """The columns of a round's row, in their order in `metrics.csv`: measures beside accuracy come last.

        Args:
            scores: columns that evaluations of clients fill.
            servers: those of the global model.
            losses: names of the losses that are taken down.
        """
        later = ("_newcomers",) if self.has_newcomers else ()
        spread = [name + suffix for name in scores for suffix in (*spreads_of(name), *later)]
        spread += servers
        accuracies = [name for name in spread if not is_measure(name)]
        measures = [name for name in spread if is_measure(name)]
        lost = [*map(loss_column, losses), *(["loss_newcomers"] if self.has_newcomers else ())]
        present = ("participants", "missing", *(["skipped"] if self.skips else ()))
        spent = [*(["epsilon"] if self.account else ()), *(["record_epsilon"] if self.records else ())]
        traffic = [*spent, *self.traffic, *present, *COLUMNS, *lost]
        return ["round", *accuracies, "receive_drop", *traffic, *measures]

    def write(
        self,
        round: int,
        reports: Sequence[ClientReport],
        pulled: Size,
        absent: Absent,
        figures: Mapping[str, Any],
        lap: Mapping[str, float],
    ) -> dict[str, Any]:
        """Enter a round, and return its row.

        Args:
            round: 1-based.
            reports: of its participants.
            pulled: what was sent beyond what they posted.
            absent: how many should have taken part and did not.
            figures: its accuracies, by column.
            lap: where the seconds went since the row before.
        """
        traffic = _traffic(reports, pulled, absent.heard)
        present = {"participants": len(reports), "missing": absent.missing}
        present |= {"skipped": absent.skipped} if self.skips else {}
        row: dict[str, Any] = {"round": round, **traffic, **present, **figures}
        honest = [report for report in reports if report.client not in self.hostile]
        row |= mean_losses([report.losses for report in honest if report.client < self.num_founders])
        later = mean_losses([report.losses for report in honest if report.client >= self.num_founders])
        row |= {"loss_newcomers": later["loss"]} if "loss" in later else {}
        row |= mean_logged([report.logged for report in honest if report.client < self.num_founders])
        row |= {} if self.account is None else {"epsilon": self.account.epsilon(round)}
        if self.records is not None:
            self.records.enter(reports)
            row["record_epsilon"] = self.records.of(self.records.worst())
        row |= lap
        self.seconds += lap[SECONDS]
        for name, value in traffic.items():
            self.traffic[name] += value
        return row

    def state_dict(self) -> dict[str, Any]:
        """What was added up."""
        spent = {} if self.records is None else {"record_steps": list(self.records.steps)}
        return {"traffic": dict(self.traffic), "seconds": self.seconds, **spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.traffic, self.seconds = dict(state["traffic"]), state["seconds"]
        if self.records is not None:
            self.records.steps = list(state["record_steps"])


def _traffic(reports: Sequence[ClientReport], pulled: Size = NOTHING, heard: Size = NOTHING) -> dict[str, int]:
    """Values and bytes sent down and up in a round, by column.

    Who sends to a client that joins has no report of it, nor has a client that was left out.
    """
    sizes = {"uplink": [*(r.uplink for r in reports), pulled], "downlink": [*(r.downlink for r in reports), heard]}
    return {
        f"{direction}_{unit}": sum(getattr(size, f"num_{unit}") for size in own)
        for unit in ("params", "bytes")
        for direction, own in sizes.items()
    }
