"""What clients hold in one object, each in its turn: none trains on another one's, however they are fitted."""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.core import recording
from fl_lightning.core.server import Server
from fl_lightning.methods.fedavg import FedAvg

DATA = [(2, 2, 2, 2), (6, 1, 6, 6), (4, 4, 4, 4), (5, 5, 1, 5)]


def _write_nested(method, value):
    method.held["of"]["this"] = value


def _set_layer(method, value):
    method.model.head.held = value


def _set_mask(method, value):
    """More numbers than a tensor shows when it is printed, and all that differ in its middle."""
    mask = torch.ones(40, 40)
    mask[20, 20] = value
    method.model.head.held = mask


def _write_into_layer(method, value):
    vars(method.model.head).setdefault("held", {})["this"] = value


def _set_below_layer(method, value):
    vars(method.model.head).setdefault("held", SimpleNamespace()).this = value


class Scales(nn.Module):
    """Has a number and no tensor."""

    rate = 0.0


def _scales():
    own = Scales()
    own.rate = 0.0
    return own


HOLDERS = {
    "tensor": (lambda: torch.zeros(()), lambda m, v: m.held.fill_(v), lambda m: m.held),
    "large tensor": (lambda: torch.zeros(100), lambda m, v: m.held.fill_(v), lambda m: m.held[7]),
    "tensor in a dict": (
        lambda: {"a": torch.zeros(())},
        lambda m, v: m.held["a"].fill_(v),
        lambda m: m.held["a"],
    ),
    "dict in a dict": (lambda: {"of": {"this": 0.0}}, _write_nested, lambda m: m.held["of"]["this"]),
    "object": (lambda: SimpleNamespace(v=0.0), lambda m, v: setattr(m.held, "v", v), lambda m: m.held.v),
    "tensor of an object": (
        lambda: SimpleNamespace(v=torch.zeros(100)),
        lambda m, v: m.held.v.fill_(v),
        lambda m: m.held.v[7],
    ),
    "object in a list": (
        lambda: [SimpleNamespace(v=0.0)],
        lambda m, v: setattr(m.held[0], "v", v),
        lambda m: m.held[0].v,
    ),
    "array": (lambda: np.zeros(1), lambda m, v: m.held.fill(v), lambda m: float(m.held[0])),
    "deque": (lambda: deque([0.0], maxlen=1), lambda m, v: m.held.append(v), lambda m: m.held[0]),
    "data of a tensor": (lambda: torch.zeros(100), lambda m, v: m.held.data.fill_(v), lambda m: m.held[7]),
    "network in a list": (
        lambda: [nn.Sequential(nn.Linear(1, 1))],
        lambda m, v: m.held[0][0].weight.data.fill_(v),
        lambda m: m.held[0][0].weight.detach()[0, 0],
    ),
    "large array": (lambda: np.zeros(200_000), lambda m, v: m.held.fill(v), lambda m: float(m.held[0])),
    "array of objects": (
        lambda: np.array([None, 0.0]),
        lambda m, v: m.held.__setitem__(1, v),
        lambda m: m.held[1],
    ),
    "bytes": (lambda: bytearray(1), lambda m, v: m.held.__setitem__(0, int(v)), lambda m: float(m.held[0])),
    "long list": (
        lambda: {"a": [0.0] * 3000},
        lambda m, v: m.held["a"].__setitem__(2999, v),
        lambda m: m.held["a"][2999],
    ),
    "layer": (lambda: None, _set_layer, lambda m: m.model.head.held),
    "large tensor of a layer": (lambda: None, _set_mask, lambda m: m.model.head.held[20, 20]),
    "mapping of a layer": (lambda: None, _write_into_layer, lambda m: m.model.head.held["this"]),
    "object of a layer": (lambda: None, _set_below_layer, lambda m: m.model.head.held.this),
    "number of a layer in a list": (
        lambda: [nn.Sequential(_scales())],
        lambda m, v: setattr(m.held[0][0], "rate", v),
        lambda m: m.held[0][0].rate,
    ),
}
"""How a value is held, written and read."""


class Holding(FedAvg):
    """Weighs its loss by a value of the client's own."""

    way = "object"
    hook = "receive"

    def setup(self):
        super().setup()
        self.held = HOLDERS[self.way][0]()

    def receive(self, message, data):
        super().receive(message, data)
        HOLDERS[self.way][1](self, 1.0 + float(data.class_counts[1]))

    def local_step(self, step):
        out = step.forward()
        values = step.values(out)
        step.descend({name: value * HOLDERS[self.way][2](self) for name, value in values.items()})


SHARERS = {
    "network": (lambda m: setattr(m.model.body, "also", m.rates), lambda m: m.model.body.also),
    "layer": (lambda m: setattr(m.model.head, "also", m.rates), lambda m: m.model.head.also),
    "list": (lambda m: setattr(m, "also", [m.rates]), lambda m: m.also[0]),
    "function": (lambda m: setattr(m, "also", partial(dict, m.rates)), lambda m: m.also.args[0]),
}
"""Who holds the very mapping of the method, too, and how it is read there."""


class Sharing(FedAvg):
    """Weighs its loss by the round, which a receive writes into a mapping that somebody else holds, too."""

    with_whom = "network"

    def setup(self):
        super().setup()
        self.rates = {"now": 1.0}
        SHARERS[self.with_whom][0](self)

    def receive(self, message, data):
        super().receive(message, data)
        self.rates["now"] = 1.0 / self.facts.round

    def local_step(self, step):
        values, rate = step.values(step.forward()), SHARERS[self.with_whom][1](self)["now"]
        step.descend({name: value * rate for name, value in values.items()})


class Ending(FedAvg):
    """Sends nothing of a fit but how many clients have ended theirs since its last receive."""

    def setup(self):
        super().setup()
        self.held = SimpleNamespace(count=0)

    def receive(self, message, data):
        super().receive(message, data)
        self.held.count = 0

    def on_fit_end(self):
        super().on_fit_end()
        self.held.count += 1
        with torch.no_grad():
            self.model.head.bias += self.held.count


class EndingLast(Ending):
    """The same of the last client alone, and what it writes is sent by all before it."""

    def on_fit_end(self):
        FedAvg.on_fit_end(self)
        if self.facts.num_clients == 4 and int(self.own) == 2:
            self.held.count = 1

    def setup(self):
        super().setup()
        self.register_buffer("own", torch.zeros(()), persistent=True)

    def receive(self, message, data):
        super().receive(message, data)
        self.own.fill_(float(data.class_counts[1]))

    def send(self, data):
        message = super().send(data)
        bias = message.weights["model.head.bias"] + self.held.count
        return replace(message, weights={**message.weights, "model.head.bias": bias})


@dataclass(frozen=True, slots=True)
class Option:
    rate: float = 1.0
    steps: tuple[int, ...] = (1, 2)


class Decided(FedAvg):
    """Has what nobody can write into, some of it anew for every client."""

    def setup(self):
        super().setup()
        self.options = Option()

    def receive(self, message, data):
        super().receive(message, data)
        self.sizes = (64, self.options.steps)


@pytest.fixture
def same(run_federation, make_data, assert_near):
    """A federation one by one and otherwise; the latter when the two are alike."""

    def run(make, **options):
        given = {"data": make_data(DATA), "trainer": {"precision": "64-true"}}
        plain, other = (run_federation(make, 2, **given, **own) for own in ({}, options))
        assert_near(plain, other, 1e-9)
        return other

    return run


@pytest.mark.parametrize("options", [{"cohort": 2}, {"cohort": 4, "graph": "auto"}, {"graph": "auto"}], ids=str)
@pytest.mark.parametrize("way", HOLDERS)
def test_what_a_receive_writes_in_place_is_nobody_elses(way, options, same, mlp, capsys):
    kind = type("Holding", (Holding,), {"way": way})
    loop = same(lambda: kind(mlp()), **options)
    said = capsys.readouterr().err
    assert said.count("set it anew, or keep it in a buffer") == ("cohort" in options)
    assert (loop.cohort.reason == "") is ("graph" in options)  # one after another nobody needs it any more


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 4, "graph": "auto"}, {"graph": "auto"}], ids=str)
@pytest.mark.parametrize("whom", SHARERS)
def test_what_two_hold_stays_one(whom, options, same, mlp):
    kind = type("Sharing", (Sharing,), {"with_whom": whom})
    assert same(lambda: kind(mlp()), **options).cohort.reason == ""


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 4, "graph": "auto"}], ids=str)
def test_what_nobody_can_write_into_takes_no_clients_apart(options, same, mlp):
    assert same(lambda: Decided(mlp()), **options).cohort.reason == ""


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 4, "graph": "auto"}, {"graph": "auto"}], ids=str)
@pytest.mark.parametrize("kind", [Ending, EndingLast])
def test_what_the_end_of_a_fit_writes_in_place_is_nobody_elses(kind, options, same, mlp):
    loop = same(lambda: kind(mlp()), **options)
    assert ("what a client keeps of its fit" in loop.cohort.reason) is ("cohort" in options)


@pytest.mark.parametrize("cohort", [1, 2])
@pytest.mark.parametrize("way", HOLDERS)
def test_nor_where_the_next_ones_come_in_while_a_device_works(way, cohort, same, mlp, monkeypatch, capsys):
    monkeypatch.setattr(recording.Aside, "is_aside", True)
    monkeypatch.setattr(recording, "has_room", lambda device: False)
    kind = type("Holding", (Holding,), {"way": way})
    loop = same(lambda: kind(mlp()), cohort=cohort, graph="auto")
    assert "set it anew, or keep it in a buffer" in loop.cohort.reason


class LeavesOut(Server):
    """Sends all but one of the weights."""

    def message_for(self, client):
        weights = {name: own for name, own in self.message.weights.items() if name != "model.head.bias"}
        return replace(self.message, weights=weights)


class Begins(FedAvg):
    """Takes down what its fits begin with, and keeps something, which is all that is put back of a client."""

    seen = ()

    def setup(self):
        super().setup()
        self.register_buffer("kept", torch.zeros(()))

    def make_server(self, initial, facts):
        return LeavesOut(initial)

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = (*self.seen, self.model.head.bias.tolist())


def test_what_a_server_leaves_out_is_not_what_the_last_client_has_made_of_it(mlp, run_federation):
    loop = run_federation(lambda: Begins(mlp()), rounds=2)
    first, *others = loop.runner.modules[0].method.seen
    assert others == [first] * 7
