"""A cohort's fit: clients enter one after another, are fitted as one, and take their rounds up again one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.core.division import matches
from fl_lightning.core.handover import begin_fit
from fl_lightning.core.loose import Attributes
from fl_lightning.core.mark import changed, changed_object, difference, set_on_layer
from fl_lightning.core.method import Method
from fl_lightning.core.method_checks import check_fit, checked_weights, learns
from fl_lightning.core.nobody import in_a_round
from fl_lightning.core.of_classes import put_back, written_into
from fl_lightning.core.planning import Plan
from fl_lightning.core.recording import Aside
from fl_lightning.core.rows import Layout, Rows, Turns, Unstackable, Upset, known_reason, reason_of
from fl_lightning.core.stacked import Mixed
from fl_lightning.core.stacked_fit import Entered, Epoch, StackedFit
from fl_lightning.core.stacked_graphs import FitGraphs, StepGraphs
from fl_lightning.core.stacked_timing import Timing, measured
from fl_lightning.core.term import Term
from fl_lightning.core.written import Contents, overwritten
from fl_lightning.federation.members import Fitted, Guest, Member, Outcome, epoch_of, options_of
from fl_lightning.federation.stacked_evaluation import StackedTests
from fl_lightning.own_methods import has_own
from fl_lightning.seeding import seed_global_streams, set_stream_states, stream_states

if TYPE_CHECKING:
    from fl_lightning.core.client import ClientModule
    from fl_lightning.core.facts import Phase
    from fl_lightning.federation.runner import Runner
    from fl_lightning.federation.visits import Visit


class Stack:
    """Fits clients of one architecture together.

    Args:
        runner: whose clients they are.
        module: the resident module of the architecture.
        tell: is told why steps are not recorded, where `federation.graph` asks for it; None records nothing.
    """

    def __init__(self, runner: Runner, module: ClientModule, tell: Callable[[str], None] | None = None) -> None:
        self.runner = runner
        self.module = module
        self.layout = Layout(module.method, partial(_trained_in, _phases(module.method)))
        self.attributes = Attributes(module.method, self.layout)
        self._aside = Aside(self.layout.device if tell is not None else torch.device("cpu"))
        self.goes_ahead = tell is not None and self._aside.is_aside
        """Whether the next cohort comes in while a device still does this one's recorded steps."""
        places = 2 if self.goes_ahead else 1  # who comes in, and who was fitted before
        self._entries, self._ends_at = Turns(self.layout, places), Turns(self.layout, places)
        self._apart: set[str] = set()
        self._checked: set[Hashable] = set()
        self._tests = StackedTests(runner.evaluator, module, self.attributes)
        method = module.method
        self._begins = has_own(method, Method, "on_fit_start") or has_own(method, Method, "phases")
        terms = any(has_own(term, Term, "after_fit") for term in method.terms)
        self._ends = terms or has_own(method, Method, "on_fit_end")
        """Whether there is something to do for each client before its fit, and after it."""
        self._last: tuple[Any, Entered | None, Hashable] = None, None, None
        self.graphs = None if tell is None else StepGraphs(self.layout, tell, self.attributes.own)
        """What is recorded; None where nobody asks for it."""
        self.draws = tell is not None and self.layout.device.type == "cpu"
        """Whether a client alone may draw random numbers in its steps, which a tape draws anew."""

    @property
    def records(self) -> bool:
        """Whether steps are recorded: then a client alone has something of being fitted here, too."""
        return self.graphs is not None and not self.graphs.reason

    def close(self) -> None:
        """Let what comes wait until the last cohort's fit is done."""
        self._aside.wait()

    def open(self, count: int) -> None:
        """Let a cohort of so many clients enter."""
        self._entry = self._entries.next(count)
        self._guests: list[Guest] = []  # all that have entered, by row
        self._members: list[Member] = []  # those of them that have something to train
        self._were_tested = False
        self._largest: tuple[Sequence[Member], Rows] | None = None  # of the groups that were fitted, as it began

    # --- before the fit -----------------------------------------------------------------------------------------------

    def enter(self, visit: Visit) -> None:
        """Take down the client that the module holds, and begin its fit.

        Raises:
            Unstackable: if it cannot be taken down; where `visit.fit` is set then, it is fitted by itself later.
        """
        row, attributes, mark = len(self._guests), self.attributes.taken(), self.attributes.mark()
        free = mark.free
        self._entry.put(row)
        guest = Guest(visit, self._entry, row, attributes, mark)
        self._guests.append(guest)
        visit.fit = partial(self._fit_alone, guest)
        module, method, client, round = self.module, self.module.method, visit.job.client, visit.job.round
        _train(module)
        module.workload = self.runner.workload(client, round)
        seed_global_streams(self.runner.seed, "fit", round, client)
        entered, options = self._configured(round)
        if not entered.templates:  # nothing to train: every phase is off
            return
        if self._begins:
            try:
                guest.moved = _begin(method, self.layout)
                attributes, mark = self.attributes.taken(), self.attributes.mark()
            finally:
                self.attributes.thaw(free)  # what a client that falls sick here froze is not the next one's
        else:
            attributes = [{**attributes[0], "fit": method.fit}, *attributes[1:]]  # of the method, and of its parts
            mark = mark._replace(modes=self.attributes.modes())
        entered.weights = _weights_of(method)
        both = options, tuple(entered.weights.items())
        streams = stream_states() if self._ends or len(self._entry) == 1 else ()
        self._members.append(Member(visit, row, entered, both, mark, attributes, streams, free))

    def _configured(self, round: int) -> tuple[Entered, Hashable]:
        """Phases, optimizers and fit of the client in the module; those of the one before, where they are the same."""
        module, phases = self.module, self.module.method.phases()
        known, before, options = self._last
        free = not any(phase.tune or phase.optimizer for phase in phases)  # else they may be the client's own
        now = phases, self.attributes.free(), round  # another one may have other options, whoever says so
        if before is not None and free and now == known and options == tuple(map(options_of, before.templates)):
            cut = [module.workload.of(planned.phase.epochs) for planned in before.plan]
            plan = Plan(own._replace(last=last) for own, (_, last) in zip(before.plan, cut, strict=True))
            if [epochs for epochs, _ in cut] == [planned.epochs for planned in plan]:
                module.method.fit = copy.copy(before.fit)
                return Entered(plan, before.templates, module.method.fit), options
        templates = module.configure_optimizers()
        entered, options = Entered(module.plan(), templates, module.method.fit), tuple(map(options_of, templates))
        self._last = now, replace(entered, fit=copy.copy(entered.fit)), options  # before it has counted anything
        return entered, options

    def _fit_alone(self, guest: Guest) -> None:
        """Fit a client that has entered, by itself."""
        guest.entry.load(guest.row)
        self.attributes.restore(guest.attributes, guest.mark)
        self.runner.fit(self.module, guest.visit.data, guest.visit.job.round)

    # --- the fit ------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Fit those that have entered, all that are alike together; who is like nobody else is fitted by itself.

        Raises:
            Unstackable: saying why they cannot be stacked; all of them are fitted by themselves then.
        """
        alike: dict[Hashable, list[Member]] = {}
        for member in self._members:
            alike.setdefault(member.key, []).append(member)
        groups = [own for own in alike.values() if len(own) > 1] or list(alike.values())[: int(self.records)]
        if len(self._members) > 1 and not groups and (name := _difference(*self._members[:2])):
            raise Unstackable(f"its clients differ in {name}")
        if not groups:
            return
        begun = [self._begins_at(own) for own in groups]
        largest = max(groups, key=len)  # recorded steps have one place for clients
        fitted = [self._fit_group(own, rows, own is largest) for own, rows in zip(groups, begun, strict=True)]
        self._largest = max(zip(groups, begun, strict=True), key=lambda pair: len(pair[0]))
        for own, each in zip(groups, fitted, strict=True):
            self._finish(own, each)

    def _begins_at(self, own: Sequence[Member]) -> Rows:
        """Clients as their fits begin, to be read only."""
        rows, moved = [member.row for member in own], [self._guests[member.row].moved for member in own]
        if rows == list(range(len(self._entry))) and all(one is None for one in moved):
            return self._entry
        begun = self._entry.pick(torch.tensor(rows, device=self.layout.device))
        for place, one in enumerate(moved):
            if one is not None:
                begun.put_back(torch.tensor([place], device=self.layout.device), one)
        return begun

    def _fit_group(self, own: Sequence[Member], rows: Rows, records: bool) -> Fitted:
        """Fit clients that are alike; again, where a step asks for what they differ in."""
        alike, phases = own[0].alike, [planned.phase.name for planned in own[0].entered.plan]
        new = {phase for phase in phases if (phase, alike) not in self._checked}
        # Here: not aside, where memory may be given away again too early, nor anew, where those before have ended.
        ended = self._ends_at.next(len(own)) if records and self.records and self.goes_ahead else None
        while True:
            try:
                fitted = self._fitted(own, rows, records, ended, new)
            except Mixed as mixed:
                if mixed.name in self._apart:
                    raise Unstackable(f"its step asks for {mixed.name}") from mixed
                self._apart.add(mixed.name)
            else:
                if new or not self.records:
                    fitted.wait()  # the comparison was made in the resident module, and places may be given up
                self._checked |= {(phase, alike) for phase in new}
                return fitted

    def _fitted(
        self, own: Sequence[Member], rows: Rows, records: bool, ended: Rows | None, new: Collection[str]
    ) -> Fitted:
        """The same at one go; where the next cohort comes in meanwhile, clients end up in `ended`."""
        first, entered, graphs = own[0], [member.entered for member in own], None
        if records and self.graphs is not None:
            self._aside.wait()
            graphs = self.graphs.enter(rows, first.attributes, (first.about, self.attributes.layers()))
        present = rows.clone() if graphs is None else graphs.rows
        self.attributes.restore(first.attributes if graphs is None else graphs.attributes, first.mark)
        for member in own:
            member.entered.fit.num_batches = member.entered.fit.num_steps = 0
        fit = self._made(entered, present, partial(epoch_of, self.runner, own), graphs)
        if graphs is None or ended is None:
            _run(fit, self.attributes, new, first)
            return Fitted(present, fit)
        with self._aside.work():
            _run(fit, self.attributes, new, first)
            ended.copy_(present)  # others come to the same place next
        return Fitted(ended, fit, self._aside.waiting())

    def _made(
        self, entered: Sequence[Entered], rows: Rows, epoch: Epoch, graphs: FitGraphs | None = None
    ) -> StackedFit:
        about = self._apart, self.attributes.aliases(), self.runner.trainer.precision_plugin, graphs
        return StackedFit(self.module, self.layout, rows, entered, epoch, *about, self.draws and len(self._entry) == 1)

    def measure(self) -> tuple[int, Timing] | None:
        """How many clients were stacked at most, and how long a step of theirs takes, on copies of their beginnings.

        None where nobody has had something to train.
        """
        if self._largest is None:
            return None
        own, rows = self._largest
        self.attributes.restore(own[0].attributes)
        entered = [replace(member.entered, fit=copy.copy(member.entered.fit)) for member in own]
        self.module.method.fit = entered[0].fit
        fits = [member.entered.fit for member in self._members]  # one's steps are counted, those of the timing, too
        done = [(fit.num_batches, fit.num_steps) for fit in fits]
        try:
            timing = measured(
                partial(self._made, entered), self.module, rows, entered, partial(epoch_of, self.runner, own)
            )
        finally:
            for fit, counts in zip(fits, done, strict=True):
                fit.num_batches, fit.num_steps = counts
        return len(own), timing

    # --- after the fit ------------------------------------------------------------------------------------------------

    def _finish(self, own: Sequence[Member], fitted: Fitted) -> None:
        """Let clients end their fits, and test them together where they can be."""
        outcomes = [Outcome(member, fitted, place, not self._ends) for place, member in enumerate(own)]
        for outcome in outcomes:
            outcome.member.visit.fit = partial(self._bring_in, outcome)
        if len(own) == 1:  # nobody to be tested with
            return
        if self._ends:
            self._end(outcomes)
        if all(outcome.has_ended and outcome.member.visit.job.trained for outcome in outcomes):
            clients, marks = [member.visit.job.client for member in own], [member.mark for member in own]
            with self.runner.stopwatch.part("evaluate"):
                fitted.wait()
                scores = self._tests.scores(clients, fitted.rows, own[0].attributes, marks, "trained")
            for member, known in zip(own, scores, strict=True):
                member.visit.trained = known

    def _end(self, outcomes: Sequence[Outcome]) -> None:
        """Let clients end their fits one after another, and keep each as it is then."""
        contents = self.attributes.contents()
        for outcome in outcomes:
            with _raised_later():
                self._bring_in(outcome)
                outcome.fitted.rows.put(outcome.place)
                member = outcome.member
                member.mark, member.attributes = self.attributes.mark(), self.attributes.taken()
                outcome.has_ended = True
            contents = _unwritten(contents, self.attributes)

    def _bring_in(self, outcome: Outcome) -> None:
        """Bring a fitted client into the module, and let method and terms keep what they need, if they have not yet."""
        member, fitted, method = outcome.member, outcome.fitted, self.module.method
        fitted.wait()
        fitted.rows.load(outcome.place)
        self.attributes.restore(member.attributes, member.mark)
        self.attributes.thaw(member.free)
        self.module.meter = fitted.fit.meter.of(outcome.place)
        method.fit = member.entered.fit
        _train(self.module)
        if not (self._ends and outcome.has_ended):  # else it was asked as it ended
            check_fit(method, self.module.meter)
        if not outcome.has_ended:
            set_stream_states(member.streams)
            method.on_fit_end()
            for term in method.terms.exchanging:
                term.after_fit(method)

    # --- tests after the receive --------------------------------------------------------------------------------------

    def test_received(self) -> None:
        """Test those that have entered and were not tested after their receive, together where that is possible."""
        waiting = [guest for guest in self._guests if guest.visit.waits]
        if not waiting or self._were_tested:
            return
        self._were_tested = True
        clients, marks = [guest.visit.job.client for guest in waiting], [guest.mark for guest in waiting]
        rows = self._entry.pick(torch.tensor([guest.row for guest in waiting], device=self.layout.device))
        with self.runner.stopwatch.part("evaluate"):
            scores = self._tests.scores(clients, rows, waiting[0].attributes, marks, "received")
        for guest, known in zip(waiting, scores, strict=True):
            if known is not None:
                guest.visit.scores.update(known)
                guest.visit.waits = False

    def test_alone(self, visit: Visit) -> None:
        """Test a client that has entered after its receive, by itself."""
        for guest in self._guests:
            if guest.visit is visit:
                self._entry.load(guest.row)
                self.attributes.restore(guest.attributes)
        visit.scores.update(self.runner.evaluator.client(self.module, visit.job.client, "received"))
        visit.waits = False


def _begin(method: Method, layout: Layout) -> Rows | None:
    """Let a method begin a client's fit; the client as it is then, where that has written to it."""
    versions = [tensor._version for tensor in layout.tensors()]
    begin_fit(method)
    if versions == [tensor._version for tensor in layout.tensors()]:
        return None
    moved = Rows.empty(layout, 1)
    moved.put(0)
    return moved


def _difference(one: Member, other: Member) -> str:
    """Names what keeps two clients from being stacked; empty where it is what their optimizers or phases say."""
    weights = "the weights of its losses" if one.entered.weights != other.entered.weights else ""
    return difference(one.mark, other.mark) or weights


def _weights_of(method: Method) -> dict[str, float]:
    """The factors of the losses of the client in the module.

    Raises:
        Unstackable: naming a loss whose factor learns, of which there is one tensor for all.
    """
    weights = checked_weights(method)
    name = next((name for name, weight in weights.items() if learns(weight)), None)
    if name is not None:
        raise Unstackable(f"the weight of its loss {name!r} learns")
    return weights


def _run(fit: StackedFit, attributes: Attributes, new: Collection[str], first: Member) -> None:
    """Make a stacked fit whose steps leave the method's attributes alone.

    Args:
        fit: the fit.
        attributes: of the method's modules.
        new: the phases whose first steps are to be compared with one alone.
        first: of the clients; where steps may draw, they draw from its streams.
    """
    if fit.draws:
        set_stream_states(first.streams)
    taken, before, objects = attributes.taken(), attributes.mark(), attributes.objects()
    of_classes, of_layers = attributes.of_classes(), attributes.of_layers()
    device = fit.layout.device

    def changes() -> str:
        after = attributes.mark()._replace(modes=before.modes, free=before.free)  # a phase's own, while it runs
        own = changed(before, after, attributes.is_read) or changed_object(objects, attributes.objects())
        return own or written_into(of_classes) or set_on_layer(of_layers, attributes.of_layers())

    fit.changes = changes
    streams = stream_states(device)
    try:
        fit.run(new.__contains__)
        drawn = fit.check_streams(streams)
        name = changed(before, attributes.mark(), attributes.is_read) or changes()
        if name:
            raise Unstackable(f"its step changes {name}")
    except Exception as error:
        refused = error if isinstance(error, (Mixed, Unstackable)) else _refused(error, changes)
        attributes.restore(taken, before)  # whose tensors are several clients', or none's: all of them begin anew
        put_back(of_classes)
        if refused is error:
            raise
        raise refused from error
    if fit.draws:
        first.streams = drawn


def _refused(error: Exception, changes: Callable[[], str]) -> Unstackable:
    """Why clients cannot be stacked in whose steps something went wrong: it may be what a step before has left."""
    with suppress(Unstackable):
        if name := changes():
            return Unstackable(f"its step changes {name}")
    return (Unstackable if known_reason(error) else Upset)(reason_of(error))


@contextmanager
def _raised_later() -> Iterator[None]:
    """Pass over what goes wrong at the end of a client's fit: it is raised again when that one's turn comes.

    Raises:
        Unstackable: for what has no place in the rows: no client could be brought back from them.
    """
    try:
        yield
    except Unstackable:
        raise
    except Exception:
        return


def _unwritten(before: Contents, attributes: Attributes) -> Contents:
    """What attributes hold, once a client has ended its fit and others have not.

    Raises:
        Unstackable: if it has written into what the others hold, too.
    """
    now = attributes.contents()
    name = overwritten(before, now)
    if name:
        raise Unstackable(f"what a client keeps of its fit is written into {name}, which others hold, too")
    return now


def _train(module: ClientModule) -> None:
    if not module.training:
        module.train()


def _phases(method: Method) -> Sequence[Phase]:
    """What a method trains, before its clients enter their round: one's own may have a schedule from round 1 on."""
    with in_a_round(method):
        return method.phases()


def _trained_in(phases: Sequence[Phase], name: str) -> Hashable:
    """The phases, and their parts, that train a parameter."""
    parts = [(i, p, own) for i, phase in enumerate(phases) for p, own in phase.by_part.items()]
    return tuple((index, part) for index, part, own in parts if matches(name, own))
