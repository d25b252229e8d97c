"""The local fit of several clients of one architecture: their steps as one, phase after phase."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.client import ClientModule
from fl_lightning.core.descent import FitSettings, Machine
from fl_lightning.core.facts import Fit
from fl_lightning.core.freezing import batch_norms, norms_in
from fl_lightning.core.lone_step import Gradients, LoneBench
from fl_lightning.core.planning import Plan, Planned
from fl_lightning.core.rows import Alias, Drawing, Layout, OneByOne, Rows, Unstackable
from fl_lightning.core.stacked import Common, CommonFacts, CommonFit, Outcome, StackedBench, agree, exact
from fl_lightning.core.stacked_descent import StackedDescent
from fl_lightning.core.stacked_graphs import FitGraphs
from fl_lightning.core.stacked_meter import StackedMeter
from fl_lightning.core.step import Bench
from fl_lightning.seeding import drawn_from_torch, same_stream_states, set_stream_states, stream_states

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision


class Batches(Protocol):
    """One mini-batch of each of some clients, all of one size."""

    rows: list[int]
    x: Tensor
    y: Tensor
    index: list[int]
    is_last: list[bool]


Epoch = Callable[[int, Sequence[int | None]], Iterable[Batches]]
"""From an epoch of the fit, and each client's limit of mini-batches, to its steps; a limit of 0 leaves a client out."""


@dataclass
class Entered:
    """A client that is about to be fitted.

    Args:
        plan: its phases, with the epochs of its own workload.
        templates: optimizers as they would be made for it alone, by phase and part.
        fit: what its method may know of the fit.
        weights: the factor of each loss, noted while the client was in the module: they may rest on its buffers.
    """

    plan: Plan
    templates: list[Optimizer]
    fit: Fit
    weights: Mapping[str, float] = field(default_factory=dict)


class StackedFit:
    """Fits clients that stand in rows.

    Args:
        module: the resident module of their architecture.
        layout: where its tensors stand.
        rows: the clients as their fits begin; as they end afterwards.
        entered: the clients, with phases of the same kinds and epochs.
        epoch: gives the steps of an epoch.
        apart: names of what steps ask for and clients may differ in: those who do step one after another.
        aliases: attributes of the method's modules that hold parameters or buffers.
        plugin: the trainer's precision; mini-batches are made outside its context of a step. None for no trainer.
        graphs: what is recorded of such fits, whose rows `rows` are; None records nothing.
        draws: whether steps may draw from torch's stream: of one client alone, whose it is.
    """

    def __init__(
        self,
        module: ClientModule,
        layout: Layout,
        rows: Rows,
        entered: Sequence[Entered],
        epoch: Epoch,
        apart: set[str],
        aliases: Sequence[Alias] = (),
        plugin: Precision | None = None,
        graphs: FitGraphs | None = None,
        draws: bool = False,
    ) -> None:
        assert module.settings is not None, "`settings` is set by the runner"
        self.module = module
        self.method = module.method
        self.layout = layout
        self.rows = rows
        self.entered = list(entered)
        self.epoch = epoch
        self.apart = apart
        self.settings: FitSettings = module.settings
        self.meter = StackedMeter(len(entered))
        self.common = Common()
        self.aliases = list(aliases)
        self.plugin = plugin
        self.context: Callable[[], AbstractContextManager[Any]] = plugin.train_step_context if plugin else nullcontext
        self.graphs = graphs
        self.draws = draws
        self.changes: Callable[[], str] = str
        """Names an attribute of the method that steps have changed; empty for none."""

    def refuse_changes(self) -> None:
        """Refuse steps that leave something in the method: a check, or a recording, would do so once more.

        Raises:
            Unstackable: naming it.
        """
        name = self.changes()
        if name:
            raise Unstackable(f"its step changes {name}")

    def check_streams(self, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse draws that are not the client's own; returns the streams' states now.

        Args:
            before: the states that they had.

        Raises:
            Drawing: if somebody has drawn.
        """
        now = stream_states(self.layout.device)
        if not (drawn_from_torch if self.draws else same_stream_states)(before, now):
            raise Drawing
        return now

    def run(self, checks: Callable[[str], bool]) -> None:
        """All phases.

        Args:
            checks: whether a phase's first step is to be compared with the same of one client alone, by its name.

        Raises:
            Unstackable: saying why these clients cannot be stacked.
            Mixed: if a step asks for what its clients differ in.
        """
        method, facts, fit = self.method, self.method.facts, self.method.fit
        trainable = [parameter for parameter in method.parameters() if parameter.requires_grad]
        method.facts = CommonFacts.of(facts, self.common)
        method.fit = CommonFit(fit, self.common)
        try:
            templates = iter(self.entered[0].templates)
            begin = 0
            for index, planned in enumerate(self.entered[0].plan):
                own = {name: next(templates) for name in planned.parts}
                trained = {id(parameter) for parameter in planned.parameters}
                for parameter in trainable:
                    parameter.requires_grad_(id(parameter) in trained)
                _Phase(self, index, planned, own).run(begin, checks(planned.phase.name))
                begin += planned.epochs
        finally:
            for entered in self.entered:
                entered.fit.descends |= method.fit.descends
            method.facts, method.fit = facts, fit
            for parameter in trainable:
                parameter.requires_grad_(True)


class _Turn(NamedTuple):
    """Clients that step together.

    Args:
        places: where they stand in the mini-batches.
        rows: where they stand among the clients.
        known: what the method may ask of each one's fit.
    """

    places: list[int]
    rows: list[int]
    known: list[dict[str, Any]]

    @property
    def due(self) -> list[bool]:
        """Whether each of them steps now, or only accumulates."""
        return [own["steps_now"] for own in self.known]


class _Phase:
    """One phase of a stacked fit."""

    def __init__(self, fit: StackedFit, index: int, planned: Planned, templates: Mapping[str, Optimizer]) -> None:
        self.fit = fit
        self.index = index
        self.planned = planned
        method = fit.method
        machine = Machine(fit.module.device.type, fit.plugin)
        bench = Bench.of(method, machine, batch_norms(method), planned.phase, fit.entered[0].weights)
        if any(own._backward_hooks or own._post_accumulate_grad_hooks for own in planned.parameters):  # type: ignore[attr-defined]
            raise Unstackable("hooks are tied to its parameters' gradients")
        padded = any(isinstance(own, nn.Embedding) and own.padding_idx is not None for own in method.modules())
        if padded and len(fit.entered) > 1:  # of all but the first client the padding's row would be trained
            raise OneByOne("torch does not stack embeddings with padding_idx as they are alone")
        self.graphs = None if fit.graphs is None or fit.settings.accumulate > 1 else fit.graphs.phase(index)
        self.descent = StackedDescent(fit.layout, fit.rows, planned, templates, fit.settings, self.graphs)
        given = fit.layout, bench, self.descent.trained, fit.common, fit.aliases
        self.bench = LoneBench(*given, self.descent.parts) if len(fit.entered) == 1 else StackedBench(*given)
        self.worked = False
        """Whether the method has done the present step, and not a recording of it."""

    def run(self, begin: int, check: bool) -> None:
        """All its epochs, the first of which is so many epochs into the fit."""
        fit = self.fit
        for entered in fit.entered:
            entered.fit.num_batches = 0
        resting = norms_in(fit.method, self.planned.phase.resting)
        for layer in resting:
            layer.eval()
        try:
            for epoch in range(self.planned.epochs):
                is_last = epoch == self.planned.epochs - 1
                limits = [own.plan[self.index].last if is_last else None for own in fit.entered]
                fit.method.fit.epoch = begin + epoch
                for batches in fit.epoch(begin + epoch, limits):
                    for turn in self._turns(batches):
                        with fit.context():
                            self._step(turn, batches, begin + epoch, check)
                        check = False
        finally:
            for layer in resting:
                layer.train()

    def _turns(self, batches: Batches) -> Iterable[_Turn]:
        """The step's clients, apart where they differ in what the method asks."""
        turns: dict[tuple[Any, ...], _Turn] = {}
        for place, row in enumerate(batches.rows):
            known = self._known(batches, place, row)
            turn = turns.setdefault(tuple(known[name] for name in sorted(self.fit.apart)), _Turn([], [], []))
            turn.places.append(place)
            turn.rows.append(row)
            turn.known.append(known)
        return turns.values()

    def _known(self, batches: Batches, place: int, row: int) -> dict[str, Any]:
        own, index, is_last = self.fit.entered[row].fit, batches.index[place], batches.is_last[place]
        return {
            "is_last": is_last,
            "is_first": index == 0,
            "steps_now": is_last or (index + 1) % self.fit.settings.accumulate == 0,
            "num_batches": own.num_batches,
            "num_steps": own.num_steps,
        }

    def _step(self, turn: _Turn, batches: Batches, epoch: int, check: bool) -> None:
        fit, rows, known = self.fit, turn.rows, turn.known
        count = len(rows)
        whole = count == len(batches.rows)
        x, y = (batches.x, batches.y) if whole else (batches.x[turn.places], batches.y[turn.places])
        fit.common.known = {name: value for name, value in known[0].items() if all(k[name] == value for k in known)}
        index = None if rows == list(range(count)) else torch.tensor(rows, device=fit.layout.device)
        work = partial(self._work, turn, epoch, check)
        given = (x, y) if index is None else (x, y, index)
        unlike = index is not None and (index.is_cuda or not all(turn.due))
        graphs, self.worked = None if check or unlike else self.graphs, False
        outcome = work(*given) if graphs is None else graphs.step(work, given, fit.common)
        if self.worked and (check or self.graphs is not None):  # else once a fit is enough: it is not done twice
            fit.refuse_changes()
        for row, now in zip(rows, turn.due, strict=True):
            fit.entered[row].fit.num_batches += 1
            fit.entered[row].fit.num_steps += outcome.steps * now
        if outcome.logged:
            fit.meter.add(rows, outcome.logged, outcome.size)

    def _work(self, turn: _Turn, epoch: int, check: bool, x: Tensor, y: Tensor, index: Tensor | None = None) -> Outcome:
        """Pass, gradients and descent of some clients."""
        self.worked = True
        own = self.fit.rows if index is None else self.fit.rows.pick(index)
        views = own.views(len(turn.rows))
        if check:
            self._check(turn.rows, views, x, y, epoch)
        if isinstance(self.bench, LoneBench):
            return self._work_alone(self.bench, turn, views, epoch, x, y)
        versions = [view._version for view in views]
        outcome = self.bench.step(views, x, y, epoch)
        if index is not None and versions != [view._version for view in views]:
            self.fit.rows.put_back(index, own)
        return outcome._replace(steps=self.descent.descend(outcome, turn.rows, index, turn.due))

    def _work_alone(
        self, bench: LoneBench, turn: _Turn, views: Sequence[Tensor], epoch: int, x: Tensor, y: Tensor
    ) -> Outcome:
        """The same of one client, which descends within its pass, maybe several times."""
        steps: list[int] = []

        def descend(gradients: Gradients, parts: Sequence[str]) -> None:
            if steps and self.fit.settings.accumulate > 1:
                raise Unstackable("its step descends twice, and mini-batches are accumulated")
            found = [None if own is None else own[None] for own in gradients]
            steps.append(self.descent.descend(Outcome(True, found, tuple(parts), {}, 0), [0], None, turn.due))

        outcome = bench.step(views, x, y, epoch, descend)
        return outcome._replace(steps=sum(steps))

    def _check(self, rows: Sequence[int], views: Sequence[Tensor], x: Tensor, y: Tensor, epoch: int) -> None:
        """Compare the first and the last client's step, by the resident module, with the same stacked.

        Nothing is changed. Both, because torch stacks some layers so that one of their clients' is right by chance.

        Raises:
            Unstackable: naming the phase, if the two are not the same.
        """
        copies, bench = [view.clone() for view in views], copy.copy(self.bench)
        bench.bench = replace(bench.bench, machine=Machine(self.fit.layout.device.type))  # as parameters are rounded
        outcome: Outcome | None = None
        for place in dict.fromkeys((0, len(rows) - 1)):
            self.fit.rows.load(rows[place])
            with exact(self.fit.layout.device):
                before = stream_states(x.device)
                losses, gradients = bench.alone(x[place], y[place], epoch)
                self.fit.check_streams(before)
                if self.fit.draws:
                    set_stream_states(before)
                after = self.fit.layout.tensors()
                outcome = outcome or bench.step(copies, x, y, epoch)
                if self.fit.draws:
                    set_stream_states(before)
            if not agree(outcome, [own[place] for own in copies], losses, gradients, after, place):
                raise Unstackable(f"a step of phase {self.planned.phase.name!r} gives other values stacked than alone")
