"""Steps of stacked clients, recorded once and replayed for every cohort: what must be the same, and what moves.

A recorded step has in it its addresses and all that Python has decided. Clients' tensors stand in rows that stay, and
so do its mini-batch, the optimizers' state and the tensors that the method's attributes hold: what is new is copied
there. What a step asks about the round, the fit and the mini-batch is noted as it is recorded, and must be the same
when it is replayed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core import recording
from fl_lightning.core.held import Held, held
from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.reads import Unrecordable
from fl_lightning.core.recording import Recording
from fl_lightning.core.rows import Drawing, Layout, Rows, reason_of
from fl_lightning.core.stacked import CLOSE, Common, Mixed, Outcome, same
from fl_lightning.core.stacked_optimizers import StackedOptimizer
from fl_lightning.seeding import drawn_from_torch, set_stream_states, stream_states

WARM = 2
"""Steps of a kind that run as they are, before one is recorded: what they meet first is new to a GPU."""
MOST_FITS, MOST_TOLD = 16, 8
"""Kinds of fits, and of what steps of one size are told, that are recorded; where there are more, nothing stays so."""
MOST_SIZES = {"cpu": 64, "cuda": 8}
"""Sizes of steps in a phase that are recorded, on a GPU each in memory of its own; what comes later runs as it is."""
PLACES = 8
"""Last places by which a number may be rounded otherwise."""
ROUNDED, NOISE, MOST_ODD = 2, 4, 3
"""Steps from beginnings that are rounded otherwise, of which a replay may come out so many times as far off; and how
many steps running it may come out farther off before it counts as wrong."""

Parts = dict[str, list[tuple[StackedOptimizer, list[list[int]]]]]
"""A phase's optimizers, by part, with the places of their parameters."""
Given = tuple[Tensor, ...]
"""A step's mini-batch: inputs and classes, and who takes part."""
Work = Callable[..., Outcome]
"""A step, from what it is given."""


class StepGraphs:
    """The recorded steps of one architecture.

    Args:
        layout: where its tensors stand.
        tell: is told why steps are not recorded (any more), if they are not.
        own: ids of the method's modules.
    """

    def __init__(self, layout: Layout, tell: Callable[[str], None], own: Collection[int] = ()) -> None:
        self.layout = layout
        self._own = own
        self.reason = ""
        """Why nothing is recorded (any more)."""
        self._tell = tell
        self._rows: dict[int, Rows] = {}
        self._fits: dict[tuple[int, Hashable, Hashable], FitGraphs] = {}

    def enter(self, rows: Rows, attributes: Sequence[Mapping[str, Any]], about: Hashable) -> FitGraphs | None:
        """Bring clients where recorded steps look for them.

        Args:
            rows: the clients as their fit begins; they are left as they are.
            attributes: of the method's modules, the same for all of the clients.
            about: what else must be the same: phases, optimizers and weights of losses.

        Returns:
            What is recorded of such fits; None where nothing can be.
        """
        if self.reason:
            return None
        try:
            loose = held(attributes, self.layout, self._own)
        except Unrecordable as error:
            self.stop(str(error))
            return None
        key = len(rows), about, loose.key
        if key not in self._fits:
            if len(self._fits) == MOST_FITS:
                if all(count == len(rows) for count, *_ in self._fits):
                    self.stop("what its steps read changes from fit to fit")
                return None
            if len(rows) not in self._rows:
                self._rows[len(rows)] = rows.clone()
            own = [tensor.detach().clone() for tensor in loose.tensors]
            self._fits[key] = FitGraphs(self, self._rows[len(rows)], own)
        fit = self._fits[key]
        fit.begin(rows, loose)
        return fit

    @property
    def has_recorded(self) -> bool:
        """Whether a step was recorded."""
        return any(fit.has_recorded for fit in self._fits.values())

    def stop(self, reason: str) -> None:
        """Record and replay nothing from now on."""
        if not self.reason:
            self.reason = reason
            self._fits.clear()
            self._tell(reason)


class FitGraphs:
    """The recorded steps of fits that are alike.

    Args:
        all: of the architecture.
        rows: where its clients stand.
        tensors: where the tensors stand that the method's attributes hold.
    """

    def __init__(self, all: StepGraphs, rows: Rows, tensors: Sequence[Tensor]) -> None:
        self.all = all
        self.rows = rows
        self.tensors = list(tensors)
        self.number = 0
        self.attributes: list[dict[str, Any]] = []
        """The method's attributes, which hold `tensors`."""
        self._phases: dict[int, PhaseGraphs] = {}

    @torch.no_grad()
    def begin(self, rows: Rows, loose: Held) -> None:
        """Bring the clients of one more fit."""
        self.number += 1
        self.restart(rows)
        for own, given in zip(self.tensors, loose.tensors, strict=True):
            own.copy_(given)
        self.attributes = loose.holding(self.tensors)

    def restart(self, rows: Rows) -> None:
        """Bring the clients once more."""
        self.rows.copy_(rows)

    @property
    def has_recorded(self) -> bool:
        """Whether a step was recorded."""
        return any(phase.has_recorded for phase in self._phases.values())

    def phase(self, index: int) -> PhaseGraphs:
        """The recorded steps of a phase."""
        if index not in self._phases:
            self._phases[index] = PhaseGraphs(self)
        return self._phases[index]


@dataclass(eq=False)
class _Recorded:
    """One recorded step.

    Args:
        recording: of the step.
        given: where its inputs, its classes, and who takes part stand.
        asked: what it has asked for, and what it was told.
        outcome: of the step; what is in it moves at every replay.
        losses: [losses, n] the same losses as one tensor; None where they are of several types.
        number: of the fit in which it was recorded.
        due: the fit in which it is to be compared with the step as it is: at once, and in the next one; None where it
            takes turns with others from then on.
        odd: the last comparisons in which it came to others; another step follows each.
    """

    recording: Recording
    given: Given
    asked: Mapping[tuple[str, str], Any]
    outcome: Outcome
    losses: Tensor | None
    number: int
    due: int | None
    odd: int = 0

    def replay(self, given: Given) -> Outcome:
        """Do the step on another mini-batch."""
        for own, new in zip(self.given, given, strict=True):
            own.copy_(new)
        self.recording.replay()
        logged = self.outcome.logged
        if self.losses is not None:
            return self.outcome._replace(logged=dict(zip(logged, self.losses.clone().unbind(), strict=True)))
        return self.outcome._replace(logged={name: value.clone() for name, value in logged.items()})


class _Turns:
    """Which of a phase's recorded steps is compared once each has been in two fits: one of them, ever more rarely.

    What may have changed since, as a number that Python has, is the same in all of them.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Recorded] = deque()
        self._first = self._due = 0

    def is_due(self, found: _Recorded, number: int) -> bool:
        """Whether a recorded step is to be compared in a fit; one whose turn was missed leaves it to the next."""
        if found.due is not None:
            return number >= found.due
        return number > self._due or (number == self._due and found is self._waiting[0])

    def was_odd(self, found: _Recorded) -> None:
        """Let all be compared in every step until each comes to the same again."""
        if found.due is None:
            for own in self._waiting:
                own.due = 0
            self._waiting.clear()

    def was_right(self, found: _Recorded, number: int) -> None:
        """Let the next one have its turn, when a quarter as many fits have gone by once more."""
        if found.due == found.number:  # at once: the next fit is another one
            found.due += 1
            return
        if found.due is None:
            self._waiting.remove(found)
        self._waiting.append(found)
        found.due = None
        self._first = self._first or found.number
        if number >= self._due:
            self._due = number + 1 + (number - self._first) // 4


@dataclass
class PhaseGraphs:
    """The recorded steps of one phase.

    Args:
        fit: of the fits.
        optimizers: of the phase, as they are made; their state stays where it is.
        reached: part -> places of its parameters that its loss reaches.
    """

    fit: FitGraphs
    optimizers: Parts = field(default_factory=dict)
    reached: dict[str, set[int]] = field(default_factory=dict)
    _recorded: dict[Hashable, list[_Recorded]] = field(default_factory=dict)
    _seen: Counter[Hashable] = field(default_factory=Counter)
    _turns: _Turns = field(default_factory=_Turns)

    @property
    def has_recorded(self) -> bool:
        """Whether a step was recorded."""
        return any(self._recorded.values())

    def begin(self, templates: Mapping[str, Optimizer]) -> None:
        """Let optimizers begin anew, with the options of those that are made for the present fit."""
        for name, own in self.optimizers.items():
            for optimizer, _ in own:
                optimizer.begin(templates[name].param_groups[optimizer.index])

    def step(self, work: Work, given: Given, common: Common) -> Outcome:
        """One mini-batch of each of n clients: as recorded, or as it is.

        Args:
            work: the whole step, with its descent.
            given: [n, B, …] inputs, [n, B] classes and [n] rows of the clients, unless they are the first n.
            common: what the clients have in common.
        """
        if self.fit.all.reason:
            return work(*given)
        key = len(given), given[0].shape, given[0].stride(), given[0].dtype
        known = self._recorded.setdefault(key, [])
        for own in self.optimizers.values():
            for optimizer, _ in own:
                optimizer.tell_rate()  # here: within a recording it would be told the same for ever
        found = next((own for own in known if common.tells(own.asked)), None)
        if found is None:
            self._seen[key] += 1
            full = not known and sum(map(bool, self._recorded.values())) == MOST_SIZES[given[0].device.type]
            if self._seen[key] <= WARM or not self.optimizers or full:
                return work(*given)
            found = self._record(work, given, common, known)
            if found is None:
                return work(*given)
            known.append(found)
        if self._turns.is_due(found, self.fit.number):
            return self._checked(found, work, given)
        return found.replay(given)

    def _record(
        self,
        work: Work,
        given: Given,
        common: Common,
        known: Sequence[_Recorded],
    ) -> _Recorded | None:
        """Record a step; None where that does not go, or would go on for ever."""
        if len(known) == MOST_TOLD:
            told = {name: {repr(own.asked.get(name)) for own in known} for own in known for name in own.asked}
            names = ", ".join(f"{of}.{name}" for (of, name), values in told.items() if len(values) > 1)
            self.fit.all.stop(f"its steps change: they ask for {names}")
            return None
        given = tuple(own.clone() for own in given)
        made: list[tuple[Outcome, Tensor | None]] = []

        def run() -> list[Tensor]:
            outcome = work(*given)
            values = list(outcome.logged.values())
            alike = len({(value.dtype, value.shape) for value in values}) == 1
            if not alike:  # one that is the same for all clients may be theirs by its strides alone: it is written to
                values = [value.clone(memory_format=torch.contiguous_format) for value in values]
                outcome = outcome._replace(logged=dict(zip(outcome.logged, values, strict=True)))
            made.append((outcome._replace(gradients=[]), torch.stack(values) if alike else None))
            return values if made[-1][1] is None else [made[-1][1]]

        common.asked = {}
        try:
            own = recording.record(run, [*given, *self.fit.tensors, *self._moving()])
        except Unrecordable as error:
            if not _takes_apart(error.__cause__):
                self.fit.all.stop(str(error))
            return None
        finally:
            asked, common.asked = common.asked, None
        return _Recorded(own, given, asked, *made[-1], self.fit.number, self.fit.number)

    def _moving(self) -> list[Tensor]:
        """Whatever a step may change."""
        optimizers = [optimizer for own in self.optimizers.values() for optimizer, _ in own]
        return [*self.fit.rows.flats, *(tensor for own in optimizers for tensor in own.tensors())]

    @torch.no_grad()
    def _checked(self, found: _Recorded, work: Work, given: Given) -> Outcome:
        """The step as it is and as recorded: where they come to others time and again, nothing is replayed any more."""
        moving = self._moving()
        start, streams = [tensor.clone() for tensor in moving], stream_states()

        def come(step: Callable[[], Outcome], start: list[Tensor] = start) -> tuple[Outcome, list[Tensor]]:
            torch._foreach_copy_(moving, start)
            set_stream_states(streams)
            with torch.enable_grad():
                outcome = step()
            names = sorted(outcome.logged)
            return outcome, [tensor.clone() for tensor in (*moving, *(outcome.logged[name] for name in names))]

        as_it_is = partial(work, *given)
        again, there = come(partial(found.replay, given))
        outcome, expected = come(as_it_is)
        if not drawn_from_torch(streams, stream_states()):  # the fit is refused for that, by its own name
            return outcome
        begun = [*start, *(None for _ in outcome.logged)]
        odd = [not _moves_as(*own) for own in zip(there, expected, begun, strict=True)]
        if any(odd):  # maybe by rounding, of which Adam makes whole steps where gradients are nearly 0
            others = zip(*(come(as_it_is, _rounded(start, number))[1] for number in range(ROUNDED)), strict=True)
            odd = [not _is_rounding(*own) for own in compress(zip(there, expected, others, strict=True), odd)]
        if any(odd):  # maybe by a unit that rounding turns off: what is wrong is so in the steps that follow, too
            torch._foreach_copy_(moving, expected[: len(moving)])
            found.odd += 1
            self._turns.was_odd(found)
            if found.odd == MOST_ODD:
                self.fit.all.stop("replayed, a step gives other values than as it is")
            return outcome
        torch._foreach_copy_(moving, there[: len(moving)])
        found.odd = 0
        self._turns.was_right(found, self.fit.number)
        return again


def _takes_apart(error: BaseException | None) -> bool:
    """Whether a step fails for what its clients do not have in common: they are taken apart then."""
    return isinstance(error, Mixed) or (isinstance(error, Exception) and reason_of(error) == str(Drawing()))


def _moves_as(one: Tensor, other: Tensor, before: Tensor | None) -> bool:
    """Whether two steps from one place come to the same: by their ways, which are short beside where they lead."""
    if before is None or not other.is_floating_point():
        return same(one, other)
    way = _length(other - before)
    if not math.isfinite(way):
        return same(one, other)
    rounding = PLACES * torch.finfo(other.dtype).eps * _length(before)
    return _length(one - other) <= CLOSE * way + rounding


def _rounded(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """The same numbers, rounded otherwise: each a few of its last place away, as sums in another order are."""

    def moved(own: Tensor) -> Tensor:
        if not own.is_floating_point():
            return own
        places = torch.randint(-PLACES, PLACES + 1, own.shape, generator=streams, device=own.device).to(own.dtype)
        return own * (1 + places * torch.finfo(own.dtype).eps)

    streams = torch.Generator(tensors[0].device).manual_seed(number)
    return list(map(moved, tensors))


def _is_rounding(one: Tensor, other: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a step comes to another place, but no farther off than from a beginning that is rounded otherwise."""
    if not other.is_floating_point():
        return False
    return _length(one - other) <= NOISE * max(_length(own - other) for own in others) < math.inf


def _length(of: Tensor) -> float:
    return float(torch.linalg.vector_norm(of, dtype=accumulation_dtype(of.device)))
