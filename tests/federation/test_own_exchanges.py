"""Graphs that are a user's own: what they say of a round is looked at before it is taken."""

import math

import numpy as np
import pytest
import torch
from federation.test_peers import connected, pass_round

from fl_lightning.core.aggregation import TensorMean
from fl_lightning.core.checkup import Unsound
from fl_lightning.core.message import Message
from fl_lightning.core.mixing import MeanMixer
from fl_lightning.errors import ConfigError
from fl_lightning.federation.peers import Peers

CLIENTS = [0, 1, 2, 3]
SENT = dict.fromkeys(CLIENTS, 1.0)


class Own(Peers):
    """A graph as a function of who is there."""

    def __init__(self, connects, sponsors=lambda there: there) -> None:
        self.connects, self.asked = connects, sponsors

    def connect(self, round, live):
        return self.connects(live)

    def sponsors(self, round, client, there):
        return self.asked(there)


def beside(client, own, other, live):
    """A row of two: the client and the next one."""
    return {client: own, live[(live.index(client) + 1) % len(live)]: other}


@pytest.mark.parametrize(
    ("connects", "rule"),
    [
        (lambda live: None, r"a row to each of clients \[0, 1, 2, 3\], and to no other, got None"),
        (lambda live: {c: {c: 1.0} for c in live[1:]}, r"a row to each of clients .*, got \[1, 2, 3\]"),
        (lambda live: {c: {c: 1.0} for c in [*live, 7]}, r"and to no other, got \[0, 1, 2, 3, 7\]"),
        (lambda live: {c: list(live) for c in live}, r"client 0 senders with their shares, numbers >= 0"),
        (
            lambda live: {c: beside(c, 2.0, -1.0, live) for c in live},
            r"shares, numbers >= 0, got \{0: 2\.0, 1: -1\.0\}",
        ),
        (lambda live: {c: {c: math.nan} for c in live}, r"shares, numbers >= 0, got \{0: nan\}"),
        (lambda live: {c: {c: "all"} for c in live}, r"shares, numbers >= 0, got \{0: '?all'?\}"),
        (lambda live: {c: {o: 1 / 3 for o in live if o != c} for c in live}, r"client 0 itself and senders that"),
        (
            lambda live: {c: {c: 0.5, c + 4: 0.5} for c in live},
            r"that take part, of clients .*, got \{0: 0\.5, 4: 0\.5\}",
        ),
    ],
)
def test_graph_that_is_none_is_refused_before_anybody_trains(connects, rule):
    exchange = connected(Own(connects))
    with pytest.raises(ConfigError, match=rf"^federation\.exchange: Own: in round 1 connect\(\) must give .*{rule}"):
        exchange.open(1, CLIENTS)


def test_shares_that_are_no_mean_are_refused():
    exchange = connected(Own(lambda live: {c: beside(c, 1.0, 1.0, live) for c in live}), mixer=MeanMixer())
    with pytest.raises(ConfigError, match=r"^federation\.exchange: Own: in round 1 shares of client 0 must sum to 1"):
        pass_round(exchange, SENT)


def test_only_who_has_finished_something_is_asked_for_a_newcomer():
    exchange = connected(Own(lambda live: {c: {c: 1.0} for c in live}, sponsors=lambda there: [*there, 3]))
    pass_round(exchange, {0: 1.0, 1: 2.0})
    with pytest.raises(ConfigError, match=r"sponsors\(\) may name only who finished the round before, got \[3\]$"):
        exchange.open(2, CLIENTS)


class Adds(TensorMean):
    """Adds in place to the first that it hears."""

    total = None

    def add(self, value, num_samples):
        self.total = value if self.total is None else self.total.add_(value)

    def result(self, previous):
        return self.total


class Halves(MeanMixer):
    """Halves what the client itself has sent."""

    def mix(self, own, neighbours, previous):
        own.message.weights["w"].mul_(0.5)
        return super().mix(own, neighbours, previous)


@pytest.mark.parametrize(
    ("mixer", "what"),
    [(MeanMixer({"a": Adds}), "MeanMixer, .* changes the artifact a"), (Halves(), "Halves, .* weight w")],
)
def test_what_others_hear_too_is_changed_by_nobody(mixer, what):
    """Each receiver heard what those before it had made of it."""
    exchange = connected(Own(lambda live: {c: dict.fromkeys(live, 1 / len(live)) for c in live}), mixer=mixer)
    exchange.open(1, CLIENTS)
    for client in CLIENTS:
        exchange.post(client, Message({"w": torch.ones(1)}, {"a": torch.ones(2)}, 1))
    with pytest.raises(Unsound, match=what):
        exchange.close()


def test_numbers_of_any_kind_are_shares():
    half = np.float32(0.5)
    exchange = connected(Own(lambda live: {c: beside(c, half, half, live) for c in live}), mixer=MeanMixer())
    pass_round(exchange, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0})
    assert pass_round(exchange, SENT) == {0: 0.5, 1: 1.5, 2: 2.5, 3: 1.5}
