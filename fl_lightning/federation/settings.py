"""What a configuration's section `federation` says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.private_steps import RecordPrivacy
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import require, require_choices
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.callbacks import FederationCallback, check_hooks
from fl_lightning.federation.checkpoint import CheckpointPolicy
from fl_lightning.federation.early_stopping import EarlyStopping
from fl_lightning.federation.exchange import Exchange
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.policy import EvaluationPolicy as EvaluationPolicy
from fl_lightning.federation.selection import ClientSelection
from fl_lightning.federation.wire import WireFilter
from fl_lightning.federation.workloads import Draw, check_workload

MOST_THREADS = 1024


@dataclass(frozen=True)
class Newcomers:
    """Clients that stay out at first and join later, to see what a federation gives to those who come late.

    They are the last ones. Until they join they neither train nor count in any mean; afterwards they take part like the
    others, from what their method shares, and their mean is a column of its own (`Local-T_newcomers` and the like),
    while the other columns stay those of the founders. Their samples are in the union of all clients' parts, which the
    global model is tested on, from the beginning: it stays the same in all rounds.

    Args:
        clients: how many; 0 for none.
        after: the round after which they join.
    """

    clients: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        require(self.clients >= 0, "federation.newcomers.clients", "must be >= 0", self.clients)
        rule = f"must be named, and >= 1, for {self.clients} newcomers" if self.clients else "must be >= 0"
        require(self.after >= min(self.clients, 1), "federation.newcomers.after", rule, self.after)


@dataclass(frozen=True)
class Federation:
    """How a federation runs.

    Args:
        rounds: rounds of the run, >= 1.
        participation: fraction of the clients in a round, in (0, 1].
        sampling: how they are drawn, from the seed: ``fixed`` draws ``max(1, int(participation * N))`` of them without
            replacement; ``poisson`` takes each with that chance by itself, so that a round may have none: what
            privacy by sampling asks for.
        selection: a rule for who takes part, in the place of a draw in which all have the same chance; null draws.
        local_epochs: passes over the client's training part in a local fit, > 0, where the method does not say
            otherwise: 2, or 0.5 for half of its mini-batches; ``{uniform: [2, 5]}`` draws them for every client and
            round (FedNova's setting).
        local_steps: local mini-batches of a fit instead, >= 1, or a draw of them; null counts epochs.
        lr_decay: factor on the learning rate from round to round, in (0, 1].
        evaluate: what is evaluated.
        early_stopping: ends the run once a figure on the validation parts has not become better for some time; null
            runs all rounds.
        evaluate_every: rounds between evaluations, >= 1; the last of `rounds` is always evaluated.
        exchange: how messages travel; null takes the method's own way (mostly a star around a server).
        server_optimizer: what the server makes of the mean of the weights; null takes the mean itself.
        aggregator: what the server makes of a round's messages where some clients may lie; null takes the mean.
        wire: filters that messages pass on their way, in this order on the way up and down.
        record_privacy: record-level differential privacy, DP-SGD in every local fit; null trains as ever.
        newcomers: clients that join later.
        failures: clients that are out for rounds.
        attack: hostile clients, for experiments; null for none.
        on_client_error: what becomes of a round in which a client raises an error, its loss or its model is no finite
            number any more, or its message is not what it should be: ``stop`` ends the run, ``skip`` leaves the client
            out of the round as if it had been out: it keeps its last good state, and `metrics.csv` counts it as
            ``skipped``.
        max_growth: how many times larger than what it started the round from (or than 1) the largest magnitude of a
            client's parameter may become in one round, > 1; that of a running statistic or an artifact, which may be
            the square of something in the data's units, its third power (of an artifact that it did not receive, a
            count maybe, no less than 1e12). A client that exceeds it is sick, too.
        init: ``common`` starts all clients of an architecture from the same weights, ``own`` gives each its own
            private initial weights.
        share_buffers: whether batch norm's running statistics travel with the layers that are shared, and are averaged;
            some public code shares parameters alone.
        pool: where clients' private states are kept between their fits; ``disk`` for large federations.
        checkpoint: when the federation is saved.
        workers: processes that share out a round's clients: a number, or ``auto`` for as many as keep all cores busy,
            or one a GPU; more than there are GPUs share them evenly. By default one, or all that torchrun or SLURM
            started. It changes no result.
        threads: threads of each worker on the CPU, >= 1. By default one where `workers` is a number or the model is so
            small (4 million operations of a mini-batch's forward pass) that threads wait more than they compute, the
            cores divided by the workers where it is ``auto`` or they share GPUs, else torch's own choice, as
            wherever torchrun or srun has started the workers (torchrun says 1). Another number may change sums in
            their last bit.
        cohort: clients of one architecture whose local steps run as one: for small models, whose step is overhead and
            not arithmetic. A number >= 2, or ``auto``, which measures a few steps at the start and chooses; null or 1
            fits one after another. Numbers agree but for rounding; a fit that cannot be stacked runs by itself, and one
            line says why.
        graph: record local steps and replay them, a cohort's or, where `cohort` is null or 1, one client's after
            another's: as CUDA graphs, whose operations a GPU does at once; on a CPU as a list of torch's operations,
            without modules, autograd and `vmap` deciding anew what they are. ``auto`` and true do so; what cannot be
            recorded runs as it is, and one line says why. Numbers agree but for rounding.
        compile: compile local steps with torch.compile, once for all clients and rounds, where the method's step is the
            usual one; numbers agree but for rounding. What cannot be compiled (any of several architectures, then none)
            runs as it is, and one line says why; so does a smaller last mini-batch.
        recall: MiB that a client may keep, during a phase of several epochs, of what networks at rest (a teacher, the
            model that came in, a frozen body) made of its samples, >= 0: made once a sample then, and not once an
            epoch. Numbers agree but for rounding; 0 makes them anew. Augmented samples are.
        worker_timeout: seconds without a sign of life after which a worker counts as lost, >= 5, and the run ends.
        steps_per_bundle: local mini-batches gathered and normalised at once, >= 1; changes no result.
        channels_last: lay images out with channels last, which is faster on CPUs and under mixed precision; a line
            says where a model flattens by `view`, which they do not let it, and images are left as they are.
        callbacks: hooks of your own.
    """

    rounds: int = 20
    participation: float = 1.0
    sampling: Literal["fixed", "poisson"] = "fixed"
    selection: ClientSelection | None = None
    local_epochs: int | float | Draw = 1
    local_steps: int | Draw | None = None
    lr_decay: float = 1.0
    evaluate: EvaluationPolicy = field(default_factory=EvaluationPolicy)
    early_stopping: EarlyStopping | None = None
    evaluate_every: int = 1
    exchange: Exchange | None = None
    server_optimizer: ServerOptimizer | None = None
    aggregator: Aggregator | None = None
    wire: list[WireFilter] | None = None
    record_privacy: RecordPrivacy | None = None
    newcomers: Newcomers = field(default_factory=Newcomers)
    failures: Failures = field(default_factory=Failures)
    attack: Attack | None = None
    on_client_error: Literal["stop", "skip"] = "stop"
    max_growth: float = 1e4
    init: Literal["common", "own"] = "common"
    share_buffers: bool = True
    pool: Literal["memory", "disk"] = "memory"
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    workers: int | Literal["auto"] | None = None
    threads: int | None = None
    cohort: int | Literal["auto"] | None = None
    graph: bool | Literal["auto"] | None = None
    compile: bool = False
    recall: int = 256
    worker_timeout: float = 20.0
    steps_per_bundle: int = 16
    channels_last: bool = True
    callbacks: list[FederationCallback] | None = None

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "federation.rounds", "must be >= 1", self.rounds)
        require(0 < self.participation <= 1, "federation.participation", "must be in (0, 1]", self.participation)
        require(self.sampling in ("fixed", "poisson"), "federation.sampling", "must be fixed or poisson", self.sampling)
        ruled = self.selection is None or self.sampling == "fixed"
        require(ruled, "federation.sampling", "must be fixed beside federation.selection, which draws", self.sampling)
        some = not isinstance(self.local_epochs, (int, float)) or self.local_epochs > 0
        require(some, "federation.local_epochs", "must be > 0", self.local_epochs)
        check_workload(self.local_epochs, self.local_steps)
        require(0 < self.lr_decay <= 1, "federation.lr_decay", "must be in (0, 1]", self.lr_decay)
        require(self.evaluate_every >= 1, "federation.evaluate_every", "must be >= 1", self.evaluate_every)
        require_choices(
            "federation",
            on_client_error=(self.on_client_error, Literal["stop", "skip"]),
            init=(self.init, Literal["common", "own"]),
            pool=(self.pool, Literal["memory", "disk"]),
        )
        require(self.graph in (None, True, False, "auto"), "federation.graph", "must be auto, true or null", self.graph)
        grows = 1 < self.max_growth < float("inf")
        require(grows, "federation.max_growth", "must be > 1 and finite", self.max_growth)
        require(self.steps_per_bundle >= 1, "federation.steps_per_bundle", "must be >= 1", self.steps_per_bundle)
        counted = self.workers in (None, "auto") or (isinstance(self.workers, int) and self.workers >= 1)
        require(counted, "federation.workers", "must be auto or a number >= 1", self.workers)
        fits = self.threads is None or 1 <= self.threads <= MOST_THREADS
        require(fits, "federation.threads", f"must be from 1 to {MOST_THREADS}", self.threads)
        stacked = self.cohort in (None, "auto") or (isinstance(self.cohort, int) and self.cohort >= 1)
        require(stacked, "federation.cohort", "must be auto or a number >= 1; null fits one by one", self.cohort)
        rule = "cannot be combined with federation.cohort, federation.graph or federation.record_privacy; leave one out"
        alone = self.cohort in (None, 1) and not self.graph
        require(not self.compile or (alone and self.record_privacy is None), "federation.compile", rule)
        require(self.recall >= 0, "federation.recall", "must be >= 0 MiB", self.recall)
        require(self.worker_timeout >= 5, "federation.worker_timeout", "must be >= 5 seconds", self.worker_timeout)
        early = self.newcomers.clients == 0 or self.newcomers.after < self.rounds
        allowed = f"must be < federation.rounds ({self.rounds})"
        require(early, "federation.newcomers.after", allowed, self.newcomers.after)
        check_hooks(self.callbacks or (), "federation.callbacks")

    def check(self, num_clients: int, overlaps: bool) -> None:
        """Refuse what cannot be done with these clients.

        Args:
            num_clients: of the federation.
            overlaps: whether they share samples.

        Raises:
            ConfigError: naming the key.
        """
        some = f"must be < data.num_clients ({num_clients})"
        require(self.newcomers.clients < num_clients, "federation.newcomers.clients", some, self.newcomers.clients)
        self.evaluate.check(num_clients, overlaps)
        rule = "must be null where clients share samples (Population): of a sample's privacy all that hold it spend"
        require(self.record_privacy is None or not overlaps, "federation.record_privacy", rule)
