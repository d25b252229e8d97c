"""A server of somebody's own: what it remembers is saved and can be read, and what goes wrong in it is one line."""

import itertools
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerMomentum, ServerOptimizer
from fl_lightning.errors import ConfigError
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.peers import Peers
from fl_lightning.federation.sickness import ServerError
from fl_lightning.methods.fedavg import FedAvg


class Remembers(Server):
    """Keeps a mean of the means."""

    rate = 0.5

    def __init__(self, initial):
        super().__init__(initial)
        self.velocity, self.options = {}, {"rate": 0.5}

    def open_round(self):
        super().open_round()
        self.seen, self.total = [], torch.zeros(2)

    def weight_of(self, message):
        self.seen.append(message.num_samples)
        self.total += 1
        return message.num_samples

    def close_round(self):
        super().close_round()
        self.velocity = {name: self.rate * tensor for name, tensor in self.message.weights.items()}


class Saves(Remembers):
    def state_dict(self):
        return {**super().state_dict(), "velocity": self.velocity}


class ForOneRound(Remembers):
    def close_round(self):
        Server.close_round(self)


class Sees(Server):
    """Has the last message of everybody."""

    sees_messages = True

    def __init__(self, initial):
        super().__init__(initial)
        self.last = {}

    def see(self, client, message):
        self.last[client] = message
        return message


class KeepsMessages(Sees):
    def state_dict(self):
        return {**super().state_dict(), "last": self.last}


class SavesSome(Remembers):
    """Saves what it counts, and not what it remembers."""

    def __init__(self, initial):
        super().__init__(initial)
        self.kept = self.seen_rounds = 0

    def close_round(self):
        super().close_round()
        self.kept += 1

    def state_dict(self):
        return {**super().state_dict(), "kept": self.kept}


class CountsTwice(SavesSome):
    """The second number has the value of the first one."""

    def close_round(self):
        Server.close_round(self)
        self.kept = self.seen_rounds = self.kept + 1


class SavesByOtherNames(Remembers):
    """In a part of its own, by other names, in other forms, and one by way of another function."""

    def __init__(self, initial):
        super().__init__(initial)
        self.kept, self.rng, self._mean, self.twice = 0, np.random.default_rng(0), np.zeros(2), 0

    def close_round(self):
        super().close_round()
        self.rng.random()
        self.kept, self._mean = self.kept + 1, self._mean + 1
        self.twice = 2 * self.kept

    def speeds(self):
        return {name: tensor.clone() for name, tensor in self.velocity.items()}

    def state_dict(self):
        own = {"kept": self.kept, "draws": self.rng.bit_generator.state, "mean": self._mean.tolist()}
        return {**super().state_dict(), "own": own, "speeds": self.speeds()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.twice = 2 * state["own"]["kept"]


class KeepsNothing(Server):
    def state_dict(self):
        pass


class HasNothing(Server):
    def close_round(self):
        super().close_round()
        self.message_for = {}.get


class GivesAway(Server):
    """Has something for each client once a round, or twice; when it is asked again, it has nothing."""

    times = 1

    def open_round(self):
        super().open_round()
        self.left = {client: [self.message] * self.times for client in range(4)}

    def message_for(self, client):
        return self.left[client].pop()


class GivesAwayTwice(GivesAway):
    times = 2


class TellsInPlace(Server):
    """Puts into the one message for all what is for one client."""

    def message_for(self, client):
        self.message.artifacts["you"] = torch.tensor(float(client))
        return self.message


class Distrusts(Server):
    """Lets some clients count for less than nothing."""

    def weight_of(self, message):
        return message.num_samples - 1000


class FailsAtOnce(Server):
    def setup(self, facts):
        raise KeyError("mine")


class Forgetful(FedAvg):
    def make_server(self, initial, facts):
        Server(initial)


class Heavy(ServerOptimizer):
    """A ball that rolls on, in an attribute."""

    def __init__(self):
        super().__init__(1.0)
        self.velocity = {}

    def direction(self, name, delta):
        self.velocity[name] = 0.5 * self.velocity.get(name, 0 * delta) + delta
        return self.velocity[name]


class HeavyOnTwo(ServerMomentum):
    """Counts its steps beside what is saved of it."""

    steps = 0

    def direction(self, name, delta):
        self.steps += 1
        return super().direction(name, delta)

    def state_dict(self):
        return {**super().state_dict(), "rate": self.lr}


class HeavyInArrays(Heavy):
    def state_dict(self):
        return {"velocity": {name: tensor.numpy() for name, tensor in self.velocity.items()}}


class Sluggish(Aggregator):
    """The mean of this round's vectors and of the last one's, in an attribute."""

    def start(self, trained):
        super().start(trained)
        self.last = None

    def combine(self, vectors):
        mean = vectors.points.double().mean(0)
        before, self.last = mean if self.last is None else self.last, mean
        return (before + mean) / 2


class SluggishInPart(Sluggish):
    def state_dict(self):
        return {"weight": 0.5}


class SluggishInNumbers(Sluggish):
    def state_dict(self):
        return {"last": [np.float64(value) for value in self.last[:2]]}


class Counting(Star):
    def state_dict(self):
        return {**super().state_dict(), "seen": {"rounds": np.ones(1)}}


def with_server(kind):
    return type("Own", (FedAvg,), {"make_server": lambda self, initial, facts: kind(initial)})


@pytest.mark.parametrize(("kind", "times"), [(Remembers, 1), (Saves, 0), (ForOneRound, 0), (Server, 0)])
def test_state_that_a_resumed_run_would_lack_is_said_once(kind, times, mlp, set_up_federation, capsys):
    set_up_federation(lambda: with_server(kind)(mlp()), rounds=3).run()
    said = "fl-lightning: Remembers.velocity changes from round to round and is not in Remembers.state_dict()"
    assert capsys.readouterr().err.count(said) == times


@pytest.mark.parametrize(
    ("kind", "lost"),
    [(SavesSome, "velocity"), (CountsTwice, "seen_rounds"), (Saves, ""), (SavesByOtherNames, "")],
)
def test_state_dict_of_ones_own_is_looked_through(kind, lost, mlp, set_up_federation, capsys):
    set_up_federation(lambda: with_server(kind)(mlp()), rounds=4).run()
    err, who = capsys.readouterr().err, kind.__name__
    said = f"{who}.{lost} changes from round to round and is not in {who}.state_dict(), so that a resumed run differs"
    assert err.count("changes from round to round") == err.count(f"{said}: add it to state_dict and") == bool(lost)


@dataclass
class Account:
    rounds: int = 0


class Slotted:
    __slots__ = ("rounds",)

    def __init__(self):
        self.rounds = 0


def counting():
    count = [0]

    def count_on():
        count[0] += 1

    return count_on


def grow(account):
    account.rounds += 1


def step(layer):
    layer.bias.data += 1


def descend(optimizer):
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()


# Somewhere to remember something, and how it is written there.
MEMORIES = {
    "array": (lambda: np.zeros(2), lambda own: own.__iadd__(1)),
    "array of objects": (lambda: np.array([[0], None], dtype=object), lambda own: own[0].append(1)),
    "deque": (lambda: deque([0, 0], maxlen=2), lambda own: own.append(own[-1] + 1)),
    "module": (lambda: torch.nn.Linear(1, 1), step),
    "optimizer": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9), descend),
    "dataclass": (Account, grow),
    "slots": (Slotted, grow),
    "in a dict": (lambda: {"a": [SimpleNamespace(rounds=0)]}, lambda own: grow(own["a"][0])),
    "closure": (counting, lambda own: own()),
    "bound method": (lambda: [].append, lambda own: None),  # of a list, which is no object of one's own
    "count": (itertools.count, next),
    "data": (lambda: torch.zeros(2**20 + 1), lambda own: own.add_(1)),
    "large array": (lambda: np.zeros(2**20 + 1, dtype=np.float16), lambda own: own.__iadd__(1)),
    "long list": (lambda: [0] * 5000, lambda own: own.append(0)),
    "complex": (lambda: torch.zeros(1, dtype=torch.complex64), lambda own: own.add_(1j)),
}
UNSEEN = {"bound method"}


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_a_server_writes_into_is_looked_at_too(kind, mlp, set_up_federation, capsys):
    make, write = MEMORIES[kind]

    class Own(Server):
        def __init__(self, initial):
            super().__init__(initial)
            self.memory, self.same = make(), make()
            self.me, self.nan = SimpleNamespace(server=self), torch.full((2,), torch.nan)

        def close_round(self):
            super().close_round()
            write(self.memory)

    set_up_federation(lambda: with_server(Own)(mlp()), rounds=3).run()
    said = "fl-lightning: Own.memory changes from round to round and is not in Own.state_dict()"
    err = capsys.readouterr().err
    assert err.count(said) == err.count("changes from round to round") == (kind not in UNSEEN)


class BeginsThere(Server):
    """Goes on from what went out, by other names."""

    def open_round(self):
        super().open_round()
        self.start, self.bias = self.message.weights, self.message.weights["model.head.bias"]


def test_what_a_servers_message_says_is_saved_with_it(mlp, set_up_federation, capsys):
    set_up_federation(lambda: with_server(BeginsThere)(mlp()), rounds=3).run()
    assert "changes from round to round" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "lost"),
    [
        ({"server_optimizer": Heavy()}, "Heavy.velocity"),
        ({"server_optimizer": HeavyOnTwo()}, "HeavyOnTwo.steps"),
        ({"aggregator": Sluggish()}, "Sluggish.last"),
        ({"aggregator": SluggishInPart()}, "SluggishInPart.last"),
    ],
)
def test_what_follows_or_guards_the_mean_is_held_to_the_same(own, lost, mlp, set_up_federation, capsys):
    set_up_federation(lambda: FedAvg(mlp()), rounds=3, **own).run()
    said = f"fl-lightning: {lost} changes from round to round and is not in {lost.partition('.')[0]}.state_dict()"
    assert capsys.readouterr().err.count(said) == 1


class Rolling(Peers):
    """Everybody hears one other, drawn by a generator that is its own."""

    def setup(self, template, facts):
        super().setup(template, facts)
        self.rng = np.random.default_rng(0)
        self.drawn = {}

    def connect(self, round, live):
        if round not in self.drawn:
            self.drawn[round] = int(self.rng.integers(1, len(live)))
        step = self.drawn[round] % len(live)
        return {client: {client: 0.5, live[place - step]: 0.5} for place, client in enumerate(live)}

    def sponsors(self, round, client, there):
        return [there[0]]


class RollingSaved(Rolling):
    def state_dict(self):
        return {**super().state_dict(), "rng": self.rng.bit_generator.state, "drawn": self.drawn}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.rng.bit_generator.state, self.drawn = state["rng"], state["drawn"]


@pytest.mark.parametrize(("kind", "times"), [(Rolling, 1), (RollingSaved, 0)])
def test_an_exchange_of_ones_own_is_held_to_the_same(kind, times, mlp, set_up_federation, capsys):
    """A resumed run began the generator anew, without a word."""
    set_up_federation(lambda: FedAvg(mlp()), rounds=3, exchange=kind()).run()
    err = capsys.readouterr().err
    assert (
        err.count("fl-lightning: Rolling.rng changes from round to round and is not in Rolling.state_dict()") == times
    )
    assert err.count("changes from round to round") == times


@pytest.mark.parametrize(
    ("own", "odd"),
    [
        ({"server_optimizer": HeavyInArrays()}, r"HeavyInArrays\..*\(velocity\.model\..* is numpy's ndarray\)"),
        ({"aggregator": SluggishInNumbers()}, r"SluggishInNumbers\..*\(last\.0 is numpy's float64\)"),
        ({"exchange": Counting()}, r"Counting\..*\(seen\.rounds is numpy's ndarray\)"),
    ],
)
def test_state_that_no_checkpoint_could_be_read_with_is_refused_before_it_is_written(
    own, odd, mlp, set_up_federation, tmp_path
):
    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, folder=tmp_path, **own)
    with pytest.raises(ServerError, match=odd):
        loop.run()
    assert not list(tmp_path.rglob("*.ckpt"))


def test_method_that_gives_no_server_is_refused(mlp, set_up_federation):
    with pytest.raises(ConfigError, match=r"method: Forgetful\.make_server\(\) gives NoneType, and must give a Server"):
        set_up_federation(lambda: Forgetful(mlp()))


class KeepsTheHead(Server):
    """Has no head to give after the first round."""

    def close_round(self):
        super().close_round()
        body = {name: own for name, own in self.message.weights.items() if "head" not in name}
        self.message = replace(self.message, weights=body)


def test_what_neither_comes_nor_is_kept_is_what_it_was_in_the_beginning(mlp, set_up_federation, outcome):
    """Once a client kept anything at all, it trained on from the head of the client before it."""
    runs = []
    for order in (list, lambda clients: clients[::-1]):
        loop = set_up_federation(lambda: with_server(KeepsTheHead)(mlp()), rounds=3, wire=[Quantize(16, True)])
        loop.fit_order = order
        loop.run()
        runs.append({key: message.weights for key, message in loop.diary.sent.items()})
    for key, weights in runs[0].items():
        assert all(torch.equal(own, runs[1][key][name]) for name, own in weights.items()), key


class TellsLater(KeepsTheHead):
    """Does so from the second round on, once it has been said that it leaves weights out."""

    def message_for(self, client):
        return TellsInPlace.message_for(self, client) if self.round > 1 else self.message


class HalvesInPlace(Server):
    """By a write that torch does not count."""

    def message_for(self, client):
        for weight in self.message.weights.values():
            weight.data.mul_(0.5)
        return self.message


@pytest.mark.parametrize(("server", "rounds"), [(TellsInPlace, 1), (TellsLater, 3), (HalvesInPlace, 1)])
def test_what_is_for_one_client_is_not_put_into_the_message_for_all(mlp, set_up_federation, server, rounds):
    """A filter on the way down heard it once, and told all what was the first one's."""
    loop = set_up_federation(lambda: with_server(server)(mlp()), rounds=rounds)
    loop.callbacks.clear()  # which asks for itself
    with pytest.raises(
        ServerError, match=rf"{server.__name__}\.message_for\(\) changes self\.message, which others hear, too"
    ):
        loop.run()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            KeepsMessages,
            r"2, the server: KeepsMessages\.state_dict\(\) must give plain containers of numbers, texts and",
        ),
        (KeepsNothing, r"2, the server: KeepsNothing\.state_dict\(\) must give plain containers"),
        (HasNothing, r"1, the server: HasNothing\.message_for\(\) gives NoneType, and must give a Message"),
        (Distrusts, r"1, client 0, message: ValueError: a client's weight in a mean must be a number >= 0, not -\d+"),
        (GivesAway, r"1, the server: IndexError: pop from empty list \(test_unsaved\.py:\d+\)"),
        (GivesAwayTwice, r"1, the server: IndexError: pop from empty list \(test_unsaved\.py:\d+\)"),
    ],
)
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_what_goes_wrong_in_a_server_between_rounds_is_said_of_it(kind, said, participation, mlp, set_up_federation):
    loop = set_up_federation(lambda: with_server(kind)(mlp()), rounds=2, participation=participation)
    with pytest.raises(ServerError, match=rf"^round {said}"):
        loop.run()


def test_error_as_a_server_or_a_method_is_set_up_is_said_with_its_place(mlp, set_up_federation):
    failing = type("Failing", (FedAvg,), {"setup": lambda self: 1 / 0})
    for make, said in (
        (with_server(FailsAtOnce), r"FailsAtOnce\.setup\(\) raises KeyError: 'mine'"),
        (failing, r"Failing\.setup\(\) raises ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(ConfigError, match=rf"^method: {said} \(test_unsaved\.py:\d+\)$"):
            set_up_federation(lambda make=make: make(mlp()))
