"""Clients whose local steps run as one: the same numbers as one by one, or one line that says why not."""

import copy
import math
import random
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from every_method import METHODS
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning.core import stacked_optimizers, stacked_timing
from fl_lightning.core.facts import Phase
from fl_lightning.core.private_steps import RecordPrivacy
from fl_lightning.core.rows import Unstackable
from fl_lightning.core.stacked_optimizers import StackedOptimizer
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.workloads import Draw
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.models.wrapped import WrappedModel

# Why a method's clients run one by one. A method that is not here is stacked.
REFUSED = {
    "APFL": "its step takes gradients of its own",
    "DRDFL": "its step descends twice on a mini-batch",
    "DisPFL": "its step changes a tensor that its gradient needs",
    "FedCP": "its step draws random numbers",
    "FedCVAE": "its clients differ in FedCVAE.own_data",
    "FedFed": "its clients differ in FedFed.num_own",
    "FedGen": "its step draws random numbers",
    "FedPA": "its clients differ in terms.1.classes",
    "PerFedAvg": "its step changes PerFedAvg._waiting",
    "pFedMe": "its step takes gradients of its own",
}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


@pytest.fixture
def both(run_federation, assert_near):
    """A federation one by one and stacked, in double precision; returns the latter when the two are alike."""

    def run(make, rounds=2, tolerance=1e-9, **options):
        options["trainer"] = {"precision": "64-true", **options.get("trainer", {})}
        options.setdefault("optimizer", adam)
        plain, stacked = (run_federation(make, rounds, cohort=own, **copy.copy(options)) for own in (None, 4))
        assert stacked.cohort.reason == ""
        assert_near(plain, stacked, tolerance)
        return stacked

    return run


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_the_same_stacked_or_says_why_not(name, both, run_federation, mlp, capsys):
    if name not in REFUSED:
        both(lambda: METHODS[name](mlp()))
        return
    rounds = 2 if name == "FedGen" else 1  # whose first round is FedAvg's
    loop = run_federation(lambda: METHODS[name](mlp()), rounds, cohort=4, optimizer=adam)
    assert REFUSED[name] in loop.cohort.reason
    line = f"fl-lightning: federation.cohort: {name} runs one by one: {loop.cohort.reason}\n"
    assert capsys.readouterr().err.count(line) == 1


def test_a_correction_after_the_step_is_no_stacked_one(run_federation, mlp):
    loop = run_federation(lambda: SCAFFOLD(mlp(), "step"), 1, cohort=4)
    assert loop.cohort.reason == "its step changes a tensor that its gradient needs"


class Clamps(FedAvg):
    """Keeps its last bias small after every step."""

    def local_step(self, step):
        super().local_step(step)
        with torch.no_grad():
            self.model.head.bias.clamp_(-0.01, 0.01)


class Averages(FedAvg):
    """Keeps a running mean of its last bias."""

    def setup(self):
        self.register_buffer("mean", torch.zeros(4))

    def local_step(self, step):
        super().local_step(step)
        self.mean = self.mean.lerp(self.model.head.bias.detach(), 0.5)


class Sparse(FedAvg):
    """Holds its weights to a mask by references of its own."""

    def setup(self):
        self._pruned = [(self.model.head.weight, torch.eye(4, self.model.head.weight.shape[1]))]

    def local_step(self, step):
        super().local_step(step)
        with torch.no_grad():
            for weight, mask in self._pruned:
                weight.mul_(mask)


@pytest.mark.parametrize("kind", [Clamps, Averages, Sparse])
def test_what_a_step_does_after_its_descent_is_no_stacked_one(kind, run_federation, mlp, outcome, assert_identical):
    plain, stacked = (run_federation(lambda: kind(mlp()), 2, cohort=own) for own in (None, 4))
    assert stacked.cohort.reason.startswith("its step changes")  # after its descent, or what its gradient needs
    assert_identical(outcome(stacked), outcome(plain))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_heeded_one_by_one(hook, run_federation, mlp):
    def empties(parameter):
        parameter.grad.zero_()

    def make():
        method = FedAvg(mlp())
        getattr(method.model.head.bias, hook)(torch.zeros_like if hook == "register_hook" else empties)
        return method

    loop = run_federation(make, 1, cohort=4)
    assert loop.cohort.reason == "hooks are tied to its parameters' gradients"
    assert torch.equal(
        loop.diary.sent[1, 0].weights["model.head.bias"], loop.diary.received[1, 0].weights["model.head.bias"]
    )


def with_batch_norm():
    """A network whose batch norm keeps statistics; batches of one sample leave them in peace."""
    body = Body([nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())], nn.Linear(8, 5))
    return SplitModel(body, nn.Linear(5, 4), 5, 4, (1, 8, 8))


def sgd_with(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"local_epochs": 2, "lr_decay": 0.5, "trainer": {"gradient_clip_val": 0.5}},
        {"local_epochs": 2, "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}},
        {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
        {"local_steps": Draw(uniform=[2, 9]), "optimizer": sgd_with(momentum=0.9, weight_decay=0.01)},
        {"optimizer": sgd_with(momentum=0.9, nesterov=True), "participation": 0.75},
        {"optimizer": lambda own: torch.optim.AdamW(own, lr=0.01, weight_decay=0.1), "init": "own"},
        {"attack": Attack([1], kind="label_flip"), "steps_per_bundle": 2},
    ],
    ids=["epochs", "accumulates", "clips", "draws", "nesterov", "AdamW", "attack"],
)
def test_fits_of_all_kinds_are_the_same_stacked(options, both, mlp):
    both(lambda: FedRep(mlp()), **options)


def test_batch_norm_keeps_each_clients_statistics(both):
    loop = both(lambda: FedAvg(with_batch_norm()))
    assert loop.cohort.stacks


def test_clients_of_two_architectures_are_stacked_with_their_like(both, mlp):
    def make(architecture):
        return FedProto(mlp((8, 5) if architecture == 0 else (6, 5)))

    both(make, architecture=[0, 1, 0, 1])


def test_augmented_batches_are_the_clients_own(both, mlp, make_data):
    def noisy(arrays):
        arrays.x = (arrays.x * 40 + 128).clamp(0, 255).to(torch.uint8)
        arrays.mean, arrays.std = (0.5,), (0.25,)

    def data():
        return make_data(edit=noisy, augmentation=["RandomHorizontalFlip"])

    both(lambda: FedAvg(mlp()), data=data())


def test_numbers_of_single_precision_agree_and_the_same_cohort_repeats_every_bit(
    run_federation, outcome, assert_identical, mlp
):
    loops = [run_federation(lambda: FedCPD(mlp()), 3, cohort=own, optimizer=adam) for own in (None, 4, 4)]
    assert_identical(outcome(loops[1]), outcome(loops[2]))
    plain, stacked = (loop.exchange.global_message().weights for loop in loops[:2])
    assert max(float((plain[name] - stacked[name]).abs().max()) for name in plain) < 1e-5


def test_stacked_run_resumes_exactly(assert_resumes, mlp):
    straight = assert_resumes(lambda: FedCPD(mlp()), cohort=4, optimizer=adam)
    assert straight.cohort.stacks


def test_resumed_run_knows_that_it_came_out_not_to_be_stacked(set_up_federation, conv_net, tmp_path):
    first, second = (set_up_federation(lambda: FedAvg(conv_net()), folder=tmp_path, cohort=4) for _ in range(2))
    first.advance()
    assert second.cohort.stacks
    second.load_state_dict(second.checkpoints.load(second.checkpoints.find("auto")))
    assert second.cohort.reason == first.cohort.reason == "its step draws random numbers"


def test_sick_client_leaves_its_neighbours_alone(set_up_federation, mlp, capsys):
    def losses(**options):
        loop = set_up_federation(lambda: FedRep(mlp()), 1, optimizer=adam, **options)
        loop.data.store.x[loop.data.clients[1].train[0]] = math.nan
        loop.run()
        return {client: report.losses["loss"] for (_, client), report in loop.diary.reports.items()}

    plain, stacked = (losses(cohort=own, on_client_error="skip") for own in (None, 4))
    assert stacked == pytest.approx(plain)
    assert set(stacked) == {0, 2, 3}
    assert capsys.readouterr().err.count("client 1, fit: the loss's term cross_entropy is nan at step") == 2


class Spoils(nn.Module):
    """Looks at training samples, and cannot do with one."""

    def forward(self, x):
        if (x > 100).any():
            raise KeyError("bright")
        return x


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 4, "graph": "auto"}])
def test_client_whose_data_are_no_good_takes_nobody_else_apart(options, set_up_federation, make_data, mlp, assert_near):
    """The method was said to run one by one from then on, for what was one sample's fault."""

    def run(**own):
        data = make_data(augmentation=[Spoils()])
        loop = set_up_federation(
            lambda: FedRep(mlp()), 3, data, adam, on_client_error="skip", trainer={"precision": "64-true"}, **own
        )
        sample = loop.data.clients[1].train[0]
        before = loop.data.store.x[sample].clone()
        loop.data.store.x[sample] = 1000.0
        loop.advance()
        assert loop.diary.rows[0]["skipped"] == 1
        loop.data.store.x[sample] = before
        loop.run()
        return loop

    plain, stacked = run(), run(**options)
    assert stacked.cohort.reason == ""
    assert not stacked.cohort.apart
    assert_near(plain, stacked, 1e-9)


class Fails(FedAvg):
    """Its step cannot be made with others'."""

    def local_step(self, step):
        out = step.forward()
        if torch._C._functorch.is_functorch_wrapped_tensor(out.z):
            raise KeyError("together")
        step.descend(step.values(out))


def test_what_goes_wrong_with_nobody_alone_is_named_with_its_place(run_federation, mlp, capsys):
    loop = run_federation(lambda: Fails(mlp()), cohort=4, on_client_error="skip")
    assert [row["skipped"] for row in loop.diary.rows] == [0, 0, 0]
    said = "Fails runs one by one: KeyError: 'together' (test_cohort.py:"
    assert capsys.readouterr().err.count(said) == 1


class Freezes(FedAvg):
    """Freezes its body for a moment as a fit begins, in which a client falls sick."""

    def on_fit_start(self):
        super().on_fit_start()
        self.model.requires_grad_(False)
        if (self.facts.round, self.facts.client) == (2, 1):
            raise RuntimeError("sick at once")
        self.model.requires_grad_(True)


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 4, "graph": "auto"}, {"graph": "auto"}])
def test_client_that_falls_sick_as_its_fit_begins_leaves_nothing_frozen(options, run_federation, mlp, assert_near):
    """Those after it trained without what it had frozen, without a word."""
    plain, other = (
        run_federation(lambda: Freezes(mlp()), on_client_error="skip", trainer={"precision": "64-true"}, **own)
        for own in ({}, options)
    )
    assert other.cohort.stacks
    assert [row["skipped"] for row in other.diary.rows] == [0, 1, 0]
    assert_near(plain, other, 1e-9)


TYPES = set()


class Similar(Term):
    """Multiplies embeddings with each other, and takes down in which type."""

    def forward(self, host, out):
        product = out.z @ out.z.T
        TYPES.add(product.dtype)
        return product.mean()


@pytest.mark.parametrize("options", [{"cohort": 4}, {"cohort": 1, "graph": True}])
def test_losses_are_as_wide_stacked_as_alone(options, run_federation, mlp):
    TYPES.clear()
    loop = run_federation(
        lambda: FedAvg(mlp(), extra_terms=[Similar(0.1)]), 1, trainer={"precision": "bf16-mixed"}, **options
    )
    assert loop.cohort.reason == ""
    assert {torch.float32} == TYPES


@pytest.mark.parametrize("make", [FedAvg, FedCPD])
def test_mixed_precision_rounds_no_more_stacked_than_alone(make, run_federation, mlp):
    exact, plain, stacked = (
        run_federation(lambda: make(mlp()), 2, cohort=own, trainer={"precision": kind})
        for own, kind in ((None, "64-true"), (None, "bf16-mixed"), (4, "bf16-mixed"))
    )
    assert stacked.cohort.reason == ""

    def loss(loop):
        return sum(report.losses["loss"] for report in loop.diary.reports.values())

    assert loss(plain) != pytest.approx(loss(exact), rel=1e-6)
    assert loss(stacked) != pytest.approx(loss(exact), rel=1e-6)
    assert loss(stacked) == pytest.approx(loss(exact), rel=1e-2)


# --- what runs one by one ----------------------------------------


class Watching(Callback):
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"exchange": Ring("sequential")}, "clients are fitted in turn, each hears the one before"),
        ({"trainer": {"callbacks": [Watching()]}}, "trainer.callbacks (Watching) follow single fits"),
        ({"trainer": {"max_steps": 2}}, "trainer.max_steps is for single fits"),
        ({"trainer": {"precision": "bf16-true"}}, "trainer.precision is for single fits"),
        ({"optimizer": torch.optim.Adadelta}, "its optimizer is Adadelta, and not SGD, Adam or AdamW"),
        ({"optimizer": lambda own: torch.optim.Adam(own, amsgrad=True)}, "its optimizer has amsgrad"),
    ],
    ids=["in turn", "callbacks", "max_steps", "precision", "optimizer", "option"],
)
def test_what_a_stack_cannot_do_runs_one_by_one(options, reason, run_federation, mlp, outcome, assert_identical):
    plain, other = (run_federation(lambda: FedAvg(mlp()), 1, cohort=own, **options) for own in (None, 2))
    assert reason in other.cohort.reason
    assert_identical(outcome(plain), outcome(other))


def test_record_privacy_runs_one_by_one(set_up_federation, mlp):
    pytest.importorskip("opacus")
    loop = set_up_federation(lambda: FedAvg(mlp()), 1, cohort=4, record_privacy=RecordPrivacy())
    assert loop.cohort.reason == "federation.record_privacy looks at each sample by itself"


class Counting(Term):
    """Counts how often it was called."""

    calls = 0

    def forward(self, host, out):
        self.calls += 1
        return out.z.square().mean()


class Filtering(Term):
    """Sees only parameters that say that they are trained: none do under `vmap`."""

    def forward(self, host, out):
        return sum((p.square().sum() for p in host.parameters() if p.requires_grad), torch.zeros(()))


class Drawing(Term):
    """Draws noise in every step."""

    def forward(self, host, out):
        return (out.z * torch.randn(out.z.shape)).mean()


class Deciding(Term):
    """Looks at a number in every step."""

    def forward(self, host, out):
        return out.z.mean() if out.z.sum() > 0 else -out.z.mean()


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        (Counting, "its step changes terms.1.calls"),
        (Filtering, "a step of phase 'all' gives other values stacked than alone"),
        (Drawing, "its step draws random numbers"),
        (Deciding, "its step decides by a tensor's value"),
    ],
)
def test_terms_that_a_stack_would_get_wrong_are_noticed(term, reason, run_federation, mlp, outcome, assert_identical):
    def make():
        return FedAvg(mlp(), extra_terms=[term()])

    plain, other = (run_federation(make, 2, cohort=own, optimizer=adam) for own in (None, 4))
    assert reason in other.cohort.reason
    assert_identical(outcome(plain), outcome(other))


def test_resolved_configuration_is_stacked_and_gathers_bundles(trial):
    """It names every flag of the Trainer, most of them with Lightning's default."""
    built = BuiltExperiment(trial(name="cohort", method="FedAvg", federation__cohort=4).config)
    built.setup(in_memory=True)
    runner = built.loop.runner
    assert (built.loop.cohort.reason, runner.steps_per_bundle, runner.fits.shortens) == ("", 16, True)


# --- choosing ----------------------------------------------------


def test_auto_says_what_it_measured(run_federation, mlp, capsys):
    loop = run_federation(lambda: FedCPD(mlp()), 2, cohort="auto", optimizer=adam)
    said = [line for line in capsys.readouterr().err.splitlines() if "federation.cohort" in line]
    assert len(said) == 1
    assert ("a client, one by one" in said[0]) if loop.cohort.stacks else ("stacked" in said[0])


def test_auto_counts_no_step_of_its_measurements(run_federation, mlp):
    sent = [run_federation(lambda: FedNova(mlp()), 1, cohort=own).diary.sent for own in (None, "auto")]
    for client in range(4):
        one, other = (own[1, client].artifacts["normaliser"] for own in sent)
        assert torch.equal(one, other)


def test_auto_measures_once_somebody_has_something_to_train(run_federation, mlp, capsys):
    """A first cohort of none ended the run: nothing was there to be measured."""

    class Rests(FedAvg):
        def phases(self):
            return [Phase("local", epochs=0 if self.facts.round == 1 else None)]

    run_federation(lambda: Rests(mlp()), 1, cohort="auto")
    assert "federation.cohort" not in capsys.readouterr().err
    run_federation(lambda: Rests(mlp()), 2, cohort="auto")
    assert capsys.readouterr().err.count("federation.cohort") == 1


@pytest.mark.parametrize("cohort", [0, -1, "some"])
def test_bad_cohort_is_refused(cohort):
    with pytest.raises(ConfigError, match=r"federation.cohort: must be auto or a number >= 1"):
        Federation(cohort=cohort)


# --- optimizers --------------------------------------------------

KINDS = {
    "SGD": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda own: torch.optim.Adam(own, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("pieces", [[7], [3, 4]])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_step_as_torch_steps_them_alone(kind, recorded, pieces, monkeypatch):
    """Three clients, of which the last one sits out every second step, so that counts of steps differ."""
    monkeypatch.setattr(stacked_optimizers, "_MANY", 1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 7, generator=generator)
    gradients = torch.randn(6, 3, 7, generator=generator)
    alone = [nn.Parameter(row.clone()) for row in start]
    optimizers = [KINDS[kind]([parameter]) for parameter in alone]
    flat = start.clone()
    stacked = StackedOptimizer(optimizers[0], 0, [(0, 7)], flat, recorded)
    for step, own in enumerate(gradients):
        rows = [0, 1, 2] if step % 2 else [1, 0]
        for row in rows:
            alone[row].grad = own[row].clone()
            optimizers[row].step()
        stacked.step(torch.tensor(rows), rows, [own[rows].split(pieces, 1)])
    torch.testing.assert_close(flat, torch.stack([parameter.detach() for parameter in alone]), rtol=1e-6, atol=1e-7)


def test_optimizer_of_another_kind_is_refused():
    template = torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])
    with pytest.raises(Unstackable, match="its optimizer is LBFGS"):
        StackedOptimizer(template, 0, [(0, 2)], torch.zeros(1, 2))


def test_hooks_around_a_fit_that_an_instance_has_are_heeded(both, mlp):
    def fills(method, value):
        def fill():
            with torch.no_grad():
                method.model.head.bias.fill_(value)

        return fill

    def make():
        method = FedAvg(mlp())
        method.on_fit_start, method.on_fit_end = fills(method, 7.0), fills(method, 3.0)
        return method

    loop = both(make, 1)
    assert torch.equal(loop.diary.sent[1, 0].weights["model.head.bias"], torch.full((4,), 3.0, dtype=torch.float64))


class FreezesSome(FedAvg):
    """Half of the clients freeze their bodies."""

    def receive(self, message, data):
        super().receive(message, data)
        self.model.body.requires_grad_(self.facts.client % 2 == 0)


class RestsSome(FedAvg):
    """The batch norm of half of the clients rests."""

    def phases(self):
        return [Phase("all", resting=("model.body",) if self.facts.client % 2 else ())]


class EvaluatesSome(FedAvg):
    """The bodies of half of the clients are in eval mode in their fits."""

    def on_fit_start(self):
        self.model.body.train(self.facts.client % 2 == 0)


class FreezesLate(FedAvg):
    """What is frozen when the optimizers are made already."""

    def on_fit_start(self):
        self.model.body.requires_grad_(False)


@pytest.mark.parametrize("kind", [FreezesSome, RestsSome, EvaluatesSome, FreezesLate])
def test_clients_whose_phases_or_modes_differ_keep_their_own(kind, both):
    both(lambda: kind(with_batch_norm()))


class Padded(nn.Module):
    """Numbers of words from pixels, embedded with a padding row: by a layer, or by a function."""

    def __init__(self, by_layer):
        super().__init__()
        self.by_layer = by_layer
        self.table = nn.Embedding(3, 8, padding_idx=0)
        if not by_layer:
            self.table.padding_idx = None
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        words = (x.flatten(1) > 0).long() + (x.flatten(1) > 1).long()
        found = self.table(words) if self.by_layer else nn.functional.embedding(words, self.table.weight, 0)
        return self.fc(found.mean(1))


@pytest.mark.parametrize(
    ("by_layer", "reason"),
    [
        (True, "torch does not stack embeddings with padding_idx as they are alone"),
        (False, "a step of phase 'all' gives other values stacked than alone"),
    ],
)
def test_a_padding_row_is_trained_by_nobody(by_layer, reason, run_federation, outcome, assert_identical):
    """Stacked, torch lets the first client alone leave it out, with which the comparison of one client ended."""
    make = lambda: FedAvg(WrappedModel((1, 8, 8), 4, Padded(by_layer), "fc"))  # noqa: E731
    plain, stacked = (run_federation(make, 2, cohort=own) for own in (None, 4))
    assert stacked.cohort.reason == reason
    assert_identical(outcome(stacked), outcome(plain))
    weights = stacked.exchange.global_message().weights
    (table,) = (own for name, own in weights.items() if name.endswith("table.weight"))
    assert table[0].abs().max() == 0
    assert table[1].abs().max() > 0


class CountsHere(FedAvg):
    """Counts steps in a tensor that is no buffer."""

    def setup(self):
        self.count = torch.zeros(1)

    def local_step(self, step):
        super().local_step(step)
        self.count.add_(1)


class CountsThere(FedAvg):
    """Counts steps in an object of its own."""

    def setup(self):
        self.own = SimpleNamespace(count=0)

    def local_step(self, step):
        super().local_step(step)
        self.own.count += 1


class DrawsThere(FedAvg):
    """Triples the loss of some mini-batches, by a generator in an object of its own."""

    def setup(self):
        self.own = SimpleNamespace(random=np.random.default_rng(0))

    def local_step(self, step):
        out = step.forward()
        factor = 3 if self.own.random.random() < 0.01 else 1  # in none of the first steps, which are compared
        step.descend({name: factor * value for name, value in step.values(out).items()})


class KeepsThere(FedAvg):
    """Keeps its last embeddings in an object of its own, and sends what they came to."""

    def setup(self):
        self.own = SimpleNamespace(mean=torch.zeros(self.model.embedding_size))
        self.register_buffer("mean_z", torch.zeros(self.model.embedding_size))

    def local_step(self, step):
        super().local_step(step)
        self.own.mean = step.forward().z.detach().mean(0)

    def on_fit_end(self):
        self.mean_z.copy_(self.own.mean)


class WritesThere(FedAvg):
    """Lets a tensor in an object of its own fall from step to step."""

    def setup(self):
        self.own = SimpleNamespace(rate=torch.ones(1))

    def local_step(self, step):
        values = step.values(step.forward())
        step.descend({name: value * self.own.rate.sum() for name, value in values.items()})
        self.own.rate.mul_(0.999)


class SetsOnALayer(FedAvg):
    """Lets a number of one of torch's layers fall from step to step."""

    def setup(self):
        self.model.body.neck.append(nn.Softplus())

    def local_step(self, step):
        super().local_step(step)
        self.model.body.neck[-1].beta *= 0.999


class SetsBelowALayer(SetsOnALayer):
    """The same of a number in a mapping that such a layer has."""

    def setup(self):
        self.model.head.rates = {"rate": 1.0}

    def local_step(self, step):
        FedAvg.local_step(self, step)
        self.model.head.rates["rate"] *= 0.999


class Iterates(FedAvg):
    """Has a number for each step."""

    def setup(self):
        self.rates = (0.999**step for step in range(1000))

    def local_step(self, step):
        values, rate = step.values(step.forward()), next(self.rates)
        step.descend({name: value * rate for name, value in values.items()})


class IteratesThere(FedAvg):
    """The same in an object of its own."""

    def setup(self):
        self.own = SimpleNamespace(rates=iter([0.999**step for step in range(1000)]))

    def local_step(self, step):
        values, rate = step.values(step.forward()), next(self.own.rates)
        step.descend({name: value * rate for name, value in values.items()})


class CountsInBytes(FedAvg):
    """Counts steps in bytes."""

    def setup(self):
        self.count = bytearray(1)

    def local_step(self, step):
        super().local_step(step)
        self.count[0] += 1


class Remembers(FedAvg):
    """Has its last step's embeddings where there was nothing before, and sends as many samples as they are of."""

    def setup(self):
        self.seen = None

    def local_step(self, step):
        super().local_step(step)
        self.seen = step.forward().z.detach()

    def send(self, data):
        sent = super().send(data)
        return sent if self.seen is None else replace(sent, num_samples=len(self.seen))


class RemembersByClass(Remembers):
    """The same, where the class says that there is nothing."""

    seen = None

    def setup(self):
        """Leave it at that."""


class KeepsForTheEnd(FedAvg):
    """Reads after its fit what its last step has made, which no attribute was there for."""

    def setup(self):
        self.register_buffer("mean_z", torch.zeros(self.model.embedding_size))

    def local_step(self, step):
        super().local_step(step)
        self.last = step.forward().z.detach().mean(0)

    def on_fit_end(self):
        if hasattr(self, "last"):
            self.mean_z.copy_(self.last)
            del self.last


class KeepsForAHelper(KeepsForTheEnd):
    """The same, where the end leaves it to a function of its own, which names it in a text."""

    def on_fit_end(self):
        self.take_down()

    def take_down(self):
        own = getattr(self, "last", None)
        if own is not None:
            self.mean_z.copy_(own)


def _take_down(method):
    if hasattr(method, "last"):
        method.mean_z.copy_(method.last)


class KeepsForAFunction(KeepsForTheEnd):
    """The same, where a function beside the class reads it."""

    def on_fit_end(self):
        _take_down(self)


class KeepsForAProperty(KeepsForTheEnd):
    """The same, where a cached property does."""

    def on_fit_end(self):
        self.mean_z.copy_(self.kept)
        del self.kept

    @cached_property
    def kept(self):
        return self.last if hasattr(self, "last") else torch.zeros_like(self.mean_z)


class Centres(nn.Module):
    """Takes off in evaluations what it has seen last in training."""

    def forward(self, x):
        if self.training:
            self.centre = x.detach().mean(0)
        return x - self.centre if hasattr(self, "centre") and not self.training else x


class HasACentre(FedAvg):
    """Has one of these below its network."""

    def setup(self):
        self.model.body.neck.append(Centres())


class HasTheLast(FedAvg):
    """Each step is pulled to the one before, whose embeddings there are none of in the first."""

    def setup(self):
        self.last = None

    def losses(self):
        return {"pull": 0.1}

    def local_step(self, step):
        z = (out := step.forward()).z.mean(0)
        step.descend({**step.values(out), "pull": 0 * z.sum() if self.last is None else (z - self.last).square().sum()})
        self.last = z.detach()


class HasTheLastByClass(HasTheLast):
    """The same, where the class has it, in a mapping of all its objects."""

    by_class: ClassVar = {}

    def setup(self):
        """Leave it at that."""

    @property
    def last(self):
        return self.by_class.get("last")

    @last.setter
    def last(self, z):
        self.by_class["last"] = z


class WritesASet(FedAvg):
    """Weighs its loss by the classes that it has, which it keeps in one set."""

    def setup(self):
        self.own = set()

    def receive(self, message, data):
        super().receive(message, data)
        self.own.clear()
        self.own.update(data.class_counts.nonzero().flatten().tolist())

    def local_step(self, step):
        values = step.values(step.forward())
        step.descend({name: value * sum(self.own) for name, value in values.items()})


class Late(FedAvg):
    """Has a buffer from its first receive on."""

    def setup(self):
        self.register_buffer("anchor", None, persistent=False)

    def receive(self, message, data):
        super().receive(message, data)
        self.anchor = torch.tensor(float(self.facts.client))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsHere, "its step changes CountsHere.count"),
        (CountsThere, "its step changes CountsThere.own"),
        (DrawsThere, "its step changes DrawsThere.own"),
        (KeepsThere, "its step changes KeepsThere.own"),
        (WritesThere, "its step changes WritesThere.own"),
        (SetsOnALayer, "its step changes beta of one of torch's layers"),
        (SetsBelowALayer, "its step changes rates of one of torch's layers"),
        (Iterates, "Iterates.rates is an iterator"),
        (IteratesThere, "its step changes IteratesThere.own"),
        (CountsInBytes, "its step changes CountsInBytes.count"),
        (Remembers, "its step changes Remembers.seen"),
        (RemembersByClass, "its step changes RemembersByClass.seen"),
        (KeepsForTheEnd, "its step changes KeepsForTheEnd.last"),
        (KeepsForAHelper, "its step changes KeepsForAHelper.last"),
        (KeepsForAFunction, "its step changes KeepsForAFunction.last"),
        (KeepsForAProperty, "its step changes KeepsForAProperty.last"),
        (HasACentre, "its step changes model.body.neck.2.centre"),
        (HasTheLast, "its step changes HasTheLast.last"),  # where the second step reads a tensor of the first's `vmap`
        (HasTheLastByClass, "its step changes HasTheLastByClass.by_class"),
        (WritesASet, "its clients differ in WritesASet.own"),
        (Late, "it gets buffers in a round, which it must have from the beginning"),
    ],
)
def test_what_no_client_has_for_itself_is_not_stacked(kind, reason, run_federation, mlp):
    assert run_federation(lambda: kind(mlp()), 1, cohort=4).cohort.reason == reason


class Registry(dict):
    """A mapping that knows no copies."""

    def __copy__(self):
        raise TypeError("one of a kind")


def test_a_mapping_of_a_class_that_knows_no_copies_is_looked_at_all_the_same(run_federation, mlp):
    """The run ended in its words; so it did where one holds itself."""
    around = {}
    around["all"] = around
    kind = type("IsRegistered", (FedAvg,), {"all_of_us": Registry(here="FedAvg"), "around": around})
    assert run_federation(lambda: kind(mlp()), 1, cohort=4).cohort.reason == ""


@pytest.mark.parametrize("cohort", [None, 4])
def test_what_a_step_made_is_there_at_the_end_of_the_fit(cohort, run_federation, mlp):
    method = run_federation(lambda: KeepsForTheEnd(mlp()), 1, cohort=cohort).runner.modules[0].method
    assert method.mean_z.abs().sum() > 0


class KeepsForObserving(FedAvg):
    """Reads what a step has made in that step alone."""

    def local_step(self, step):
        self.out = step.forward()
        step.descend(step.values(self.out))
        self.out = self.out.z.detach()


def test_what_a_step_makes_for_itself_is_stacked(both, mlp):
    both(lambda: KeepsForObserving(mlp()), 1)


def test_what_was_checked_is_not_checked_again_at_another_rate(run_federation, mlp):
    loop = run_federation(lambda: FedRep(mlp()), 3, cohort=4, lr_decay=0.9)
    lanes = loop.cohort.lanes.values()
    assert [len(stack._checked) for own in lanes for stack in own.stacks] == [2]


class Refers(FedAvg):
    """Has its head's bias in an object of its own."""

    def setup(self):
        self.own = SimpleNamespace(bias=self.model.head.bias)


class PassesAgain(FedAvg):
    """Shows its terms a second pass, after the descent."""

    def local_step(self, step):
        super().local_step(step)
        step.observe(step.forward())


def test_a_pass_after_the_descent_is_stacked(both, mlp):
    both(lambda: PassesAgain(mlp()))


def test_an_object_may_refer_to_parameters(both, mlp):
    both(lambda: Refers(mlp()))


class Idle(FedAvg):
    """Does nothing."""

    def local_step(self, step):
        step.forward()


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_step_that_trains_nothing_is_refused_stacked_as_alone(cohort, run_federation, mlp):
    with pytest.raises(ConfigError, match=r"Idle\.local_step\(\) trains nothing"):
        run_federation(lambda: Idle(mlp()), 1, cohort=cohort)


NARROW = []


class Passes(nn.Module):
    """Takes down whether passes are made under mixed precision."""

    def forward(self, x):
        NARROW.append(torch.is_autocast_enabled("cpu"))
        return x


def test_auto_times_the_lone_step_under_mixed_precision_as_it_is_made(run_federation, mlp, monkeypatch):
    timed, found = stacked_timing._timed, []

    def times(module, call):
        NARROW.clear()
        seconds = timed(module, call)
        found.extend(NARROW)
        return seconds

    def make():
        method = FedAvg(mlp())
        method.model.body.neck.append(Passes())
        return method

    monkeypatch.setattr(stacked_timing, "_timed", times)
    run_federation(make, 1, cohort="auto", trainer={"precision": "bf16-mixed"})
    assert found
    assert all(found)


class TwoKinds(FedNova):
    """Of clients that are not stacked with one another."""

    def receive(self, message, data):
        super().receive(message, data)
        self.kind = int(self.facts.client > 1)


def test_auto_counts_no_step_of_its_measurements_to_other_kinds(run_federation, mlp, make_data):
    data = make_data([[4, 4, 4, 4]] * 5)
    sent = [run_federation(lambda: TwoKinds(mlp()), 1, data=data, cohort=own).diary.sent for own in (None, "auto")]
    steps = [[own[1, client].artifacts["normaliser"].item() for client in range(5)] for own in sent]
    assert steps[0] == steps[1]


SETTING = {"lr": 0.1}


class Sets(FederationCallback):
    """Has a schedule of its own."""

    def on_round_start(self, loop, round, participants):
        SETTING["lr"] = 0.1 / round


class Begins(FedAvg):
    """Takes down what is counted as its fits begin."""

    counts = set()  # noqa: RUF012

    def on_fit_start(self):
        self.counts.add((self.fit.num_steps, self.fit.num_batches, self.fit.epoch))


def test_every_round_makes_optimizers_of_its_own(both, mlp):
    both(lambda: Begins(mlp()), optimizer=lambda own: torch.optim.SGD(own, **SETTING), callbacks=[Sets()])
    assert Begins.counts == {(0, 0, 0)}


class Blurs(FedAvg):
    """Draws from the second epoch on."""

    draws = staticmethod(np.random.rand)

    def local_step(self, step):
        values = step.values(step.forward())
        step.descend({name: value * (self.draws() if step.epoch else 1) for name, value in values.items()})


class BlursOtherwise(Blurs):
    """Draws from Python's stream."""

    draws = staticmethod(random.random)


@pytest.mark.parametrize("kind", [Blurs, BlursOtherwise])
def test_who_draws_late_is_fitted_by_itself(kind, run_federation, mlp, outcome, assert_identical, monkeypatch):
    monkeypatch.setattr("fl_lightning.seeding.CHECKS", False)  # whose library draws from Python's stream
    plain, stacked = (run_federation(lambda: kind(mlp()), 1, cohort=own, local_epochs=2) for own in (None, 4))
    assert stacked.cohort.reason == "its step draws random numbers"
    assert_identical(outcome(stacked), outcome(plain))


class Weighs(FedAvg):
    """Of two clients each the loss of embeddings weighs the same; the weight lies in a buffer."""

    def setup(self):
        self.register_buffer("own", torch.zeros(()), persistent=False)

    def receive(self, message, data):
        super().receive(message, data)
        self.own.fill_(0.1 * (1 + data.client // 2))

    def losses(self):
        return {"size": float(self.own)}

    def local_step(self, step):
        out = step.forward()
        step.descend({**step.values(out), "size": out.z.square().mean()})


class WeighsByATensor(Weighs):
    def losses(self):
        return {"size": self.own}


class WeighsAtTheStart(Weighs):
    """Says the weight in an attribute, as the fit begins."""

    weight = 0.0

    def on_fit_start(self):
        self.weight = float(self.own)

    def losses(self):
        return {"size": self.weight}


class WeighsEachOtherwise(Weighs):
    def losses(self):
        return {"size": 0.1 + max(0, self.facts.client)}


class LearnsAWeight(Weighs):
    def setup(self):
        super().setup()
        self.weight = nn.Parameter(torch.ones(()))

    def losses(self):
        return {"size": self.weight}


@pytest.mark.parametrize("kind", [Weighs, WeighsByATensor, WeighsAtTheStart])
def test_weights_of_losses_are_each_clients_own(kind, both, run_federation, mlp, outcome, assert_identical):
    both(lambda: kind(mlp()))
    own, known = (run_federation(lambda one=one: one(mlp()), 2) for one in (kind, Weighs))
    assert_identical(outcome(own), outcome(known))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WeighsEachOtherwise, "its clients differ in the weights of its losses"),
        (LearnsAWeight, "the weight of its loss 'size' learns"),
    ],
)
def test_weights_of_losses_that_no_two_share_are_not_stacked(kind, reason, run_federation, mlp):
    assert run_federation(lambda: kind(mlp()), 1, cohort=4).cohort.reason == reason
