"""One local mini-batch as a method sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_lightning.core.facts import Phase
from fl_lightning.core.forward import Forward, LateMaps
from fl_lightning.core.freezing import keeping_statistics, single_sample, training
from fl_lightning.core.precision import widened
from fl_lightning.core.recall import Memory, Recall
from fl_lightning.errors import ConfigError, require
from fl_lightning.models.own_training import SkippedBatch

if TYPE_CHECKING:
    from fl_lightning.core.descent import Descent, Machine
    from fl_lightning.core.devices import Part
    from fl_lightning.core.meter import LossMeter
    from fl_lightning.models.own_training import OwnTraining


@dataclass
class Bench:
    """What all steps of a phase have in common.

    Args:
        method: the client's.
        machine: precision and devices.
        layers: the method's batch-norm layers.
        phase: the present phase.
        terms: the terms that count in it.
        weights: the factor of each loss.
        descent: its optimizers; None outside a fit.
        meter: takes the losses down; None outside a fit.
        memory: of what networks at rest make of the client's samples; None keeps nothing.
        body_rests: whether nothing in the phase trains the model's body.
    """

    method: Any
    machine: Machine
    layers: Sequence[nn.Module]
    phase: Phase
    terms: Sequence[Any]
    weights: Mapping[str, float]
    descent: Descent | None = None
    meter: LossMeter | None = None
    memory: Memory | None = None
    body_rests: bool = False

    @classmethod
    def of(
        cls,
        method: Any,
        machine: Machine,
        layers: Sequence[nn.Module],
        phase: Phase,
        weights: Mapping[str, float],
        descent: Descent | None = None,
        meter: LossMeter | None = None,
    ) -> Bench:
        """A phase's, with those of the method's terms that count in it by `weights`, which hold for the whole fit."""
        return cls(method, machine, layers, phase, method.terms.counting(phase, weights), weights, descent, meter)

    # What every step would look up again:

    @cached_property
    def model(self) -> Any:
        """The split model that the phase's mini-batches pass through."""
        return self.method.get_submodule(self.phase.through)

    @cached_property
    def has_own_loss(self) -> bool:
        """Whether that model computes its loss by itself, in a fit."""
        return self.descent is not None and self.model.own.has_loss

    @cached_property
    def named_terms(self) -> list[tuple[str, Any]]:
        """The terms that count, with their names."""
        return [(term.name, term) for term in self.terms]

    @cached_property
    def observers(self) -> list[Any]:
        """The terms that see every pass."""
        return self.method.terms.exchanging

    @cached_property
    def precision(self) -> Any:
        """The context of a pass through a network; None where there is none."""
        return self.machine.precision if self.machine.autocasts else None

    def note_descent(self, values: Mapping[str, Tensor]) -> None:
        """Take down that a step descends, and refuse a loss without a weight, which would count as nothing.

        Raises:
            ConfigError: naming it.
        """
        if not values.keys() <= self.weights.keys():
            name, who = min(values.keys() - self.weights.keys()), type(self.method).__name__
            raise ConfigError("method", f"{who}.local_step() has a loss {name!r} to which losses() gives no weight")
        self.method.fit.descends = True


class Step:
    """One local mini-batch: its samples, and all that a method may do with them.

    Small models spend their time between operations, so that a context that does nothing is not entered here.

    Args:
        bench: what the phase's steps have in common.
        part: the samples; on several devices this one's.
        epoch: of the fit, 0-based.
        is_first: whether it is the first mini-batch of its epoch.
        is_last: whether it is the last one.
        steps_now: whether optimizers step, or gradients are only accumulated.
    """

    def __init__(
        self,
        bench: Bench,
        part: Part,
        epoch: int = 0,
        is_first: bool = False,
        is_last: bool = False,
        steps_now: bool = True,
    ) -> None:
        self.x, self.y = part.x, part.y
        self.phase = bench.phase
        self.epoch = epoch
        self.is_first = is_first
        self.is_last = is_last
        self.part = part
        self._bench = bench
        self.steps_now = steps_now
        self._logged: dict[str, Tensor] = {}
        self._total: Tensor | None = None
        self._descents = 0
        self._has_stepped = self._lacks_loss = self._has_passed = False
        self._pulled: dict[str, Tensor] = {}
        self._batch = part.y.shape[0]
        self._size = self._batch if part.counts else 0
        self._known: Recall | None = None
        if bench.memory is not None and part.rows is not None:
            self._known = Recall(bench.memory, part.rows, part.x, part.x._version)

    @property
    def round(self) -> int:
        """The present round, 1-based."""
        return self._bench.method.facts.round

    @property
    def _recall(self) -> Recall | None:
        """Where what is made of the mini-batch may be kept, unless the method has changed its inputs."""
        return self._known if self._known is not None and self._known.is_of(self.x) else None

    def take(self) -> None:
        """Let the method do its step, and take its losses down."""
        bench = self._bench
        try:
            if self._batch == 1 or bench.precision is not None:
                with single_sample(bench.layers, self._batch), bench.machine.wide():
                    self.act()
            else:
                self.act()
        except SkippedBatch:
            _skip(bench, self.steps_now)
        if self._logged and bench.meter is not None:
            total = self._total if self._descents == 1 and self._total is not None else self._sum(self._logged)
            logged = {"loss": total, **self._logged}
            if self._lacks_loss:
                logged = {n: v for n, v in logged.items() if n not in ("loss", bench.method.terms.cross_entropy.name)}
            bench.meter.add(logged, self._size)

    def act(self) -> None:
        """What the method does with the mini-batch."""
        self._bench.method.local_step(self)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None, through: Any = None) -> Forward:
        """A forward pass, in the trainer's precision; a batch of one sample leaves batch norm's statistics in peace.

        Args:
            x: [B, …] inputs; None takes the mini-batch's.
            y: [B] int64 classes; None takes the mini-batch's.
            through: a split model; None takes the phase's, mostly ``model``.
        """
        recall = self._recall if x is None else None
        x, y = self.x if x is None else x, self.y if y is None else y
        bench = self._bench
        model = bench.model if through is None else through
        if bench.has_own_loss and model is bench.model:
            return self._own_pass(model.own, x, y, recall)
        if recall is not None and bench.body_rests and model is bench.model:
            return self._recalled(model, recall, y)
        if y.shape[0] > 1 and bench.precision is None:
            features, z = model.forward_features(x)
            return Forward(x, y, features, z, model.head(z), recall=recall)
        with single_sample(bench.layers, len(y)), bench.machine.precision():
            features, z = model.forward_features(x)
            logits = model.head(z)
        return Forward(x, y, features, z, logits, precision=bench.machine.precision, recall=recall)

    def _recalled(self, model: Any, recall: Recall, y: Tensor) -> Forward:
        """A pass through a body at rest: its embeddings as an earlier epoch made them, its feature maps on demand."""
        bench, maps = self._bench, LateMaps(lambda: self._maps(model, nullcontext()))
        with single_sample(bench.layers, self._batch), bench.machine.precision():
            z = recall.of("pass", model.body, [model.body], lambda: maps.seen(*model.forward_features(self.x)))
            logits = model.head(z)
        return Forward(self.x, y, maps, z, logits, precision=bench.machine.precision, recall=recall)

    def _maps(self, model: Any, mode: AbstractContextManager[None]) -> list[Tensor]:
        """Feature maps of the mini-batch by a model at rest, whose batch norm keeps its statistics, in some mode."""
        alone = single_sample(self._bench.layers, self._batch)
        with torch.no_grad(), mode, keeping_statistics(model), alone, self._bench.machine.precision():
            return model.features(self.x)

    def _own_pass(self, own: OwnTraining, x: Tensor, y: Tensor, recall: Recall | None) -> Forward:
        """A pass in which the model computes its loss, and may step on it, by itself."""
        bench = self._bench
        own.counts, own.factor = self.part.counts, self.part.factor
        with single_sample(bench.layers, len(y)), bench.machine.precision():
            z, logits, loss = own.training_pass(x, y, self._pull, self._has_passed)
        self._has_passed = True
        self._has_stepped, self._lacks_loss = own.steps_itself, loss is None
        loss = torch.zeros((), device=y.device) if loss is None else loss
        return Forward(x, y, [], z, logits, precision=bench.machine.precision, loss=loss, recall=recall)

    def _pull(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of the terms that see weights alone, for a model that steps by itself; None where none reach.

        An optimizer passes over what has no gradient; on zeros it would decay it, and move it on by its momentum.
        """
        with torch.enable_grad(), self._bench.machine.wide():
            values = {
                n: _scalar(t, t(self._bench.method, None)) for n, t in self._bench.named_terms if t.sees == "weights"
            }
            total = self._sum(values)
        self._pulled = {name: value.detach() for name, value in values.items()}  # as they were before the model stepped
        if not values or not parameters or not total.requires_grad:
            return [None] * len(parameters)
        return self._bench.machine.reached(total, parameters)  # the same on all devices, as weights are

    def through(self, network: Callable[..., Any], *inputs: Any) -> Any:
        """Pass inputs through a network of the method's own, in the trainer's precision.

        Args:
            network: a module, or a function that calls some.
            inputs: what it takes.
        """
        with self._bench.machine.precision():
            return network(*inputs)

    def told(self, network: nn.Module) -> Any:
        """The mini-batch through a module of the method's own that rests for the fit: as `through`, kept over epochs.

        Args:
            network: what came in, a teacher, …; see `Forward.told`.
        """
        with torch.no_grad():
            if self._recall is None:
                return self.through(network, self.x)
            return self._recall.of("through", network, [network], lambda: self.through(network, self.x))

    def told_by(self, model: Any) -> Forward:
        """What a split model that does not learn in the fit makes of the mini-batch: in eval mode, in float32 or wider.

        Embeddings and logits are kept over epochs, as `Forward.told` has it; maps are made if they are asked for.
        """
        with torch.no_grad(), training(model, False):
            recall = self._recall
            if recall is None:
                return self.forward(through=model).wide()
            maps = LateMaps(lambda: self._maps(model, training(model, False)))

            def made() -> tuple[Tensor, Tensor]:
                out = self.forward(through=model)
                return maps.seen(out.features, out.z), out.logits

            z, logits = recall.of("told by", model, [model], made)
        return Forward(self.x, self.y, maps, z, logits, precision=self._bench.machine.precision).wide()

    def values(self, out: Forward, terms: Iterable[Any] | None = None) -> dict[str, Tensor]:
        """Each term's unweighted value, by its name: outside autocast, in float32 or wider.

        Args:
            out: the pass that they are of.
            terms: some terms; None takes all that count in the phase.

        Raises:
            ConfigError: for a term whose value is no scalar tensor.
        """
        bench, wide = self._bench, out.wide()
        method, named = bench.method, bench.named_terms if terms is None else [(term.name, term) for term in terms]
        if self._has_stepped:
            with bench.machine.wide():
                made = {n: _scalar(term, term(method, wide)) for n, term in named if n not in self._pulled}
                return {n: self._pulled[n] if n in self._pulled else made[n] for n, _ in named}
        if bench.precision is None:
            return {name: _scalar(term, term(method, wide)) for name, term in named}
        with bench.machine.wide():
            return {name: _scalar(term, term(method, wide)) for name, term in named}

    def task_loss(self, out: Forward) -> Tensor:
        """The task's own loss of a pass, the cross-entropy, in float32 or wider."""
        task = self._bench.method.terms.cross_entropy
        return self.values(out, [task])[task.name]

    @property
    def terms(self) -> Sequence[Any]:
        """The terms that count in the phase."""
        return self._bench.terms

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """Σ weight · value over what has a weight."""
        if self._bench.precision is None:
            return self._sum(values)
        with self._bench.machine.wide():
            return self._sum(values)

    def _sum(self, values: Mapping[str, Tensor]) -> Tensor:
        weights, total = self._bench.weights, None
        for name, value in values.items():
            weight = weights.get(name, 0.0)
            if weight > 0:
                weighted = value if weight == 1 else weight * value  # a weight of 1 changes no bit
                total = weighted if total is None else total + weighted
        return torch.zeros((), dtype=torch.float32, device=self.y.device) if total is None else total

    def descend(self, values: Mapping[str, Tensor], *parts: str) -> None:
        """Step on Σ weight · value, with accumulation, clipping, scaling and devices, and log the values.

        Args:
            values: by name, as in `Method.term_weights`.
            parts: the phase's parts that step; they alone get a gradient. None are all.

        Raises:
            ConfigError: naming a loss that has no weight, or where they have no names, or outside a fit.
        """
        named = isinstance(values, Mapping)
        require(named, "method", "step.descend() takes losses by name: {'cross_entropy': loss}", type(values).__name__)
        self._bench.note_descent(values)
        total = self.total(values)
        self._logged.update(values)
        self._total, self._descents = total, self._descents + 1
        descent = _descent_of(self._bench, "descend")
        if total.requires_grad and not self._has_stepped:
            descent.descend(total, self.part.factor, parts, self.steps_now)

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """∇ loss with respect to some parameters, for steps of a method's own; averaged over devices.

        Nothing is left in `.grad`; zeros where the loss does not reach.
        """
        self._require_steps()
        factor = self.part.factor
        return self._bench.machine.gradients(loss if factor == 1 else loss * factor, parameters)

    def follow(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], steps_now: bool | None = None) -> None:
        """Let the phase's optimizers step on gradients that were found by hand.

        Args:
            gradients: averaged over devices, as `gradients` gives them.
            parameters: what they are of.
            steps_now: whether to step; None as the accumulation of mini-batches has it.
        """
        self._require_steps()
        _descent_of(self._bench, "follow").follow(
            gradients, parameters, self.steps_now if steps_now is None else steps_now
        )

    def _require_steps(self) -> None:
        """Refuse steps of the method's own where the model has made them."""
        rule = f"{type(self._bench.method).__name__} makes steps of its own, but the module has stepped by itself"
        require(not self._has_stepped, "model", f"{rule} (manual optimization)")

    def log(self, values: Mapping[str, Tensor], size: int | None = None) -> None:
        """Take down values that belong to the step; those without a weight are in no sum.

        Args:
            values: scalars, by name.
            size: samples that they are means over; None takes the mini-batch's.

        Raises:
            ConfigError: for one named as the sum of all losses is.
        """
        who = type(self._bench.method).__name__
        require(
            "loss" not in values, "method", f"{who}.local_step() logs 'loss', which is the sum: give it another name"
        )
        self._logged.update(values)
        self._size = self._size if size is None else size

    def observe(self, out: Forward) -> None:
        """Show a forward pass to the terms that average artifacts while training runs; call it after the step."""
        if self.part.counts and self._bench.observers:
            with self._bench.machine.wide():
                for term in self._bench.observers:
                    term.observe(self._bench.method, out)

    def agreed(self, drawn: Tensor) -> Tensor:
        """What the first device has drawn: random streams part where devices see parts of different sizes."""
        devices = self._bench.machine.devices
        return drawn if devices is None else devices.first(drawn)


def _descent_of(bench: Bench, call: str) -> Descent:
    """What makes a fit's steps; there is none outside one (`OwnData.steps`), where nothing would be trained."""
    if bench.descent is None:
        rule = "is for the local fit, and trains nothing outside it: use train_copy or train_outside"
        raise ConfigError("method", f"step.{call}() {rule} (core/finetuning.py)")
    return bench.descent


def _scalar(term: Any, value: Any) -> Tensor:
    """What a term gave, in float32 or wider."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return widened(value if value.dim() == 0 else value.reshape(()))
    got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(type(term).__name__, f"its forward must return a scalar tensor, not {got}")


def _skip(bench: Bench, steps_now: bool) -> None:
    """Leave a mini-batch out that the model has no loss of."""
    rule = "must be 1 where training_step leaves mini-batches out (returns None), which other devices do not know"
    require(bench.machine.devices is None, "trainer.devices", rule)
    if bench.descent is not None:
        bench.descent.skip(steps_now)
