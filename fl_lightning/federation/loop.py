"""FederatedLoop: receive, local fit, send, exchange; round after round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fl_lightning.core.client import ClientModule, OptimizerFactory
from fl_lightning.core.message import NOTHING, Message, Size
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import CheckpointPolicy, Checkpoints
from fl_lightning.federation.clients import ClientPool
from fl_lightning.federation.evaluation import Correct, Scores, join_batches, score_columns
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.graphs import EXCHANGES
from fl_lightning.federation.runner import ClientReport, Job, Runner
from fl_lightning.federation.scores import ScoreBoard, is_received, loss_column, mean_losses
from fl_lightning.federation.transport import Waiting
from fl_lightning.federation.watch import watched
from fl_lightning.federation.workers import MAIN, Workers, shared_exchange
from fl_lightning.seeding import numpy_generator

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData

KEEP_MODELS_BELOW = 2**30  # bytes of all clients' models together, for `models: auto`


@dataclass(frozen=True)
class EvaluationPolicy:
    """What is evaluated, in the rounds that are.

    Args:
        trained: clients' models after the local fit (`Local-T`, `Global-T`).
        received: clients' models right after the receive (`Local-T_received`, `Global-T_received`).
        globally: on the union of all clients' test splits, too (`Global-T`); costs N times that union.
        server: the global model on that union, where the method has one (`Server-T`).
        batch_size: test samples a batch, >= 1.
    """

    trained: bool = True
    received: bool = True
    globally: bool = True
    server: bool = True
    batch_size: int = 512

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "federation.evaluate.batch_size", "must be >= 1", self.batch_size)

    @property
    def moments(self) -> list[str]:
        """The moments at which clients are evaluated."""
        return [moment for moment in ("trained", "received") if getattr(self, moment)]


@dataclass(frozen=True)
class Newcomers:
    """Clients that stay out at first and join later, to see what a federation gives to those who come late.

    They are the last ones. Until they join they neither train nor count in any mean; afterwards they take part like the
    others, from what their method shares, and their mean is a column of its own (`Local-T_newcomers` and the like),
    while the other columns stay those of the founders.

    Args:
        clients: how many; 0 for none.
        after: the round after which they join.
    """

    clients: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        require(self.clients >= 0, "federation.newcomers.clients", "must be >= 0", self.clients)
        least = 1 if self.clients else 0
        require(self.after >= least, "federation.newcomers.after", f"must be >= {least}", self.after)


class FederatedLoop:
    """Runs a federation. Knows no method by name.

    Args:
        rounds: rounds of the run, >= 1.
        participation: fraction of the clients in a round, in (0, 1]; ``max(1, int(participation * N))`` of them are
            drawn without replacement, from the seed.
        local_epochs: epochs of a local fit, >= 1, where the method does not say otherwise.
        lr_decay: factor on the learning rate from round to round, in (0, 1].
        evaluate: what is evaluated.
        evaluate_every: rounds between evaluations, >= 1; the last round is always evaluated.
        exchange: how messages travel; null takes the method's own way (mostly a star around a server).
        newcomers: clients that join later.
        failures: clients that are out for rounds.
        init: ``common`` starts all clients of an architecture from the same weights, ``own`` gives each its own
            private initial weights.
        share_buffers: whether batch norm's running statistics travel with the layers that are shared, and are averaged;
            some public code shares parameters alone.
        pool: where clients' private states are kept between their fits; ``disk`` for large federations.
        checkpoint: when the federation is saved.
        workers: processes that share out a round's clients, one device each: a number, or ``auto`` for as many as keep
            all cores busy, or all GPUs. By default one, or all that torchrun or SLURM started. It changes no result.
        threads: threads of each worker on the CPU, >= 1. By default one where `workers` is a number, the cores divided
            by the workers where it is ``auto``, else torch's own choice. Another number may change sums in their last
            bit.
        worker_timeout: seconds without a sign of life after which a worker counts as lost, >= 5, and the run ends.
        steps_per_bundle: local mini-batches gathered and normalised at once, >= 1; changes no result.
        channels_last: lay images out with channels last, which is faster on CPUs and under mixed precision.
        callbacks: hooks of your own.
    """

    def __init__(
        self,
        rounds: int = 20,
        participation: float = 1.0,
        local_epochs: int = 1,
        lr_decay: float = 1.0,
        evaluate: EvaluationPolicy = EvaluationPolicy(),
        evaluate_every: int = 1,
        exchange: Exchange | None = None,
        newcomers: Newcomers = Newcomers(),
        failures: Failures = Failures(),  # noqa: B008 - frozen
        init: Literal["common", "own"] = "common",
        share_buffers: bool = True,
        pool: Literal["memory", "disk"] = "memory",
        checkpoint: CheckpointPolicy = CheckpointPolicy(),  # noqa: B008 - frozen
        workers: int | Literal["auto"] | None = None,
        threads: int | None = None,
        worker_timeout: float = 20.0,
        steps_per_bundle: int = 16,
        channels_last: bool = True,
        callbacks: list[FederationCallback] | None = None,
    ) -> None:
        require(rounds >= 1, "federation.rounds", "must be >= 1", rounds)
        require(0 < participation <= 1, "federation.participation", "must be in (0, 1]", participation)
        require(local_epochs >= 1, "federation.local_epochs", "must be >= 1", local_epochs)
        require(0 < lr_decay <= 1, "federation.lr_decay", "must be in (0, 1]", lr_decay)
        require(evaluate_every >= 1, "federation.evaluate_every", "must be >= 1", evaluate_every)
        require(steps_per_bundle >= 1, "federation.steps_per_bundle", "must be >= 1", steps_per_bundle)
        counted = workers in (None, "auto") or (isinstance(workers, int) and workers >= 1)
        require(counted, "federation.workers", "must be auto or a number >= 1", workers)
        require(threads is None or threads >= 1, "federation.threads", "must be >= 1", threads)
        require(worker_timeout >= 5, "federation.worker_timeout", "must be >= 5 seconds", worker_timeout)
        self.rounds = rounds
        self.participation = participation
        self.local_epochs = local_epochs
        self.lr_decay = lr_decay
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        early = newcomers.clients == 0 or newcomers.after < rounds
        require(early, "federation.newcomers.after", f"must be < federation.rounds ({rounds})", newcomers.after)
        self.configured_exchange = exchange
        self.newcomers = newcomers
        self.failures = failures
        self.init = init
        self.share_buffers = share_buffers
        self.pool = pool
        self.checkpoint = checkpoint
        self.configured_workers = workers
        self.threads = threads
        self.worker_timeout = worker_timeout
        self.steps_per_bundle = steps_per_bundle
        self.channels_last = channels_last
        self.callbacks = list(callbacks or ())
        self.round = 0
        self.stopping = False
        """Whether somebody asked to stop."""
        self._stops = False  # whether all processes know it
        self.fit_order: Callable[[list[int]], list[int]] = list  # results do not depend on it

    # --- setting up -------------------------------------------------------------------------------------------------

    def setup(
        self,
        make_client: Callable[[int], ClientModule],
        data: FederatedData,
        optimizer: OptimizerFactory,
        seed: int,
        trainer: Mapping[str, Any] | None = None,
        architecture: Sequence[int] | None = None,
        folder: Path | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the resident modules and the Trainer. Writes nothing.

        Args:
            make_client: makes a client module of an architecture.
            data: the federation's data, set up.
            optimizer: makes an optimizer for some parameters.
            seed: the run's seed.
            trainer: flags of `lightning.pytorch.Trainer`.
            architecture: [N] each client's architecture; None gives all the same.
            folder: the run's folder, for checkpoints; None keeps everything in memory.
            identity: what makes this run this run (its configuration); a checkpoint of another is refused.
        """
        self.data = data
        self.seed = seed
        self.num_clients = len(data.clients)
        self.num_founders = self.num_clients - self.newcomers.clients
        some = f"must be < data.num_clients ({self.num_clients})"
        require(self.num_founders >= 1, "federation.newcomers.clients", some, self.newcomers.clients)
        self.identity = dict(identity or {})
        self.checkpoints = None if folder is None or self.checkpoint.every == 0 else Checkpoints(folder / "checkpoints")
        begun = self.checkpoints is not None and bool(self.checkpoints.all())
        self.failures.check(self.num_clients, None if begun else self.rounds)
        require(self.pool == "memory" or folder is not None, "federation.pool", "disk needs a run's folder")
        self.runner = Runner(
            make_client,
            architecture or [0] * self.num_clients,
            data,
            optimizer,
            self.local_epochs,
            trainer or {},
            seed,
            own_init=self.init == "own",
            share_buffers=self.share_buffers,
            eval_batch_size=self.evaluate.batch_size,
            globally=self.evaluate.globally,
            steps_per_bundle=self.steps_per_bundle,
            channels_last=self.channels_last,
        )
        self._set_up_exchange()
        on_disk = self.pool == "disk" and self.workers.writes
        self.runner.pool = ClientPool(self._pool_folder(folder), on_disk)
        self.models_folder = self._models_folder(folder) if self.workers.writes else None
        self.num_train = np.array([client.num_train for client in data.clients])
        self.num_test = np.array([client.num_test for client in data.clients])
        self.holders = self.workers.share_out({c: float(n) for c, n in enumerate(self.num_train)}, {})
        module = self.runner.modules[0]
        self.columns = score_columns(module, self.evaluate.moments, data.local_test, self.evaluate.globally)
        self.board = ScoreBoard(self.columns, self.num_test, self.num_founders)
        self.traffic = _traffic([])
        self.seconds = 0.0
        self.advice = "the rounds before are saved" if self.checkpoints is not None else "nothing was saved"
        self._draws: dict[int, frozenset[int]] = {}
        self.participants: list[int] = []
        self._global_correct: Correct | None = None
        self.final_scores: dict[str, np.ndarray] = {}

    def _set_up_exchange(self) -> None:
        template = self.runner.modules[0]
        joins = template.takes_newcomers or not self.newcomers.clients
        rule = f"{type(template).__name__} has no rule for clients that join later: must be 0"
        require(joins, "federation.newcomers.clients", rule, self.newcomers.clients)
        configured = self.configured_exchange
        self.exchange = EXCHANGES[template.exchange]() if configured is None else configured
        self.runner.keeps_shared = self.exchange.keeps_shared
        self.exchange.setup(template, self.num_clients, self.seed)
        self.workers = Workers.present(spread=self.runner.single_device)
        if self.workers.size > 1:
            self.exchange = shared_exchange(self.exchange, self.workers, self.runner.device)

    def _pool_folder(self, folder: Path | None) -> Path | None:
        if self.checkpoints is not None:
            return self.checkpoints.clients
        return folder / "checkpoints" / "clients" if folder is not None and self.pool == "disk" else None

    def _models_folder(self, folder: Path | None) -> Path | None:
        keep = self.checkpoint.models
        if folder is None or keep is False or self.checkpoints is None:
            return None
        return folder / "models" if keep is True or self.runner.model_bytes() < KEEP_MODELS_BELOW else None

    # --- running ----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """All rounds are done, or all processes know that somebody asked to stop."""
        return self.round >= self.rounds or self._stops

    def stop(self) -> None:
        """Ask the loop to stop once the present round is done and saved."""
        self.stopping = True

    def _agree(self) -> None:
        """Let all processes know whether to stop; who is asked later stops after the next round, with the others."""
        self._stops = self.workers.any_says(self.stopping)
        if self._stops:
            self.stopping = True

    def run(self) -> dict[str, Any] | None:
        """All rounds that are left; then one more receive. Returns `final_received`, None if stopped before the end.

        Raises:
            ConfigError: if more workers are configured than there are processes.
        """
        more = "needs that many processes: start them with `federation.launch.launch`, torchrun or the command line"
        wanted = self.configured_workers
        require(wanted in (None, "auto", self.workers.size), "federation.workers", more, wanted)
        with watched(self.worker_timeout, self.advice):
            self._call("on_run_start")
            self._agree()
            while not self.done:
                self.advance()
            if self.round < self.rounds:
                return None
            final = self.receive_once_more()
            self._call("on_run_end", final)
        return final

    def advance(self) -> None:
        """One round."""
        start = time.perf_counter()
        round = self.round + 1
        self.participants = self.draw_participants(round)
        self.exchange.open(round, self.participants)
        owners = self._share_out(round)
        self._call("on_round_start", round, self.participants)
        if self.evaluate.received and self.is_evaluated(round) and any(map(self._hears_global, self.participants)):
            self._global_hits()  # now: it needs the resident module, which clients' own states are about to enter
        reports = []
        for client in self.fit_order([client for client in self.participants if owners[client] == self.workers.rank]):
            self.runner.module(client).lr_factor = self.lr_decay ** (round - 1)
            report = self.runner.run(self._job(round, client))
            report.downlink = self.exchange.downlink(client)
            report.uplink = self.exchange.uplink(client, report.message)
            self.exchange.post(client, report.message)
            reports.append(report)
            self._call("on_client_fit_end", report)
        reports = self._gather(reports)
        self.exchange.close()
        self._global_correct = None
        self.round = round
        self._end_round(reports, start)

    def _share_out(self, round: int) -> dict[int, int]:
        """Decide which worker fits which participant, and bring states and messages there."""
        if self.exchange.in_turn:
            owners = dict.fromkeys(self.participants, MAIN)
        else:
            owners = self.workers.share_out({c: self._cost(round, c) for c in self.participants}, self.holders)
        self.workers.move(self.holders, owners, self.runner.pool)
        self.holders |= owners
        self.exchange.address(owners)
        return owners

    def _cost(self, round: int, client: int) -> float:
        """About how long a client's round takes, in forward passes of one sample; a step is three of them."""
        tested = len(self.data.server_test) if self.evaluate.globally else int(self.num_test[client])
        passes = len(self.evaluate.moments) if self.is_evaluated(round) else 0
        return 3.0 * self.runner.module(client).fit_epochs * int(self.num_train[client]) + passes * tested

    def _gather(self, own: list[ClientReport]) -> list[ClientReport]:
        """Every worker's reports, in the order of clients; the main one tells its callbacks of the others'."""
        if self.workers.size == 1:
            return sorted(own, key=lambda report: report.client)
        parts = self.workers.gather([replace(report, message=Message()) for report in own])
        for report in [report for part in parts[1:] for report in part]:
            self._call("on_client_fit_end", report)
        return sorted((report for part in parts for report in part), key=lambda report: report.client)

    def _end_round(self, reports: Sequence[ClientReport], start: float) -> None:
        for report in reports:
            self.board.record(report.client, report.scores, report.losses)
        evaluated = self.is_evaluated(self.round)
        if evaluated:
            self._evaluate_strangers()
        traffic = _traffic(reports, self.exchange.pulled())
        present = {"participants": len(reports), "missing": len(self.missing(self.round))}
        row: dict[str, Any] = {"round": self.round, **traffic, **present}
        if evaluated:
            row |= self.board.figures(self.participants, self.is_evaluated(self.round - 1))
            row["Server-T"] = self.server_accuracy() if self.evaluate.server else None
        row |= mean_losses([report.losses for report in reports if report.client < self.num_founders])
        later = mean_losses([report.losses for report in reports if report.client >= self.num_founders])
        row |= {"loss_newcomers": later["loss"]} if "loss" in later else {}
        elapsed = time.perf_counter() - start
        row["seconds"] = elapsed
        self.seconds += elapsed
        for name, value in traffic.items():
            self.traffic[name] += value
        self._call("on_round_end", row)
        self._agree()
        if self.checkpoint.due(self.round, self.done):
            self._save()

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        if not self.workers.writes:
            return
        with Waiting.context():  # a slow disk takes its time
            files = _union(self.workers.gather(self.runner.pool.flush(self.round)))
            if self.workers.is_main:
                self.checkpoints.save(self.round, self.state_dict(), files, self.checkpoint.keep)

    def _hears_global(self, client: int) -> bool:
        """Whether the client is about to predict as the global model does."""
        return self.runner.module(client).received_is_global and self.exchange.hears_global(client)

    def _job(self, round: int, client: int) -> Job:
        received = self.evaluate.received and self.is_evaluated(round)
        known = received and self._hears_global(client)
        last = not any(self._takes_part(client, later) for later in range(round + 1, self.rounds + 1))
        return Job(
            round,
            client,
            self.exchange.inbox(client),
            received=received,
            trained=self.evaluate.trained and self._is_last_before_evaluation(round, client),
            received_scores=(lambda module: self._global_scores(module, client)) if known else None,
            keep_model=self.models_folder / f"{client:05d}.pt" if last and self.models_folder is not None else None,
        )

    def receive_once_more(self) -> dict[str, float]:
        """What every client's model scores after one more receive, without a fit: `final_received`."""
        if not self.evaluate.received:
            return {}
        self.exchange.address(self.holders)
        if any(map(self._hears_global, range(self.num_clients))):
            self._global_hits()
        own = {c: self._received_scores(c) for c in self.holders if self.holders[c] == self.workers.rank}
        scores = {name: np.full(self.num_clients, np.nan) for name in self.columns if is_received(name)}
        for client, values in _union(self.workers.gather(own)).items():
            for name, value in values.items():
                scores[name][client] = value
        self.final_scores = scores
        return {n: v for name, values in scores.items() for n, v in self.board.spread(name, values).items()}

    def _received_scores(self, client: int) -> Scores:
        if self._hears_global(client):
            return self._global_scores(self.runner.module(client), client)
        return self.runner.evaluate_received(client, self.exchange.inbox(client), self.rounds + 1)

    # --- who takes part, who is evaluated ---------------------------------------------------------------------------

    def draw_participants(self, round: int) -> list[int]:
        """The clients that take part in a round, in order; depends on seed and round alone."""
        out = self.missing(round)
        return [client for client in self._draw(round) if client not in out]

    def missing(self, round: int) -> set[int]:
        """The clients that should take part in a round and fail."""
        return self.failures.among(self._draw(round), self.seed, round)

    def _draw(self, round: int) -> list[int]:
        there = self._num_present(round)
        count = max(1, int(self.participation * there + 1e-9))
        if count == there:
            return list(range(there))
        rng = numpy_generator(self.seed, "participants", round)
        return sorted(rng.choice(there, size=count, replace=False).tolist())

    def _num_present(self, round: int) -> int:
        """How many clients have joined by `round`; they are the first ones."""
        return self.num_clients if round > self.newcomers.after else self.num_founders

    def is_evaluated(self, round: int) -> bool:
        """Whether clients are evaluated in `round`."""
        return round % self.evaluate_every == 0 or round == self.rounds

    @property
    def row_columns(self) -> list[str]:
        """The columns of a round's row, in their order in `metrics.csv`."""
        suffixes = ("", "_std", "_min", "_worst10", "_weighted", *(["_newcomers"] if self.newcomers.clients else ()))
        accuracies = [name + suffix for name in self.columns for suffix in suffixes]
        module = self.runner.modules[0]
        losses = [loss_column(name) for name in module.loss_names]
        losses += ["loss_newcomers"] if self.newcomers.clients else []
        present = ("participants", "missing")
        return ["round", *accuracies, "Server-T", "receive_drop", *self.traffic, *present, "seconds", *losses]

    def _is_last_before_evaluation(self, round: int, client: int) -> bool:
        """Whether the state after this fit is the one that the next evaluated round reports.

        Participants are known ahead, so a client that will sit out until then is evaluated now: its weights need not be
        kept for it.
        """
        while not self.is_evaluated(round):
            round += 1
            if self._takes_part(client, round):
                return False
        return True

    def _takes_part(self, client: int, round: int) -> bool:
        if round not in self._draws:
            self._draws[round] = frozenset(self.draw_participants(round))
        return client in self._draws[round]

    def _evaluate_strangers(self) -> None:
        """Clients that never took part count with their initial model, once they have joined."""
        strangers = self.board.strangers(self._num_present(self.round)) if self.evaluate.trained else []
        own = strangers[self.workers.rank :: self.workers.size]
        scores = {client: self.runner.evaluate_resting(client) for client in own}
        for client, values in _union(self.workers.gather(scores)).items() if strangers else ():
            self.board.record(client, values)

    @property
    def scores(self) -> dict[str, np.ndarray]:
        """Column -> [N] each client's last score, NaN where there is none."""
        return self.board.scores

    # --- numbers ----------------------------------------------------------------------------------------------------

    def server_accuracy(self) -> float | None:
        """Server-T of the present global model; None where there is none."""
        module = self.runner.modules[0]
        if not module.has_global_model or self.exchange.global_message() is None:
            return None
        hit = self._global_hits()[module.headline("global")]
        return float(hit.double().mean()) if len(hit) else None

    def _global_hits(self) -> Correct:
        """What the global model gets right on the union of all test splits; computed once a round, in parts."""
        message = self.exchange.global_message()
        assert message is not None
        if self._global_correct is None:
            module = self.runner.load_global(message)
            rank, size = self.workers.rank, self.workers.size
            own = self.runner.evaluator.correct_batches(module, self.data.server_test, rank, size)
            parts = self.workers.gather(own)
            self._global_correct = {name: join_batches([part[name] for part in parts]) for name in own}
        return self._global_correct

    def _global_scores(self, module: ClientModule, client: int) -> Scores:
        return self.runner.evaluator.scores(module, client, "received", self._global_hits())

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on, but for the clients' private states (they are the pool's)."""
        return {
            "identity": self.identity,
            "partition": self.data.partition_hash,
            "exchange": self.exchange.state_dict(),
            "board": self.board.state_dict(),
            "traffic": dict(self.traffic),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; `state` is a checkpoint as `Checkpoints.load` returns it.

        Raises:
            ConfigError: if the checkpoint belongs to another configuration or partition.
        """
        check_identity(state["identity"], self.identity)
        require(state["partition"] == self.data.partition_hash, "--resume", "the checkpoint's partition is another one")
        self.round = state["round"]
        self.exchange.load_state_dict(_to(state["exchange"], self.runner.device))
        rank = self.workers.rank
        self.runner.pool.restore({c: file for c, file in state["clients"].items() if self.holders[c] == rank})
        same = state["board"]["scores"].keys() == self.scores.keys()
        require(same, "--resume", "the checkpoint evaluates other columns")
        self.board.load_state_dict(state["board"])
        self.traffic = dict(state["traffic"])
        self.seconds = state["seconds"]
        self._global_correct = None

    def _call(self, hook: str, *arguments: Any) -> None:
        with Waiting.context():  # somebody else's code may take its time
            for callback in self.callbacks if self.workers.is_main else ():
                getattr(callback, hook)(self, *arguments)


def check_identity(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another configuration, naming the first key that differs.

    Raises:
        ConfigError: with that key.
    """
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            was = f"{there[key]!r} there" if key in there else "absent there"
            now = f"{here[key]!r} here" if key in here else "absent here"
            raise ConfigError("--resume", f"the checkpoint belongs to another configuration: {key} is {was}, {now}")


def _traffic(reports: Sequence[ClientReport], pulled: Size = NOTHING) -> dict[str, int]:
    """Values and bytes sent down and up in a round, by column; who sends to a client that joins has no report of it."""
    sizes = {"uplink": [*(r.uplink for r in reports), pulled], "downlink": [report.downlink for report in reports]}
    return {
        f"{direction}_{unit}": sum(getattr(size, f"num_{unit}") for size in own)
        for unit in ("params", "bytes")
        for direction, own in sizes.items()
    }


def _union(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    """Every worker's share, by client."""
    return {client: value for part in parts for client, value in part.items()}


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, torch.Tensor):
        return state.to(device)
    return {key: _to(value, device) for key, value in state.items()} if isinstance(state, dict) else state
