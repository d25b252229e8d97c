"""What runs on from one client's fit into the next one's is said, once; what a fit makes anew is not."""

import random

import numpy as np
import pytest
import torch

from fl_lightning.federation.wire import MessageFilter, WireFilter
from fl_lightning.methods.fedavg import FedAvg


class Own(FedAvg):
    def local_step(self, step):
        self.act()
        super().local_step(step)


class Counts(Own):
    seen = 0

    def act(self):
        self.seen += 1


class Remembers(Own):
    def setup(self):
        self.history = {"losses": []}

    def act(self):
        self.history["losses"].append(0.5)


class Draws(Own):
    kind = np.random.default_rng

    def setup(self):
        self.rng = type(self).kind(0)

    def act(self):
        self.rng.random()


class DrawsByPython(Draws):
    kind = random.Random


class DrawsByTorch(Draws):
    def setup(self):
        self.rng = torch.Generator().manual_seed(0)

    def act(self):
        torch.rand((), generator=self.rng)


class Begins(Counts):
    """Counts from the beginning of every fit."""

    def on_fit_start(self):
        self.seen = 0


class Decays(Own):
    rate = 1.0

    def act(self):
        self.rate *= 0.99


class StepsByItself(Own):
    """With an optimizer whose momentum nobody puts away."""

    momentum = 0.9

    def on_fit_start(self):
        if not hasattr(self, "own"):
            self.own = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=self.momentum)

    def act(self):
        self.own.zero_grad()
        next(self.model.parameters()).sum().backward()
        self.own.step()


class StepsPlainly(StepsByItself):
    momentum = 0.0


class StepsAnew(StepsByItself):
    def on_fit_start(self):
        self.own = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)


class PutsAside(Own):
    """Has a step's tensor at hand, and counts in a buffer."""

    def setup(self):
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def act(self):
        self.count += 1
        self.last = torch.rand(3)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Counts, "Counts.seen"),
        (Remembers, "Remembers.history"),
        (Draws, "Draws.rng"),
        (DrawsByPython, "DrawsByPython.rng"),
        (DrawsByTorch, "DrawsByTorch.rng"),
        (Decays, "Decays.rate"),
        (StepsByItself, "StepsByItself.own"),
        (StepsPlainly, ""),
        (StepsAnew, ""),
        (Begins, ""),
        (PutsAside, ""),
    ],
)
def test_attribute_that_no_client_of_its_own_has_is_said_once(kind, said, mlp, set_up_federation, capsys):
    set_up_federation(lambda: kind(mlp()), rounds=2).run()
    err = capsys.readouterr().err
    assert err.count("runs on from one client to the next") == bool(said)
    assert f"{said} runs on" in err or not said


class Owes(WireFilter):
    """What rounding leaves, for the next client."""

    def __init__(self):
        self.left = {}

    def apply(self, packet, memory):
        self.left = {name: packed.values - packed.values.round() for name, packed in packet.weights.items()}
        return packet


class Momentum(MessageFilter):
    """What it has averaged so far, of whom it may concern."""

    def __init__(self):
        self.mean = 0.0

    def change(self, message, received):
        self.mean = 0.9 * self.mean + 0.1 * float(next(iter(message.weights.values())).mean())
        return message


class RemembersEach(WireFilter):
    def apply(self, packet, memory):
        memory["left"] = torch.ones(2)
        return packet


@pytest.mark.parametrize(("kind", "times"), [(Owes, 1), (Momentum, 1), (RemembersEach, 0)])
def test_filter_that_remembers_clients_by_itself_is_said_once(kind, times, mlp, set_up_federation, capsys):
    set_up_federation(lambda: FedAvg(mlp()), rounds=1, wire=[kind()]).run()
    said = "runs on from one client to the next and is saved nowhere"
    err = capsys.readouterr().err
    assert err.count(said) == times
    assert f"{kind.__name__}.{'left' if kind is Owes else 'mean'} {said}" in err or not times
