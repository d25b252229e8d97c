"""The local fit of several clients of one architecture: their steps as one, phase after phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from fl_lightning.core.stacked_graphs import FitGraphs, Parts
from fl_lightning.core.stacked_meter import StackedMeter
from fl_lightning.core.stacked_optimizers import StackedOptimizer, Stretch
from fl_lightning.core.step import Bench
from fl_lightning.core.term import counts
from fl_lightning.seeding import drawn_from_torch, same_stream_states, set_stream_states, stream_states


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
    """

    plan: Plan
    templates: list[Optimizer]
    fit: Fit


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
        context: the trainer's, of a step; mini-batches are made outside.
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
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
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
        self.context = context
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


class _Phase:
    """One phase of a stacked fit."""

    def __init__(self, fit: StackedFit, index: int, planned: Planned, templates: Mapping[str, Optimizer]) -> None:
        self.fit = fit
        self.index = index
        self.planned = planned
        method = fit.method
        weights = method.term_weights()
        terms = [term for term in method.terms if counts(term, planned.phase, weights[term.name])]
        machine = Machine(fit.module.device.type)
        bench = Bench(method, machine, batch_norms(method), planned.phase, terms, weights)
        if any(own._backward_hooks or own._post_accumulate_grad_hooks for own in planned.parameters):  # type: ignore[attr-defined]
            raise Unstackable("hooks are tied to its parameters' gradients")
        padded = any(isinstance(own, nn.Embedding) and own.padding_idx is not None for own in method.modules())
        if padded and len(fit.entered) > 1:  # of all but the first client the padding's row would be trained
            raise OneByOne("torch does not stack embeddings with padding_idx as they are alone")
        self.trained = fit.layout.index([parameter for parameter in planned.parameters if parameter.requires_grad])
        self.templates = dict(templates)
        self.parts = {name: fit.layout.index(own) for name, own in planned.parts.items()}
        self.groups = {n: [fit.layout.index(g["params"]) for g in own.param_groups] for n, own in templates.items()}
        given = fit.layout, bench, self.trained, fit.common, fit.aliases
        self.bench = LoneBench(*given, self.parts) if len(fit.entered) == 1 else StackedBench(*given)
        self.optimizers: Parts = {}
        self.reached: dict[str, set[int]] = {}
        self.graphs = None if fit.graphs is None or fit.settings.accumulate > 1 else fit.graphs.phase(index)
        if self.graphs is not None:
            self.graphs.begin(self.templates)
            self.optimizers, self.reached = self.graphs.optimizers, self.graphs.reached
        self.accumulated: dict[tuple[int, int, int], Tensor] = {}
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
                    for own in self._split(batches):
                        with fit.context():
                            self._step(*own, batches, begin + epoch, check)
                        check = False
        finally:
            for layer in resting:
                layer.train()

    def _split(self, batches: Batches) -> list[tuple[list[int], list[int]]]:
        """Places in the step's rows, and the rows, of clients that step together."""
        by_key: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(batches.rows):
            known = self._known(batches, place, row)
            by_key.setdefault(tuple(known[name] for name in sorted(self.fit.apart)), []).append(place)
        return [(places, [batches.rows[place] for place in places]) for places in by_key.values()]

    def _known(self, batches: Batches, place: int, row: int) -> dict[str, Any]:
        own, index, is_last = self.fit.entered[row].fit, batches.index[place], batches.is_last[place]
        return {
            "is_last": is_last,
            "is_first": index == 0,
            "steps_now": is_last or (index + 1) % self.fit.settings.accumulate == 0,
            "num_batches": own.num_batches,
            "num_steps": own.num_steps,
        }

    def _step(self, places: list[int], rows: list[int], batches: Batches, epoch: int, check: bool) -> None:
        fit, count = self.fit, len(rows)
        whole = count == len(batches.rows)
        x, y = (batches.x, batches.y) if whole else (batches.x[places], batches.y[places])
        known = [self._known(batches, place, row) for place, row in zip(places, rows, strict=True)]
        fit.common.known = {name: value for name, value in known[0].items() if all(k[name] == value for k in known)}
        index = None if rows == list(range(count)) else torch.tensor(rows, device=fit.layout.device)
        due = [own["steps_now"] for own in known]
        work = partial(self._work, rows, due, epoch, check)
        given = (x, y) if index is None else (x, y, index)
        unlike = index is not None and (index.is_cuda or not all(due))
        graphs, self.worked = None if check or unlike else self.graphs, False
        outcome = work(*given) if graphs is None else graphs.step(work, given, fit.common)
        if self.worked and (check or self.graphs is not None):  # else once a fit is enough: it is not done twice
            fit.refuse_changes()
        for row, now in zip(rows, due, strict=True):
            fit.entered[row].fit.num_batches += 1
            fit.entered[row].fit.num_steps += outcome.steps * now
        if outcome.logged:
            fit.meter.add(rows, outcome.logged, outcome.size)

    def _work(
        self,
        rows: list[int],
        due: list[bool],
        epoch: int,
        check: bool,
        x: Tensor,
        y: Tensor,
        index: Tensor | None = None,
    ) -> Outcome:
        """Pass, gradients and descent of some clients."""
        self.worked = True
        fit, count = self.fit, len(rows)
        own = fit.rows if index is None else fit.rows.pick(index)
        views = own.views(count)
        if check:
            self._check(rows, views, x, y, epoch)
        if isinstance(self.bench, LoneBench):
            return self._work_alone(self.bench, views, due, epoch, x, y)
        versions = [view._version for view in views]
        outcome = self.bench.step(views, x, y, epoch)
        if index is not None and versions != [view._version for view in views]:
            fit.rows.put_back(index, own)
        return outcome._replace(steps=self._descend(outcome, rows, index, due))

    def _work_alone(
        self, bench: LoneBench, views: Sequence[Tensor], due: list[bool], epoch: int, x: Tensor, y: Tensor
    ) -> Outcome:
        """The same of one client, which descends within its pass, maybe several times."""
        steps: list[int] = []

        def descend(gradients: Gradients, parts: Sequence[str]) -> None:
            if steps and self.fit.settings.accumulate > 1:
                raise Unstackable("its step descends twice, and mini-batches are accumulated")
            found = [None if own is None else own[None] for own in gradients]
            steps.append(self._descend(Outcome(True, found, tuple(parts), {}, 0), [0], None, due))

        outcome = bench.step(views, x, y, epoch, descend)
        return outcome._replace(steps=sum(steps))

    def _check(self, rows: Sequence[int], views: Sequence[Tensor], x: Tensor, y: Tensor, epoch: int) -> None:
        """Compare the first and the last client's step, by the resident module, with the same stacked.

        Nothing is changed. Both, because torch stacks some layers so that one of their clients' is right by chance.

        Raises:
            Unstackable: naming the phase, if the two are not the same.
        """
        copies = [view.clone() for view in views]
        outcome: Outcome | None = None
        for place in dict.fromkeys((0, len(rows) - 1)):
            self.fit.rows.load(rows[place])
            with exact(self.fit.layout.device):
                before = stream_states(x.device)
                losses, gradients = self.bench.alone(x[place], y[place], epoch)
                self.fit.check_streams(before)
                if self.fit.draws:
                    set_stream_states(before)
                after = self.fit.layout.tensors()
                outcome = outcome or self.bench.step(copies, x, y, epoch)
                if self.fit.draws:
                    set_stream_states(before)
            if not agree(outcome, [copy[place] for copy in copies], losses, gradients, after, place):
                raise Unstackable(f"a step of phase {self.planned.phase.name!r} gives other values stacked than alone")

    # --- descending ---------------------------------------------------------------------------------------------------

    def _descend(self, outcome: Outcome, rows: list[int], index: Tensor | None, due: list[bool]) -> int:
        """Accumulate, clip and step; returns the optimizers that step."""
        fit, settings = self.fit, self.fit.settings
        if not outcome.descends:
            return 0
        names = [name for name in outcome.parts if name in self.templates]
        if outcome.parts and not names:
            return 0
        if names and settings.accumulate > 1:
            raise Unstackable("its parts accumulate gradients by themselves")
        names = names or list(self.templates)
        self._make(names, outcome)
        found = {p: own for p, own in zip(self.trained, outcome.gradients, strict=True) if own is not None}

        def columns(place: int, gradient: Tensor) -> Tensor:
            return fit.layout.places[place].columns(gradient)

        for name in names:
            for optimizer, stretches in self.optimizers[name]:
                gradients = [[columns(place, found[place]) for place in own] for own in stretches]
                stepping, where = rows, slice(0, len(rows)) if index is None else index
                if not (optimizer.by_piece and settings.accumulate == 1 and settings.clip_value is None):
                    whole = [torch.cat(own, 1) for own in gradients]
                    if settings.accumulate > 1:
                        whole = self._accumulate(optimizer, rows, whole, due)
                    if not all(due):
                        stepping = [row for row, now in zip(rows, due, strict=True) if now]
                        where, kept = (torch.tensor(own, device=fit.layout.device) for own in (stepping, due))
                        whole = [own[kept] for own in whole]
                    self._clip(whole)
                    gradients = [[own] for own in whole]
                if stepping:
                    optimizer.step(where, stepping, gradients)
        return len(names)

    def _make(self, names: Sequence[str], outcome: Outcome) -> None:
        """Make optimizers, each at its part's first descent for the parameters that it reaches."""
        with_gradient = {place for place, own in zip(self.trained, outcome.gradients, strict=True) if own is not None}
        for name in names:
            reached = with_gradient.intersection(self.parts[name])
            if name not in self.optimizers:
                self.optimizers[name], self.reached[name] = self._of_part(name, reached), reached
            if reached != self.reached[name]:
                raise Unstackable("its steps reach different parameters within a phase")

    def _of_part(self, name: str, reached: set[int]) -> list[tuple[StackedOptimizer, list[list[int]]]]:
        template, made = self.templates[name], []
        hooks = len(template._optimizer_step_post_hooks) > 1 or template._optimizer_step_pre_hooks
        if hooks:
            raise Unstackable("hooks are tied to its optimizer's steps")
        for number, group in enumerate(self.groups[name]):
            places = [place for place in group if place in reached]
            for kind in dict.fromkeys(self.fit.layout.places[place].kind for place in places):
                runs = _runs(self.fit.layout, [p for p in places if self.fit.layout.places[p].kind == kind])
                stretches = [stretch for stretch, _ in runs]
                flat, recorded = self.fit.rows.flats[kind], self.graphs is not None
                optimizer = StackedOptimizer(template, number, stretches, flat, recorded)
                made.append((optimizer, [own for _, own in runs]))
        if self.fit.settings.clip_value is not None and len(made) > 1:
            raise Unstackable("its optimizer has several groups whose gradients are clipped together")
        return made

    def _accumulate(
        self, optimizer: StackedOptimizer, rows: list[int], gradients: list[Tensor], due: list[bool]
    ) -> list[Tensor]:
        """Add a share of the gradients to what waits; what is due is given out and waits no longer."""
        share, given = 1 / self.fit.settings.accumulate, []
        index = torch.tensor(rows, device=self.fit.layout.device)
        leaving = index[torch.tensor(due, device=index.device)]
        for (start, end), gradient in zip(optimizer.stretches, gradients, strict=True):
            key = start, end, id(optimizer)
            if key not in self.accumulated:
                self.accumulated[key] = torch.zeros_like(optimizer.flat[:, start:end])
            waiting = self.accumulated[key].index_add_(0, index, gradient * share)
            given.append(waiting[index])
            waiting[leaving] = 0
        return given

    def _clip(self, gradients: list[Tensor]) -> None:
        """Clip each client's gradients as `clip_grad_norm_` and `clip_grad_value_` do."""
        limit = self.fit.settings.clip_value
        if limit is None:
            return
        if self.fit.settings.clip_algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-limit, limit)
            return
        norms = torch.stack([torch.linalg.vector_norm(gradient, dim=1) for gradient in gradients], 1)
        factor = (limit / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)[:, None]
        for gradient in gradients:
            gradient.mul_(factor)


def _runs(layout: Layout, places: Sequence[int]) -> list[tuple[Stretch, list[int]]]:
    """Stretches of columns that places make up, with the places of each."""
    runs: list[tuple[Stretch, list[int]]] = []
    for index in places:
        place = layout.places[index]
        if runs and runs[-1][0][1] == place.start:
            runs[-1] = (runs[-1][0][0], place.end), [*runs[-1][1], index]
        else:
            runs.append(((place.start, place.end), [index]))
    return runs
