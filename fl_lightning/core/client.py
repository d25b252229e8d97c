"""The client: a LightningModule with its method's composite loss; it holds the method and does the fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.core.compiled import CompiledLosses
from fl_lightning.core.descent import Descent, FitSettings, Machine
from fl_lightning.core.devices import Part, SharedFit
from fl_lightning.core.division import Division, division_of, load_entries
from fl_lightning.core.engine import backward
from fl_lightning.core.facts import Facts, Fit, Phase
from fl_lightning.core.finetuning import FineTune
from fl_lightning.core.fit_hooks import FitHooks
from fl_lightning.core.fit_log import FitLog
from fl_lightning.core.freezing import batch_norms, norms_in, train_alone, trainable
from fl_lightning.core.handover import Heard, begin_fit, handed_over
from fl_lightning.core.message import Message
from fl_lightning.core.meter import LossMeter
from fl_lightning.core.method import Method, Predictor
from fl_lightning.core.method_checks import check_fit, check_method, checked_weights
from fl_lightning.core.naming import known_ways
from fl_lightning.core.nobody import in_a_round
from fl_lightning.core.own_data import BoundData
from fl_lightning.core.plain_steps import PlainDescent, is_plain, tell_of_steps
from fl_lightning.core.planning import Plan, plan_of
from fl_lightning.core.private_steps import PrivateDescent, PrivateFit, PrivateStep
from fl_lightning.core.recall import Memory
from fl_lightning.core.server import Server
from fl_lightning.core.step import Bench, Step
from fl_lightning.core.term import Term
from fl_lightning.core.walking import parameters_of
from fl_lightning.core.workload import Workload
from fl_lightning.errors import own_code, require
from fl_lightning.models.own_training import maker_of
from fl_lightning.models.split import SplitModel
from fl_lightning.running_on import RunningOn
from fl_lightning.seeding import kept_streams

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
    from torch.optim import Optimizer

    from fl_lightning.core.facts import OptimizerFactory
    from fl_lightning.models.own_training import OwnTraining

__all__ = ["ClientModule", "FitSettings"]


def _set_up(method: Method) -> None:
    """Let a method's terms change its model, then the method and its terms see to what they need."""
    rule = f"{type(method).__name__}.__init__() must call super().__init__(model, …)"
    require(hasattr(method, "terms"), "method", rule)
    for term in method.terms:
        with own_code("method", term, "alter()"), _streams_of(term):
            term.alter(method.model)
    with own_code("method", method, "setup()"):
        method.setup()
    for term in method.terms:
        with own_code("method", term, "setup()"), _streams_of(term):
            term.setup(method)
    unsized = next((n for n, own in (*method.named_parameters(), *method.named_buffers()) if is_lazy(own)), None)
    rule = f"{type(method).__name__}'s {unsized} has no size yet: setup() must give its layers theirs"
    require(unsized is None, "method", rule)


def _streams_of(term: Term) -> AbstractContextManager[None]:
    """What a term of weight 0 draws as it is set up must not move what is drawn after it."""
    return nullcontext() if term.weight > 0 else kept_streams()


class ClientModule(L.LightningModule):
    """One participant: a method and its composite loss, and the local fit.

    The fit's phases, optimizers, accumulation, clipping, precision, devices and meters are here; what is trained on
    what, and what leaves the client, is the method's. Each step of Lightning's is several consecutive mini-batches.

    Args:
        method: what the paper says; its terms get to know it here.
        settings: what the experiment says of a local fit; None for a client that is not fitted.
        share_buffers: whether batch norm's running statistics travel with their layers.
        drop_last: whether a smaller last mini-batch is dropped.
    """

    def __init__(
        self,
        method: Method,
        settings: FitSettings | None = None,
        share_buffers: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        _set_up(method)
        division_of(method, share_buffers)
        self.method = method
        self.settings = settings
        self.share_buffers = share_buffers
        self.drop_last = drop_last
        self.lr_factor = 1.0
        self.workload = Workload(1 if settings is None else settings.local_epochs)
        self.meter = LossMeter()
        self.logged, self._running_on, self.hooks = FitLog(), RunningOn(method.modules()), FitHooks(method)
        self.private: PrivateFit | None = None
        self.compiled: CompiledLosses | None = None
        self.fine_tune: FineTune | None = None
        others = (part for part in method.modules() if isinstance(part, SplitModel) and part is not method.model)
        self.own = method.model.own.beside([other.own for other in others if trainable(other)])
        self._layers = batch_norms(method)
        self._plugin: Precision | None = None
        self._machine = Machine()
        self.memory: Memory | None = None
        self._heard, self.fitting = Heard(Message()), Plan()  # the latter of the present fit
        self.planned: Plan | None = None
        """Of the fit that begins, where its optimizers may be made of it."""
        check_method(method)

    def __setattr__(self, name: str, value: Any) -> None:
        """What torch does, in a fifth of the time where a plain attribute stays one.

        Lightning notes the hook that it is in, and the one before, some thirty times a fit.
        """
        if name in self.__dict__ and not isinstance(value, (Tensor, nn.Module)):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # --- a round's messages -------------------------------------------------------------------------------------------

    @property
    def division(self) -> Division:
        """Which entries of the method's state travel, stay, and are made anew."""
        return division_of(self.method)

    @property
    def entries(self) -> dict[str, Tensor]:
        """The method's state dict, without copies."""
        return self.division.entries()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy entries of the method's state dict in."""
        load_entries(self.method, weights)

    def use(self, plugin: Precision) -> ClientModule:
        """Take up the trainer's precision."""
        self._plugin = plugin
        converted: ClientModule = plugin.convert_module(self)  # type: ignore[assignment]
        division_of(converted.method, self.share_buffers)  # a loss scale stays with the client, too
        return converted

    def bench(self) -> Bench:
        """What steps outside the fit stand on: all terms, no optimizer."""
        machine, method = Machine(self.device.type, self._plugin, self._machine.devices), self.method
        return Bench(method, machine, self._layers, Phase("outside"), list(method.terms), method.term_weights())

    def step(self, x: Tensor, y: Tensor) -> Step:
        """A step outside the fit, of inputs [B, …] of classes [B]."""
        return Step(self.bench(), Part.whole(x, y))

    def bound(self, source: Any) -> BoundData:
        """The client's samples, as its method sees them.

        Args:
            source: the client's samples (`data/store.py`).
        """
        return BoundData(source, self.bench, self.drop_last)

    def receive(self, message: Message, source: Any) -> None:
        """Let the method take a message; what it knows of a fit is of none yet, not of the client's before it."""
        self.method.fit = self.method.fit.afresh()
        self._heard = Heard(message, by_bits=self._running_on.any_own)
        self._heard.give(self.method, self.bound(source))

    def send(self, source: Any) -> Message:
        """What the method sends after its fit; what it has counted on the CPU goes with the rest."""
        message = handed_over(self.method.send(self.bound(source)), self.method, source.num_train)
        self._heard.check()
        self._heard = Heard(Message())
        if self.device.type != "cpu":
            message.artifacts = {name: value.to(self.device) for name, value in message.artifacts.items()}
        return message

    def adapt(self, source: Any, fine_tunes: bool = False) -> None:
        """Let the method personalise itself, or fine-tune it; the state that this is done to is thrown away."""
        if fine_tunes and self.fine_tune is not None:
            self.fine_tune.tune(self.method, self.bound(source))
        else:
            self.method.adapt(self.bound(source))

    def initial_message(self) -> Message:
        """What every client receives first: the common initial weights."""
        return Message(self.division.weights())

    def make_server(self, facts: Facts) -> Server:
        """The method's server, with the rules of its terms' artifacts."""
        with own_code("method", self.method, "make_server()"):
            server = self.method.make_server(self.initial_message(), facts)
        rule = f"{type(self.method).__name__}.make_server() gives {type(server).__name__}, and must give a Server"
        require(isinstance(server, Server), "method", rule)
        server.follow(self.method.terms.rules())
        return server

    @property
    def predictors(self) -> dict[str, Predictor]:
        """The method's ways to predict, by name, and the fine-tuned one if the configuration wants it."""
        ways = known_ways(self.method)
        return ways if self.fine_tune is None else self.fine_tune.wrap(ways)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses that are taken down: the sum, each term that counts, and the method's own."""
        with in_a_round(self.method):
            return ("loss", *(term.name for term in self.method.terms if term.weight > 0), *self.method.losses())

    # --- the local fit ------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The phases with their parameters and epochs under the present workload; those without either are left out."""
        assert self.settings is not None, "`settings` is set by the runner"
        return plan_of(self.method, self.workload)

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        """Fresh optimizers: neither momentum nor moments cross a round.

        One for each part of each phase, and then those that a model which steps by itself has beside them.
        """
        assert self.settings is not None, "`settings` is set by the runner"
        self.fitting, self.planned = self.planned or self.plan(), None
        epochs, own = self.fitting.epochs, self.own
        accumulate, clipping = self.settings.accumulate, self.settings.clipping
        make = own.optimizer(self.settings.optimizer, accumulate, self.lr_factor, clipping)
        fit = self.method.fit = Fit(make, epochs, self.lr_factor, accumulate)
        made, further = _optimizers(fit, self.fitting, own, make)
        for optimizer in made:
            optimizer.register_step_post_hook(_count_step(fit))
        made = made if self.private is None else [self.private.wrap(optimizer) for optimizer in made]
        fit.lr = made[0].param_groups[0]["lr"] if made else 0.0
        self.hooks.begin()  # behind the optimizers' own, or every fit would be looked through
        return made + further

    def on_train_start(self) -> None:
        """Prepare one fit: meter, devices, optimizers by phase and part."""
        assert self.settings is not None
        own, several = self.own, self.trainer.world_size > 1
        devices = own.devices = SharedFit(self.trainer.global_rank, self.trainer.world_size) if several else None
        plain = not several and self.private is None and not own.watches and is_plain(self.trainer)
        goes_back = backward if plain else self.manual_backward
        watch = (own.watched(goes_back), own.before_step) if own.watches else (goes_back, None)
        self._machine = Machine(self.device.type, self.trainer.precision_plugin, devices, *watch)
        self._machine.whole = own.whole
        own.machine = self._machine if own.steps_itself else None
        tell_of_steps(self._machine, self.trainer, None if plain else self, own.steps_itself)
        self.meter = LossMeter(devices)
        optimizers = self.optimizers()
        waiting = iter(optimizers if isinstance(optimizers, list) else [optimizers])
        by_part = [{name: next(waiting) for name in planned.parts} for planned in self.fitting]
        own_steps = partial(PlainDescent, self.method.fit, self.trainer) if plain else Descent
        descent = own_steps if self.private is None else partial(PrivateDescent, self.private)
        self._descents = [descent(self._machine, parts, self.settings) for parts in by_part]
        self._trainable = [p for p in parameters_of(self) if p.requires_grad]
        self._waiting = 0
        self._resting: list[nn.Module] = []
        if self._machine.careful is not None:
            self._machine.careful.start_fit(self.method)
        self._left = [True] * len(self._trainable)  # what the next two freeze stays so
        own.start_fit()
        begin_fit(self.method)
        self._weights = checked_weights(self.method)  # of which the method may have said some right there

    def on_train_epoch_start(self) -> None:
        """Enter the phase that this epoch belongs to."""
        assert self.settings is not None
        index, epoch, _ = self.fitting.at(self.current_epoch)
        planned, method = self.fitting[index], self.method
        trained = {id(p) for p in planned.parameters}
        if epoch == 0:
            self._left = train_alone(self._trainable, trained, self._left)
        for layer in self._resting:
            layer.train()
        self._resting = norms_in(method, planned.phase.resting)
        for layer in self._resting:
            layer.eval()
        if self.current_epoch == 0:
            self._running_on.begin()
        if epoch == 0:
            alone = self._machine.devices is None and self.private is None and self.compiled is None
            several = planned.epochs > 1 and self.settings.recall > 0
            if self.memory is not None:
                self.memory.clear()
            self.memory = Memory(self.settings.recall, coarse=self._machine.autocasts) if alone and several else None
        elif self.memory is not None:
            self.memory.begin_epoch()
        if self.private is not None:
            self.private.enter(method)
        method.fit.epoch = self.current_epoch
        method.fit.num_batches = method.fit.num_batches if epoch else 0
        self._bench = Bench.of(
            method, self._machine, self._layers, planned.phase, self._weights, self._descents[index], self.meter
        )
        self._bench.memory = self.memory
        self._bench.body_rests = self.memory is not None and _body_rests(self._bench.model, trained)
        self._begins = True
        self.own.start_epoch(index, epoch)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Several consecutive local steps: one mini-batch, one optimizer step each."""
        assert self.settings is not None
        assert self._bench.descent is not None
        steps, epoch, fit, machine = list(batch.steps()), self.current_epoch, self.method.fit, self._machine
        waiting, begins = self._waiting, self._begins  # a module's attributes are slow to set
        own_step = Step if self.compiled is None else self.compiled.step
        make, divide = (own_step, Part.whole) if self.private is None else (PrivateStep, self.private.part)
        divide = divide if machine.devices is None else machine.devices.part
        rows: Sequence[Tensor | None] = ()
        if self.memory is not None:
            rows, self.memory.num_samples = batch.step_rows(), batch.num_rows
        for index, (x, y) in enumerate(steps):
            if index:
                self.own.end_batch()
            waiting += 1
            is_last = index == len(steps) - 1 and (batch.is_last or self.trainer.is_last_batch)
            steps_now = is_last or waiting >= self.settings.accumulate
            part = divide(x, y)._replace(rows=rows[index]) if rows else divide(x, y)
            make(self._bench, part, epoch, begins and index == 0, is_last, steps_now).take()
            fit.num_batches += 1
            if steps_now:
                waiting = 0
                if machine.careful is not None:
                    machine.careful.end_batch()
        self._bench.descent.end_bundle()
        self._waiting, self._begins = waiting, False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let a model of the user's own hear of it behind the callbacks, as in Lightning."""
        self.own.end_batch()
        self.logged.tell(self, self.meter, self.own, batch.is_last or self.trainer.is_last_batch)

    def on_train_epoch_end(self) -> None:
        """Let a model of the user's own end its epoch."""
        self.logged.end_epoch(self, self.meter, self.own.end_epoch())

    def on_train_end(self) -> None:
        """Thaw what the last phase froze, and let method and terms keep what they need."""
        if self.memory is not None:
            self.memory.clear()
        if self._machine.devices is not None:
            self._machine.devices.agree(self.method, self.method.terms)
        if self._machine.careful is not None:
            self._machine.careful.end_fit(self.method)
        if self.private is not None:
            self.private.leave()
        self.own.end_fit()
        self.logged.end(self, self.meter, self.own.logged_for_run)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
            parameter.grad = None
        check_fit(self.method, self.meter, skips=self._machine.scaler is not None)
        self.method.on_fit_end()
        for term in self.method.terms.exchanging:  # they keep the model as the method leaves it
            term.after_fit(self.method)
        self._running_on.end()
        self.hooks.end()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bundles are gathered on the device already; one of a single mini-batch is ``[x, y]`` to callbacks."""
        return batch.as_batch() if self.trainer.callbacks else batch  # type: ignore[attr-defined]


def _optimizers(
    fit: Fit, plan: Plan, own: OwnTraining, make: OptimizerFactory
) -> tuple[list[Optimizer], list[Optimizer]]:
    """One for each part of each phase; and those that a model of the user's own has beside these."""
    made: list[Optimizer] = []
    further: list[Optimizer] = []
    for planned in plan:
        own.plan(planned.epochs, planned.last)
        for part, parameters in planned.parts.items():
            made.append(fit.make_optimizer(parameters, planned.phase, part=part))
            further += maker_of(planned.phase.optimizer or make).further
    return made, further


def _body_rests(model: SplitModel, trained: Collection[int]) -> bool:
    """Whether embeddings are a body's that has parameters, and none of them is among those that are trained."""
    body = {id(parameter) for parameter in model.body.parameters()}
    return bool(body) and body.isdisjoint(trained) and model.embeds_by_body


def _count_step(fit: Fit) -> Any:
    def count(*_: Any) -> None:
        fit.num_steps += 1

    return count
