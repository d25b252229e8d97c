"""Descending with several clients at once: their gradients accumulated, clipped and stepped on, each as if alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.descent import FitSettings
from fl_lightning.core.planning import Planned
from fl_lightning.core.rows import Layout, Rows, Unstackable
from fl_lightning.core.stacked import Outcome
from fl_lightning.core.stacked_graphs import Parts, PhaseGraphs
from fl_lightning.core.stacked_optimizers import StackedOptimizer, Stretch


class StackedDescent:
    """How clients that stand in rows descend in one phase.

    Args:
        layout: where their tensors stand.
        rows: the clients.
        planned: the phase.
        templates: part -> optimizer as it would be made for one of them alone.
        settings: of accumulation and clipping.
        graphs: what is recorded of the phase, whose optimizers begin anew; None makes them here.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Rows,
        planned: Planned,
        templates: Mapping[str, Optimizer],
        settings: FitSettings,
        graphs: PhaseGraphs | None,
    ) -> None:
        self.trained = layout.index([parameter for parameter in planned.parameters if parameter.requires_grad])
        """Places of the parameters that get gradients."""
        self.parts = {name: layout.index(own) for name, own in planned.parts.items()}
        """Part -> places of its parameters."""
        self._layout = layout
        self._rows = rows
        self._templates = dict(templates)
        self._groups = {n: [layout.index(g["params"]) for g in own.param_groups] for n, own in templates.items()}
        self._settings = settings
        self._optimizers: Parts = {}
        self._reached: dict[str, set[int]] = {}
        self._is_plain = settings.accumulate == 1 and settings.clip_value is None
        self._is_recorded = graphs is not None
        if graphs is not None:
            graphs.begin(self._templates)
            self._optimizers, self._reached = graphs.optimizers, graphs.reached
        self._waiting: dict[tuple[int, int, int], Tensor] = {}

    def descend(self, outcome: Outcome, rows: list[int], index: Tensor | None, due: list[bool]) -> int:
        """Accumulate, clip and step on a step's gradients.

        Args:
            outcome: the step.
            rows: the n clients that took it.
            index: [n] the same as a tensor; None where they are the first n.
            due: of each, whether it steps now, or only accumulates.

        Returns:
            How many optimizers step.

        Raises:
            Unstackable: saying why these clients cannot descend together.
        """
        names = self._named(outcome)
        if not names:
            return 0
        self._make(names, outcome)
        found = {p: own for p, own in zip(self.trained, outcome.gradients, strict=True) if own is not None}
        where = slice(0, len(rows)) if index is None else index
        for name in names:
            for optimizer, stretches in self._optimizers[name]:
                pieces = [[self._layout.places[place].columns(found[place]) for place in own] for own in stretches]
                if optimizer.by_piece and self._is_plain:
                    optimizer.step(where, rows, pieces)
                else:
                    self._step_as_wholes(optimizer, [torch.cat(own, 1) for own in pieces], where, rows, due)
        return len(names)

    def _named(self, outcome: Outcome) -> list[str]:
        """The parts whose optimizers step."""
        names = [name for name in outcome.parts if name in self._templates]
        if not outcome.descends or (outcome.parts and not names):
            return []
        if names and self._settings.accumulate > 1:
            raise Unstackable("its parts accumulate gradients by themselves")
        return names or list(self._templates)

    def _step_as_wholes(
        self,
        optimizer: StackedOptimizer,
        gradients: list[Tensor],
        where: slice | Tensor,
        rows: list[int],
        due: list[bool],
    ) -> None:
        """Accumulate, clip and step on gradients of [n, columns] a stretch."""
        if self._settings.accumulate > 1:
            gradients = self._accumulate(optimizer, rows, gradients, due)
        if not all(due):
            rows = [row for row, now in zip(rows, due, strict=True) if now]
            where, kept = (torch.tensor(own, device=self._layout.device) for own in (rows, due))
            gradients = [own[kept] for own in gradients]
        self._clip(gradients)
        if rows:
            optimizer.step(where, rows, [[own] for own in gradients])

    def _make(self, names: Sequence[str], outcome: Outcome) -> None:
        """Make optimizers, each at its part's first descent for the parameters that it reaches."""
        with_gradient = {place for place, own in zip(self.trained, outcome.gradients, strict=True) if own is not None}
        for name in names:
            reached = with_gradient.intersection(self.parts[name])
            if name not in self._optimizers:
                self._optimizers[name], self._reached[name] = self._of_part(name, reached), reached
            if reached != self._reached[name]:
                raise Unstackable("its steps reach different parameters within a phase")

    def _of_part(self, name: str, reached: set[int]) -> list[tuple[StackedOptimizer, list[list[int]]]]:
        template, made = self._templates[name], []
        if len(template._optimizer_step_post_hooks) > 1 or template._optimizer_step_pre_hooks:
            raise Unstackable("hooks are tied to its optimizer's steps")
        for number, group in enumerate(self._groups[name]):
            places = [place for place in group if place in reached]
            for kind in dict.fromkeys(self._layout.places[place].kind for place in places):
                runs = _runs(self._layout, [p for p in places if self._layout.places[p].kind == kind])
                stretches = [stretch for stretch, _ in runs]
                optimizer = StackedOptimizer(template, number, stretches, self._rows.flats[kind], self._is_recorded)
                made.append((optimizer, [own for _, own in runs]))
        if self._settings.clip_value is not None and len(made) > 1:
            raise Unstackable("its optimizer has several groups whose gradients are clipped together")
        return made

    def _accumulate(
        self, optimizer: StackedOptimizer, rows: list[int], gradients: list[Tensor], due: list[bool]
    ) -> list[Tensor]:
        """Add a share of the gradients to what waits; what is due is given out and waits no longer."""
        share, given = 1 / self._settings.accumulate, []
        index = torch.tensor(rows, device=self._layout.device)
        leaving = index[torch.tensor(due, device=index.device)]
        for (start, end), gradient in zip(optimizer.stretches, gradients, strict=True):
            key = start, end, id(optimizer)
            if key not in self._waiting:
                self._waiting[key] = torch.zeros_like(optimizer.flat[:, start:end])
            waiting = self._waiting[key].index_add_(0, index, gradient * share)
            given.append(waiting[index])
            waiting[leaving] = 0
        return given

    def _clip(self, gradients: list[Tensor]) -> None:
        """Clip each client's gradients as `clip_grad_norm_` and `clip_grad_value_` do."""
        limit = self._settings.clip_value
        if limit is None:
            return
        if self._settings.clip_algorithm == "value":
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
