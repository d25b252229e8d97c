"""Clients whose local fits run as one: who is stacked with whom, and what stands against it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.core import recording
from fl_lightning.core.rows import Drawing, OneByOne, Unstackable, Upset
from fl_lightning.federation.flags import unstacked_flag
from fl_lightning.federation.lanes import Lanes
from fl_lightning.federation.sickness import at
from fl_lightning.federation.stack import Stack
from fl_lightning.models.own_training import OwnTraining
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.core.stacked_timing import Timing
    from fl_lightning.federation.runner import Runner
    from fl_lightning.federation.sickness import Ward
    from fl_lightning.federation.visits import Job, Visit

Size = int | Literal["auto"] | None
LARGEST = 32
"""Clients that ``auto`` stacks at most: beyond, memory grows and time does not fall."""


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
        self._records = bool(graph) and recording.can_record(runner.device)
        alone = 1 if self._records else None  # recorded, one is a cohort, too
        self.size = alone if size in (None, 1) else size
        self._records_alone = alone == self.size == 1  # nobody wants clients to be stacked
        self._most = LARGEST if size == "auto" else size or 1
        self.is_main = is_main
        self.reason = ""
        self._chosen = False
        self._unstacked, self._told = "", False
        self.lanes: dict[int, Lanes] = {}
        self._said: set[str] = set()
        if graph is True and not self._records:
            self._tell_graph(f"the fits are on {runner.device.type}, and CPUs and CUDA GPUs record")
        if self.size is not None:
            # An operation that `vmap` does one by one inside is no reason to do all of them so; `auto` measures.
            warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            self._refuse(self._refusal(in_turn))

    @property
    def stacks(self) -> bool:
        """Whether clients are stacked."""
        return self.size is not None and not self.reason

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

    def _refuse(self, reason: str) -> None:
        """From now on all run one by one; says so once."""
        if reason and not self.reason:
            self.reason = reason
            if self._records_alone:
                self._tell_graph(reason)
            elif self.is_main:
                method = type(self.runner.modules[0].method).__name__
                say(f"fl-lightning: federation.cohort: {method} runs one by one: {reason}")

    @property
    def apart(self) -> bool:
        """Whether each client's steps are made by themselves."""
        return self._most == 1

    @property
    def unrecorded(self) -> list[str]:
        """Why steps are not recorded (any more), of each architecture of which they are not."""
        return [lanes.unrecorded for lanes in self.lanes.values() if lanes.unrecorded]

    def _tell_graph(self, reason: str) -> None:
        """Say why steps are not recorded (any more)."""
        if self.is_main and reason not in self._said:
            self._said.add(reason)
            method = type(self.runner.modules[0].method).__name__
            say(f"fl-lightning: federation.graph: {method} runs as it is: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Why all run, or are recorded, one by one, where a round has shown it: whether its tests are stacked is a bit.

        What ``auto`` has measured is left out, for a run may go on on another machine.
        """
        if not isinstance(self.size, int):
            return {}
        found = {"reason": self.reason, "unstacked": self._unstacked}
        return {name: reason for name, reason in found.items() if reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Find out no second time, or the first round of a resumed run would be tested as the run's first one was."""
        if self.size is not None:
            self._refuse(state.get("reason", ""))
            self._take_apart(state.get("unstacked", ""))

    def visits(self, clients: Sequence[int], job: Callable[[int], Job], ward: Ward) -> Iterator[Visit]:
        """Participants one after another, with the first part of their round done; fitted where they are stacked.

        Args:
            clients: of this process, in order.
            job: what the round asks of a client.
            ward: takes down who falls sick.
        """
        ahead: deque[list[Visit]] = deque()
        for group in self._groups(clients):
            stack = self._stack(group) if self.stacks else None
            begun: list[Visit] = []
            for client in group:
                for visit in self._begun(client, job, ward, stack):
                    if visit.fit is None:
                        yield visit
                    else:
                        begun.append(visit)
                if stack is not None and begun and not self._waits_well(stack, begun[-1]):
                    yield from self._again([*chain.from_iterable(ahead), *begun], ward)
                    stack, ahead, begun = None, deque(), []
            if stack is not None:
                begun = [visit for visit in begun if self._is_tested(stack, visit, ward)]
                error = self._fit(stack)
                if error is not None:
                    yield from self._again(begun, ward)
                    if isinstance(error, Upset) and not ward.knows(visit.job.client for visit in begun):
                        self._stop(stack, error)  # nobody's alone
                    begun = []
            ahead.append(begun)
            waiting = len(self._lanes_of(group)) if stack is not None and stack.records and stack.goes_ahead else 0
            while len(ahead) > waiting:  # while a GPU does the steps that it was just told
                yield from ahead.popleft()
        for begun in ahead:
            yield from begun
        for lanes in self.lanes.values():
            lanes.close()

    def _begun(self, client: int, job: Callable[[int], Job], ward: Ward, stack: Stack | None) -> list[Visit]:
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
                group, own = own[: self._most], own[self._most :]  # which may become less on the way
                yield group

    def _lanes_of(self, group: Sequence[int]) -> Lanes:
        architecture = self.runner.architecture[group[0]]
        if architecture not in self.lanes:
            tell = self._tell_graph if self._records else None
            self.lanes[architecture] = Lanes(partial(Stack, self.runner, self.runner.modules[architecture], tell))
        return self.lanes[architecture]

    def _stack(self, group: Sequence[int]) -> Stack | None:
        """Where these clients are fitted together; None for one alone whose steps are not recorded."""
        return self._lanes_of(group).open(len(group), self.apart)

    def _enter(self, stack: Stack, visit: Visit) -> None:
        try:
            stack.enter(visit)
        except Unstackable as error:
            self._refuse(str(error))

    def _waits_well(self, stack: Stack, last: Visit) -> bool:
        """Whether those who have entered may go on waiting for their fit, now that one more has come in."""
        if not self.stacks:
            return False
        name = self._lanes_of([last.job.client]).overwritten(stack)
        if name:
            reason = f"what a client receives is written into {name}, which the one before it holds, too"
            self._give_up(stack, f"{reason}: set it anew, or keep it in a buffer", alone=not stack.goes_ahead)
        return not name

    def _again(self, visits: Sequence[Visit], ward: Ward) -> Iterator[Visit]:
        """Participants who cannot be fitted together after all: each begins once more, right before its fit."""
        jobs = {visit.job.client: visit.job for visit in visits}
        for client in jobs:
            yield from self._begun(client, jobs.__getitem__, ward, None)

    def _fit(self, stack: Stack) -> Unstackable | None:
        """Fit those who have entered; what stood against it."""
        if self.stacks:
            try:
                with self.runner.stopwatch.part("fit"):
                    stack.fit()
                self._tell_apart()
                if self.size == "auto" and not self._chosen:
                    self._choose(*stack.measure())
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
        if alone and stack.records and not self.apart:
            self._take_apart(reason)
        else:
            self._refuse(reason)

    def _take_apart(self, reason: str) -> None:
        """From now on record each client's steps alone, which needs nothing of how torch stacks them."""
        if reason:
            self._unstacked, self._most = reason, 1

    def _tell_apart(self) -> None:
        """Say so once it has worked."""
        if self._unstacked and not self._told:
            self._told = True
            if self.is_main:
                method = type(self.runner.modules[0].method).__name__
                recorded = "" if self.unrecorded else ", each one's steps are recorded"
                line = f"{method}'s clients are not stacked{recorded}: {self._unstacked}"
                say(f"fl-lightning: federation.cohort: {line}")

    def _choose(self, count: int, timing: Timing) -> None:
        """From what was measured at the start."""
        self._chosen = True
        stacked, alone = (f"{1e3 * seconds:.2f} ms" for seconds in (timing.stacked, timing.alone))
        if not timing.pays and self._records:
            self._take_apart(f"a step takes {alone} alone, and {stacked} of {count} stacked")
        elif not timing.pays:
            self._refuse(f"a step takes {alone} so, and {stacked} of {count} stacked")
        elif self.is_main:
            line = f"up to {LARGEST} clients' steps run as one: {stacked} a client, one by one {alone}"
            say(f"fl-lightning: federation.cohort: {line}")
