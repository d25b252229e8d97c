"""What runs on from one client's fit into the next one's is said, once; what a fit makes anew is not."""

import copy
import random
from collections import deque
from functools import cached_property
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch

from fl_lightning.federation.wire import MessageFilter, WireFilter
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.running_on import RunningOn


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


class Averages(Own):
    """Keeps a running mean in a tensor that is nobody's buffer, and one of a step's own at hand."""

    def setup(self):
        self.center, self.fixed, self.last = torch.zeros(3), torch.ones(3), torch.zeros(2, 3)

    def act(self):
        self.center = 0.9 * self.center + 0.1
        self.last = torch.rand(4, 3)


class WritesInto(Averages):
    def act(self):
        self.center.mul_(0.9).add_(0.1)


class AveragesByClass(Own):
    """Keeps a mean of each class in a mapping."""

    def setup(self):
        self.centers = {label: torch.zeros(3) for label in range(2)}
        self.own = [self.model.head.weight, {"head": self.model.head}]

    def act(self):
        self.centers[1] = 0.9 * self.centers[1] + 0.1


class Hides(Own):
    """Has a teacher where nobody registers it."""

    def setup(self):
        self.teacher = [copy.deepcopy(self.model)]

    def act(self):
        with torch.no_grad():
            for own, other in zip(self.teacher[0].parameters(), self.model.parameters(), strict=True):
                own.lerp_(other, 0.1)


class HidesAnew(Hides):
    def on_fit_start(self):
        self.teacher = [copy.deepcopy(self.model)]


class HasALossAtHand(Own):
    """Its pass leaves a loss behind, as a mixture of experts does, from when it was tried out on."""

    def setup(self):
        self.aside = torch.zeros(())

    def act(self):
        self.aside = next(self.model.parameters()).square().sum() * torch.rand(())


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
        (Averages, "Averages.center"),
        (WritesInto, "WritesInto.center"),
        (AveragesByClass, "AveragesByClass.centers"),
        (Hides, "Hides.teacher"),
        (HidesAnew, ""),
        (HasALossAtHand, ""),
        (Begins, ""),
        (PutsAside, ""),
    ],
)
def test_attribute_that_no_client_of_its_own_has_is_said_once(kind, said, mlp, set_up_federation, capsys):
    set_up_federation(lambda: kind(mlp()), rounds=2).run()
    err = capsys.readouterr().err
    assert err.count("runs on from one client to the next") == bool(said)
    assert f"{said} runs on" in err or not said


class Account:
    """An object of one's own, with what need not be made again."""

    fits = 0

    @cached_property
    def scale(self):
        return np.arange(3)


# What a method remembers something in, and how it is written there.
MEMORIES = {
    "number of NumPy's": (lambda: np.int64(0), lambda own: own + 1),
    "array": (lambda: np.zeros(2), lambda own: own.__iadd__(1)),
    "large array": (lambda: np.zeros(2**20), lambda own: own.__iadd__(1)),
    "deque": (lambda: deque([0, 0], maxlen=2), lambda own: own.append(own[-1] + 1)),
    "namespace": (lambda: SimpleNamespace(fits=0), lambda own: vars(own).update(fits=own.fits + 1)),
    "object": (Account, lambda own: vars(own).update(fits=own.fits + 1)),
    "in a list": (lambda: [Account()], lambda own: vars(own[0]).update(fits=own[0].fits + 1)),
    "text": (str, lambda own: own + "."),
    "long list": (lambda: [0] * 5000, lambda own: own.append(0)),
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_whatever_a_method_writes_into_is_looked_at(kind, mlp, set_up_federation, capsys):
    make, write = MEMORIES[kind]

    class Writes(Own):
        def setup(self):
            self.memory, self.same = make(), make()

        def act(self):
            new = write(self.memory)
            self.memory = self.memory if new is None else new

    set_up_federation(lambda: Writes(mlp()), rounds=2).run()
    err = capsys.readouterr().err
    assert err.count("Writes.memory runs on") == err.count("runs on from one client to the next") == 1


class MakesOnce(Own):
    """Has what the first fit makes for all, and what leads back to all else."""

    mask = account = None

    def act(self):
        if self.mask is None:
            self.mask, self.account = np.eye(3), Account()
            self.near = SimpleNamespace(method=self, model=self.model, trainer=self.trainer_of(), layers=[self.model])
        self.account.scale  # noqa: B018
        self.one  # noqa: B018

    @cached_property
    def one(self):
        return 1.0

    def trainer_of(self):
        return L.Trainer(logger=False, enable_checkpointing=False)


def test_what_the_first_fit_makes_for_all_is_not_said(mlp, set_up_federation, capsys):
    set_up_federation(lambda: MakesOnce(mlp()), rounds=3).run()
    assert "runs on" not in capsys.readouterr().err


class Much(dict):
    """Counts how often, and how much of it, is looked at."""

    looks = values = 0

    def items(self):
        self.looks += 1
        for key, value in super().items():
            self.values += len(value)
            yield key, value


def test_of_much_only_some_is_looked_at_and_not_at_every_turn():
    much = Much({row: [row] * 100 for row in range(100)})
    running_on = RunningOn([SimpleNamespace(much=much), Account()])
    for _ in range(100):
        running_on.begin()
        running_on.end()
    assert 40 < much.looks < 80
    assert much.values <= 600 * much.looks


class Owes(WireFilter):
    """What rounding leaves, for the next client."""

    def __init__(self):
        self.left = {}

    def apply(self, packet, memory):
        self.left = {name: packed.values - packed.values.round() for name, packed in packet.weights.items()}
        return packet


class OwesAll(Owes):
    """What rounding leaves of what the server sends, for the next round."""

    ways = "down"


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


@pytest.mark.parametrize(("kind", "times"), [(Owes, 1), (OwesAll, 1), (Momentum, 1), (RemembersEach, 0)])
def test_filter_that_remembers_clients_by_itself_is_said_once(kind, times, mlp, set_up_federation, capsys):
    set_up_federation(lambda: FedAvg(mlp()), rounds=2, wire=[kind()]).run()
    said = "runs on from one client to the next and is saved nowhere"
    err = capsys.readouterr().err
    assert err.count(said) == times
    assert f"{kind.__name__}.{'mean' if kind is Momentum else 'left'} {said}" in err or not times
