"""Recorded steps of clients, stacked and alone: a CPU's tapes, which go by the rules of a GPU's graphs.

What is on a tape is done again with the tensors that it was done with, whatever Python would decide or look up today.
"""

import ast
import copy
from collections import deque
from functools import lru_cache, partial
from operator import getitem
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from every_method import METHODS
from leaves import flatten
from torch import nn
from torch.utils.checkpoint import checkpoint

from fl_lightning.core import recording, stacked_graphs
from fl_lightning.core.facts import Phase
from fl_lightning.core.held import held
from fl_lightning.core.reads import Unrecordable
from fl_lightning.core.rows import Layout, Rows
from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.moon import MOON
from fl_lightning.models.split import Body, SplitModel

EIGHT = [[6, 6, 6, 6]] * 4
"""Whole mini-batches of four alone."""


class Counted:
    """A recording, and how often it was replayed."""

    def __init__(self, own):
        self.own = own
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.own.replay()


@pytest.fixture
def tapes(monkeypatch):
    """All tapes that were recorded."""
    found, record = [], recording.record

    def counted(work, known):
        found.append(Counted(record(work, known)))
        return found[-1]

    monkeypatch.setattr(recording, "record", counted)
    return found


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


@pytest.fixture
def both(run_federation, assert_near, make_data, tapes):
    """A federation as it is and recorded, in double precision; returns the latter when the two are alike."""

    def run(make, rounds=3, tolerance=1e-9, counts=EIGHT, **options):
        options["trainer"] = {"precision": "64-true", **options.get("trainer", {})}
        options.setdefault("optimizer", adam)
        plain, recorded = (
            run_federation(make, rounds, data=make_data(counts), **{"cohort": 4, "graph": own, **copy.copy(options)})
            for own in (None, "auto")
        )
        assert plain.cohort.reason == recorded.cohort.reason == ""
        assert_near(plain, recorded, tolerance)
        return recorded

    return run


def reasons(loop):
    """Why nothing is recorded any more."""
    return [stack.graphs.reason for lanes in loop.cohort.lanes.values() for stack in lanes.stacks]


STACKED = sorted(
    set(METHODS) - {"APFL", "DRDFL", "DisPFL", "FedCP", "FedCVAE", "FedFed", "FedGen", "FedPA", "PerFedAvg", "pFedMe"}
)


@pytest.mark.parametrize("name", STACKED)
def test_every_stacked_method_is_the_same_recorded(name, both, mlp, tapes):
    loop = both(lambda: METHODS[name](mlp()))
    assert loop.cohort.unrecorded == []
    assert sum(tape.replays for tape in tapes) >= 3


def test_losses_of_several_types_take_nobody_apart(both, mlp, tapes, capsys):
    """MOON's is of another one in its first round, one for all clients, and was written to as each one's."""
    loop = both(lambda: MOON(mlp()))
    assert not loop.cohort.apart
    assert tapes
    assert "not stacked" not in capsys.readouterr().err


def test_momentum_clipping_and_a_rate_that_falls_are_the_same_recorded(both, mlp, tapes, sgd):
    momentum, clipped = sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), {"gradient_clip_val": 0.5}
    both(lambda: FedAvg(mlp()), 4, optimizer=momentum, trainer=clipped, lr_decay=0.7)
    assert len(tapes) == 2  # whole mini-batches and the last one: another rate is no reason to record anew
    assert tapes[0].replays >= 10


def test_decoupled_decay_is_the_same_recorded(both, mlp, tapes):
    def adam_w(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    both(lambda: FedAvg(mlp()), optimizer=adam_w, lr_decay=0.5)
    assert len(tapes) == 2


def with_batch_norm():
    """A network whose batch norm keeps statistics."""
    body = Body([nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())], nn.Linear(8, 5))
    return SplitModel(body, nn.Linear(5, 4), 5, 4, (1, 8, 8))


def test_batch_norms_statistics_move_as_ever(both, tapes):
    both(lambda: FedAvg(with_batch_norm()), tolerance=1e-7, local_epochs=2)
    assert tapes


class Anchored(FedAvg):
    """Pulled to the weights that came in, kept as plain attributes; the pull grows with the rounds."""

    grows = False

    def receive(self, message, data):
        super().receive(message, data)
        self.anchor = {"head": [message.weights["model.head.weight"]]}

    def local_step(self, step):
        out = step.forward()
        gap = (self.model.head.weight - self.anchor["head"][0]).square().sum()
        step.descend({**step.values(out), "pull": gap * (self.facts.round if self.grows else 1)})

    def losses(self):
        return {"pull": 0.5}


def test_tensors_that_attributes_hold_are_read_anew(both, mlp, tapes):
    loop = both(lambda: Anchored(mlp()), 4)
    assert loop.cohort.unrecorded == []
    assert len(tapes) == 2


class Growing(Anchored):
    """Asks for the round."""

    grows = True


def test_what_a_step_asks_for_is_asked_again(both, mlp, tapes, capsys):
    loop = both(lambda: Growing(mlp()), 12, counts=[[5, 5, 5, 5]] * 4, local_epochs=2)
    line = "fl-lightning: federation.graph: Growing runs as it is: its steps change: they ask for facts.round"
    assert loop.cohort.unrecorded == ["its steps change: they ask for facts.round"]
    assert capsys.readouterr().err.count(line) == 1
    assert len(tapes) == 15  # eight of whole mini-batches, and fewer of the last one


OUTSIDE = torch.ones(5)


class Reaches(FedAvg):
    """Reads a tensor that nobody can know of."""

    def local_step(self, step):
        out = step.forward()
        task = self.terms.cross_entropy.name
        step.descend({task: step.values(out)[task] + (out.z * OUTSIDE.to(out.z)).sum()})


def test_a_step_that_reads_what_is_not_known_is_named(both, mlp, tapes, capsys):
    loop = both(lambda: Reaches(mlp()))
    reason = "its step reads a tensor [5] that is no parameter, buffer or attribute"
    assert loop.cohort.unrecorded == [reason]
    assert capsys.readouterr().err.count(f"federation.graph: Reaches runs as it is: {reason}") == 1
    assert tapes == []


SCALE = [1.0]


class Hides(FedAvg):
    """Decides by a number that is not the step's to know."""

    def local_step(self, step):
        out = step.forward()
        task = self.terms.cross_entropy.name
        step.descend({task: step.values(out)[task] * SCALE[0]})

    def on_fit_start(self):
        SCALE[0] = 1.0 + self.facts.round


def test_a_recording_that_has_become_wrong_is_found_at_its_next_fit(both, mlp, tapes):
    loop = both(lambda: Hides(mlp()), 4)
    assert loop.cohort.unrecorded == ["replayed, a step gives other values than as it is"]
    assert len(tapes) == 1


def test_clients_of_several_lengths_and_groups_are_the_same_recorded(both, mlp, tapes):
    both(lambda: FedProto(mlp()), 4, counts=((12, 8, 0, 0), (6, 6, 5, 0), (0, 5, 9, 5), (0, 0, 1, 13)), local_epochs=3)
    assert tapes


def test_two_cohorts_take_turns_in_one_place(both, mlp, tapes, make_data):
    both(lambda: FedCPD(mlp()), 3, counts=[[6, 6, 6, 6]] * 9, local_epochs=2)
    assert len(tapes) == 7 + 5  # the ninth client by itself


def test_kinds_of_fits_without_end_are_not_kept(run_federation, mlp, tapes, make_data):
    class Restless(FedAvg):
        """Never the same."""

        def on_fit_start(self):
            self.now = self.facts.round

    loop = run_federation(lambda: Restless(mlp()), 18, data=make_data(EIGHT), cohort=4, graph="auto", optimizer=adam)
    assert loop.cohort.unrecorded == ["what its steps read changes from fit to fit"]


def test_a_resumed_run_goes_on_with_recordings_of_its_own(assert_resumes, mlp, tapes):
    assert_resumes(lambda: FedAvg(mlp()), rounds=4, cohort=4, graph="auto")
    assert tapes


def test_on_other_devices_nothing_is_recorded(run_federation, mlp, make_data, capsys, monkeypatch):
    monkeypatch.setattr(recording, "can_record", lambda device: False)
    for graph in ("auto", True):
        loop = run_federation(lambda: FedAvg(mlp()), 1, data=make_data(EIGHT), cohort=4, graph=graph)
        assert loop.cohort.unrecorded == []
        said = "federation.graph: FedAvg runs as it is: the fits are on cpu, and CPUs and CUDA GPUs record\n"
        assert capsys.readouterr().err.count(said) == (graph is True)


def test_graphs_and_compiled_steps_are_two_ways():
    with pytest.raises(ConfigError, match=r"federation\.compile: cannot be combined with .*graph"):
        Federation(graph="auto", compile=True)


@pytest.mark.parametrize("cohort", [1, None])
@pytest.mark.parametrize("make", [FedAvg, FedCPD])
def test_steps_of_one_client_after_another_are_recorded(make, cohort, both, mlp, tapes):
    loop = both(lambda: make(mlp()), cohort=cohort)
    assert loop.cohort.unrecorded == []
    assert len(tapes) == (8 if make is FedCPD else 2)  # of two sizes
    assert sum(tape.replays for tape in tapes) > 3 * len(EIGHT)


def test_a_large_model_whose_stacked_steps_take_longer_is_recorded_alone(both, mlp, tapes, monkeypatch, capsys):
    monkeypatch.setattr("fl_lightning.core.stacked_timing.GAIN", 0.0)
    loop = both(lambda: FedAvg(mlp()), cohort="auto", graph="auto")
    assert "FedAvg's clients are not stacked, each one's steps are recorded: a step takes" in capsys.readouterr().err
    assert tapes
    assert [*loop.cohort._groups([0, 1, 2])] == [[0], [1], [2]]


class Reads(FedAvg):
    """Its step is one that torch does not stack."""

    def local_step(self, step):
        step.x.is_contiguous(memory_format=torch.channels_last)
        super().local_step(step)


def test_what_torch_cannot_stack_is_recorded_alone(run_federation, assert_near, mlp, tapes, make_data, capsys):
    plain, recorded = (
        run_federation(lambda: Reads(mlp()), 3, data=make_data([[6, 6, 6, 6]] * 5), cohort=own, graph=graph,
                       trainer={"precision": "64-true"})
        for own, graph in ((None, None), (2, "auto"))
    )  # fmt: skip
    assert_near(plain, recorded, 1e-9)
    assert sum(tape.replays for tape in tapes) > 10
    assert capsys.readouterr().err.count("each one's steps are recorded") == 1
    assert [*recorded.cohort._groups([0, 1])] == [[0], [1]]
    assert "unstacked" in recorded.cohort.state_dict()


ELSEWHERE = [torch.ones(100)]


class Takes(Reads):
    """Asks for a layout, and takes a tensor that is in nobody's keeping."""

    def local_step(self, step):
        step.x.is_contiguous(memory_format=torch.channels_last)
        values = step.values(step.forward())
        step.descend({name: value * ELSEWHERE[0].mean() for name, value in values.items()})


def test_what_is_neither_stacked_nor_recorded_is_not_said_to_be(run_federation, mlp, make_data, capsys):
    loop = run_federation(lambda: Takes(mlp()), 3, data=make_data([[6, 6, 6, 6]] * 4), cohort=2, graph="auto")
    said = capsys.readouterr().err
    assert loop.cohort.unrecorded or loop.cohort.reason
    assert "steps are recorded" not in said


def with_dropout(mlp):
    """Drops a quarter of the embeddings."""
    model = mlp()
    model.body.stages.append(nn.Dropout(0.25))
    return FedAvg(model)


@pytest.mark.parametrize("cohort", [1, 3])
def test_dropout_draws_for_each_client_what_it_draws_alone(cohort, run_federation, mlp, tapes, assert_near, capsys):
    options = {"trainer": {"precision": "64-true"}, "local_epochs": 2}
    plain = run_federation(lambda: with_dropout(mlp), 3, **options)
    recorded = run_federation(lambda: with_dropout(mlp), 3, cohort=cohort, graph="auto", **options)
    assert_near(plain, recorded, 1e-9)
    assert recorded.cohort.unrecorded == []
    assert sum(tape.replays for tape in tapes) > 10
    said = "clients are not stacked, each one's steps are recorded: its step draws random numbers"
    assert capsys.readouterr().err.count(said) == (cohort == 3)


@pytest.mark.parametrize("name", ["FedCP", "FedGen"])
def test_methods_that_draw_are_recorded_one_after_another(name, run_federation, mlp, tapes, assert_near):
    options = {"trainer": {"precision": "64-true"}, "local_epochs": 2, "optimizer": sgd_at(0.05)}
    plain, recorded = (run_federation(lambda: METHODS[name](mlp()), 3, graph=own, **options) for own in (None, "auto"))
    assert_near(plain, recorded, 1e-9)
    assert recorded.cohort.unrecorded == []
    assert tapes


def scaled(method, step, factor):
    """Descend on the cross-entropy times a factor."""
    out = step.forward()
    task = method.terms.cross_entropy.name
    step.descend({task: step.values(out)[task] * factor})


def halves(make, put, get):
    """A method that keeps its factor in an object of its own, and halves it in round 4."""

    class Own(FedAvg):
        def __init__(self, model):
            super().__init__(model)
            self.own = make()

        def on_fit_start(self):
            put(self.own, 1.0 if self.facts.round < 4 else 0.5)

        def local_step(self, step):
            scaled(self, step, get(self.own))

    return Own


def closed():
    """Functions that get and put a number that nobody else sees."""
    own = 1.0

    def get():
        return own

    def put(value):
        nonlocal own
        own = value

    return get, put


OBJECTS = {
    "object": (SimpleNamespace, lambda own, value: setattr(own, "f", value), lambda own: own.f),
    "array": (lambda: np.ones(1), lambda own, value: own.fill(value), lambda own: own.item()),
    "deque": (lambda: deque([1.0], 1), lambda own, value: own.append(value), lambda own: own[0]),
    "closure": (closed, lambda own, value: own[1](value), lambda own: own[0]()),
    "partial": (
        lambda: partial(getitem, [1.0], 0),
        lambda own, value: own.args[0].__setitem__(0, value),
        lambda own: own(),
    ),
    "tensor": (SimpleNamespace, lambda own, value: setattr(own, "f", torch.tensor(value)), lambda own: own.f),
}


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_what_objects_of_ones_own_come_to_is_part_of_what_a_step_is_told(name, both, mlp, tapes):
    loop = both(lambda: halves(*OBJECTS[name])(mlp()), 5, counts=[[4, 4, 4, 4]] * 2, optimizer=sgd_at(0.1))
    assert loop.cohort.unrecorded == []
    assert sum(tape.replays for tape in tapes) >= 4


def sgd_at(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


class Rests(FedAvg):
    """Lets its batch norm rest from the fourth round on."""

    def phases(self):
        return [Phase("all", resting=["model.body"] if self.facts.round > 3 else ())]


class Slows(FedAvg):
    """Its batch norm hardly moves from the fourth round on."""

    def on_fit_start(self):
        self.model.body.stages[0][2].momentum = 0.1 if self.facts.round < 4 else 0.5


class Swaps(FedAvg):
    """Trains one of two parts, and the other one from the fourth round on."""

    def phases(self):
        names = ("model.body", "model.head")
        one, other = names if self.facts.round < 4 else names[::-1]
        return [Phase("all", parts={"a": (one,), "b": (other,)})]

    def local_step(self, step):
        step.descend(step.values(step.forward()), "a")


class Freezes(FedAvg):
    """Freezes its body from the fourth round on."""

    def receive(self, message, data):
        super().receive(message, data)
        self.model.body.requires_grad_(self.facts.round < 4)


@pytest.mark.parametrize("kind", [Rests, Slows, Swaps, Freezes])
def test_another_kind_of_phase_or_layer_is_recorded_anew(kind, both, tapes):
    loop = both(lambda: kind(with_batch_norm()), 5, 1e-7, [[4, 4, 4, 4]] * 2, local_epochs=2, optimizer=sgd_at(0.1))
    assert loop.cohort.unrecorded == []
    assert len(tapes) >= 2


def test_one_step_a_fit_follows_the_rate_that_falls(both, mlp, tapes):
    loop = both(lambda: FedAvg(mlp()), 7, counts=[[2, 1, 1, 1]] * 2, lr_decay=0.9, optimizer=sgd_at(0.1))
    assert loop.cohort.unrecorded == []
    assert tapes[0].replays


NEAR = [True]


class Detaches(FedAvg):
    """Its gradient alone depends on what nobody can know of."""

    def on_fit_start(self):
        NEAR[0] = self.facts.round < 2

    def local_step(self, step):
        out = step.forward()
        z = out.z if NEAR[0] else out.z.detach()
        step.descend({**step.values(out), "far": z.square().mean()})

    def losses(self):
        return {"far": 0.05}


def test_a_recording_is_checked_by_where_its_steps_lead(both, mlp, tapes):
    loop = both(lambda: Detaches(mlp()), optimizer=sgd_at(0.01))
    assert loop.cohort.unrecorded == ["replayed, a step gives other values than as it is"]


@pytest.fixture
def disturbed(monkeypatch):
    """Lets the first so many replays begin where weights are another number's multiple."""
    replay = stacked_graphs._Recorded.replay

    def disturb(flats, times, factor):
        def elsewhere(self, given):
            if next(left, None) is not None:
                for flat in flats():
                    flat.mul_(factor)
            return replay(self, given)

        left = iter(range(times))
        monkeypatch.setattr(stacked_graphs._Recorded, "replay", elsewhere)

    check, fits = stacked_graphs.PhaseGraphs._checked, []
    monkeypatch.setattr(
        stacked_graphs.PhaseGraphs, "_checked", lambda own, *a: (fits.append(own.fit), check(own, *a))[1]
    )
    return partial(disturb, lambda: fits[-1].rows.flats)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_odd_once_or_twice_is_left_out_and_wrong_the_third_time(times, both, disturbed, mlp, tapes):
    disturbed(times, 1.5)
    loop = both(lambda: FedAvg(mlp()))
    assert loop.cohort.unrecorded == ["replayed, a step gives other values than as it is"] * (times == 3)
    assert bool(tapes[0].replays > 3) is (times < 3)


def test_steps_that_were_right_in_two_fits_take_turns_in_being_compared(run_federation, make_data, mlp, monkeypatch):
    """All of them were, in every fit that was due: a third of a run of forty rounds went into that."""
    check, due = stacked_graphs.PhaseGraphs._checked, {}

    def checked(phase, found, *given):
        due.setdefault(found, []).append(phase.fit.number)
        return check(phase, found, *given)

    monkeypatch.setattr(stacked_graphs.PhaseGraphs, "_checked", checked)
    counts = make_data([[6, 6, 6, 6], [6, 6, 6, 6], [6, 6, 0, 3], [6, 6, 0, 1]])
    loop = run_federation(lambda: FedAvg(mlp()), 21, data=counts, cohort=4, graph="auto")
    assert loop.cohort.unrecorded == []
    assert len(due) >= 3
    assert all(fits[:2] == [found.number, found.number + 1] for found, fits in due.items())
    begun = min(found.number for found in due)
    later = sorted((number, place) for place, fits in enumerate(due.values()) for number in fits[2:])
    assert [number - begun for number, _ in later] == [2, 3, 4, 6, 8, 11, 14, 18]
    assert {place for _, place in later} == set(range(len(due)))


def test_a_step_whose_turn_it_is_and_that_does_not_come_leaves_it_to_another():
    turns = stacked_graphs._Turns()
    one, other = (stacked_graphs._Recorded(None, (), {}, None, None, number=1, due=2) for _ in range(2))
    for own in (one, other):
        turns.was_right(own, 2)
    assert (one.due, other.due) == (None, None)
    assert [turns.is_due(own, 3) for own in (one, other)] == [True, False]
    assert turns.is_due(other, 4)
    turns.was_odd(other)  # what is wrong may be so in both
    assert (one.due, other.due) == (0, 0)
    turns.was_right(other, 9)
    turns.was_right(one, 10)
    due = [[turns.is_due(own, number) for own in (one, other)] for number in (11, 12, 13)]
    assert due == [[False, False], [False, True], [True, True]]


class Chaotic(FedAvg):
    """How far its steps go hangs on the last digits."""

    def local_step(self, step):
        out = step.forward()
        task = self.terms.cross_entropy.name
        step.descend({task: step.values(out)[task] * (2 + (1e17 * out.z.detach().sum()).sin())})


def test_a_replay_may_be_as_far_off_as_rounding_takes_a_step(run_federation, disturbed, mlp, tapes):
    disturbed(1000, 1 + 1e-15)
    options = {"cohort": 1, "graph": "auto", "optimizer": sgd_at(0.1), "trainer": {"precision": "64-true"}}
    assert run_federation(lambda: Chaotic(mlp()), 3, **options).cohort.unrecorded == []
    assert tapes[0].replays > 3


def test_a_recording_that_becomes_wrong_late_is_found(run_federation, mlp, tapes, make_data):
    class Late(Hides):
        def on_fit_start(self):
            SCALE[0] = 1.0 if self.facts.round < 7 else 2.0

    data = make_data([[5, 5, 5, 5]] * 2)
    loop = run_federation(lambda: Late(mlp()), 9, data=data, cohort=2, graph="auto", optimizer=adam)
    assert loop.cohort.unrecorded == ["replayed, a step gives other values than as it is"]


def test_of_mini_batches_of_many_sizes_the_first_ones_are_recorded(both, mlp, tapes, monkeypatch):
    monkeypatch.setitem(stacked_graphs.MOST_SIZES, "cpu", 8)
    counts = [[3 * (own + 2), 0, 0, 3] for own in range(12)]  # a cohort has ever fewer that still have one
    loop = both(lambda: FedAvg(mlp()), 5, counts=counts, cohort=12)
    assert loop.cohort.unrecorded == []
    assert len(tapes) == 8


def test_steps_that_ask_for_what_clients_differ_in_are_no_reason_to_stop(both, mlp, tapes, monkeypatch):
    class Asks(FedAvg):
        def local_step(self, step):
            scaled(self, step, 0.5 if step.epoch and step.is_last else 1.0)

    loop = both(lambda: Asks(mlp()), 2, counts=[[8, 8, 8, 8], [4, 4, 4, 4]], local_epochs=2)
    assert loop.cohort.unrecorded == []


def test_containers_that_cannot_be_made_anew_are_left(both, mlp, tapes):
    class Sealed(Anchored):
        def receive(self, message, data):
            super().receive(message, data)
            self.anchor = MappingProxyType(self.anchor)

    loop = both(lambda: Sealed(mlp()), 2)
    assert loop.cohort.unrecorded == ["its step reads a tensor [4, 5] that is no parameter, buffer or attribute"]


class Dial:
    """Holds a number."""

    def __init__(self):
        self.turned = {"scale": 1.0}


@lru_cache
def weigher(round):
    """A function that has a number enclosed, another one in every round."""
    scale = 1.0 if round < 4 else 3.0
    return lambda loss: loss * scale


class Weighs(FedAvg):
    """Weighs its loss by such a function."""

    def receive(self, message, data):
        super().receive(message, data)
        self.weigh = weigher(self.facts.round)

    def local_step(self, step):
        task = self.terms.cross_entropy.name
        step.descend({task: self.weigh(step.values(step.forward())[task])})


def test_a_function_that_is_made_anew_is_known_by_what_it_encloses(run_federation, mlp, make_data, outcome, tapes, sgd):
    options = {"data": make_data(EIGHT), "cohort": 4, "optimizer": sgd(0.05)}
    plain, recorded = (run_federation(lambda: Weighs(mlp()), 6, graph=own, **options) for own in (None, "auto"))
    one, other = (flatten(outcome(loop)["exchange"]) for loop in (plain, recorded))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5)
    assert recorded.cohort.unrecorded == []
    assert tapes[0].replays > 6


def test_objects_that_hold_one_another_are_looked_through_once():
    one, other = Dial(), Dial()
    one.other, other.other = other, one
    layout = Layout(torch.nn.Linear(1, 1))
    first = held([{"dial": one}], layout)
    assert held([{"dial": one}], layout).key == first.key
    other.turned["scale"] = 2.0
    assert held([{"dial": one}], layout).key != first.key


def test_what_has_fields_and_is_no_tuple_is_no_container():
    """A syntax tree was taken for a named tuple, and the run ended: it is not iterable."""
    layout, tree = Layout(torch.nn.Linear(1, 1)), ast.parse("x")
    there = held([{"tree": tree}], layout)
    assert there.key == held([{"tree": tree}], layout).key
    assert there.holding([])[0]["tree"] is tree


def test_tensors_elsewhere_are_known_by_their_numbers_if_they_are_few():
    layout = Layout(torch.nn.Linear(1, 1))
    few, many = torch.ones(3, device="meta"), torch.ones(100, device="meta")
    with pytest.raises(Unrecordable, match="own is a tensor on meta"):
        held([{"own": many}], layout)
    with pytest.raises(Unrecordable, match="own is a tensor that has a gradient"):
        held([{"own": [torch.ones(1, requires_grad=True)]}], layout)
    with pytest.raises(NotImplementedError):  # a tensor without values
        held([{"own": few}], layout)


# --- one cohort's steps while the next one comes in ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["FedAvg", "FedCPD", "FedPer", "FedALA"])
def test_cohorts_that_come_in_ahead_are_the_same(name, both, mlp, tapes):
    loop = both(lambda: METHODS[name](mlp()), cohort=2, counts=[[6, 6, 6, 6]] * 7)
    assert loop.cohort.unrecorded == []
    assert tapes


class Gambles(FedAvg):
    """One client's steps draw random numbers, and not from torch."""

    def receive(self, message, data):
        super().receive(message, data)
        self.gambles = self.facts.client == 2

    def local_step(self, step):
        if self.gambles:
            np.random.rand()
        super().local_step(step)


def test_who_cannot_be_stacked_leaves_those_who_came_in_before_alone(run_federation, assert_near, mlp, tapes):
    double = {"precision": "64-true"}
    plain, recorded = (
        run_federation(lambda: Gambles(mlp()), 3, cohort=1, graph=own, trainer=double) for own in (None, "auto")
    )
    assert recorded.cohort.reason == "its step draws random numbers"
    assert_near(plain, recorded, 1e-9)


def test_a_sick_client_leaves_those_who_came_in_ahead_alone(set_up_federation, mlp, tapes):
    def losses(**options):
        loop = set_up_federation(lambda: FedCPD(mlp()), 3, optimizer=adam, on_client_error="skip", **options)
        loop.data.store.x[loop.data.clients[1].train[0]] = np.nan
        loop.run()
        return {key: report.losses["loss"] for key, report in loop.diary.reports.items()}

    plain, recorded = losses(), losses(cohort=1, graph="auto")
    assert recorded == pytest.approx(plain, rel=1e-4)
    assert {client for _, client in recorded} == {0, 2, 3}
    assert tapes


class Halves(FedAvg):
    """The last step of an epoch counts half."""

    def local_step(self, step):
        scaled(self, step, 0.5 if step.is_last else 1.0)


def test_who_is_taken_apart_leaves_those_who_were_fitted_before_alone(both, mlp, tapes):
    both(lambda: Halves(mlp()), 2, counts=[[12, 12, 12, 12]] * 2 + [[8, 8, 8, 8], [4, 4, 4, 4]], cohort=2)
    assert tapes


class Shrinks(FedAvg):
    """Sets its weights' data to others, from the second epoch on."""

    def local_step(self, step):
        weight = self.model.head.weight
        if step.epoch:
            weight.data = weight.data * 0.9
        super().local_step(step)


def test_weights_whose_data_a_step_sets_are_one_clients_own(both, mlp, tapes):
    loop = both(lambda: Shrinks(mlp()), 2, counts=EIGHT[:2], cohort=1, local_epochs=2)
    assert loop.cohort.unrecorded == []
    assert tapes


class Blurs(FedAvg):
    """Draws from the second epoch on."""

    draw = staticmethod(lambda: np.random.rand())

    def local_step(self, step):
        scaled(self, step, self.draw() if step.epoch else 1.0)


class Tints(Blurs):
    """Draws from torch's stream."""

    draw = staticmethod(lambda: torch.rand(()))


@pytest.mark.parametrize("cohort", [1, 2])
@pytest.mark.parametrize("make", [Blurs, Tints])
def test_who_draws_late_is_fitted_again(make, cohort, run_federation, assert_near, mlp, tapes):
    options = {"local_epochs": 2, "trainer": {"precision": "64-true"}}
    plain, recorded = (
        run_federation(lambda: make(mlp()), 3, cohort=cohort, graph=own, **options) for own in (None, "auto")
    )
    assert recorded.cohort.reason == ("its step draws random numbers" if make is Blurs else "")
    assert recorded.cohort.unrecorded == []
    assert_near(plain, recorded, 1e-9)


class Recurrent(nn.Module):
    """Reads images row by row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, 0])[0].flatten(1)


def test_recurrent_layers_are_recorded_once(both, tapes):
    def make():
        return FedAvg(SplitModel(Body([Recurrent()], nn.Linear(24, 5)), nn.Linear(5, 4), 5, 4, (1, 8, 8)))

    loop = both(make, 2, counts=EIGHT[:2], cohort=1)
    assert loop.cohort.unrecorded == []
    assert len(tapes) == 2


class Shows(FedAvg):
    """Keeps its head's weights as they are, and not what they were."""

    def receive(self, message, data):
        super().receive(message, data)
        self.own = [self.model.head.weight.detach()]

    def local_step(self, step):
        scaled(self, step, 1 + self.own[0].square().sum())


class Sums(FedAvg):
    """Sums its losses up, and reads the sum once it is fitted."""

    def on_fit_start(self):
        self.sum = torch.tensor(0.0)

    def local_step(self, step):
        out = step.forward()
        values = step.values(out)
        self.sum = self.sum + values[self.terms.cross_entropy.name].detach()
        step.descend(values)

    def on_fit_end(self):
        self.model.head.bias.data.add_(0.1 * self.sum)


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize(
    ("make", "reason"),
    [(Shows, "Shows.own shows memory of a parameter or buffer"), (Sums, "its step changes Sums.sum")],
)
def test_what_attributes_come_to_hold_is_one_clients_own(make, reason, cohort, run_federation, assert_near, mlp):
    options = {"trainer": {"precision": "64-true"}, "local_epochs": 2}
    plain, recorded = (
        run_federation(lambda: make(mlp()), 2, cohort=own, graph=graph, **options)
        for own, graph in ((None, None), (cohort, "auto"))
    )
    assert recorded.cohort.reason == reason
    assert_near(plain, recorded, 1e-9)


class Checkpointed(nn.Module):
    """Makes its pass once more for the gradients."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, x):
        return checkpoint(lambda x: self.layer(x).tanh(), x.flatten(1), use_reentrant=False)


def test_a_pass_that_is_made_once_more_for_the_gradients_is_the_clients_own(both, tapes):
    def make():
        return FedAvg(SplitModel(Body([Checkpointed()], nn.Linear(5, 5)), nn.Linear(5, 4), 5, 4, (1, 8, 8)))

    loop = both(make, cohort=None)
    assert loop.cohort.unrecorded == []
    assert tapes


@pytest.mark.parametrize("channels", [1, 3])
def test_clients_in_rows_lie_in_memory_as_the_model_does(channels):
    net = nn.Conv2d(channels, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout(net)
    rows = Rows.empty(layout, 2)
    assert [view[0].stride() for view in rows.views(2)] == [net.weight.stride(), net.bias.stride()]
