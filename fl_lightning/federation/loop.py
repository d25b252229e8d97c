"""FederatedLoop: receive, local fit, send, exchange; round after round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.core.facts import OptimizerFactory
from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.errors import require
from fl_lightning.federation import saving
from fl_lightning.federation.agreement import Agreement
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.callbacks import tell
from fl_lightning.federation.checkpoint import RunStorage
from fl_lightning.federation.clients import ClientPool
from fl_lightning.federation.cohort import Cohort
from fl_lightning.federation.collusion import Collusion, Held
from fl_lightning.federation.compiling import compile_steps
from fl_lightning.federation.early_stopping import patience_of
from fl_lightning.federation.examiner import Examiner
from fl_lightning.federation.exchange import Carriers
from fl_lightning.federation.graphs import exchange_of
from fl_lightning.federation.holders import Holders
from fl_lightning.federation.ledger import Absent, Ledger
from fl_lightning.federation.measures import Measures, MetricsFactory
from fl_lightning.federation.model_sizes import model_bytes
from fl_lightning.federation.posting import Posts
from fl_lightning.federation.privacy import start_account
from fl_lightning.federation.record_privacy import RecordAccount
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.runner import Runner
from fl_lightning.federation.scores import ScoreBoard
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.sickness import Ward, at_server, heard
from fl_lightning.federation.trainers import report_profile
from fl_lightning.federation.transport import Waiting
from fl_lightning.federation.visits import Job, Visit
from fl_lightning.federation.watch import watched
from fl_lightning.federation.wire import Wire
from fl_lightning.federation.workers import Workers, of_one_kind, shared_exchange
from fl_lightning.report.columns import SECONDS
from fl_lightning.report.record import num_evaluated

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData


class FederatedLoop:
    """Runs a federation. Knows no method by name.

    Args:
        settings: how it runs.
        make_metrics: makes further metrics of a number of classes, by the names of their columns; None for none.
    """

    def __init__(self, settings: Federation, make_metrics: MetricsFactory | None = None) -> None:
        self.settings = settings
        self.make_metrics = make_metrics
        self.callbacks = list(settings.callbacks or ())
        self.fit_order: Callable[[list[int]], list[int]] = list  # results do not depend on it

    # --- setting up -------------------------------------------------------------------------------------------------

    def setup(
        self,
        make_method: Callable[[int], Method],
        data: FederatedData,
        optimizer: OptimizerFactory,
        seed: int,
        trainer: Mapping[str, Any] | None = None,
        architecture: Sequence[int] | None = None,
        folder: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        anew: bool = False,
    ) -> None:
        """Build the resident modules and the Trainer, for a run from the first round on. Writes nothing.

        Args:
            make_method: makes a method of an architecture.
            data: the federation's data, set up.
            optimizer: makes an optimizer for some parameters.
            seed: the run's seed.
            trainer: flags of `lightning.pytorch.Trainer`.
            architecture: [N] each client's architecture; None gives all the same.
            folder: the run's folder, for checkpoints; None keeps everything in memory.
            identity: what makes this run this run (its configuration); a checkpoint of another is refused.
            anew: whether a run that the folder holds is replaced, not continued.
        """
        settings = self.settings
        self.data, self.seed = data, seed
        self.num_clients = len(data.clients)
        settings.check(self.num_clients, data.overlaps)
        self.calendar = Calendar(settings, self.num_clients, seed, data.num_train)
        self.calendar.check()
        self.identity = dict(identity or {})
        storage = RunStorage(folder, settings.checkpoint, on_disk=settings.pool == "disk")
        self.checkpoints = storage.checkpoints
        goes_on = storage.has_begun and not anew
        settings.failures.check(self.num_clients, None if goes_on else settings.rounds)
        measures = Measures.made_for(settings.evaluate, len(data.arrays.classes), self.make_metrics)
        self.runner = Runner(make_method, architecture, data, optimizer, settings, trainer or {}, seed, measures)
        self.stopwatch = self.runner.stopwatch
        self._set_up_exchange()
        self.round, self.agreement = 0, Agreement(self.cohort)
        self.runner.pool = ClientPool(storage.states, storage.on_disk and self.workers.writes, self.workers.rank)
        self.models = storage.models(model_bytes(self.runner), self.workers.writes)
        self.num_train, self.num_test = data.num_train, data.num_test
        self.holders = Holders(self.workers, self.num_train)
        policy, growth, trained = settings.on_client_error, settings.max_growth, self.runner.trained_names
        self.ward = Ward(policy, self.workers, self.exchange, self.wire, growth, trained)
        self.examiner = Examiner(self.runner, self.exchange, self.workers, self.calendar, self.ward, goes_on)
        newcomers, skips = settings.newcomers.clients, policy == "skip"
        own, hostile = settings.record_privacy, self.runner.attackers.clients
        self.records = None if own is None else RecordAccount(own, self.num_train, data.batch_size)
        self.ledger = Ledger(self.calendar.num_founders, newcomers > 0, self.account, self.records, skips, hostile)
        self.advice: Callable[[], str] = partial(_advice, self.checkpoints is not None)
        self.participants: list[int] = []
        self.final_scores: dict[str, np.ndarray] = {}
        filled = [name for name in self.row_columns if self.examiner.may_fill(name)]
        self.patience = patience_of(settings.early_stopping, filled, data, settings.evaluate, settings.newcomers.after)

    def _set_up_exchange(self) -> None:
        runner, settings, hostile, template = self.runner, self.settings, self.runner.attackers, self.runner.modules[0]
        exchange = exchange_of(template.method) if settings.exchange is None else settings.exchange
        self.wire = Wire(settings.wire or (), exchange, runner.trained_names, self.seed)
        exchange.setup(template, runner.facts)
        exchange.know(self.wire.down)
        runner.keeps_shared, hostile.increments = exchange.keeps_shared, exchange.increments
        if settings.server_optimizer is not None:
            exchange.optimize(settings.server_optimizer, template)
        if settings.aggregator is not None:
            exchange.guard(settings.aggregator, template, self.calendar.fewest)
        self.account = start_account(settings.wire or (), exchange, template, runner.facts, self.calendar)
        self.workers = of_one_kind(Workers.present(spread=runner.single_device), self.data)
        self.carriers = Carriers(exchange, self.seed)
        self.exchange = shared_exchange(exchange, self.workers, runner.device, self.carriers)
        if settings.compile:
            compile_steps(runner, self.workers.is_main)
        self.cohort = Cohort(runner, settings.cohort, self.exchange.in_turn, self.workers.is_main, settings.graph)
        self.posts = Posts(self.exchange, self.carriers, in_order=self.cohort.size is None)
        self.collusion = Collusion(runner, self.posts, self.workers, exchange.in_turn) if hostile.collude else None

    # --- running ----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """All rounds are done, the run has ended before, or all processes know that somebody asked to stop."""
        return self.round >= self.settings.rounds or self.agreement.stops or bool(self.ended)

    @property
    def ended(self) -> str:
        """Why the run has ended before its last round, as one that is whole; empty where it has not."""
        return "" if self.round >= self.settings.rounds else self.patience.reason or self.agreement.reason

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to stop."""
        return self.agreement.asked_by != 0

    def stop(self, number: int = 0, reason: str = "a callback asked for it") -> None:
        """Ask the loop to stop once the present round is done and saved.

        Args:
            number: the signal by which somebody asked; a process that ran the loop alone ends with 128 + this number.
                0 for none: the run ends, whole, with this round, which is evaluated, and its models kept, only where it
                would have been anyway.
            reason: of the latter.
        """
        self.agreement.ask(number, reason)

    def run(self) -> dict[str, Any] | None:
        """All rounds that are left; then one more receive. Returns `final_received`, None if stopped before the end.

        Raises:
            ConfigError: if more workers are configured than there are processes.
        """
        more = "needs that many processes: start them with `federation.launch.launch`, torchrun or the command line"
        wanted = self.settings.workers
        require(wanted in (None, "auto", self.workers.size), "federation.workers", more, wanted)
        with watched(self.settings.worker_timeout, self.advice) as self.ward.watch:
            self._call("on_run_start")
            self.agreement.note_save()
            self.agreement.settle(self.workers, self.round)
            while not self.done:
                self.advance()
            self.ledger.seconds += self.stopwatch.lap()[SECONDS]  # the last round's save stands in no row
            report_profile(self.runner.trainer)
            if self.round < self.settings.rounds and not self.ended:
                return None
            final = self.receive_once_more()
            self._call("on_run_end", final)
        return final

    def advance(self) -> None:
        """One round."""
        self.stopwatch.start()
        round = self.round + 1
        self.participants = self.calendar.participants(round)
        with self.stopwatch.part("exchange"), at_server(round, self.carriers.opening(round)):
            self.ward.note_outgoing()
            self.exchange.open(round, self.participants)
            owners = self._share_out(round)
        self._call("on_round_start", round, self.participants)
        with self.stopwatch.part("evaluate"), at_server(round):  # which is asked who hears what
            self.examiner.prepare(round, self.participants)
        reports: list[ClientReport] = []
        own = self.fit_order([client for client in self.participants if owners[client] == self.workers.rank])
        for visit in self.cohort.visits(own, partial(self._job, round), self.ward):
            if not self.ward.ends_round:
                with self.ward.care(visit.job.client):
                    report = self._take_part(round, visit)
                    reports.append(report.without_message())  # or memory would grow with the participants
                    if self.ward.watch is not None:
                        self.ward.watch.note(round, len(reports))
                    self._call("on_client_fit_end", report)
        with self.stopwatch.part("exchange"):
            self.participants = self.ward.leave_out(round, self.participants, self.carriers.streams("withdraw"))
            for report in reports if self.ward.skipped else ():  # there may be fewer to send to
                report.uplink = self.exchange.uplink(report.client, report.message)
            reports = self._gather(reports)
            if self.collusion is not None:
                self.collusion.release(round)
            self.posts.deliver(round)
            with at_server(round, self.carriers.streams("close")):
                self.exchange.close()
                self.ward.check_outgoing(round)
        self.examiner.forget(round)
        self.round = round
        self._end_round(reports)

    def _take_part(self, round: int, visit: Visit) -> ClientReport:
        """One participant's round: its fit, and what it sends."""
        job, client = visit.job, visit.job.client
        with self.stopwatch.part("fit"):
            report = self.runner.run(visit, self.wire)
        with self.stopwatch.part("exchange"):
            report.downlink = heard(self.exchange, client, job.message)
            report.uplink = self.exchange.uplink(client, report.message)
            if self.collusion is not None:
                self.collusion.hold(client, Held(report.message, visit.began, job.message))
            else:
                self.posts.take(round, client, report.message)
        return report

    def _share_out(self, round: int) -> dict[int, int]:
        """Decide which worker fits which participant, and bring states and messages there."""
        pool = self.runner.pool
        if self.exchange.in_turn or self.workers.size == 1:
            owners = self.holders.all_to_main(self.participants, pool)
        else:
            owners = self.holders.share_out({c: self.examiner.cost(c, round) for c in self.participants}, pool)
        self.exchange.address(owners)
        return owners

    def _gather(self, own: list[ClientReport]) -> list[ClientReport]:
        """Every worker's reports, in the order of clients; the main one tells its callbacks of the others'."""
        parts = self.workers.gather(own)
        for report in [report for part in parts[1:] for report in part]:
            self._call("on_client_fit_end", report)
        return sorted((report for part in parts for report in part), key=lambda report: report.client)

    def _end_round(self, reports: Sequence[ClientReport]) -> None:
        self.board.follow(self.participants)
        for report in reports:
            self.board.record(report.client, report.scores, report.losses, self.examiner.is_alone(self.round))
        evaluated = self.calendar.is_evaluated(self.round)
        with self.stopwatch.part("evaluate"):
            figures = self.examiner.figures(self.round, self.participants) if evaluated else {}
        absent = Absent(len(self.calendar.missing(self.round)), len(self.ward.skipped), self.ward.heard)
        lap = self.stopwatch.lap()
        row = self.ledger.write(self.round, reports, self.exchange.pulled(), absent, figures, lap)
        self.patience.see(self.round, row if num_evaluated([row]) else None)  # not where nobody was tested
        self._call("on_round_end", row)
        self.agreement.settle(self.workers, self.round)
        if self.settings.checkpoint.due(self.round, self.done, self.agreement.waited):
            saving.save(self)

    def _job(self, round: int, client: int) -> Job:
        facts = replace(self.runner.facts, round=round, participants=tuple(self.participants))
        return Job(
            facts,
            client,
            self._inbox(round, client),
            received=self.examiner.tests_received(round, client),
            trained=self.examiner.tests_trained(round, client),
            known_scores=self.examiner.global_scores(client),
            keep_model=self.models.place(client, self.calendar.may_be_last_fit(client, round)),
        )

    def _inbox(self, round: int, client: int) -> Message:
        with at_server(round, self.carriers.streams("inbox", client)):
            return self.wire.down(self.exchange.inbox(client), round)

    def receive_once_more(self) -> dict[str, float]:
        """What models score after one more receive, without a fit: `final_received`."""
        if not self.settings.evaluate.received:
            return {}
        again = self.carriers.round = self.round + 1
        there = self.calendar.num_present(again)
        holders = self.holders.of([client for client in self.board.clients.tolist() if client < there])
        with at_server(again):
            self.exchange.address(holders)
        self.final_scores = self.examiner.receive_once_more(holders, partial(self._inbox, again), again)
        return self.examiner.board.spreads(self.final_scores)

    @property
    def row_columns(self) -> list[str]:
        """The columns of a round's row, in their order in `metrics.csv`."""
        return self.ledger.columns(*self.examiner.all_columns, self.runner.modules[0].loss_names)

    @property
    def board(self) -> ScoreBoard:
        """What is known of every client's accuracy."""
        return self.examiner.board

    @property
    def scores(self) -> dict[str, np.ndarray]:
        """Column -> [N] the last scores of the clients of the board, NaN where there is none."""
        return self.examiner.board.scores

    @property
    def traffic(self) -> dict[str, int]:
        """Values and bytes that were sent so far, by column."""
        return self.ledger.traffic

    @property
    def seconds(self) -> float:
        """How long the rounds took so far."""
        return self.ledger.seconds

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on, but for the clients' private states (they are the pool's)."""
        return saving.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; `state` is a checkpoint as `Checkpoints.load` returns it.

        Raises:
            ConfigError: if the checkpoint belongs to another configuration, data set or partition, or lacks something.
        """
        saving.restore(self, state)

    def _call(self, hook: str, *arguments: Any) -> None:
        with Waiting.context(), self.stopwatch.part(None):  # somebody else's code may take its time
            tell(self.callbacks if self.workers.is_main else (), hook, self, *arguments)


def _advice(saves: bool) -> str:
    """What is said of a loop that was broken off; whoever knows its folder knows more (`resuming.advice_on`)."""
    return "the rounds before are saved" if saves else "nothing was saved"
