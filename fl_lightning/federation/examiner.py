"""What is tested when: Local-T, Global-T and Server-T of a federation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fl_lightning.core.checkup import Unsound
from fl_lightning.core.client import ClientModule
from fl_lightning.core.finetuning import NAME, check_tunable
from fl_lightning.core.message import Message
from fl_lightning.core.method import headline
from fl_lightning.errors import ConfigError
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.evaluation import Batches, Outcomes, Scores, join_batches
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.fairness import read_reference
from fl_lightning.federation.fit_checks import check_inputs
from fl_lightning.federation.resting import draws, goes_by_the_round, mixes, rests_on_what_travels
from fl_lightning.federation.runner import Runner
from fl_lightning.federation.scores import ScoreBoard, is_received
from fl_lightning.federation.sickness import ServerError, Ward, at
from fl_lightning.federation.workers import Workers
from fl_lightning.report.columns import is_measure


class Examiner:
    """Decides what is tested in a round, and tests what does not belong to one client's fit.

    Args:
        runner: the resident modules.
        exchange: who hears what.
        workers: the processes that share the work.
        calendar: who takes part when.
        ward: takes down who falls sick in a test.
        goes_on: whether there is a checkpoint, which knows what clients reach alone.
    """

    def __init__(
        self,
        runner: Runner,
        exchange: Exchange,
        workers: Workers,
        calendar: Calendar,
        ward: Ward,
        goes_on: bool = False,
    ) -> None:
        self.ward = ward
        self.runner = runner
        self.exchange = exchange
        self.workers = workers
        self.calendar = calendar
        self.policy = calendar.settings.evaluate
        template, data = runner.modules[0], runner.data
        self.parts = runner.evaluator.parts
        self.columns = runner.evaluator.columns(template, self.policy.moments)
        samples = {str(part.letter): part.sizes for part in self.parts}
        follows, hostile = self.policy.clients == "participants", runner.attackers.clients
        self.board = ScoreBoard(self.columns, samples, calendar.num_founders, hostile, follows)
        if self.policy.reference is not None:
            with suppress(ConfigError) if goes_on else nullcontext():  # it may have been moved since
                self.board.alone = read_reference(self.policy.reference, data)
        some = torch.arange(len(data.store.x))[:3]  # any will do
        few = data.store.gather(some)[0] if len(some) else None
        sample = None if few is None else few[:1]
        if few is not None and sample is not None:
            check_inputs(runner.modules, sample)
            runner.evaluator.draws = any(draws(module, sample) for module in runner.modules)
            runner.evaluator.mixes = any(mixes(module, few) for module in runner.modules)
            if NAME in template.predictors:
                check_tunable(template.method, sample)
        ways = list(template.predictors.values())
        travel = [sample is not None and rests_on_what_travels(template, way, sample) for way in ways]
        server = headline(template.predictors, "Server-T")
        self.has_global_model = dict(zip(template.predictors, travel, strict=True)).get(str(server), False)
        self._received_is_global = (
            self.has_global_model
            and all(travel)
            and not runner.evaluator.mixes
            and not any(way.adapts or way.fine_tunes for way in ways)
            and not (sample is not None and goes_by_the_round(template, sample))
        )
        self._global_outcomes: list[Outcomes] | None = None
        self._round = 0

    def forget(self, round: int) -> None:
        """The global model is another one now, that of a round that is done."""
        self._global_outcomes, self._round = None, round

    # --- the global model ---------------------------------------------------------------------------------------------

    def may_predict_as_global(self, client: int) -> bool:
        """Whether the client may be about to predict as the global model does."""
        if self.runner.architecture[client] != 0 or not self._received_is_global:
            return False  # the first architecture is measured, and the global model is tested in it
        try:
            return self.exchange.hears_global(client)
        except Unsound:  # of which is spoken where the client hears it
            return False

    @property
    def all_columns(self) -> tuple[list[str], list[str]]:
        """The columns of clients, and those of the global model."""
        return self.columns, self.server_columns

    @property
    def server_columns(self) -> list[str]:
        """The columns of the global model: on the union of the test parts, and on that of the validation parts."""
        measures = self.runner.evaluator.measures.names
        names = [f"{measure}/Server-{part.letter}".lstrip("/") for part in self.parts for measure in measures]
        return sorted(names, key=lambda name: (is_measure(name), names.index(name)))

    @property
    def tests_server(self) -> bool:
        """Whether there is a global model, and it is asked for."""
        return self.policy.server and self.has_global_model and self.exchange.global_message() is not None

    def may_fill(self, column: str) -> bool:
        """Whether a column of `metrics.csv` can have a value: that of a global model needs one."""
        return self.tests_server or column not in self.server_columns

    def server_scores(self) -> dict[str, float | None]:
        """Figures of the present global model, by column; None where there is none."""
        scores: dict[str, float | None] = dict.fromkeys(self.server_columns)
        if not self.tests_server:
            return scores
        way = str(headline(self.runner.modules[0].predictors, "Server-T"))
        for part, outcomes in zip(self.parts, self.global_outcomes(), strict=True):
            for measure, value in self.runner.evaluator.of_union(part, way, "received", outcomes[way]).items():
                scores[f"{measure}/Server-{part.letter}".lstrip("/")] = None if math.isnan(value) else value
        return scores

    def global_outcomes(self) -> list[Outcomes]:
        """What the global model makes of the union of each part; computed once a round, in parts.

        Raises:
            ServerError: if its scores are no numbers, the same on every process.
        """
        message = self.exchange.global_message()
        assert message is not None
        if self._global_outcomes is None:
            module = self.runner.residents.load_global(message, self._round)
            rank, size = self.workers.rank, self.workers.size
            try:
                own = [self.runner.evaluator.batches(module, part.union, rank, size) for part in self.parts]
                shares = self.workers.gather((own if size == 1 else _on_cpu(own), ""))
            except Unsound as error:
                shares = self.workers.gather(([], str(error)))
            broken = [why for _, why in shares if why]
            if broken:
                raise ServerError(f"the server's model: {broken[0]}")
            self._global_outcomes = [
                {
                    name: join_batches([share[index][name] for share, _ in shares]).to(self.runner.device)
                    for name in found
                }
                for index, found in enumerate(shares[0][0])
            ]
        return self._global_outcomes

    def global_scores(self, client: int) -> Callable[[ClientModule], Scores | None] | None:
        """What gives a client's scores right after its receive without testing it; None where nothing can.

        It gives None where the client did not end up with the global weights.
        """
        if not self.may_predict_as_global(client):
            return None
        message = self.exchange.global_message()
        assert message is not None

        def read_off(module: ClientModule) -> Scores | None:
            if not holds(module, self.runner.residents.global_entries(message)):
                return None
            return self.runner.evaluator.scores(module, client, "received", self.global_outcomes())

        return read_off

    def prepare(self, round: int, participants: Sequence[int]) -> None:
        """Test the global model now, if the round needs it: clients' own states are about to enter its module."""
        if any(self.tests_received(round, own) and self.may_predict_as_global(own) for own in participants):
            self.global_outcomes()

    def is_alone(self, round: int) -> bool:
        """Whether participants of a round have heard of nobody yet, and what they reach alone is not known."""
        known = self.policy.reference is not None
        return round == 1 and not known and not self.exchange.in_turn and self.calendar.is_evaluated(round)

    # --- clients ------------------------------------------------------------------------------------------------------

    def tests_received(self, round: int, client: int) -> bool:
        """Whether a participant is tested right after its receive.

        Who sits out an evaluated round counts with its last fit there; where fits are not tested, with what it received
        last.
        """
        if not self.policy.received or self.calendar.is_evaluated(round):
            return self.policy.received
        if self.policy.trained or self.board.follows:
            return False
        if self.calendar.settings.on_client_error == "skip":
            return True
        return self.calendar.is_last_before_evaluation(client, round)

    def tests_trained(self, round: int, client: int) -> bool:
        """Whether a participant is tested after its fit."""
        if self.board.follows:  # who sits out an evaluated round does not count in it
            return self.policy.trained and self.calendar.is_evaluated(round)
        if self.calendar.settings.on_client_error == "skip":  # who falls sick counts with its fit before
            return self.policy.trained
        return self.policy.trained and self.calendar.is_last_before_evaluation(client, round)

    def cost(self, client: int, round: int) -> float:
        """About how long a client's round takes, in forward passes of one sample; a step is three of them."""
        moments = len(self.policy.moments) if self.calendar.is_evaluated(round) else 0
        tested = moments * sum(len(part.indices(client)) for part in self.parts)
        return 3.0 * self.runner.passes(client, round) * self.runner.data.clients[client].num_train + tested

    def test_strangers(self, round: int) -> None:
        """Clients that never took part count with their initial model, once they have joined."""
        strangers = self.board.strangers(self.calendar.num_present(round)) if self.policy.trained else []
        own = strangers[self.workers.rank :: self.workers.size]
        scores = {}
        for client in own:
            with self.ward.care(client, takes_part=False), at(round, client, "evaluation before its first round"):
                scores[client] = self.runner.evaluate_resting(client)
        if strangers:
            self.ward.agree()
        for client, values in union(self.workers.gather(scores)).items() if strangers else ():
            self.board.record(client, values)

    def figures(self, round: int, participants: Sequence[int]) -> dict[str, Any]:
        """The accuracies of an evaluated round, by column."""
        self.test_strangers(round)
        row = self.board.figures(participants, self.calendar.is_evaluated(round - 1))
        return {**row, **self.server_scores()}

    def receive_once_more(
        self, holders: Mapping[int, int], inbox: Callable[[int], Message], round: int
    ) -> dict[str, np.ndarray]:
        """What the model of every client that counts scores after one more receive, without a fit, by column.

        Args:
            holders: client -> the worker that has its state; the clients of the board.
            inbox: what a client hears.
            round: the one that does not come.
        """
        if not self.policy.received:
            return {}
        if any(map(self.may_predict_as_global, holders)):
            self.global_outcomes()
        own = {}
        for client in (client for client in holders if holders[client] == self.workers.rank):
            with self.ward.care(client, takes_part=False), at(round, client, "receive"):
                own[client] = self._received(client, inbox(client), round)
        self.ward.agree()
        scores = {name: np.full(len(self.board.clients), np.nan) for name in self.columns if is_received(name)}
        for client, values in union(self.workers.gather(own)).items():
            for name, value in values.items():
                scores[name][self.board.place(client)] = value
        return scores

    def _received(self, client: int, message: Message, round: int) -> Scores:
        facts = replace(self.runner.facts, round=round)
        return self.runner.evaluate_received(client, message, facts, self.global_scores(client))


def holds(module: ClientModule, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether a client's entries are these, bit for bit."""
    entries = module.entries
    return all(name in entries and torch.equal(entries[name], tensor) for name, tensor in weights.items())


def _on_cpu(found: Sequence[Batches]) -> list[Batches]:
    """Outcomes as they can be sent to other processes."""
    return [{name: [outcome.to("cpu") for outcome in own] for name, own in batches.items()} for batches in found]


def union(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    """Every worker's share, by client."""
    return {client: value for part in parts for client, value in part.items()}
