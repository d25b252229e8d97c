"""One mini-batch of one client whose tensors stand in a row: it descends as it goes along, as it does by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core import engine
from fl_lightning.core.devices import Part
from fl_lightning.core.rows import Alias, Layout, Unstackable
from fl_lightning.core.stacked import Common, Outcome, StackedBench, StackedStep
from fl_lightning.core.stacked_layers import layers
from fl_lightning.core.step import Bench, Step

Gradients = list[Tensor | None]
"""Of each of a phase's parameters; None where it does not step."""
Act = Callable[[Gradients, Sequence[str]], None]
"""Steps on gradients, by the optimizers of the named parts; of all, where none is named."""


class Descents:
    """What a step descends on.

    Args:
        parts: part -> places of its parameters.
        trained: places of the phase's parameters.
        leaves: the client's tensors, in the order of places.
        act: what is done with gradients.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[int]], trained: Sequence[int], leaves: Sequence[Tensor], act: Act
    ) -> None:
        self._parts = parts
        self._trained = trained
        self._leaves = leaves
        self._act = act

    def on(self, total: Tensor, parts: Sequence[str]) -> None:
        """Step on a loss.

        Args:
            total: what is minimised.
            parts: those that step, and alone get a gradient; empty for all.
        """
        names = [name for name in parts if name in self._parts]
        if (parts and not names) or not total.requires_grad:
            return
        stepping = {place for name in names for place in self._parts[name]} if names else set(self._trained)
        inputs = [self._leaves[place] for place in self._trained if place in stepping]
        if not inputs:  # all of it is frozen
            return
        found = iter(engine.gradients(total, inputs))
        self._act([next(found) if place in stepping else None for place in self._trained], names)

    def along(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Step on gradients that were found by hand.

        Raises:
            Unstackable: if they are of tensors that are not the client's to train.
        """
        given = {id(own): gradient for own, gradient in zip(parameters, gradients, strict=True)}
        found = [given.pop(id(self._leaves[place]), None) for place in self._trained]
        if given:
            raise Unstackable("its step follows gradients of tensors that its phase does not train")
        self._act(found, ())


class LoneStep(StackedStep):
    """A step of one client.

    Args:
        bench: what the phase's steps have in common.
        part: the samples.
        epoch: of the fit, 0-based.
        common: what the step may know of the fit.
        descents: where it descends.
    """

    def __init__(self, bench: Bench, part: Part, epoch: int, common: Common, descents: Descents) -> None:
        super().__init__(bench, part, epoch, common)
        self._to = descents

    @override
    def descend(self, values: Mapping[str, Tensor], *parts: str) -> None:
        self._bench.note_descent(values)
        self._total, self._descents = self.total(values), self._descents + 1
        self._logged.update(values)
        self._to.on(self._total, parts)

    @override
    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return Step.gradients(self, loss, parameters)

    @override
    def follow(  # type: ignore[override]
        self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], steps_now: bool | None = None
    ) -> None:
        if steps_now is False or self._bench.method.fit.accumulate > 1:
            raise Unstackable("its step accumulates gradients by itself")
        self._to.along(gradients, parameters)


class LoneBench(StackedBench):
    """Steps of one phase for one client.

    Args:
        layout: where the method's tensors stand.
        bench: what the phase's steps have in common; without optimizers.
        trained: places of the phase's parameters.
        common: what a step may know of the fit.
        aliases: attributes that hold parameters or buffers.
        parts: part -> places of its parameters.
    """

    def __init__(
        self,
        layout: Layout,
        bench: Bench,
        trained: Sequence[int],
        common: Common,
        aliases: Sequence[Alias],
        parts: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(layout, bench, trained, common, aliases)
        self.parts = parts

    @override
    def step(self, views: Sequence[Tensor], x: Tensor, y: Tensor, epoch: int, act: Act | None = None) -> Outcome:
        """One mini-batch.

        Args:
            views: [1, …] every tensor of the client, in the order of places.
            x: [1, B, …] inputs.
            y: [1, B] classes.
            epoch: of the fit, 0-based.
            act: steps on gradients; None steps nowhere, and leaves them all in the outcome.

        Raises:
            Unstackable: if it changes the resident module's tensors, or replaces one by another kind.
        """
        leaves, found = [view[0] for view in views], list[Tensor | None]()
        for place in self.trained:
            leaves[place] = leaves[place].detach().requires_grad_()
        memory, residents = [leaf.data_ptr() for leaf in leaves], self.layout.tensors()
        before = [own._version for own in residents]

        def moved() -> list[int]:
            now = self.layout.present()
            return [i for i, own in enumerate(now) if own is not leaves[i] or own.data_ptr() != memory[i]]

        def take(gradients: Gradients, parts: Sequence[str]) -> None:
            if act is None:
                found.extend(gradients)
                return
            self._bring(views, leaves, moved())
            act(gradients, parts)

        with self.layout.swapped(leaves, self.aliases), layers(self.layout.device, 1):
            descents = Descents(self.parts, self.trained, leaves, take)
            taken = LoneStep(self.bench, Part.whole(x[0], y[0]), epoch, self.common, descents).taken()
            self._bring(views, leaves, moved())
        if before != [own._version for own in residents]:
            raise Unstackable("its step reaches its tensors by an object that holds them")
        losses = {name: value.detach()[None] for name, value in taken.logged.items()}
        return Outcome(False, [None if own is None else own[None] for own in found], (), losses, taken.size)

    @torch.no_grad()
    def _bring(self, views: Sequence[Tensor], leaves: Sequence[Tensor], places: Sequence[int]) -> None:
        """Bring tensors that a step has replaced, or given other memory, to where optimizers look for them."""
        present = self.layout.present()
        self._move(views, places, [present[place][None] for place in places])
        for place in places:
            leaves[place].data = views[place][0]
            for home, key in self.layout.places[place].homes:
                home[key] = leaves[place]

    @override
    def alone(self, x: Tensor, y: Tensor, epoch: int) -> tuple[dict[str, Tensor], Gradients]:
        """The same for the client that the resident module holds, which steps nowhere."""
        found: Gradients = []
        descents = Descents(self.parts, self.trained, self.layout.tensors(), lambda own, _: found.extend(own))
        taken = LoneStep(self.bench, Part.whole(x, y), epoch, self.common, descents).taken()
        return {name: value.detach() for name, value in taken.logged.items()}, found
