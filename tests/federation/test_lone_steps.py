"""Recorded steps of one client that descend several times, or find gradients by themselves."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from every_method import METHODS

from fl_lightning.core.facts import Phase
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.dispfl import DisPFL
from fl_lightning.methods.drdfl import DRDFL, Updates
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.pfedme import pFedMe
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models.mlp import MLP

FOUR = [[6, 6, 6, 6]] * 4


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


@pytest.fixture
def recorded(run_federation, assert_near, make_data):
    """A federation recorded, in double precision, if it is the same as it is."""

    def run(make, rounds=3, tolerance=1e-9, counts=FOUR, **options):
        options["trainer"] = {"precision": "64-true", **options.get("trainer", {})}
        options = {"local_epochs": 2, "optimizer": adam, **options}
        plain, found = (
            run_federation(make, rounds, data=make_data(counts), graph=own, **options) for own in (None, "auto")
        )
        assert_near(plain, found, tolerance)
        return found

    return run


def replays(loop):
    """How many steps are recorded."""
    fits = [fit for lanes in loop.cohort.lanes.values() for own in lanes.stacks for fit in own.graphs._fits.values()]
    return sum(len(own) for fit in fits for phase in fit._phases.values() for own in phase._recorded.values())


def shared_moments(model):
    return DRDFL(model, updates=Updates(personanet_moments="shared"))


def whole_gradients(model):
    return DRDFL(model, updates=Updates(grad_flow="full"))


def by_logits(model):
    return APFL(model, mixed="logits")


@pytest.mark.parametrize("make", [DRDFL, shared_moments, whole_gradients, APFL, by_logits, DisPFL, pFedMe])
def test_methods_of_several_descents_are_recorded_alone(make, recorded, mlp):
    loop = recorded(lambda: make(mlp()))
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])
    assert replays(loop) >= 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DRDFL", "descends twice on a mini-batch"),
        ("APFL", "takes gradients of its own"),
        ("pFedMe", "takes gradients of its own"),
        ("DisPFL", "changes a tensor that its gradient needs"),
    ],
)
def test_what_was_to_be_stacked_is_recorded_alone(name, why, recorded, mlp, capsys):
    loop = recorded(lambda: METHODS[name](mlp()), cohort=3)
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])
    assert replays(loop) >= 2
    line = f"federation.cohort: {name}'s clients are not stacked, each one's steps are recorded: its step {why}\n"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize("cohort", [None, 1, 4])
def test_what_was_asked_for_is_what_is_said_not_to_be_done(cohort, run_federation, mlp, capsys):
    """That they run one by one was said of who had never asked for anything else."""
    run_federation(lambda: FedAvg(mlp()), 1, cohort=cohort, graph="auto", optimizer=torch.optim.RMSprop)
    said = "federation.cohort: FedAvg runs one by one" if cohort == 4 else "federation.graph: FedAvg runs as it is"
    line = f"fl-lightning: {said}: its optimizer is RMSprop, and not SGD, Adam or AdamW\n"
    assert capsys.readouterr().err == line


def test_without_recordings_they_run_one_by_one(run_federation, mlp, capsys):
    loop = run_federation(lambda: DRDFL(mlp()), 1, cohort=3, optimizer=adam)
    assert loop.cohort.reason == "its step descends twice on a mini-batch"


class Twice(FedAvg):
    """Steps on its head, on its body where that leads, and on both along gradients of its own."""

    masks = False

    def phases(self):
        return [Phase("all", parts={"head": ("model.head",), "body": ("model.body",)})]

    def local_step(self, step):
        step.descend(step.values(step.forward()), "head")
        step.descend(step.values(step.forward()), "body")
        weights = list(self.model.parameters())
        out = step.forward()
        step.follow(step.gradients(out.logits.square().mean(), weights), weights)
        if self.masks:
            with torch.no_grad():
                weights[0].mul_(0.9)
        step.observe(out)


class Masked(Twice):
    """Changes its weights once it has stepped."""

    masks = True


class Sets(Twice):
    """Sets its weights' data before it descends, and afterwards."""

    def local_step(self, step):
        weight = self.model.head.weight
        weight.data = weight.data * 0.99
        super().local_step(step)
        weight.data = weight.data * 0.99


class Replaces(FedAvg):
    """Puts another buffer in its place, between two descents."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("own", torch.ones(4, dtype=torch.float64))

    def local_step(self, step):
        step.descend(step.values(step.forward()))
        self.own = self.own * 0.5 + self.model.head.bias.detach()
        out = step.forward()
        name = self.terms.cross_entropy.name
        step.descend({name: step.values(out)[name] + (out.logits * self.own).mean()})


@pytest.mark.parametrize("make", [Twice, Masked, Sets, Replaces])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_pass_sees_what_the_step_has_done_so_far(make, momentum, recorded, mlp, sgd):
    loop = recorded(lambda: make(mlp()), optimizer=sgd(0.01, momentum=momentum))
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])
    assert replays(loop) >= 2


def test_clipped_it_is_the_same(recorded, mlp):
    loop = recorded(lambda: Twice(mlp()), trainer={"gradient_clip_val": 0.1})
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])


class Follows(FedAvg):
    """Finds all its gradients by itself."""

    now = None

    def local_step(self, step):
        weights, out = list(self.parameters()), step.forward()
        values = step.values(out)
        step.log(values)
        step.follow(step.gradients(step.total(values), weights), weights, steps_now=self.now)


class Waits(Follows):
    """Says itself when to step."""

    now = False


class Elsewhere(FedAvg):
    """Follows gradients of something that is nobody's."""

    def local_step(self, step):
        own = torch.ones(3, dtype=torch.float64, requires_grad=True)
        step.descend(step.values(step.forward()))
        step.follow([torch.ones(3, dtype=torch.float64)], [own])


class Held:
    """Holds parameters where nobody looks."""

    def __init__(self, parameters):
        self.parameters = parameters


class Hides(FedAvg):
    """Changes its weights by way of such an object."""

    def on_fit_start(self):
        self.held = Held(list(self.model.parameters()))

    def local_step(self, step):
        super().local_step(step)
        with torch.no_grad():
            self.held.parameters[0].mul_(0.5)


class Reads(torch.autograd.Function):
    """Divides gradients by a number that it reads off them, where no operation shows it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + 100 * float(np.abs(gradient.numpy()).max()))


class Divides(FedAvg):
    """Has such a backward pass."""

    def local_step(self, step):
        out = step.forward()
        step.descend({**step.values(out), "cross_entropy": F.cross_entropy(Reads.apply(out.logits), out.y)})


REASONS = {
    Waits: "its step accumulates gradients by itself",
    Elsewhere: "its step follows gradients of tensors that its phase does not train",
    Hides: "its step reaches its tensors by an object that holds them",
}


def test_gradients_of_its_own_alone_are_recorded(recorded, mlp):
    loop = recorded(lambda: Follows(mlp()))
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])
    assert replays(loop) >= 2


@pytest.mark.parametrize("make", REASONS)
def test_what_cannot_be_done_in_rows_runs_as_it_is(make, recorded, mlp):
    assert recorded(lambda: make(mlp())).cohort.reason == REASONS[make]


def test_a_number_that_a_backward_pass_reads_is_no_constant(recorded, mlp, capsys):
    recorded(lambda: Divides(mlp()))
    assert "Divides runs as it is: its step reads a number off a tensor" in capsys.readouterr().err


def test_what_accumulates_mini_batches_its_own_way_runs_as_it_is(recorded, mlp):
    loop = recorded(lambda: Follows(mlp()), trainer={"accumulate_grad_batches": 2})
    assert loop.cohort.reason == "its step accumulates gradients by itself"
    loop = recorded(lambda: APFL(mlp(), mixed="logits"), trainer={"accumulate_grad_batches": 2})
    assert loop.cohort.reason == "its parts accumulate gradients by themselves"


@pytest.mark.parametrize("cohort", [None, 2])
def test_what_steps_keep_for_one_another_is_not_recorded(cohort, recorded, mlp):
    """A mini-batch that only waits for the next one changes no tensor; replayed, it would be forgotten."""
    even = [[10, 10, 10, 10]] * 6  # so that none waits in the end
    loop = recorded(lambda: PerFedAvg(mlp()), counts=even, cohort=cohort)
    assert loop.cohort.reason == "its step changes PerFedAvg._waiting"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("cohort", [None, 1, 3])
def test_what_follows_a_descent_knows_whether_optimizers_step(accumulate, cohort, recorded, mlp):
    options = {"trainer": {"accumulate_grad_batches": accumulate}, "cohort": cohort}
    loop = recorded(lambda: SCAFFOLD(mlp(), correction="step"), counts=[[10, 10, 10, 10]] * 4, **options)
    assert loop.cohort.reason == ""
    assert loop.cohort.apart


class Announces(FedAvg):
    """Steps shorter on mini-batches that are only accumulated."""

    def local_step(self, step):
        out = step.forward()
        factor = 1.0 if step.steps_now else 0.5
        step.descend({name: factor * value for name, value in step.values(out).items()})


@pytest.mark.parametrize("cohort", [None, 3])
def test_whether_optimizers_step_is_each_clients_own(cohort, recorded, mlp):
    uneven = [[10, 10, 10, 10], [8, 8, 8, 8], [6, 6, 6, 6], [6, 6, 6, 6]]
    loop = recorded(lambda: Announces(mlp()), counts=uneven, cohort=cohort, trainer={"accumulate_grad_batches": 2})
    assert loop.cohort.reason == ""


def test_several_architectures(recorded):
    def make(architecture):
        return DRDFL(MLP((1, 8, 8), 4, hidden=(6 + architecture, 5)))

    loop = recorded(make, architecture=[0, 1, 0, 1])
    assert (loop.cohort.reason, loop.cohort.unrecorded) == ("", [])
