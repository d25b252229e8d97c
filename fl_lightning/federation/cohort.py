"""Clients whose local fits run as one: who is stacked with whom, and what stands against it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.core import recording
from fl_lightning.core.rows import Drawing, OneByOne, Unstackable, Upset
from fl_lightning.federation.flags import unstacked_flag
from fl_lightning.federation.lanes import Lanes
from fl_lightning.federation.sickness import at
from fl_lightning.federation.stack import Stack
from fl_lightning.federation.ways import Size, Way, Ways
from fl_lightning.models.own_training import OwnTraining

if TYPE_CHECKING:
    from fl_lightning.federation.runner import Runner
    from fl_lightning.federation.sickness import Ward
    from fl_lightning.federation.visits import Job, Visit


class Cohort:
    """Brings participants to their fits, several at once where that is configured and possible.

    Args:
        runner: the resident modules.
        size: `federation.cohort`.
        in_turn: whether what a client hears may depend on who was fitted before it.
        is_main: whether this process says what is chosen.
        graph: `federation.graph`.
    """

    def __init__(
        self,
        runner: Runner,
        size: Size,
        in_turn: bool,
        is_main: bool = True,
        graph: bool | Literal["auto"] | None = None,
    ) -> None:
        self.runner = runner
        records = bool(graph) and recording.can_record(runner.device)
        self.ways = Ways(size, records, type(runner.modules[0].method).__name__, is_main)
        self.lanes: dict[int, Lanes] = {}
        if graph is True and not records:
            self.ways.tell_unrecorded(f"the fits are on {runner.device.type}, and CPUs and CUDA GPUs record")
        if self.size is not None:
            # An operation that `vmap` does one by one inside is no reason to do all of them so; `auto` measures.
            warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            self.ways.fall_back(Way.ONE_BY_ONE, self._refusal(in_turn))

    @property
    def size(self) -> Size:
        """Clients that are wanted in a cohort; None for no cohorts."""
        return self.ways.size

    @property
    def reason(self) -> str:
        """Why clients are fitted one by one although cohorts are wanted; empty where they are not."""
        return self.ways.reason

    @property
    def stacks(self) -> bool:
        """Whether clients enter a stack, where several are fitted as one, or each one's steps are recorded."""
        return self.ways.now is not Way.ONE_BY_ONE

    @property
    def apart(self) -> bool:
        """Whether each client's steps are made by themselves there."""
        return self.ways.now is Way.APART

    @property
    def unrecorded(self) -> list[str]:
        """Why steps are not recorded (any more), of each architecture of which they are not."""
        return [lanes.unrecorded for lanes in self.lanes.values() if lanes.unrecorded]

    def _refusal(self, in_turn: bool) -> str:
        """What stands against stacking whatever the method's step; empty where nothing does."""
        if in_turn:
            return "clients are fitted in turn, each hears the one before"
        if self.runner.private is not None:
            return "federation.record_privacy looks at each sample by itself"
        if any(type(module.own) is not OwnTraining for module in self.runner.modules):
            return "the model trains by itself"
        callbacks = [type(each).__name__ for each in self.runner.trainer.callbacks]  # type: ignore[attr-defined]
        if callbacks:
            return f"trainer.callbacks ({', '.join(callbacks)}) follow single fits"
        flag = unstacked_flag(self.runner.flags)
        return f"trainer.{flag} is for single fits" if flag else ""

    def state_dict(self) -> dict[str, Any]:
        """Why all run, or are recorded, one by one, where a round has shown it: whether its tests are stacked is a bit.

        What ``auto`` has measured is left out, for a run may go on on another machine.
        """
        return self.ways.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Find out no second time, or the first round of a resumed run would be tested as the run's first one was."""
        self.ways.load_state_dict(state)

    def visits(self, clients: Sequence[int], job: Callable[[int], Job], ward: Ward) -> Iterator[Visit]:
        """Participants one after another, with the first part of their round done; fitted where they are stacked.

        Args:
            clients: of this process, in order.
            job: what the round asks of a client.
            ward: takes down who falls sick.
        """
        ahead: deque[list[Visit]] = deque()
        for group in self._groups(clients):
            stack = self._lanes_of(group).open(len(group), self.apart) if self.stacks else None
            if stack is None:
                yield from self._one_by_one(group, job, ward)
            else:
                yield from self._together(group, job, ward, stack, ahead)
            waiting = len(self._lanes_of(group)) if stack is not None and stack.records and stack.goes_ahead else 0
            while len(ahead) > waiting:  # while a GPU does the steps that it was just told
                yield from ahead.popleft()
        yield from chain.from_iterable(ahead)
        for lanes in self.lanes.values():
            lanes.close()

    def _one_by_one(self, clients: Iterable[int], job: Callable[[int], Job], ward: Ward) -> Iterator[Visit]:
        """Participants who are fitted by themselves, each right after it has begun."""
        for client in clients:
            yield from self._begun(client, job, ward)

    def _again(self, visits: Iterable[Visit], ward: Ward) -> Iterator[Visit]:
        """Participants who cannot be fitted together after all: each begins once more, right before its fit."""
        jobs = {visit.job.client: visit.job for visit in visits}
        yield from self._one_by_one(jobs, jobs.__getitem__, ward)
        for lanes in self.lanes.values():
            lanes.forget()

    def _together(
        self, group: Sequence[int], job: Callable[[int], Job], ward: Ward, stack: Stack, ahead: deque[list[Visit]]
    ) -> Iterator[Visit]:
        """Let a group enter and be fitted, to be given out after those in `ahead`; who need not wait come at once."""
        begun: list[Visit] = []
        clients = iter(group)
        for client in clients:
            for visit in self._begun(client, job, ward, stack):
                if visit.fit is None:
                    yield visit
                else:
                    begun.append(visit)
            if begun and not self._waits_well(stack, begun[-1]):
                yield from self._again([*chain.from_iterable(ahead), *begun], ward)
                ahead.clear()
                yield from self._one_by_one(clients, job, ward)
                return
        begun = [visit for visit in begun if self._is_tested(stack, visit, ward)]
        error = self._fit(stack)
        if error is not None:
            yield from chain.from_iterable(ahead)  # first: a fit by itself may write into what they hold
            ahead.clear()
            yield from self._again(begun, ward)
            if isinstance(error, Upset) and not ward.knows(visit.job.client for visit in begun):
                self._stop(stack, error)  # nobody's alone
        ahead.append(begun if error is None else [])

    def _begun(self, client: int, job: Callable[[int], Job], ward: Ward, stack: Stack | None = None) -> list[Visit]:
        """A participant that has come to its fit; none, if it fell sick on the way."""
        if ward.ends_round:
            return []
        watch = self.runner.stopwatch
        with ward.care(client):
            with watch.part("exchange"):
                own = job(client)
            with watch.part("fit"):
                visit = self.runner.begin(own, waits=stack is not None and self.stacks)
                if stack is not None and self.stacks:
                    with at(own.round, client, "fit"):
                        self._enter(stack, visit)
            if visit.fit is None and visit.waits:
                with at(own.round, client, "evaluation after the receive"), watch.part("evaluate"):
                    visit.scores.update(self.runner.evaluator.client(visit.module, client, "received"))
            return [visit]
        return []

    def _is_tested(self, stack: Stack, visit: Visit, ward: Ward) -> bool:
        """Whether a client came through its test after the receive, all together where that is possible."""
        stack.test_received()
        if visit.waits:
            place = visit.job.round, visit.job.client, "evaluation after the receive"
            with ward.care(visit.job.client), self.runner.stopwatch.part("evaluate"), at(*place):
                stack.test_alone(visit)
        return not visit.waits

    def _groups(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients of one architecture together, those with most samples first, so that a cohort is of one length."""
        if not self.stacks:
            yield from [list(clients)] if clients else []
            return
        by_architecture: dict[int, list[int]] = {}
        for client in clients:
            by_architecture.setdefault(self.runner.architecture[client], []).append(client)
        samples = self.runner.attackers.samples
        for own in by_architecture.values():
            own = sorted(own, key=lambda client: (-samples[client].num_train, client))
            while own:
                group, own = own[: self.ways.most], own[self.ways.most :]  # which may become less on the way
                yield group

    def _lanes_of(self, group: Sequence[int]) -> Lanes:
        architecture = self.runner.architecture[group[0]]
        if architecture not in self.lanes:
            tell = self.ways.tell_unrecorded if self.ways.records else None
            self.lanes[architecture] = Lanes(partial(Stack, self.runner, self.runner.modules[architecture], tell))
        return self.lanes[architecture]

    def _enter(self, stack: Stack, visit: Visit) -> None:
        try:
            stack.enter(visit)
        except Unstackable as error:
            self.ways.fall_back(Way.ONE_BY_ONE, str(error))

    def _waits_well(self, stack: Stack, last: Visit) -> bool:
        """Whether those who have entered may go on waiting for their fit, now that one more has come in."""
        if not self.stacks:
            return False
        name = self._lanes_of([last.job.client]).overwritten(stack)
        if name:
            reason = f"what a client receives is written into {name}, which the one before it holds, too"
            self._give_up(stack, f"{reason}: set it anew, or keep it in a buffer", alone=not stack.goes_ahead)
        return not name

    def _fit(self, stack: Stack) -> Unstackable | None:
        """Fit those who have entered; what stood against it."""
        if self.stacks:
            try:
                with self.runner.stopwatch.part("fit"):
                    stack.fit()
                self.ways.tell_unstacked(recorded=not self.unrecorded)
                if self.ways.is_undecided and (found := stack.measure()):
                    self.ways.choose(*found)
            except Unstackable as error:
                if not isinstance(error, Upset):
                    self._stop(stack, error)
                return error
        return None

    def _stop(self, stack: Stack, error: Unstackable) -> None:
        """From now on fit no clients together, for what has come out in a fit."""
        alone = isinstance(error, OneByOne) or (isinstance(error, Drawing) and stack.draws)
        self._give_up(stack, str(error), alone or error.__cause__ is not None)

    def _give_up(self, stack: Stack, reason: str, alone: bool) -> None:
        """From now on fit no clients together: but record each one's steps, if that goes alone."""
        recorded = alone and stack.records and not self.apart
        self.ways.fall_back(Way.APART if recorded else Way.ONE_BY_ONE, reason)
