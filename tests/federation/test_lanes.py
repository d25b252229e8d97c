"""Lone clients whose recorded steps run side by side: on a CPU one after another, by the rules of a GPU's streams."""

from collections import Counter

import numpy as np
import pytest
import torch
from every_method import METHODS

from fl_lightning.core import recording
from fl_lightning.federation import lanes
from fl_lightning.federation.cohort import Cohort
from fl_lightning.federation.stack import Stack
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.models.mlp import MLP

TEN = [[6, 6, 6, 6]] * 6 + [[5, 5, 5, 5]] * 4
SEVEN = TEN[2:9]


@pytest.fixture
def streams(monkeypatch):
    """A device that does recorded work aside and has room; returns how much room it has."""
    room = [True]
    monkeypatch.setattr(recording.Aside, "is_aside", True)
    monkeypatch.setattr(recording, "has_room", lambda device: room[0])
    return room


@pytest.fixture
def under_way(monkeypatch):
    """How many clients are fitted and wait for their turn, whenever one more comes in."""
    found, waiting = [], Counter()
    fit, visits = Stack.fit, Cohort.visits

    def counted(stack):
        fit(stack)
        waiting["fitted"] += len(stack._members)
        found.append(waiting["fitted"])

    def watched(cohort, *given):
        waiting["fitted"] = 0
        for visit in visits(cohort, *given):
            waiting["fitted"] -= 1
            yield visit

    monkeypatch.setattr(Stack, "fit", counted)
    monkeypatch.setattr(Cohort, "visits", watched)
    return found


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


def count(loop):
    """How many lanes each architecture has."""
    return [len(own) for own in loop.cohort.lanes.values()]


NAMES = ["FedAvg", "FedCPD", "FedRep", "FedProto", "FedALA", "MOON", "SCAFFOLD", "FedDW", "FedPAC", "Ditto"]
NAMES += ["APFL", "DRDFL", "FedGen"]  # which are not stacked; of the last two a tape draws what each would draw alone


@pytest.mark.parametrize("name", NAMES)
def test_clients_side_by_side_are_the_same(
    name, run_federation, assert_identical, outcome, make_data, mlp, streams, under_way
):
    data = {"data": make_data(SEVEN), "optimizer": adam, "cohort": 1}
    alone = run_federation(lambda: METHODS[name](mlp()), 3, **data)
    under_way.clear()
    beside = run_federation(lambda: METHODS[name](mlp()), 3, graph="auto", **data)
    assert count(beside) == [lanes.MOST]
    assert beside.cohort.unrecorded == []
    assert max(under_way) == lanes.MOST + 1  # the one that has just come in
    streams[0] = False
    in_turn = run_federation(lambda: METHODS[name](mlp()), 3, graph="auto", **data)
    assert count(in_turn) == [1]
    assert_identical(outcome(in_turn), outcome(beside))
    assert alone.diary.rows[-1]["loss"] == pytest.approx(beside.diary.rows[-1]["loss"], rel=1e-4)


def test_clients_that_cannot_be_stacked_go_side_by_side_then(run_federation, assert_near, make_data, mlp, streams):
    data = {"data": make_data(SEVEN), "optimizer": adam, "trainer": {"precision": "64-true"}}
    beside = run_federation(lambda: METHODS["APFL"](mlp()), 3, graph="auto", cohort=2, **data)
    assert beside.cohort.apart
    assert count(beside) == [lanes.MOST]
    assert_near(run_federation(lambda: METHODS["APFL"](mlp()), 3, cohort=1, **data), beside, 1e-9)


def test_one_more_is_opened_once_the_others_have_recorded_and_there_is_room(run_federation, make_data, mlp, streams):
    streams[0] = False
    loop = run_federation(lambda: FedAvg(mlp()), 1, data=make_data(TEN), cohort=1, graph="auto")
    assert count(loop) == [1]
    streams[0] = True
    stack = loop.cohort.lanes[0].open(1, True)
    assert count(loop) == [2]
    assert not stack.graphs.has_recorded
    assert loop.cohort.lanes[0].open(1, True) is not stack  # the other one's turn
    assert count(loop) == [2]  # until it has recorded


def test_stacked_clients_have_one_place(run_federation, make_data, mlp, streams):
    loop = run_federation(lambda: FedAvg(mlp()), 3, data=make_data(TEN), cohort=3, graph="auto")
    assert count(loop) == [1]  # the tenth client among them, who is alone


def test_several_architectures_side_by_side(run_federation, assert_identical, outcome, make_data, streams):
    def make(architecture):
        return METHODS["FedProto"](MLP((1, 8, 8), 4, hidden=(6 + architecture, 5)))

    loops = []
    for room in (True, False):
        streams[0] = room
        data = {"data": make_data(TEN), "cohort": 1, "graph": "auto", "optimizer": adam}
        loops.append(run_federation(make, 3, architecture=[0, 1] * 5, **data))
    assert [count(loop) for loop in loops] == [[lanes.MOST, lanes.MOST], [1, 1]]
    assert_identical(outcome(loops[0]), outcome(loops[1]))


def test_a_sick_client_leaves_those_beside_it_alone(set_up_federation, make_data, mlp, streams):
    def losses(**options):
        loop = set_up_federation(
            lambda: FedCPD(mlp()), 3, data=make_data(TEN), optimizer=adam, on_client_error="skip", **options
        )
        loop.data.store.x[loop.data.clients[1].train[0]] = np.nan
        loop.run()
        return {key: report.losses["loss"] for key, report in loop.diary.reports.items()}

    plain, beside = losses(), losses(cohort=1, graph="auto")
    assert beside == pytest.approx(plain, rel=1e-4)
    assert {client for _, client in beside} == {0, *range(2, 10)}


class Asks(FedAvg):
    """Asks for the round, from the second on."""

    def local_step(self, step):
        out = step.forward()
        factor = 1.0 if self.facts.round < 2 else 1.0 / self.facts.round
        step.descend({name: factor * value for name, value in step.values(out).items()})


def test_what_cannot_be_recorded_any_more_ends_it_for_all_and_is_said_once(
    run_federation, assert_near, make_data, mlp, streams, capsys
):
    data = {"data": make_data(TEN), "trainer": {"precision": "64-true"}}
    plain = run_federation(lambda: Asks(mlp()), 14, **data)
    loop = run_federation(lambda: Asks(mlp()), 14, cohort=1, graph="auto", **data)
    assert loop.cohort.unrecorded == ["its steps change: they ask for facts.round"]
    assert capsys.readouterr().err.count("federation.graph: Asks runs as it is") == 1
    assert_near(plain, loop, 1e-9)
