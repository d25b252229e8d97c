"""Every method under mixed and half precision. Methods find themselves, as in test_contract.py."""

import importlib
import math

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from tiny_optimizers import adam

from fl_lightning import catalog
from fl_lightning.core.message import ClassMeans
from fl_lightning.core.precision import widened
from fl_lightning.core.steps import HalfLayers, keeps_float32
from fl_lightning.core.term import Term
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.methods.dispfl import MaskedWeights
from fl_lightning.methods.fedavg import FedAvg

pytestmark = pytest.mark.usefixtures("plain_convolutions")
OWN = EvaluationPolicy(received=False, globally=False, server=False, loss=False, balanced_accuracy=False)
METHODS = [entry.name for entry in catalog.entries("methods")]
DIFFERENT = ["FedAvg", "FedProto", "PerFedAvg", "FedALA", "FedBABU", "FedFed", "FedNova", "DisPFL", "FedCVAE", "DRDFL"]
"""A method for each way to step and to keep what it has."""
PRECISIONS = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
"""Precision -> dtype of a layer's weights."""


def kind(name):
    module, _, last = next(e.class_path for e in catalog.entries("methods") if e.name == name).rpartition(".")
    return getattr(importlib.import_module(module), last)


class WatchesLosses(FederationCallback):
    """Remembers the dtype of every loss that was logged."""

    def __init__(self):
        self.dtypes = set()

    def on_client_fit_end(self, loop, report):
        meter = loop.runner.module(report.client).meter
        self.dtypes |= {value.dtype for pairs in meter.losses.values() for value, _ in pairs}


@pytest.fixture(scope="module")
def run_method(conv_net, set_up_federation, make_data):
    """Set a method's federation up, on a model with a convolution, batch norm and dropout, with Adam."""
    data = make_data(batch_size=6)

    def set_up(name, precision, **options):
        trainer = precision if isinstance(precision, dict) else {"precision": precision}
        options = {"evaluate": OWN, "data": data, **options}
        return set_up_federation(lambda: kind(name)(conv_net()), optimizer=adam, trainer=trainer, **options)

    return set_up


@pytest.fixture(scope="module", params=[(name, precision) for name in METHODS for precision in PRECISIONS], ids=str)
def finished(request, run_method):
    """Two rounds of one method under one precision, with what was seen on the way."""
    name, precision = request.param
    watch = WatchesLosses()
    loop = run_method(name, precision, rounds=2, callbacks=[watch])
    loop.final = loop.run()
    loop.watch, loop.precision = watch, precision
    return loop


def floats(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def test_rounds_train(finished):
    assert [row["round"] for row in finished.diary.rows] == [1, 2]
    for row in finished.diary.rows:
        assert math.isfinite(row["loss"])
        assert 0 <= row["Local-T"] <= 1
    first, last = finished.diary.rows[0]["loss"], finished.diary.rows[-1]["loss"]
    assert last != first
    for client in range(finished.num_clients):
        assert all(tensor.isfinite().all() for tensor in (finished.runner.pool.get(client) or {}).values())


def test_losses_are_float32(finished):
    assert finished.watch.dtypes == {torch.float32}


class SquaredProducts(Term):
    """A term of one's own, written like `losses/proximal.py`: of the weights, not of a forward pass."""

    def __init__(self):
        super().__init__(0.5)
        self.seen = []

    def setup(self, host):
        self.register_buffer("anchor", torch.zeros_like(host.model.head.weight.detach()), persistent=False)

    def receive(self, host, message):
        self.anchor.copy_(host.model.head.weight.detach())

    def forward(self, host, out):
        drift = widened(host.model.head.weight) - widened(self.anchor) + 1
        value = (drift @ drift.t()).square().sum()  # autocast would narrow a product
        self.seen.append((value.detach(), (drift.double() @ drift.double().t()).square().sum().item()))
        return value


def test_term_of_ones_own_is_computed_in_float32(conv_net, set_up_federation):
    watch = WatchesLosses()
    method = lambda: FedAvg(conv_net(), extra_terms=[SquaredProducts()])  # noqa: E731
    small = lambda parameters: torch.optim.SGD(parameters, lr=1e-5)  # noqa: E731 - of a value in the thousands
    trainer = {"precision": "bf16-mixed"}
    loop = set_up_federation(method, rounds=2, optimizer=small, trainer=trainer, callbacks=[watch])
    loop.run()
    seen = loop.runner.modules[0].method.terms[1].seen
    assert seen
    assert {value.dtype for value, _ in seen} == {torch.float32}
    for value, exact in seen:
        assert value.item() == pytest.approx(exact, rel=1e-5)
    assert watch.dtypes == {torch.float32}


def test_layers_are_narrow_and_statistics_wide(finished):
    module = finished.runner.modules[0]
    assert next(module.method.model.head.parameters()).dtype == PRECISIONS[finished.precision]
    wide = [part for part in module.modules() if keeps_float32(part)]
    assert wide
    for part in wide:
        own = {**part._parameters, **part._buffers}
        assert {t.dtype for t in own.values() if t is not None and t.is_floating_point()} <= {
            torch.float32,
            torch.float64,
        }


def test_artifacts_travel_in_float32_or_wider(finished):
    for message in finished.diary.sent.values():
        for artifact in message.artifacts.values():
            if isinstance(artifact, MaskedWeights):  # weights, see below
                continue
            tensor = artifact.mean if isinstance(artifact, ClassMeans) else artifact
            assert not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.float64)


def test_weights_travel_as_they_are_kept(finished):
    module = finished.runner.modules[0]
    own = {name: tensor.dtype for name, tensor in module.entries.items()}
    for messages in (finished.diary.sent, finished.diary.received):
        for message in messages.values():
            masked = {n: a.values for n, a in message.artifacts.items() if isinstance(a, MaskedWeights)}
            weights = {**message.weights, **masked}
            assert {name: tensor.dtype for name, tensor in weights.items()} == {name: own[name] for name in weights}


@pytest.mark.parametrize("precision", ["bf16-true"])  # where what is kept is not what was stepped on
@pytest.mark.parametrize("name", DIFFERENT)
def test_run_resumes_exactly(name, precision, run_method, outcome, assert_identical, tmp_path):
    options = {"rounds": 2, "participation": 0.5}
    straight = run_method(name, precision, **options)
    straight.final = straight.run()
    first = run_method(name, precision, folder=tmp_path, **options)
    first.advance()
    second = run_method(name, precision, folder=tmp_path, **options)
    second.load_state_dict(second.checkpoints.load(tmp_path / "checkpoints" / "round-0001.ckpt"))
    second.final = second.run()
    second.diary.rows = first.diary.rows[:1] + second.diary.rows
    assert_identical(outcome(second), outcome(straight))
    assert_identical(second.final, straight.final)


def float16(precision):
    """On the CPU, where only a test may: the same plugins as on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    mixed = precision == "16-mixed"
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler) if mixed else HalfPrecision(precision)]}


@pytest.mark.parametrize(
    ("name", "precision"), [(n, "16-mixed") for n in METHODS] + [(n, "16-true") for n in DIFFERENT]
)
def test_float16_trains_with_a_scaled_loss(name, precision, run_method):
    loop = run_method(name, float16(precision), rounds=2)
    loop.run()
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)
    assert loop.diary.rows[0]["loss"] != loop.diary.rows[1]["loss"]
    states = [loop.runner.pool.get(client) for client in range(4)]
    assert all(tensor.isfinite().all() for state in states for tensor in state.values())
    assert all(state["loss_scale"][0] >= 1 for state in states)
    assert not any("loss_scale" in message.weights for message in loop.diary.sent.values())


@pytest.mark.parametrize("name", ["FedAvg", "PerFedAvg", "DRDFL"])  # one optimizer, gradients of its own, several
def test_loss_scale_is_a_clients_own(name, run_method, outcome, assert_identical):
    loop, backwards = (run_method(name, float16("16-mixed"), rounds=2) for _ in range(2))
    backwards.fit_order = lambda clients: clients[::-1]
    loop.run()
    backwards.run()
    assert_identical(outcome(backwards), outcome(loop))


def test_half_precision_is_refined_for_every_run(run_method):
    assert isinstance(run_method(METHODS[0], "bf16-true").runner.trainer.precision_plugin, HalfLayers)


@pytest.mark.parametrize("name", ["FedCVAE", "FedFed"])
def test_a_message_leaves_its_tensors_in_the_type_that_a_fit_does(name, run_method):
    """The Trainer converts a module once: in a process that goes on, or in another worker, that is another client."""
    loop = run_method(name, "64-true", rounds=1)
    loop.run()
    module = loop.runner.load(2)
    module.receive(loop.exchange.inbox(2), loop.data.clients[2])
    assert {tensor.dtype for tensor in module.buffers() if tensor.is_floating_point()} == {torch.float64}


@pytest.mark.parametrize("name", ["FedProto", "FedDW", "FedDistill", "FedPAC", "FedHKD"])
def test_class_means_are_as_precise_as_what_they_are_means_of(name, run_method):
    """Under 64-true they were rounded to float32, at the client and at the server."""
    loop = run_method(name, "64-true", rounds=1)
    loop.run()
    means = [*loop.diary.sent[1, 0].artifacts.values(), *loop.exchange.inbox(0).artifacts.values()]
    held = [t for own in means for t in ([own] if isinstance(own, torch.Tensor) else own.tensors().values())]
    assert {tensor.dtype for tensor in held if tensor.is_floating_point()} == {torch.float64}
