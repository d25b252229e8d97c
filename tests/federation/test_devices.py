"""One client's fit on two devices: the mini-batches of one device, in parts."""

import math
import os
import sys
from contextlib import contextmanager

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchmetrics import Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat

from fl_lightning.core.devices import SharedFit
from fl_lightning.federation import transport
from fl_lightning.federation.launch import launch
from fl_lightning.federation.team import Team
from fl_lightning.federation.trainers import UnwrappedDDP
from fl_lightning.losses.class_relation import ClassRelation, SoftLabels
from fl_lightning.losses.distillation import Distillation
from fl_lightning.losses.prototype import PrototypeAlignment
from fl_lightning.methods.drdfl import DRDFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedcrl import FedCRL
from fl_lightning.methods.feddw import FedDW
from fl_lightning.methods.fedfed import FedFed
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.models.lightning_module import WrappedLightningModule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the functions below are handed to forked processes")


class Own(L.LightningModule):
    """Logs its loss, and what its mini-batches have in all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("own", loss, on_epoch=True, on_step=False)
        self.log("samples", len(batch[1]), on_epoch=True, on_step=False, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeps(Metric):
    """Sums classes up, at the end."""

    def __init__(self):
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx="cat")

    def update(self, y):
        self.kept.append(y)

    def compute(self):
        return dim_zero_cat(self.kept).sum()


class Counts(Own):
    """Counts samples by metrics, of which one adds up and one keeps all that it hears."""

    def __init__(self):
        super().__init__()
        self.heard, self.kept = SumMetric(), Keeps()

    def training_step(self, batch, batch_idx):
        self.heard(len(batch[1]))
        self.kept(batch[1] + 1)
        self.log("heard", self.heard, on_epoch=True, on_step=False)
        self.log("kept", self.kept, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


class Steps(Own):
    """The same, but it goes back and steps by itself, clipped by what `on_after_backward` sees."""

    def __init__(self, optimizer="SGD"):
        super().__init__()
        self.automatic_optimization = False
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def passes():
            optimizer.zero_grad()
            loss = super(Steps, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if self.optimizer == "LBFGS":
            return optimizer.step(closure=passes)
        loss = passes()
        optimizer.step()
        return loss

    def on_after_backward(self):
        if self.optimizer == "SGD":
            nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    def configure_optimizers(self):
        if self.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        return super().configure_optimizers()


class Clips(Own):
    """Clips by hand, in the hook in which gradients are there."""

    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


def own(make):
    return lambda model: FedAvg(WrappedLightningModule((1, 8, 8), 4, make()))


CASES = {
    "own steps": (own(Steps), {}),
    "own steps with a closure": (own(lambda: Steps("LBFGS")), {}),
    "own hook": (own(Clips), {}),
    "own training step": (lambda model: FedAvg(WrappedLightningModule((1, 8, 8), 4, Own())), {}),
    "FedAvg": (FedAvg, {}),
    "FedRep": (FedRep, {}),
    "FedProto": (FedProto, {}),
    "FedDW": (FedDW, {}),
    "running sums": (
        FedAvg,
        {
            "extra_terms": [
                PrototypeAlignment(collection="running"),
                ClassRelation(soft_labels=SoftLabels(source="running")),
            ]
        },
    ),
    "Per-FedAvg FO": (PerFedAvg, {"alpha": 0.5}),
    "Per-FedAvg HF": (PerFedAvg, {"alpha": 0.5, "beta": 0.2, "approximation": "HF", "delta": 0.1}),
    "FedCRL": (FedCRL, {}),
    "FedCPD": (FedCPD, {"distillation": Distillation(mid_channels=4)}),
    "DRDFL": (DRDFL, {}),
}
OWN = ("own steps", "own steps with a closure", "own hook", "own training step")
ALIKE = (*OWN, "FedAvg", "FedRep", "FedProto", "FedDW", "running sums", "Per-FedAvg FO", "Per-FedAvg HF")
"""Cases whose losses are means over samples: those of a mini-batch's parts have the mini-batch's loss as their mean."""
TWO = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


@pytest.fixture(scope="module")
def set_up_case(set_up_federation, mlp):
    def set_up(name, folder, **options):
        kind, arguments = CASES[name]
        adam = (lambda parameters: torch.optim.Adam(parameters, lr=1e-3)) if kind is DRDFL else None
        method = lambda: kind(mlp(), **arguments)  # noqa: E731
        return set_up_federation(method, rounds=2, folder=folder, optimizer=adam, **options)

    return set_up


@pytest.fixture(scope="module")
def shared(set_up_case, make_folder):
    """All cases on two devices; a folder a case."""
    folder = make_folder("devices")

    def run_all():
        for name in CASES:
            loop = set_up_case(name, folder / name, trainer=TWO)
            final = loop.run()
            message = loop.exchange.global_message()
            state = {} if message is None else dict(message.weights)
            both = transport.gather((final, loop.board.scores, state))
            if loop.workers.is_main:
                torch.save({"final": final, "rows": loop.diary.rows, "weights": state}, folder / f"{name}.pt")
                torch.save(both, folder / f"{name}-both.pt")
        return 0

    assert launch(run_all, Team(2, threads=1)) == 0
    return folder


@pytest.fixture(scope="module")
def alone(set_up_case):
    """The same on one device."""
    loops = {name: set_up_case(name, None) for name in ALIKE}
    for loop in loops.values():
        loop.final = loop.run()
    return loops


@pytest.mark.parametrize("name", CASES)
def test_both_devices_end_with_the_same(shared, name, assert_identical):
    first, second = torch.load(shared / f"{name}-both.pt", weights_only=False)
    assert_identical(first[0], second[0])
    assert {n: v.tolist() for n, v in first[1].items()} == {n: v.tolist() for n, v in second[1].items()}
    assert_identical(first[2], second[2])
    rows = torch.load(shared / f"{name}.pt")["rows"]
    assert [row["round"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows)


@pytest.mark.parametrize("name", ALIKE)
def test_two_devices_train_what_one_trains(shared, alone, name):
    """Equal but for rounding: sums over parts are made in another order."""
    left = torch.load(shared / f"{name}.pt")
    for here, there in zip(alone[name].diary.rows, left["rows"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
        assert here["uplink_params"] == there["uplink_params"]
        logged = {column: value for column, value in here.items() if column.startswith("log/")}
        assert {column: there[column] for column in logged} == pytest.approx(logged, rel=1e-4)
        assert len(logged) == 2 * (name in OWN)
    weights = alone[name].exchange.state_dict()["message"]["weights"]
    for entry, tensor in weights.items():
        torch.testing.assert_close(left["weights"][entry], tensor, rtol=1e-3, atol=1e-5)


def test_running_sums_hold_all_samples(shared, alone):
    """Soft labels of the last epoch's own predictions: half of them on each device, all of them in the message."""
    here = alone["running sums"].final
    assert torch.load(shared / "running sums.pt")["final"] == pytest.approx(here, abs=0.1)


class Remembers(FedAvg):
    """Keeps what it has seen: of the last mini-batch, or how many."""

    def __init__(self, model, samples):
        super().__init__(model)
        self.samples = samples
        self.register_buffer("memory", torch.zeros(()))

    def local_step(self, step):
        self.memory.copy_(step.x.mean()) if self.samples else self.memory.add_(1)
        super().local_step(step)


@pytest.mark.parametrize("samples", [True, False])
def test_what_devices_keep_of_other_samples_is_named(samples, set_up_federation, mlp, capfd):
    run = lambda: set_up_federation(lambda: Remembers(mlp(), samples), rounds=2, trainer=TWO).run() and 0  # noqa: E731
    assert launch(run, Team(2, threads=1)) == 0
    said = "Remembers.memory differs between devices, which see other samples of a mini-batch: their mean is kept"
    assert capfd.readouterr().err.count(said) == samples


class FailsOn(FedAvg):
    """Falls sick in client 1's second step, on some of the devices."""

    def __init__(self, model, ranks):
        super().__init__(model)
        self.ranks, self.steps = ranks, 0

    def local_step(self, step):
        self.steps = self.steps + 1 if self.facts.client == 1 else 0
        if self.steps == 2 and torch.distributed.get_rank() in self.ranks:
            raise ValueError("a label out of range")
        super().local_step(step)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_device_alone_meets_is_said_and_ends_the_run(rank, policy, set_up_federation, mlp, capfd, monkeypatch):
    """The other one waits for it in a message: its line was of a connection that closed, or that it was silent."""
    monkeypatch.setattr("fl_lightning.federation.watch.ALONE", 1.0)
    options = {"trainer": TWO, "on_client_error": policy}
    run = lambda: set_up_federation(lambda: FailsOn(mlp(), {rank}), rounds=2, **options).run() and 0  # noqa: E731
    assert launch(run, Team(2, threads=1)) == 1
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert said.startswith("fl-lightning: error: round 1, client 1, fit: ValueError: a label out of range (")
    assert f"(on process {rank} of 2 alone, which share every fit)" in said


def test_what_both_devices_meet_leaves_the_client_out(set_up_federation, mlp, capfd):
    options = {"trainer": TWO, "on_client_error": "skip"}

    def run():
        loop = set_up_federation(lambda: FailsOn(mlp(), {0, 1}), rounds=2, **options)
        loop.run()
        return 0 if [row["skipped"] for row in loop.diary.rows] == [1, 1] else 3

    assert launch(run, Team(2, threads=1)) == 0
    assert capfd.readouterr().err.count("client 1, fit: ValueError: a label out of range") == 2


def test_only_the_main_process_writes(shared):
    checkpoints = sorted(path.name for path in (shared / "FedRep" / "checkpoints").glob("*.ckpt"))
    assert checkpoints == ["round-0001.ckpt", "round-0002.ckpt"]
    assert len(list((shared / "FedRep" / "models").glob("*.pt"))) == 4


def test_accumulated_meta_gradients_are_those_of_one_device(set_up_federation, mlp, tmp_path):
    """Two meta-steps an optimizer step, and clipping."""
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}

    def run(**devices):
        method = lambda: PerFedAvg(mlp(), alpha=0.5)  # noqa: E731
        loop = set_up_federation(method, rounds=1, local_epochs=2, trainer={**trainer, **devices})
        loop.run()
        return dict(loop.exchange.global_message().weights)

    def run_both():
        weights = run(**TWO)
        if torch.distributed.get_rank() == 0:
            torch.save(weights, tmp_path / "weights.pt")
        return 0

    assert launch(run_both, Team(2, threads=1)) == 0
    there = torch.load(tmp_path / "weights.pt")
    for entry, tensor in run().items():
        torch.testing.assert_close(there[entry], tensor, rtol=1e-3, atol=1e-5)


class NotesDraws(FedFed):
    """Remembers each epoch's draws, and what it took of them."""

    notes = ()

    def _draw(self, step):
        super()._draw(step)
        if self.pool is not None:
            self.notes = [*self.notes, ([draw.tolist() for draw in self.draws], ([], []))]

    def _next_draws(self, step):
        rows = super()._next_draws(step)
        for taken, own in zip(self.notes[-1][1], rows, strict=True):
            taken.append(own.tolist())
        return rows


def test_devices_share_the_draws_from_the_pool(set_up_federation, conv_net, tmp_path):
    """Dropout on parts of different sizes makes random streams part within an epoch; the second one's draws agree."""

    def run_both():
        method = lambda: NotesDraws(conv_net(), feature_rounds=1, latent_size=4)  # noqa: E731
        loop = set_up_federation(method, rounds=3, local_epochs=2, trainer=TWO)
        loop.run()
        both = transport.gather(loop.runner.modules[0].method.notes)
        if loop.workers.is_main:
            torch.save(both, tmp_path / "notes.pt")
        return 0

    assert launch(run_both, Team(2, threads=1)) == 0
    first, second = torch.load(tmp_path / "notes.pt", weights_only=False)
    assert len(first) == 4 * 2
    for (draws, taken), (same, others) in zip(first, second, strict=True):
        assert same == draws
        for draw, own, other in zip(draws, taken, others, strict=True):
            used = [row for pair in zip(own, other, strict=True) for row in merged(*pair)]
            assert used == draw[: len(used)]
            assert len(draw) - len(used) <= 1  # a last batch of one is left out


def merged(one, other):
    """What `SharedFit.part` took apart."""
    whole = [None] * (len(one) + len(other))
    whole[::2], whole[1::2] = one, other
    return whole


def test_device_that_waits_for_another_before_a_fit_gives_signs_of_life(monkeypatch):
    """The main one was in a federation callback for longer than worker_timeout, and the other was ended as lost."""
    seen = []

    @contextmanager
    def waiting():
        seen.append("waits")
        yield
        seen.append("goes on")

    monkeypatch.setattr(transport.Waiting, "context", waiting)
    for name in ("barrier", "broadcast"):
        monkeypatch.setattr(DDPStrategy, name, lambda self, *given: seen.append(given))
    UnwrappedDDP().barrier("pre_setup")
    UnwrappedDDP().broadcast("folder", 0)
    assert seen == ["waits", ("pre_setup",), "goes on", "waits", ("folder", 0), "goes on"]


def test_parts_make_up_the_mini_batch():
    x, y = torch.arange(5.0), torch.arange(5)
    own = [SharedFit(rank, 2).part(x, y) for rank in range(2)]
    assert [part.y.tolist() for part in own] == [[0, 2, 4], [1, 3]]
    assert [part.batch_size for part in own] == [5, 5]
    assert [y[part.own].tolist() for part in own] == [[0, 2, 4], [1, 3]]
    mean = sum(part.factor * part.x.mean() for part in own) / 2
    assert float(mean) == pytest.approx(2.0)


def test_device_without_a_sample_sees_one_that_does_not_count():
    x, y = torch.ones(2), torch.tensor([4, 5])
    parts = [SharedFit(rank, 3).part(x, y) for rank in range(3)]
    assert [part.y.tolist() for part in parts] == [[4], [5], [4]]
    assert [part.factor for part in parts] == [1.5, 1.5, 0.0]
    assert [part.counts for part in parts] == [True, True, False]


def test_metrics_hear_of_every_sample_once(set_up_federation, make_data, tmp_path):
    """A sample that does not count, for a device that has none, was counted by the module's own metrics."""
    method = lambda: FedAvg(WrappedLightningModule((1, 8, 8), 4, Counts()))  # noqa: E731

    def run(**devices):
        rows = []
        for batch_size in (1, 5):  # with the first the second device has not a sample
            loop = set_up_federation(method, rounds=1, data=make_data(batch_size=batch_size), trainer=devices)
            loop.run()
            rows += [{name: row[f"log/{name}"] for name in ("heard", "samples", "kept")} for row in loop.diary.rows]
        return rows

    def run_both():
        rows = run(**TWO)
        if torch.distributed.get_rank() == 0:
            torch.save(rows, tmp_path / "rows.pt")
        return 0

    assert launch(run_both, Team(2, threads=1)) == 0
    rows = run()
    assert torch.load(tmp_path / "rows.pt") == rows
    assert [row["heard"] for row in rows] == [row["samples"] for row in rows]


def test_a_strategy_for_several_devices_leaves_nothing_behind_where_there_is_one(run_federation, mlp, monkeypatch):
    """A group of processes stayed, and later fits with workers were refused for it."""
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    plain = run_federation(lambda: FedAvg(mlp()), rounds=1)
    for strategy in ("ddp", DDPStrategy()):
        loop = run_federation(lambda: FedAvg(mlp()), rounds=1, trainer={"devices": 1, "strategy": strategy})
        assert loop.diary.rows[0]["loss"] == plain.diary.rows[0]["loss"]
        assert not torch.distributed.is_initialized()
    assert not os.environ.keys() & set(names)
