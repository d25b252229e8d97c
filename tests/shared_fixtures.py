"""One tiny federation on a CPU, shared by all tests: in-memory images, two small models, and a loop around them."""

import math
import os
import shutil
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from leaves import flatten
from lightning.pytorch.trainer.connectors import callback_connector
from lightning.pytorch.utilities import argparse
from tiny_models import TinyConvNet
from torch import nn

from fl_lightning.core.client import ClientModule, FitSettings
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Partition
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import Federation
from fl_lightning.models.mlp import MLP
from fl_lightning.seeding import seed_global_streams

# Samples of each client and class. Test parts of a quarter come off; with batches of 4 every client has a smaller last
# batch, client 1's is a single sample, and no client holds every class.
COUNTS = ((12, 8, 0, 0), (6, 6, 5, 0), (0, 5, 9, 5), (0, 0, 1, 13))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """What a test draws does not depend on those before it, nor on which of them there are."""
    seed_global_streams(0, "test")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_and_one_thread(tmp_path_factory):
    """No test reads or writes the user's cache, and float sums do not depend on the machine's cores."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FL_LIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _nobody_waits_for_the_disk():
    """No test cuts the power; those that look at syncs put their own in."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda descriptor: None)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _packages_are_asked_once():
    """Lightning asks every installed package for callbacks of its own at each Trainer, in ten milliseconds.

    And the environment for its arguments, and the driver's library for GPUs, in one.
    """
    patch = pytest.MonkeyPatch()
    asked = (callback_connector, "_load_external_callbacks"), (argparse, "_parse_env_variables")
    for module, asks in (*asked, (torch.cuda, "device_count")):
        patch.setattr(module, asks, lru_cache(getattr(module, asks)))
    yield
    patch.undo()


KNOWN: set[str] = set()
"""The modules that are imported, at the last look; making a set of thousands takes longer than many a test."""


@pytest.fixture(autouse=True)
def _what_a_test_wrote_is_imported_by_no_other(tmp_path_factory):
    """Or one's `mine.py` would be the next one's."""
    if len(sys.modules) != len(KNOWN):
        KNOWN.clear()
        KNOWN.update(sys.modules)
    yield
    if len(sys.modules) != len(KNOWN):
        folder = str(tmp_path_factory.getbasetemp())
        for name in sys.modules.keys() - KNOWN:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory, request):
    """Folders that several tests of a file look at: `make_folder(name)`; gone after the last of them, if none failed.

    As pytest does it with `tmp_path`: a file that the disk has not seen yet goes in a twentieth of a millisecond, one
    of some time ago in several.
    """
    made, failed = [], request.session.testsfailed

    def make(name):
        made.append(tmp_path_factory.mktemp(name))
        return made[-1]

    yield make
    if request.session.testsfailed == failed:
        for folder in made:
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def plain_convolutions():
    """Torch's own kernels for convolutions: on images of 8 × 8 pixels a step takes 40 % less than with oneDNN's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        yield


class InMemory(Dataset):
    """A data set that is made, not read."""

    def __init__(self, content: Arrays) -> None:
        self.content = content  # public and no plain value: never written to the cache

    def arrays(self) -> Arrays:
        return self.content


class Blocks(Partition):
    """Consecutive samples, so many a client: a test decides who holds what."""

    def __init__(self, sizes) -> None:
        self.sizes = list(sizes)

    def assign(self, labels, num_clients, num_classes, rng):
        ends = np.cumsum(self.sizes)
        return [np.arange(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]


@pytest.fixture(scope="session")
def make_data():
    """Images of classes that can be told apart, so many of each class for each client."""

    def make(counts=COUNTS, batch_size=4, shape=(1, 8, 8), seed=0, edit=None, **options) -> FederatedData:
        rng = np.random.default_rng(seed)
        num_classes = len(counts[0])
        y = np.concatenate([np.repeat(np.arange(num_classes), own) for own in counts])
        centres = rng.normal(size=(num_classes, math.prod(shape)))
        x = (centres[y] + rng.normal(scale=0.7, size=(len(y), math.prod(shape)))).reshape(-1, *shape)
        arrays = Arrays(
            torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), len(y), tuple(map(str, range(num_classes)))
        )
        if edit is not None:
            edit(arrays)
        sizes = [sum(own) for own in counts]
        data = FederatedData(InMemory(arrays), Blocks(sizes), len(counts), batch_size=batch_size, **options)
        data.setup(seed)
        return data

    return make


@pytest.fixture
def data(make_data):
    """The usual four clients."""
    return make_data()


@pytest.fixture(scope="session")
def sgd():
    """Factory of optimizer factories: `sgd(lr=…, momentum=…)`."""
    return lambda lr=0.1, **options: lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


@pytest.fixture(scope="session")
def make_client():
    """A client outside a federation: `make_client(FedAvg(mlp()))`, or with an optimizer of `sgd`."""

    def make(method, optimizer=None, round=0, facts=None, **settings) -> ClientModule:
        method.facts = facts or replace(method.facts, round=round)
        return ClientModule(method, None if optimizer is None else FitSettings(optimizer, **settings))

    return make


@pytest.fixture(scope="session")
def mlp():
    """A small MLP with one feature map, D = 5."""
    return lambda hidden=(8, 5), shape=(1, 8, 8), num_classes=4: MLP(shape, num_classes, hidden)


@pytest.fixture(scope="session")
def conv_net():
    """A small network with a convolution, batch norm and dropout, D = 6."""
    return lambda shape=(1, 8, 8), num_classes=4: TinyConvNet(shape, num_classes)


class Diary(FederationCallback):
    """Remembers the rows, each participant's message and report, by (round, client), and who sent to whom, by round."""

    def __init__(self) -> None:
        self.rows, self.received, self.sent, self.reports, self.hops = [], {}, {}, {}, {}

    def on_round_start(self, loop, round, participants):
        for client in participants:
            self.received[round, client] = loop.exchange.inbox(client)

    def on_client_fit_end(self, loop, report):
        self.sent[loop.round + 1, report.client] = report.message.clone()
        self.reports[loop.round + 1, report.client] = report

    def on_round_end(self, loop, row):
        self.rows.append(dict(row))
        self.hops[row["round"]] = list(loop.exchange.hops)


@pytest.fixture(scope="session")
def set_up_federation(make_data, sgd):
    """A loop that is set up and has not run; `loop.diary` will remember what happens."""

    def set_up(
        method, rounds=3, data=None, optimizer=None, seed=0, folder: Path | None = None, trainer=None, **loop_options
    ) -> FederatedLoop:
        architecture = loop_options.pop("architecture", None)
        diary = Diary()
        callbacks = [diary, *loop_options.pop("callbacks", ())]
        make_metrics = loop_options.pop("make_metrics", None)
        loop = FederatedLoop(Federation(rounds=rounds, callbacks=callbacks, **loop_options), make_metrics)
        loop.setup(
            method if architecture is not None else lambda _: method(),
            make_data() if data is None else data,
            sgd() if optimizer is None else optimizer,
            seed,
            trainer={"accelerator": "cpu", **(trainer or {})},
            architecture=architecture,
            folder=folder,
        )
        loop.diary = diary
        return loop

    return set_up


@pytest.fixture
def assert_resumes(set_up_federation, outcome, assert_identical, tmp_path):
    """Stop a federation, resume it from its newest checkpoint, and end where a straight run does; returns that one."""

    def check(method, stopped_after=2, **options):
        straight = set_up_federation(method, **options)
        straight.final = straight.run()
        first, second = (set_up_federation(method, folder=tmp_path, **options) for _ in range(2))
        for _ in range(stopped_after):
            first.advance()
        second.load_state_dict(second.checkpoints.load(second.checkpoints.find("auto")))
        second.final = second.run()
        second.diary.rows = first.diary.rows + second.diary.rows
        assert_identical(outcome(second), outcome(straight))
        assert_identical(second.final, straight.final)
        return straight

    return check


@pytest.fixture(scope="session")
def run_federation(set_up_federation):
    """Set a federation up, run it, return the loop: `run_federation(lambda: FedAvg(mlp()), rounds=3)`."""

    def run(method, rounds=3, **options) -> FederatedLoop:
        loop = set_up_federation(method, rounds, **options)
        loop.final = loop.run()
        return loop

    return run


def same_leaf(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return repr(a) == repr(b)  # repr, because nan is not nan


@pytest.fixture(scope="session")
def assert_identical():
    """Nested dictionaries of tensors and numbers must be equal in every bit."""

    def check(a, b) -> None:
        a, b = flatten(a), flatten(b)
        assert a.keys() == b.keys()
        assert [name for name in a if not same_leaf(a[name], b[name])] == []

    return check


@pytest.fixture(scope="session")
def outcome():
    """All that a run leaves behind, but for seconds: rows, exchange, clients' private states, last scores."""

    def read(loop) -> dict:
        rows = {row["round"]: {k: v for k, v in row.items() if not k.startswith("seconds")} for row in loop.diary.rows}
        clients = {c: dict(loop.runner.pool.get(c) or {}) for c in range(loop.num_clients)}
        scores = {name: torch.nan_to_num(torch.from_numpy(v.copy()), -1) for name, v in loop.scores.items()}
        exchange = loop.exchange.state_dict()
        return {"rows": rows, "exchange": exchange, "clients": clients, "scores": scores, "traffic": loop.traffic}

    return read


@pytest.fixture(scope="session")
def assert_near(outcome):
    """Two federations must have come to the same but for rounding, in as many steps."""

    def check(one, other, tolerance) -> None:
        found, expected = flatten(outcome(other)), flatten(outcome(one))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, (torch.Tensor, float)):
                torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, equal_nan=True)
            else:
                assert repr(found[name]) == repr(value), name
        steps = [{key: report.num_steps for key, report in loop.diary.reports.items()} for loop in (one, other)]
        assert steps[0] == steps[1]

    return check


@pytest.fixture(scope="session")
def train_by_hand():
    """A plain training loop over the batches that a client sees in one round, with an optimizer made anew."""

    def train(model, client_data, optimizer, round, batch_size=4, epochs=1, seed=0, loss=None):
        from fl_lightning.seeding import derive_seed

        loss = loss or (lambda x, y: nn.functional.cross_entropy(model(x), y))
        model.train()
        stepper = optimizer(model.parameters())
        for epoch in range(epochs):
            epoch_seed = derive_seed(seed, f"shuffle/{epoch}", round, client_data.client)
            for bundle in client_data.bundles(epoch_seed, batch_size):
                for x, y in bundle.steps():
                    stepper.zero_grad()
                    loss(x, y).backward()
                    stepper.step()

    return train


@pytest.fixture(scope="session")
def trial(tmp_path_factory):
    """Small experiments on Digits, from Python: `trial(name="a", federation__rounds=1)`, in one folder of runs."""
    from fl_lightning import Experiment

    small = {
        "output": tmp_path_factory.mktemp("trials"),
        "method": "FedRep",
        "model": {"class_path": "MLP", "init_args": {"hidden": [16, 8]}},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.2}},
        "data": {"dataset": "Digits", "partition": "IID", "num_clients": 4, "batch_size": 64},
        "trainer": {"accelerator": "cpu"},
    }
    return lambda **overrides: Experiment(small, **overrides)
