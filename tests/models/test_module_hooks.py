"""What a user's own LightningModule overrides: what a local fit calls, and what is refused."""

import copy
import csv
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.core.finetuning import FineTune
from fl_lightning.errors import ConfigError
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.pfedme import pFedMe
from fl_lightning.models.lightning_module import WrappedLightningModule
from fl_lightning.models.module_hooks import CALLED, REFUSED

SHAPE = (1, 8, 8)


class Plain(L.LightningModule):
    """Cross-entropy and SGD."""

    def __init__(self):
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.hidden(x.flatten(1)).relu())

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


class Manual(Plain):
    """The same by hand; it returns nothing, as the documentation's examples do."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip(optimizer)
        optimizer.step()

    def clip(self, optimizer):
        pass


def wrapped(module, **options):
    return WrappedLightningModule(SHAPE, 4, module, "fc", **options)


def final(loop):
    return {name: tensor.clone() for name, tensor in loop.exchange.global_message().weights.items()}


def are_equal(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# --- hooks that are called --------------------------------------------------------------------------------------------


class Zeroed(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x * 0, y


class ZeroedBefore(Plain):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 0, batch[1]]


@pytest.mark.parametrize("module", [Zeroed, ZeroedBefore])
def test_mini_batches_are_what_the_hooks_of_the_transfer_make_of_them(module, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(module())), rounds=1)
    before = loop.runner.modules[0].entries["model.body.neck.hidden.weight"].clone()
    loop.run()
    assert torch.equal(final(loop)["model.body.neck.hidden.weight"], before)


def cleared(self):
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


class ClearsBeforeStep(Plain):
    def on_before_optimizer_step(self, optimizer):
        cleared(self)


class ClearsAfterBackward(Plain):
    def on_after_backward(self):
        cleared(self)


class ManualClears(Manual):
    def on_before_optimizer_step(self, optimizer):
        cleared(self)


@pytest.mark.parametrize("module", [ClearsBeforeStep, ClearsAfterBackward, ManualClears])
def test_gradients_are_what_the_hooks_of_a_step_make_of_them(module, set_up_federation):
    loop = set_up_federation(lambda: FedProx(wrapped(module()), mu=1.0), rounds=1)
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in final(loop).items())


class Watches(Plain):
    """Notes the hooks around its steps, and the largest gradient that it sees before one."""

    def __init__(self):
        super().__init__()
        self.called, self.norms = [], []

    def on_before_backward(self, loss):
        self.called.append("before backward")
        assert loss.requires_grad

    def on_after_backward(self):
        self.called.append("after backward")

    def on_before_optimizer_step(self, optimizer):
        self.called.append("before step")
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def on_before_zero_grad(self, optimizer):
        self.called.append("before zero_grad")
        assert optimizer is self.optimizers().optimizer
        assert self.trainer.optimizers == [optimizer]


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["own", "configured"])


@OPTIMIZERS
def test_hooks_of_a_step_come_in_order_before_clipping_and_change_no_bit(optimizer, set_up_federation):
    """With the configured optimizer those around the step were never called."""
    flags = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    plain, watched = (
        set_up_federation(
            lambda kind=kind: FedAvg(wrapped(kind(), optimizer=optimizer)), rounds=1, trainer=flags, local_steps=4
        )
        for kind in (Plain, Watches)
    )
    plain.run(), watched.run()
    module = watched.runner.modules[0].own.joined.module
    backwards = ["before backward", "after backward"]
    assert module.called[:12] == [*backwards, *backwards, "before step", "before zero_grad"] * 2
    assert max(module.norms) > 0.11
    assert are_equal(final(plain), final(watched))


class NamesRate(Watches):
    """Says what it is trained by, as many modules log it."""

    def training_step(self, batch, batch_idx):
        self.rate = self.optimizers().param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)


@OPTIMIZERS
@pytest.mark.parametrize(("method", "copies"), [(FedNova, 1), (Ditto, 2)])
def test_hooks_are_of_a_fits_own_steps_alone(optimizer, method, copies, set_up_federation):
    """Not of those by which a copy is fine-tuned before a test, or by which FedNova finds what a step is worth."""
    loop = set_up_federation(
        lambda: method(wrapped(NamesRate(), optimizer=optimizer)),
        rounds=2,
        evaluate=EvaluationPolicy(fine_tune=FineTune()),
    )
    loop.run()
    module = loop.runner.modules[0].own
    homes = module.homes if copies > 1 else [module]
    called = [home.joined.module.called.count("before zero_grad") for home in homes]
    steps = 2 * sum(client.num_steps(4) for client in loop.data.clients)
    assert called == [steps] * copies


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_without_such_hooks_keeps_the_plain_step(precision, set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(Plain())), rounds=1, trainer={"precision": precision})
    assert not loop.runner.modules[0].own.watches
    loop.run()
    assert loop.runner.modules[0]._machine.before_step is None


class Again(torch.optim.SGD):
    """Two steps in one, each on gradients of its own; it may make them smaller."""

    def step(self, closure, scale=1.0):
        for _ in range(2):
            loss = torch.enable_grad()(closure)()
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(scale)
            super().step()
        return loss


class ByClosure(Manual):
    """Steps as Lightning's documentation has it for optimizers that go back more than once."""

    kind, scale = Again, 1.0

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = Plain.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        assert torch.isfinite(optimizer.step(closure=closure, **({} if self.scale == 1 else {"scale": self.scale})))


class ByHand(Manual):
    scale = 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.scale * Plain.training_step(self, batch, batch_idx))
            optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_optimizer_of_manual_optimization_is_handed_the_closure_and_the_rest(scale, set_up_federation):
    """It stepped once, on the gradients there were: SAM was SGD, in silence."""

    kinds = [type(f"Scaled{kind.__name__}", (kind,), {"scale": scale}) for kind in (ByClosure, ByHand)]
    loops = [set_up_federation(lambda m=m: FedAvg(wrapped(m())), rounds=1) for m in kinds]
    for loop in loops:
        loop.run()
    assert are_equal(*map(final, loops))


def test_terms_pull_at_every_pass_of_a_closure(set_up_federation):
    loops = [set_up_federation(lambda m=m: FedProx(wrapped(m()), mu=1.0), rounds=2) for m in (ByClosure, ByHand)]
    for loop in loops:
        loop.run()
    assert are_equal(*map(final, loops))


def test_lbfgs_steps_in_manual_optimization(set_up_federation):
    """That it needs a closure was said, which it had been given."""

    class Quasi(ByClosure):
        kind = torch.optim.LBFGS

    loop = set_up_federation(lambda: FedAvg(wrapped(Quasi())), rounds=1)
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in final(loop).items())


class Tells(L.Callback):
    """Notes the hooks around a step that it is called at, and how many steps there were when a mini-batch ends."""

    def __init__(self, clears=False):
        self.clears, self.called = clears, []

    def on_before_backward(self, trainer, pl_module, loss):
        self.called.append("before backward")
        assert loss.requires_grad

    def on_after_backward(self, trainer, pl_module):
        self.called.append("after backward")

    def on_train_start(self, trainer, pl_module):
        self.called.append([[len(group["params"]) for group in own.param_groups] for own in trainer.optimizers])

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.called.append("before step")
        for parameter in optimizer.param_groups[0]["params"] if self.clears else ():
            parameter.grad.zero_()

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.called.append("before zero_grad")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.called.append(trainer.global_step)


class Alternates(Manual):
    """Steps with two optimizers by turns, on a mini-batch each, and once more with the first."""

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.hidden, self.fc)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second, first)[: 1 + batch_idx]:
            optimizer.zero_grad()
            self.manual_backward(Plain.training_step(self, batch, batch_idx))
            optimizer.step()


@pytest.mark.parametrize("module", [Manual, Alternates, ByClosure])
def test_callbacks_hear_of_manual_optimization_what_lightning_tells_them(module, set_up_federation, make_data):
    """None of it, and no step was counted."""
    theirs, ours = Tells(), Tells()
    data = make_data(counts=((8, 6, 0, 0),) * 2)
    loops = [set_up_federation(lambda: FedAvg(wrapped(module())), 1, data=data)]
    loops += [set_up_federation(lambda: FedAvg(wrapped(module())), 1, data=data, trainer={"callbacks": [ours]})]
    for loop in loops:
        loop.run()
    assert are_equal(*map(final, loops))
    (x, y), *_ = data.clients[0].passes("train")
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[theirs], **dict.fromkeys(quiet, False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module(), DataLoader(TensorDataset(x, y), batch_size=4))
    assert ours.called == theirs.called * 2
    assert theirs.called[-1] > 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_callbacks_change_the_gradients_of_manual_optimization(precision, set_up_federation):
    trainer = {"callbacks": [Tells(clears=True)], "precision": precision}
    loop = set_up_federation(lambda: FedProx(wrapped(Manual()), mu=1.0), rounds=1, trainer=trainer)
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in final(loop).items())


class BuiltLate(Plain):
    """Its layers are made in the hooks that may make them."""

    def __init__(self):
        L.LightningModule.__init__(self)
        self.calls = []

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        self.hidden = nn.Linear(64, 8)

    def configure_model(self):
        self.calls.append("configure_model")
        self.fc = nn.Linear(8, 4)


def test_layers_are_made_once_in_setup_and_configure_model(run_federation):
    loop = run_federation(lambda: FedAvg(wrapped(BuiltLate())), rounds=1)
    assert loop.runner.modules[0].own.joined.module.calls == ["setup fit", "configure_model"]
    assert len(final(loop)) == 4


class Reads(Plain):
    """What Lightning's own trainer would say of the configuration."""

    def on_train_start(self):
        own = self.trainer
        self.said = own.accumulate_grad_batches, own.gradient_clip_val, own.gradient_clip_algorithm


def test_module_reads_how_gradients_are_accumulated_and_clipped(run_federation):
    """One was not there, the others None."""
    for flags, said in (
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, (2, 0.5, "norm")),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, (1, 1.0, "value")),
        ({}, (1, None, None)),
    ):
        loop = run_federation(lambda: FedAvg(wrapped(Reads())), rounds=1, trainer=flags)
        assert loop.runner.modules[0].own.joined.module.said == said


class NeedsTrainer(Plain):
    def setup(self, stage):
        self.steps = self.trainer.estimated_stepping_batches


def test_a_setup_that_fails_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"model\.module: NeedsTrainer's setup fails \(RuntimeError: NeedsTrainer"):
        wrapped(NeedsTrainer())


# --- hooks that are refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", REFUSED)
def test_hooks_that_are_not_called_are_refused_in_one_line(hook):
    kind = type("Own", (Plain,), {hook: lambda self, *arguments, **options: None})
    with pytest.raises(
        ConfigError, match=rf"^model\.module: Own overrides {hook}, which is not called here; "
    ) as caught:
        wrapped(kind())
    assert len(str(caught.value)) < 160


def test_what_the_federation_does_by_itself_may_be_overridden_and_is_not_called(run_federation):
    def fails(self, *arguments):
        raise AssertionError

    ignored = ("train_dataloader", "prepare_data", "validation_step", "test_step", "predict_step", "teardown")
    kind = type("Own", (Plain,), dict.fromkeys((*ignored, "on_validation_epoch_end", "on_load_checkpoint"), fails))
    run_federation(lambda: FedAvg(wrapped(kind())), rounds=1)


def test_every_hook_of_lightning_is_called_refused_or_left_to_the_federation():
    """A hook that a later Lightning adds must be decided on."""
    left = ("validation", "test", "predict", "dataloader", "prepare_data", "setup", "teardown", "configure_model")
    hooks = [name for name in vars(L.LightningModule) if name.startswith(("on_", "configure_", "optimizer"))]
    for base in L.LightningModule.__mro__[1:]:
        if base.__module__.startswith("lightning.pytorch.core.hooks"):
            hooks += [name for name in vars(base) if not name.startswith("_")]
    own = ("configure_optimizers", "on_gpu", "on_load_checkpoint")
    open_ones = {name for name in hooks if not any(word in name for word in left)} - {*CALLED, *REFUSED, *own}
    assert open_ones == set()


# --- mini-batches that are left out -----------------------------------------------------------------------------------


class Skips(Plain):
    """Has a loss of the first mini-batch of an epoch alone."""

    def __init__(self):
        super().__init__()
        self.after = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx == 0 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.after.append((self.trainer.global_step, self.hidden.weight.detach().clone()))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_nothing_is_trained_on_a_mini_batch_without_a_loss(accumulate, set_up_federation):
    trainer = {"accumulate_grad_batches": accumulate}
    loop = set_up_federation(lambda: FedProx(wrapped(Skips()), mu=5.0), rounds=1, trainer=trainer)
    loop.run()
    counts, weights = zip(*loop.runner.modules[0].own.joined.module.after, strict=True)
    size = loop.data.clients[0].num_steps(4)
    first = range(accumulate - 1, size)
    assert [counts[step] for step in first] == [1] * len(first)
    assert all(torch.equal(weights[step], weights[accumulate - 1]) for step in first)
    assert {report.num_steps for report in loop.diary.reports.values()} == {1}
    assert loop.diary.rows[0]["loss"] > 0.5


class Ends(Plain):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx))


def test_minus_one_ends_the_epoch(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(Ends())), rounds=1, local_epochs=2)
    loop.run()
    assert loop.runner.modules[0].own.joined.module.seen == [(0, 0), (0, 1), (1, 0), (1, 1)] * 4


class Logs(Manual):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.log("train_loss", torch.tensor(2.5))


def test_a_loss_that_manual_optimization_does_not_return_is_empty(trial):
    """What does not apply is empty in a run's files, never 0."""
    rows = {}
    for name in ("Manual", "Logs"):
        module = {"class_path": f"{__name__}.Ten{name}"}
        model = {"class_path": "WrappedLightningModule", "init_args": {"module": module}}
        run = trial(name=name, model=model, method="FedProx", method__mu=0.1, federation__rounds=1).fit()
        with open(run.folder / "metrics.csv") as file:
            rows[name] = list(csv.DictReader(file))[-1]
        with open(run.folder / "clients.csv") as file:
            rows[name]["client"] = next(iter(csv.DictReader(file)))["loss"]
    own = rows["Manual"]
    assert (own["loss"], own["loss/cross_entropy"], own["client"]) == ("", "", "")
    assert float(own["loss/proximal"]) > 0
    assert float(rows["Logs"]["loss/cross_entropy"]) == 2.5


class TenManual(Manual):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 10)


class TenLogs(Logs):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 10)


# --- the trainer's place ----------------------------------------------------------------------------------------------


class Counts(Plain):
    def __init__(self):
        super().__init__()
        self.counts = []

    def on_train_end(self):
        self.counts.append((self.global_step, self.trainer.estimated_stepping_batches))


@OPTIMIZERS
def test_global_step_counts_optimizer_steps(optimizer, set_up_federation):
    loop = set_up_federation(
        lambda: FedAvg(wrapped(Counts(), optimizer=optimizer)),
        rounds=1,
        trainer={"accumulate_grad_batches": 2},
        local_steps=7,
    )
    loop.run()
    counts = loop.runner.modules[0].own.joined.module.counts
    assert all(done == expected for done, expected in counts)
    assert counts[0][0] < 7


class Clips(Manual):
    def clip(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=1e-12, gradient_clip_algorithm="norm")


def test_manual_optimization_clips_by_lightnings_own_call(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(Clips())), rounds=1)
    before = {name: tensor.clone() for name, tensor in loop.runner.modules[0].entries.items()}
    loop.run()
    assert all(torch.allclose(tensor, before[name], atol=1e-8) for name, tensor in final(loop).items())


class Counted(Plain):
    """Takes down the numbers of its mini-batches."""

    starts, passes = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.starts.append(batch_idx)

    def training_step(self, batch, batch_idx):
        self.passes.append(batch_idx)
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)


def test_a_mini_batch_that_a_method_passes_several_times_counts_once(run_federation, make_data):
    """So that pFedMe's steps on one mini-batch are of one, by the copy of the module that is its θ."""
    data = make_data(counts=((8, 6, 0, 0), (3, 6, 0, 0)))
    Counted.starts.clear()
    Counted.passes.clear()
    loop = run_federation(lambda: pFedMe(wrapped(Counted()), inner_steps=2), rounds=1, data=data)
    batches = [index for client in data.clients for index in range(-(-client.num_train // 4))]
    assert Counted.starts[1:] == batches  # one was tried out
    assert Counted.passes[1:] == [index for index in batches for _ in range(2)]
    assert loop.runner.modules[0].logged.values == {"index": batches[-1]}  # though the module itself saw none


# --- what a module logs and asks of its trainer -----------------------------------------------------------------------


class LogsAll(Plain):
    """Logs as Lightning's own examples do: a loss by step and epoch, and a metric object."""

    seen, monitor = [], ""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"train_acc": self.accuracy}, on_step=False, on_epoch=True)
        self.losses = [*(self.losses if batch_idx else ()), loss.item()]
        self.sizes = [*(self.sizes if batch_idx else ()), len(batch[1])]
        return loss

    def on_train_epoch_end(self):
        self.print("epoch", self.current_epoch)
        found = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen.append((found, self.losses, self.sizes))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        watch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": watch, "monitor": self.monitor}}


@pytest.mark.parametrize("monitor", ["train_acc", "train_loss_epoch"])
def test_what_is_logged_goes_by_lightnings_names(monitor, set_up_federation, capsys):
    LogsAll.monitor, LogsAll.seen = monitor, []
    set_up_federation(lambda: FedAvg(wrapped(LogsAll())), rounds=1).run()
    for found, losses, sizes in LogsAll.seen:
        mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        assert found["train_loss"] == found["train_loss_epoch"] == pytest.approx(mean)
        assert found["train_loss_step"] == pytest.approx(losses[-1])
        assert 0 <= found["train_acc"] <= 1
    assert capsys.readouterr().out == "epoch 0\n" * 4


class KeepsBack(Plain):
    """Logs what is for no logger, and looks whether it is at hand in the fit."""

    def training_step(self, batch, batch_idx):
        self.log("shown", 1.0, prog_bar=True)
        self.log("hidden", 2.0, logger=False, on_step=True, on_epoch=True)
        self.log_dict({"neither": 3.0}, on_step=False, on_epoch=False)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


@pytest.mark.parametrize("callbacks", [[], [EarlyStopping("loss")]], ids=["no callback", "a callback"])
def test_what_is_kept_from_loggers_is_at_hand_in_the_fit_alone(callbacks, set_up_federation):
    KeepsBack.seen = []
    loop = set_up_federation(lambda: FedAvg(wrapped(KeepsBack())), rounds=1, trainer={"callbacks": callbacks})
    loop.run()
    hidden = {"hidden": 2.0, "hidden_step": 2.0, "hidden_epoch": 2.0}
    seen = {name: value for name, value in KeepsBack.seen[-1].items() if not name.startswith("loss")}
    assert seen == {"shown": 1.0, **hidden, "neither": 3.0}
    assert loop.runner.modules[0].logged.values == {"shown": 1.0}


class LogsEach(Plain):
    """Logs numbers, and metrics that are no part of it, in all of Lightning's ways."""

    def __init__(self):
        super().__init__()
        self.apart = {"rows": torchmetrics.SumMetric()}
        self.hits = torchmetrics.Accuracy("multiclass", num_classes=4)

    def on_train_start(self):
        self.log("start", 3.0)

    def on_train_batch_start(self, batch, batch_idx):
        self.log("ahead", float(batch_idx), on_epoch=True)

    def training_step(self, batch, batch_idx):
        size = len(batch[1])
        self.log("both", float(size), on_epoch=True)
        self.log("numpy", np.float32(size), on_step=False, on_epoch=True, batch_size=size**2)
        for number, reduction in enumerate(("sum", max, torch.min, "avg")):
            self.log(f"reduced/{number}", size, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.apart["rows"].update(size)
        self.log("rows", self.apart["rows"], on_step=False, on_epoch=True, metric_attribute="apart")
        self.hits(F.one_hot(batch[1] * 0, 4).float(), batch[1])
        self.log("hits", self.hits, on_step=True, on_epoch=True)
        self.log("twice", 1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("twice", float(self.current_epoch))


@pytest.mark.filterwarnings("ignore")
def test_what_is_logged_comes_to_what_lightning_makes_of_it(set_up_federation, make_data):
    data = make_data(counts=((8, 6, 0, 0), (8, 6, 0, 0)))
    loop = set_up_federation(lambda: FedAvg(wrapped(LogsEach())), rounds=1, local_epochs=2, data=data)
    loop.run()
    rows = data.clients[-1].num_train
    assert rows % 4  # mini-batches of four, and a smaller one
    (x, y), *_ = data.clients[-1].passes("train")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LogsEach(), DataLoader(TensorDataset(x, y), batch_size=4))
    theirs = {name: pytest.approx(float(value)) for name, value in trainer.callback_metrics.items()}
    found = loop.runner.modules[0].logged.values
    assert {**found, "hits_step": 0.0} == {"start": 3.0, **theirs, "hits_step": 0.0}


def test_metrics_of_a_module_count_in_half_precision(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(LogsEach())), rounds=1, trainer={"precision": "bf16-true"})
    loop.run()
    assert loop.runner.modules[0].logged.values["rows"] == loop.data.clients[-1].num_train


@pytest.mark.parametrize("value", [torch.zeros(3), "much", {"a": 1.0}, None])
def test_what_is_no_number_is_not_dropped_in_silence(value):
    class Logs(Plain):
        def training_step(self, batch, batch_idx):
            self.log("what", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"self\.log\('what', \.\.\.\) takes one number"):
        wrapped(Logs())


def test_a_metric_of_several_numbers_is_said():
    class Confuses(Plain):
        def __init__(self):
            super().__init__()
            self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)

        def training_step(self, batch, batch_idx):
            self.confusion.update(self(batch[0]), batch[1])
            self.log("confusion", self.confusion, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"MulticlassConfusionMatrix.* computes no single number"):
        wrapped(Confuses())


class Attached(Manual):
    """Makes an attribute when its fit begins, watches its steps, and goes on after them."""

    def on_train_start(self):
        self.count = 0

    def on_after_backward(self):
        self.count += 1

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", sum(parameter.grad.norm() for parameter in self.parameters()))

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        assert self.optimizers().param_groups
        self.log("steps", self.trainer.global_step - self.count)


def test_a_module_of_manual_optimization_stays_whole_behind_its_hooks(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(Attached())), rounds=1)
    loop.run()
    assert loop.runner.modules[0].logged.values == {"norm": pytest.approx(1, abs=1e3), "steps": 0.0}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, (6, 3)),
        ({"limit_train_batches": 2}, (4, 2)),
        ({"overfit_batches": 0.5}, (2, 1)),
        ({"max_steps": 4}, (4, 3)),
    ],
)
def test_a_schedule_knows_where_the_trainer_ends_a_fit(flags, wanted, set_up_federation, make_data):
    """One of `OneCycleLR` would not come down again."""
    seen = []

    class Asks(Plain):
        def on_train_start(self):
            seen.append((self.trainer.estimated_stepping_batches, self.trainer.num_training_batches))

    data = make_data(counts=((8, 6, 0, 0), (8, 6, 0, 0)))
    set_up_federation(lambda: FedAvg(wrapped(Asks())), rounds=1, local_epochs=2, data=data, trainer=flags).run()
    assert seen[1:] == [wanted] * 2  # one was tried out


def test_what_a_module_sets_of_its_trainer_is_not_ignored():
    class Stops(Plain):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    rule = r"self\.trainer\.should_stop cannot be set in a federated fit; on_train_batch_start ends an epoch"
    with pytest.raises(ConfigError, match=rule):
        wrapped(Stops())


class Begins(Plain):
    """Freezes its hidden layer as a fit begins."""

    def on_fit_start(self):
        self.hidden.requires_grad_(False)


def test_what_a_module_freezes_as_a_fit_begins_stays_frozen(run_federation):
    """As by itself; the phase thawed it, in silence."""
    loop = run_federation(lambda: FedAvg(wrapped(Begins())), 1)
    sent, received = (own[1, 0].weights for own in (loop.diary.sent, loop.diary.received))
    stood = {name for name in sent if torch.equal(sent[name], received[name])}
    assert stood == {name for name in sent if "hidden" in name} != set()


# --- the module is whole, and Lightning's order kept, on the way back -------------------------------------------------


def fitted_by_lightning(module, data, client=-1, epochs=2, **flags):
    """A module after Lightning's own fit to a client's samples, in their order."""
    (x, y), *_ = data.clients[client].passes("train")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    return trainer


class Looks(Plain):
    """A schedule, a hook of gradients and a pass that is made again on the way back look at the module."""

    def __init__(self, interval):
        super().__init__()
        self.interval, self.seen = interval, []
        self.hidden.weight.register_hook(self.look)

    def look(self, gradient):
        self.seen.append((self.current_epoch, self.trainer.max_epochs, sum(p.numel() for p in self.parameters())))

    def classify(self, z):
        self.seen.append((type(self.fc).__name__,))
        return self.fc(z)

    def forward(self, x):
        return checkpoint(self.classify, self.hidden(x.flatten(1)).relu(), use_reentrant=False)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.current_epoch))
        self.optimizer = optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_what_looks_at_a_module_on_the_way_back_sees_it_whole(interval, set_up_federation, make_data):
    data, theirs = make_data(), Looks(interval)
    fitted_by_lightning(theirs, data)
    loop = set_up_federation(lambda: FedAvg(wrapped(Looks(interval))), rounds=1, local_epochs=2, data=data)
    own = loop.runner.modules[0].method.model.own.joined.module
    own.seen.clear()  # of the pass that is tried out
    loop.run()
    assert own.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] != 0.2
    assert set(own.seen) == set(theirs.seen)
    assert {seen[0] for seen in own.seen} == {0, 1, "Linear"}


class Thaws(Plain):
    """Adds its hidden layer to the optimizer in the second epoch; until then gradients gather there."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def on_train_epoch_start(self):
        self.thaw("on_train_epoch_start", 0)

    def on_train_batch_start(self, batch, batch_idx):
        self.thaw("on_train_batch_start", batch_idx)

    def thaw(self, hook, batch):
        if (hook, self.current_epoch, batch) == (self.hook, 1, 0):
            self.optimizers().add_param_group({"params": self.hidden.parameters(), "lr": 0.1})

    def configure_optimizers(self):
        return torch.optim.SGD(self.fc.parameters(), lr=0.2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_what_is_added_to_an_optimizer_starts_without_old_gradients(hook, set_up_federation, make_data):
    torch.manual_seed(0)
    module, data = Thaws(hook), make_data(counts=((2, 2, 0, 0),))  # one mini-batch
    theirs = copy.deepcopy(module)
    loop = set_up_federation(lambda: FedAvg(wrapped(module)), rounds=1, local_epochs=2, data=data)
    loop.run()
    fitted_by_lightning(theirs, data)
    found = final(loop)
    for name, value in theirs.state_dict().items():
        own = f"model.head.{name[3:]}" if name.startswith("fc.") else f"model.body.neck.{name}"
        torch.testing.assert_close(found[own], value)


class LogsEnds(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ends", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")


class ReadsEnds(L.Callback):
    def __init__(self):
        self.read = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.read.append((float(trainer.callback_metrics["ends"]), trainer.num_training_batches))


def test_callbacks_read_what_is_logged_behind_the_last_mini_batch(set_up_federation):
    callback = ReadsEnds()
    loop = set_up_federation(lambda: FedAvg(wrapped(LogsEnds())), rounds=1, trainer={"callbacks": [callback]})
    loop.run()
    assert len(callback.read) == loop.num_clients
    assert all(ends == batches > 1 for ends, batches in callback.read)


# --- one module stands for all clients --------------------------------------------------------------------------------


class TellsStart(Plain):
    """Notes what it is told as a fit begins and ends."""

    def __init__(self):
        super().__init__()
        self.told = []

    def tell(self, place):
        trainer, steps = self.trainer, self.global_step
        self.told.append((place, self.current_epoch, steps, len(trainer.callback_metrics), trainer.is_last_batch))

    def configure_optimizers(self):
        self.tell("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self):
        self.tell("on_fit_start")

    def on_train_start(self):
        self.tell("on_train_start")

    def training_step(self, batch, batch_idx):
        self.log("size", float(len(batch[1])))
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.told.append(("on_train_end", self.current_epoch))


def test_a_fit_begins_at_its_beginning_whoever_was_fitted_before(set_up_federation):
    loop = set_up_federation(lambda: FedAvg(wrapped(TellsStart())), rounds=1, local_epochs=2)
    own = loop.runner.modules[0].method.model.own.joined.module
    own.told.clear()  # of what is tried out
    loop.run()
    begun = ["configure_optimizers", "on_fit_start", "on_train_start"]
    one = [*((place, 0, 0, 0, False) for place in begun), ("on_train_end", 2)]
    assert own.told == one * loop.num_clients


class Dims(L.Callback):
    """Halves a gradient by a hook, in every fit or in the first one alone."""

    def __init__(self, once=False):
        self.once, self.done = once, False

    def on_train_start(self, trainer, pl_module):
        if not (self.once and self.done):
            pl_module.method.model.head.bias.register_hook(lambda gradient: gradient * 0.5)
            pl_module.method.model.body.register_forward_hook(lambda body, x, z: z * 0.5)
        self.done = True


@pytest.mark.parametrize("once", [False, True])
def test_hooks_that_a_fit_is_given_go_with_it(once, mlp, set_up_federation, capsys):
    """Or the second client's gradients would be halved twice, in this process and not on another worker."""
    data = {"local_epochs": 1, "rounds": 2, "trainer": {"callbacks": [Dims(once)]}}
    loop = set_up_federation(lambda: FedAvg(mlp()), **data)
    loop.run()
    model = loop.runner.modules[0].method.model
    assert not model.head.bias._backward_hooks
    assert not model.body._forward_hooks
    assert capsys.readouterr().err.count("was given in a local fit ends with it; register one in every fit") == 1


class CountsEpochs(Plain):
    """Counts its epochs in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("epochs", torch.zeros(()))

    def on_train_epoch_start(self):
        self.epochs += 0.5

    def on_train_epoch_end(self):
        self.epochs += 0.5


@pytest.mark.parametrize("method", [FedAvg, Ditto, pFedMe])
def test_a_copy_hears_of_the_epochs_in_which_it_learns(method, set_up_federation):
    """Ditto trains its two models one after the other, each for two epochs."""
    loop = set_up_federation(lambda: method(wrapped(CountsEpochs())), rounds=1, local_epochs=2)
    loop.run()
    counted = {name: float(value) for name, value in loop.runner.modules[0].entries.items() if name.endswith("epochs")}
    assert set(counted.values()) == {2.0}


class SeesRate(Plain):
    """Notes the learning rate as an epoch ends, behind a schedule that goes by the epoch."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_epoch_end(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.filterwarnings("ignore")
def test_a_module_sees_the_rate_of_the_next_epoch_where_one_ends(set_up_federation, make_data):
    data, theirs = make_data(), SeesRate([])
    fitted_by_lightning(theirs, data)
    loop = set_up_federation(lambda: FedAvg(wrapped(SeesRate([]))), rounds=1, local_epochs=2, data=data)
    loop.run()
    assert loop.runner.modules[0].method.model.own.joined.module.rates[:2] == theirs.rates == [0.1, 0.05]


class Shared(list):
    """A list that a copied module writes into, too."""

    def __deepcopy__(self, memo):
        return self


class EndsBatch(Plain):
    def __init__(self, told):
        super().__init__()
        self.told = told

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.told.append(("module", batch_idx))


class HearsBatch(L.Callback):
    def __init__(self, told):
        self.told = told

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.told.append(("callback begins", batch_idx))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.told.append(("callback", batch_idx))


@pytest.mark.filterwarnings("ignore")
def test_a_mini_batch_ends_for_callbacks_first_and_then_for_the_module(set_up_federation, make_data):
    data, told, theirs = make_data(counts=((4, 4, 0, 0),)), Shared(), Shared()
    flags = {"callbacks": [HearsBatch(told)]}
    loop = set_up_federation(lambda: FedAvg(wrapped(EndsBatch(told))), rounds=1, data=data, trainer=flags)
    told.clear()
    loop.run()
    fitted_by_lightning(EndsBatch(theirs), data, epochs=1, callbacks=[HearsBatch(theirs)])
    assert told == theirs
