"""Fits clients one after another, with one Trainer that is used again for every fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from fl_lightning.core.client import ClientModule, FitSettings
from fl_lightning.core.facts import Facts, OptimizerFactory
from fl_lightning.core.fit_log import FitLog, logged_names
from fl_lightning.core.freezing import Trained, set_mode
from fl_lightning.core.message import Message
from fl_lightning.core.meter import LossMeter
from fl_lightning.core.method import Method
from fl_lightning.core.steps import CarefulSteps
from fl_lightning.core.workload import Workload
from fl_lightning.federation.attacks import Attackers
from fl_lightning.federation.bundles import EpochBundles
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.checkups import Checkups, Inbound
from fl_lightning.federation.clients import ClientPool, State
from fl_lightning.federation.evaluation import Evaluator, Scores
from fl_lightning.federation.fit_checks import check_workload, fewest_batches
from fl_lightning.federation.flags import check_batches, check_flags, limits
from fl_lightning.federation.measures import Measures
from fl_lightning.federation.model_files import full_state, owner_of
from fl_lightning.federation.passes import Passes
from fl_lightning.federation.record_privacy import PrivateFits
from fl_lightning.federation.refit import Fits
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.residents import Residents
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.sickness import at
from fl_lightning.federation.stopwatch import Stopwatch
from fl_lightning.federation.trainers import (
    check_callbacks,
    clip_last,
    make_trainer,
    most_batches,
    sees_batches,
    tries_out,
)
from fl_lightning.federation.visits import Job, KnownScores, Visit
from fl_lightning.federation.wire import MEMORY, Wire
from fl_lightning.federation.workloads import workload_of
from fl_lightning.models.describe import has_batch_norm
from fl_lightning.report.record import as_logged
from fl_lightning.sealed import save_tensors
from fl_lightning.seeding import derive_seed, seed_global_streams

if TYPE_CHECKING:
    from fl_lightning.data.module import FederatedData
    from fl_lightning.data.store import ClientData


class Runner:
    """The resident modules, the Trainer, and the swapping of clients' states.

    Args:
        make_method: makes a fresh method of an architecture; called under a seed.
        architecture: [N] which architecture each client has; one resident module each. None gives all the same.
        data: the federation's data.
        optimizer: makes an optimizer for a phase's parameters.
        settings: of the federation.
        trainer: flags of `lightning.pytorch.Trainer`.
        seed: the run's seed.
        measures: what is read off predictions.
    """

    def __init__(
        self,
        make_method: Callable[[int], Method],
        architecture: Sequence[int] | None,
        data: FederatedData,
        optimizer: OptimizerFactory,
        settings: Federation,
        trainer: Mapping[str, Any],
        seed: int,
        measures: Measures | None = None,
    ) -> None:
        self.architecture = np.broadcast_to(0 if architecture is None else np.array(architecture), len(data.clients))
        self.data = data
        self.settings = settings
        self.seed = seed
        flags = {name: value for name, value in trainer.items() if value is not None}
        self.flags = dict(flags)
        check_flags(flags)
        fit_settings = _taken(flags, optimizer, settings.recall << 20)
        check_workload(settings, flags)
        self.trainer = make_trainer(flags)
        fit_settings = clip_last(self.trainer, fit_settings)
        self.single_device = isinstance(self.trainer.strategy, SingleDeviceStrategy)
        by_batch = not self.single_device or bool(limits(flags)) or sees_batches(self.trainer)
        check_batches(flags, fewest_batches(data))
        self.steps_per_bundle = 1 if by_batch else settings.steps_per_bundle
        self.device = self.trainer.strategy.root_device
        self.facts = _facts(settings, data, seed, self.device)
        about = settings, data, self.trainer, self.facts
        self.residents = Residents(make_method, self.architecture, fit_settings, *about)
        self.modules = self.residents.modules
        check_callbacks(self.trainer, *logged_names((module.loss_names, module.own) for module in self.modules))
        self.fits = Fits(self.trainer, self.flags)
        self._has_batch_norm = [has_batch_norm(module) for module in self.modules]
        measures = Measures(len(data.arrays.classes)) if measures is None else measures
        self.pool = ClientPool(None)
        self.stopwatch = Stopwatch()
        self._passes = Passes()
        self.keeps_shared = self.keeps_start = False
        self._memory: dict[str, Tensor] = {}  # of wire filters, for the client that is loaded
        self._own: State = {}  # what the client that is loaded kept until now
        self._checkups = [Checkups(own, settings.max_growth) for own in self.modules]
        self._inbound = Inbound()
        data.store.serve(self.device)
        data.store.dtype = self.trainer.precision_plugin.convert_input(torch.zeros(1)).dtype  # bf16-true and the like
        data.store.channels_last = self.residents.channels_last
        self.attackers = Attackers(settings.attack, data, seed, settings.newcomers.clients)
        samples, policy = self.attackers.samples, settings.evaluate  # of copies of the store as it serves by now
        self.evaluator = Evaluator(data, policy, self._autocast, seed, measures, samples)
        own, size = settings.record_privacy, data.batch_size
        self.private = None if own is None else PrivateFits(own, self.modules, trainer, data.store, size, seed)
        self.residents.tell(self.facts)

    @property
    def trained_names(self) -> frozenset[str]:
        """Names of the entries that are trained, of all architectures."""
        return frozenset().union(*(checkups.parameters for checkups in self._checkups))

    def _autocast(self) -> AbstractContextManager[None]:
        return self.trainer.precision_plugin.forward_context()

    def module(self, client: int) -> ClientModule:
        """The resident module of the client's architecture."""
        return self.residents.of(client)

    def load(self, client: int) -> ClientModule:
        """Swap the client's own last state in; its initial one if it never took part."""
        module = self.residents.renewed(client)
        state = self.pool.get(client)
        own = self._own = self.residents.begins_with(client) if state is None else state
        known = module.division  # a method may have a module of that name
        self._memory = {n: tensor for n, tensor in own.items() if n.startswith(MEMORY) and n not in known}
        module.load({name: tensor for name, tensor in own.items() if name not in self._memory})
        return module

    def run(self, visit: Visit, wire: Wire) -> ClientReport:
        """The other part of a participant's round: local fit and send.

        Args:
            visit: the part before it.
            wire: what its message passes.

        Raises:
            ClientError: naming round, client and step, the original error chained.
        """
        start, job, data, module = time.perf_counter(), visit.job, visit.data, visit.module
        client, round = job.client, job.round
        checkups, scores = self._checkups[self.architecture[client]], visit.scores
        with at(round, client, "fit"):
            self.fit(module, data, round) if visit.fit is None else visit.fit()
            self._own, self._memory = visit.own, visit.memory
            losses, said = checkups.losses(), set(module.loss_names)
            logged = as_logged(module.logged.values | {name: own for name, own in losses.items() if name not in said})
            checkups.state(module.entries, self._own)
        with at(round, client, "evaluation after the fit"), self.stopwatch.part("evaluate"):
            if job.trained:
                scores.update(visit.trained or self.evaluator.client(module, client, "trained"))
            model = None if job.keep_model is None else full_state(module, copies=True)  # `send` may write to it
        with at(round, client, "send"):
            seed_global_streams(self.seed, "send", round, client)
            with self._autocast():
                message = module.send(data)
            module.division.check_whole()  # once more: whatever the end of a fit, or sending, has put elsewhere
            checkups.state(module.entries, self._own)  # once more: a method may write to what it keeps as it sends
            began = {**self.start(client, job.message), **visit.moved}
            message = self.attackers.forge(message, began, job.message, checkups.parameters, round, client)
            message = wire.up(message, job.message, self._memory, visit.moved)
            checkups.message(message, replace(job.message, weights=began), data.num_train)
        if self.keeps_start:  # the pool may write the new state where the old one is
            visit.began = {name: tensor.clone() for name, tensor in began.items()}
        self._keep(module, client, round)
        if job.keep_model is not None and model is not None:
            owner = owner_of(client, self.seed, self.data.partition_hash)
            save_tensors(job.keep_model, model, round=round, owner=owner)
        visit.seconds += time.perf_counter() - start
        return ClientReport(client, message, scores, losses, module.meter.num_steps, visit.seconds, logged=logged)

    def begin(self, job: Job, waits: bool = False) -> Visit:
        """The first part of a participant's round: receive, up to the fit.

        Args:
            job: what the round asks of it.
            waits: whether a test after the receive, if it takes a pass, is left for later.

        Raises:
            ClientError: naming round, client and step, the original error chained.
            ServerError: if what the client hears is not finite.
        """
        start = time.perf_counter()
        client, round, data = job.client, job.round, self.attackers.samples[job.client]
        with at(round, client, "load"):
            module = self.load(client)
            module.lr_factor = self.settings.lr_decay ** (round - 1)
        self._inbound.check(job.message, round, client)
        with at(round, client, "receive"):
            self.receive(module, job.message, data, job.facts)
        with at(round, client, "evaluation after the receive"), self.stopwatch.part("evaluate"):
            scores = self._received_scores(module, client, job.known_scores, waits) if job.received else {}
        moved = _moved(module, self.start(client, job.message), self.settings)
        seconds, waits = time.perf_counter() - start, scores is None
        return Visit(job, module, data, scores or {}, self._own, self._memory, seconds, waits=waits, moved=moved)

    def start(self, client: int, received: Message) -> Mapping[str, Tensor]:
        """The shared weights that the client that is loaded started its round from, where it took them as they came.

        Args:
            client: 0-based.
            received: what it was sent; what is not in it, it had from the round before, or from the beginning.
        """
        return {**self.residents.shared_of(client), **self._own, **received.weights}

    def _received_scores(
        self, module: ClientModule, client: int, known: KnownScores | None, waits: bool = False
    ) -> Scores | None:
        scores = known(module) if known is not None else None
        return self.evaluator.client(module, client, "received") if scores is None and not waits else scores

    def evaluate_received(
        self, client: int, message: Message, facts: Facts, known: KnownScores | None = None
    ) -> Scores:
        """What the client's model would score after one more receive; its kept state does not change."""
        module = self.load(client)
        self.receive(module, message, self.attackers.samples[client], facts)
        return self._received_scores(module, client, known) or {}

    def evaluate_resting(self, client: int) -> Scores:
        """Scores of a client that never took part: its initial model, which has received nothing before round 1."""
        module = self.load(client)
        self.receive(module, Message(), self.attackers.samples[client], self.facts)
        return self.evaluator.client(module, client, "trained")

    def receive(self, module: ClientModule, message: Message, data: ClientData, facts: Facts) -> None:
        """Let a client take a message, under its stream of the round."""
        seed_global_streams(self.seed, "receive", facts.round, data.client)
        module.method.facts = replace(facts, client=data.client)
        self.residents.lay_under(module, data.client, self._own, message)
        with self._autocast():
            module.receive(message, data)

    def workload(self, client: int, round: int) -> Workload:
        """How much a client trains in a round in phases that do not say."""
        settings, single = self.settings, self._has_batch_norm[self.architecture[client]]
        drops = (False, False) if self.private is not None else (self.data.drop_last, single)
        batches = self.attackers.samples[client].num_steps(self.data.batch_size, *drops)
        own = workload_of(settings.local_epochs, settings.local_steps, self.seed, round, client, batches)
        return own._replace(tries=tries_out(self.trainer))

    def passes(self, client: int, round: int) -> float:
        """How often a client's fit passes over its training part in a round."""
        return self._passes.of(self.module(client), self.architecture[client], self.workload(client, round), round)

    def fit(self, module: ClientModule, data: ClientData, round: int) -> None:
        """One local fit with the one Trainer."""
        seed_global_streams(self.seed, "fit", round, data.client)
        set_mode(module)
        trained = Trained(module)
        module.workload = self.workload(data.client, round)
        plan = module.plan()
        epochs = plan.epochs
        if epochs == 0:  # nothing to train: every phase is off
            module.meter, module.logged = LossMeter(), FitLog()
            return
        if not self.trainer.callbacks:  # type: ignore[attr-defined] # who may freeze something before the fit
            module.planned = plan
        bundles = EpochBundles(
            data,
            epoch_seed=lambda: self.epoch_seed(self.trainer.current_epoch, round, data.client),
            rules=self.bundle_rules(data.client),
            by_chance=self.private is not None,
            limit=lambda: module.fitting.at(self.trainer.current_epoch)[2],
        )
        module.own.steps = most_batches(self.trainer, data.num_steps(*bundles.rules[:1], *bundles.rules[2:]))
        module.own.most_steps = self.trainer.max_steps
        module.private = None if self.private is None else self.private.of(module, data, round)
        try:
            self.fits.fit(module, bundles, epochs)
        except Exception:
            self._leave(self.architecture[data.client])
            if module.private is not None:
                module.private.leave()
            raise
        finally:
            trained.restore()  # what a callback froze before the first epoch, or a phase in which the fit broke off
        if not self.single_device:  # whose strategy's teardown moves a module to the CPU
            module.to(self.device)

    def epoch_seed(self, epoch: int, round: int, client: int) -> int:
        """Of an epoch's order; to overfit is to see the same mini-batches again, in every epoch of every round."""
        again = bool(self.flags.get("overfit_batches"))
        return derive_seed(self.seed, f"shuffle/{0 if again else epoch}", 1 if again else round, client)

    def bundle_rules(self, client: int) -> tuple[int, int, bool, bool]:
        """How a client's epoch is made of mini-batches: what `ClientData.bundles` takes after the seed."""
        single = self._has_batch_norm[self.architecture[client]]
        return self.data.batch_size, self.steps_per_bundle, self.data.drop_last, single

    def _leave(self, architecture: int) -> None:
        """Make a resident module whole again whose fit broke off."""
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, CarefulSteps):
            plugin.break_off()
        module = self.modules[architecture].to(self.device)
        module.planned = None
        module.hooks.end()
        if module.memory is not None:
            module.memory.clear()

    def _keep(self, module: ClientModule, client: int, round: int) -> None:
        names = (*module.division.kept, *(module.division.shared if self.keeps_shared else ()))
        self.pool.put(client, {**module.division.state(names), **self._memory}, round)


def _facts(settings: Federation, data: FederatedData, seed: int, device: torch.device) -> Facts:
    """What everybody knows before the first round."""
    newcomers, num_clients = settings.newcomers, len(data.clients)
    expected = Calendar(settings, num_clients, seed, data.num_train).expected(newcomers.after + 1)
    later, after = newcomers.clients, newcomers.after
    return Facts(num_clients, settings.rounds, seed, device, newcomers=later, expected=expected, joins_after=after)


def _taken(flags: dict[str, Any], optimizer: OptimizerFactory, recall: int) -> FitSettings:
    """Take out of a Trainer's flags those that are the fit's own affair."""
    return FitSettings(
        optimizer,
        clip_value=flags.pop("gradient_clip_val", None),
        clip_algorithm=flags.pop("gradient_clip_algorithm", "norm"),
        accumulate=flags.pop("accumulate_grad_batches", 1),
        recall=recall,
    )


@torch.no_grad()
def _moved(module: ClientModule, start: Mapping[str, Tensor], settings: Federation) -> dict[str, Tensor]:
    """Shared weights that a fit begins from otherwise than they came, or lay: FedAMP keeps its own, FedFomo goes on.

    Args:
        module: before the fit.
        start: what came in, over what the client had.
        settings: whether filters or an attack heed it; nothing is looked at where none does.
    """
    if not settings.wire and settings.attack is None:
        return {}
    entries = module.entries
    there = {name: entries[name] for name in module.division.shared if name in entries and name in start}
    apart = (name for name, own in there.items() if not torch.equal(own, start[name].to(own)))
    return {name: there[name].clone() for name in apart}
