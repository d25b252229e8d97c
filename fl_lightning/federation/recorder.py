"""Writes a federation's numbers: files of the run's folder, and the loggers of the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.method import Method
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.exchange import Hop
from fl_lightning.federation.loggers import Loggers
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.model_sizes import num_parameters
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.runner import Runner
from fl_lightning.report.columns import LOG
from fl_lightning.report.journal import RunTables
from fl_lightning.report.record import (
    LOGGED,
    LOGGED_COLUMNS,
    num_evaluated,
    read_metrics,
    read_packed,
    summarise,
)
from fl_lightning.report.run_logger import RoundRecord, RunLogger, RunStart
from fl_lightning.sealed import write_json
from fl_lightning.terminal import say
from fl_lightning.trust import is_known


class Recorder(FederationCallback, AbstractContextManager["Recorder"]):
    """Keeps `metrics.csv`, `clients.csv` and `summary.json`, and hands every row to the loggers.

    Use it as a context manager around the run, so that the loggers are closed whatever ends it.

    Args:
        folder: the run's folder.
        about: what `summary.json` says of the run beside its numbers.
        loggers: Lightning's loggers; they receive the values of `metrics.csv` with the round as step.
        check: raises `WriteError` where the folder is the run's no more; it is called before a round and its rows.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        loggers: Loggers | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self._check = check or (lambda: None)
        self.about = dict(about)
        self._loggers = loggers or Loggers()
        self._before: Mapping[str, Any] = {}
        self._logged: dict[int, dict[str, float]] = {}  # in the fits of the present round, by client

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that have not failed."""
        return self._loggers.present

    def __exit__(self, *exception: object) -> None:
        self._loggers.close("failed")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tables": self.tables.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = state["tables"]

    @override
    def on_run_start(self, loop: FederatedLoop) -> None:
        sick = ["skipped"] if loop.ledger.skips else []
        hostile = ["attacker"] if loop.ledger.hostile else []
        ahead = ["round", "client", "participated", "failed", *sick, *hostile, "num_train", "num_test"]
        columns: dict[str, Sequence[str]] = {
            "metrics.csv": loop.row_columns,
            "clients.csv": [*ahead, *loop.examiner.columns, "loss"],
        }
        if loop.exchange.between_clients:
            columns["topology.csv"] = ["round", *Hop._fields]
        if _logs(loop.runner):
            columns[LOGGED] = LOGGED_COLUMNS
        resumed = loop.checkpoints is not None or loop.round > 0  # one that saves nothing any more has rows before it
        journal = Checkpoints(self.folder / "checkpoints").journal if resumed else None
        self.tables = RunTables(self.folder, columns, journal)
        notice = self.tables.start(loop.round, self._before)
        if notice:
            say(notice)
        asked = any(isinstance(logger, RunLogger) for logger in self.loggers)  # of rows without end in a long run
        self._loggers.begin(
            RunStart(
                self.folder,
                self.about,
                loop.data.partition_hash,
                loop.data.arrays.classes,
                loop.data.class_counts(),
                loop.settings.rounds,
                read_metrics(self.folder),
                read_packed(self.folder / "clients.csv") if asked else (),
                loop.patience.monitor,
                loop.patience.less,
                loop.num_clients,
                loop.calendar.num_founders,
            )
        )

    @override
    def on_round_start(self, loop: FederatedLoop, round: int, participants: Sequence[int]) -> None:
        self._check()

    @override
    def on_client_fit_end(self, loop: FederatedLoop, report: ClientReport) -> None:
        self._logged[report.client] = report.logged

    @override
    def on_round_end(self, loop: FederatedLoop, row: dict[str, Any]) -> None:
        self._check()
        clients = self._client_rows(loop)
        rows: dict[str, list[dict[str, Any]]] = {"metrics.csv": [row], "clients.csv": clients}
        if loop.exchange.between_clients:
            rows["topology.csv"] = [{"round": loop.round, **hop._asdict()} for hop in loop.exchange.hops]
        if _logs(loop.runner):
            rows[LOGGED] = _logged_rows(self._logged, row)
        self._logged = {}
        self.tables.append(loop.round, rows)
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        evaluated = loop.calendar.is_evaluated(loop.round)
        ends = bool(loop.ended or loop.agreement.asked_why)  # by a callback before this one, say

        def record(with_shared: bool) -> RoundRecord:
            shared = Shared()
            if with_shared:
                shared = shared_by_class(loop.exchange.global_message(), loop.runner.modules[0])
            return RoundRecord(numbers, clients, evaluated, shared.rows, shared.relations, ends)

        self._loggers.log_round(row, record)

    def _client_rows(self, loop: FederatedLoop) -> list[dict[str, Any]]:
        """A row of each client whose figures count, and one without any of each other that failed or was skipped."""
        evaluated, taking_part = loop.calendar.is_evaluated(loop.round), set(loop.participants)
        failed = loop.calendar.missing(loop.round)
        places = {client: place for place, client in enumerate(loop.board.clients.tolist())}
        rows = []
        for client in sorted({*places, *failed, *loop.ward.skipped}):
            row: dict[str, Any] = {"round": loop.round, "client": client, "participated": int(client in taking_part)}
            row |= {
                "failed": int(client in failed),
                "num_train": int(loop.num_train[client]),
                "num_test": int(loop.num_test[client]),
            }
            row |= {"skipped": int(client in loop.ward.skipped)} if loop.ledger.skips else {}
            row |= {"attacker": int(client in loop.ledger.hostile)} if loop.ledger.hostile else {}
            place = places.get(client)
            scores = loop.scores.items() if evaluated else ()
            row |= {name: None if place is None else _known(values[place]) for name, values in scores}
            rows.append({**row, "loss": _known(loop.board.losses[places[client]]) if client in taking_part else None})
        return rows

    @override
    def on_run_end(self, loop: FederatedLoop, summary: dict[str, Any]) -> None:
        self._check()
        said = self.write_summary(loop, summary, finished=True)
        self._loggers.end(said, summary, loop.round)
        self._loggers.close("success")

    def stop(self, loop: FederatedLoop) -> None:
        """The run was stopped before its last round."""
        said = self.write_summary(loop, {}, finished=False)
        self._loggers.end(said, None, loop.round)
        self._loggers.close("aborted")

    def write_summary(self, loop: FederatedLoop, final_received: Mapping[str, float], finished: bool) -> dict[str, Any]:
        """Write `summary.json` and return what it says."""
        self.tables.restore("metrics.csv")
        rows = self.tables.rows("metrics.csv")
        counting = loop.board.counted
        figures = summarise(rows, loop.patience.monitor, loop.patience.less)
        honest = "best_by" in figures or loop.data.evaluate_on == "validation"
        without_test = counting[loop.num_test[counting] == 0].tolist() if loop.data.local_test else []
        summary = {
            **self.about,
            "finished": finished,
            **({"stopped": loop.ended} if finished and loop.ended else {}),
            "rounds": loop.round,
            "evaluated_rounds": num_evaluated(rows),
            "clients": loop.num_clients,
            "participants_per_round": sum(row["participants"] for row in rows) / max(len(rows), 1),
            "partition_hash": loop.data.partition_hash,
            "seconds": loop.seconds,
            **figures,
            "best_on": "validation" if honest else "test",
            "final_received": dict(final_received),
            "communication": communication(loop.traffic, rows, sent_to_skipped=not loop.exchange.between_clients),
            "parameters": num_parameters(loop.runner),
            "clients_without_test": without_test,
            **({} if loop.account is None else {"privacy": loop.account.summary(loop.round)}),
            **({} if loop.records is None else {"record_privacy": loop.records.summary()}),
        }
        self.tables.sync()
        tables = self.tables.sums  # by which a table's cell is found to be what the run wrote
        write_json(self.folder / "summary.json", {**summary, "tables": tables}, indent=2)
        return summary


def communication(
    traffic: Mapping[str, int], rows: Sequence[Mapping[str, Any]], sent_to_skipped: bool = True
) -> dict[str, float]:
    """What was sent in all, by or to one client in one round, and under the convention of published tables.

    Args:
        traffic: values and bytes sent up and down in the whole run.
        rows: rows of `metrics.csv`, with the number of participants of each round.
        sent_to_skipped: whether clients that fell sick in a round had been sent something in it, as a server does.

    Returns:
        `traffic`; ``…_params_per_client``, the mean over rounds and participants; ``…_params_Mi_per_round``, the values
        that all participants send in one round and one direction over 2^20, which tables print as "# Comm. Params (M)".
    """
    messages, rounds = sum(row["participants"] for row in rows), len(rows)
    skipped = sum(row.get("skipped") or 0 for row in rows) if sent_to_skipped else 0
    figures: dict[str, float] = dict(traffic)
    for direction, clients in (("uplink", messages), ("downlink", messages + skipped)):
        values = traffic[f"{direction}_params"]
        figures[f"{direction}_params_per_client"] = values / max(clients, 1)
        figures[f"{direction}_params_Mi_per_round"] = values / max(rounds, 1) / 2**20
    return figures


class Shared(NamedTuple):
    """What the federation shares of each class.

    Args:
        rows: by name, [C, K], NaN in the rows of classes that nobody holds.
        relations: those of them whose rows relate a class to all classes.
    """

    rows: Mapping[str, np.ndarray] = MappingProxyType({})
    relations: frozenset[str] = frozenset()


def shared_by_class(message: Message | None, template: ClientModule) -> Shared:
    """What the global message says of each class, as plain arrays, and what terms draw beside it.

    Args:
        message: the global message; None where there is none.
        template: a client, for the architecture that the message's weights are of.
    """
    if message is None:
        return Shared()
    found, relations = {}, set()
    for name, artifact in message.artifacts.items():
        if isinstance(artifact, ClassMeans) and artifact.mean.ndim > 1:
            rows = artifact.mean.detach().flatten(1).float().cpu().numpy().copy()
            rows[~artifact.valid.cpu().numpy()] = np.nan
            found[name] = rows
            if artifact.relates_classes:
                relations.add(name)
    for term in template.method.terms.exchanging:
        drawn = term.drawn(template.method, message)
        found |= drawn
        relations |= drawn.keys()
    return Shared(found, frozenset(relations))


def _logs(runner: Runner) -> bool:
    """Whether fits may log values: Lightning's callbacks do, models with a training step of their own, own methods."""
    methods = [type(module.method) for module in runner.modules]
    own = any(kind.local_step is not Method.local_step and not is_known(kind.__module__) for kind in methods)
    return own or bool(runner.trainer.callbacks) or any(module.own.has_loss for module in runner.modules)  # type: ignore[attr-defined]


def _logged_rows(logged: Mapping[int, Mapping[str, float]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every participant's fit logged, a row a value, and the means over participants that the round's row has."""
    own = [(client, name, value) for client in sorted(logged) for name, value in logged[client].items()]
    means = [(None, name.removeprefix(LOG), value) for name, value in row.items() if name.startswith(LOG)]
    return [
        {"round": row["round"], "client": client, "value": value, "name": name}
        for client, name, value in (*own, *means)
    ]


def _known(value: float) -> float | None:
    """A client's accuracy; None where it has none."""
    return None if math.isnan(value) else float(value)
