"""Optimizers of one's own LightningModules: several of them, under other precisions, with schedules of short fits."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ReduceLROnPlateau

from fl_lightning.core.finetuning import FineTune
from fl_lightning.errors import ConfigError
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.methods.dfedpgp import DFedPGP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.models.lightning_module import WrappedLightningModule


class Net(L.LightningModule):
    """Steps by its one optimizer, by itself, or by one optimizer for each of its layers."""

    def __init__(self, optimizers=1, lr=0.2, manual=None, rests=False):
        super().__init__()
        self.number, self.lr = optimizers, lr
        self.automatic_optimization = not (optimizers > 1 if manual is None else manual)
        self.hidden, self.fc = nn.Linear(64, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        if rests:
            self.norm.eval()
        self.seen, self.scales = [], []

    def forward(self, x):
        return self.fc(self.norm(self.hidden(x.flatten(1))).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(self.norm.training)
        loss = F.cross_entropy(self(x).float(), y)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.scales.append(float(gradient)))
        if not self.automatic_optimization:
            mine = self.optimizers()
            mine = mine if isinstance(mine, list) else [mine]
            for optimizer in mine:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in mine:
                optimizer.step()
        return loss

    def configure_optimizers(self):
        if self.number == 1:
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        parts = [self.fc.parameters(), [*self.hidden.parameters(), *self.norm.parameters()]]
        return [torch.optim.SGD(part, lr=self.lr) for part in parts]


def wrapped(module, **options):
    return WrappedLightningModule((1, 8, 8), 4, module, "fc", **options)


def inner(loop):
    return loop.runner.modules[0].own.joined.module


# --- several optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, FedBABU], ids=["fine-tuned", "FedBABU"])
def test_what_is_trained_outside_a_fit_is_trained_by_all_optimizers(kind, run_federation):
    policy = EvaluationPolicy(fine_tune=FineTune(3) if kind is FedAvg else None)
    one, two = (
        run_federation(lambda n=n: kind(wrapped(Net(n, manual=True))), rounds=1, evaluate=policy) for n in (1, 2)
    )
    for name, value in one.diary.rows[0].items():
        if not name.startswith("seconds"):
            assert two.diary.rows[0][name] == value, name


def test_a_phases_learning_rate_goes_to_all_optimizers(set_up_federation):
    rates = []

    class Told(Net):
        def on_train_epoch_start(self):
            rates.append([[group["lr"] for group in own.param_groups] for own in self.optimizers()])

    make = lambda: DFedPGP(wrapped(Told(2)), head_lr=0.5)  # noqa: E731
    loop = set_up_federation(make, rounds=2, lr_decay=0.5)
    rates.clear()  # of the rehearsal
    loop.run()
    heads, bodies = rates[0::2], rates[1::2]
    assert heads[0] == [[0.5], [0.5]]
    assert bodies[0] == [[0.2], [0.2]]
    assert heads[-1] == [[0.25], [0.25]]
    assert bodies[-1][0] == bodies[-1][1]


# --- what a loss does not reach --------------------------------------------------------------------------------------


class Aside(Net):
    """Has a layer that its loss does not reach, under an optimizer that decays weights."""

    def __init__(self, manual):
        super().__init__(manual=manual)
        self.aside = nn.Linear(3, 3)
        nn.init.ones_(self.aside.weight)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "by hand"])
def test_what_the_loss_does_not_reach_is_not_stepped(manual, run_federation):
    """By hand it had a gradient of zeros, along which an optimizer decays it."""
    loop = run_federation(lambda: FedAvg(wrapped(Aside(manual))), rounds=1)
    assert torch.equal(inner(loop).aside.weight, torch.ones(3, 3))


def test_a_term_reaches_what_the_loss_does_not(run_federation):
    """FedProx pulls every weight, so that an optimizer steps all of them, whoever calls it."""
    found = [run_federation(lambda own=own: FedProx(wrapped(Aside(own))), rounds=2) for own in (False, True)]
    first, second = (inner(loop).aside.weight for loop in found)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(3, 3))


class Sparse(Net):
    """Embeds pixels, with gradients of the rows that occur."""

    def __init__(self):
        super().__init__(manual=True, optimizers=2)
        self.rows = nn.Embedding(8, 8, sparse=True)

    def forward(self, x):
        return self.fc(self.norm(self.rows((4 * x.flatten(1)).long() % 8).mean(1)))

    def configure_optimizers(self):
        rest = [p for name, p in self.named_parameters() if not name.startswith("rows")]
        return [torch.optim.SparseAdam(self.rows.parameters(), lr=0.01), torch.optim.SGD(rest, lr=self.lr)]


def test_sparse_gradients_are_stepped_on_by_hand(run_federation):
    loop = run_federation(lambda: FedAvg(wrapped(Sparse())), rounds=2)
    first, second = (row["loss"] for row in loop.diary.rows)
    assert second < first


@pytest.mark.parametrize("skips", [lambda y: len(y) < 8, lambda y: len(y.unique()) == len(y)], ids=["few", "no pair"])
def test_a_step_that_leaves_two_samples_out_is_no_step_without_a_loss(skips):
    class Choosy(Net):
        def training_step(self, batch, batch_idx):
            return None if skips(batch[1]) else super().training_step(batch, batch_idx)

    assert wrapped(Choosy()).own is not None


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [1, 2])
def test_steps_by_hand_are_on_float32_copies(optimizers, run_federation):
    """Steps that bfloat16 would lose one by one: as by automatic optimization, to the bit."""
    own = {"rounds": 2, "local_epochs": 6, "trainer": {"precision": "bf16-true"}}
    automatic = run_federation(lambda: FedAvg(wrapped(Net(lr=2e-3))), **own)
    by_hand = run_federation(lambda: FedAvg(wrapped(Net(optimizers, lr=2e-3, manual=True))), **own)
    ours, others = (loop.exchange.global_message().weights for loop in (by_hand, automatic))
    assert {name for name, tensor in ours.items() if not torch.equal(tensor, others[name])} == set()
    assert by_hand.diary.rows[-1]["loss"] == automatic.diary.rows[-1]["loss"]


def test_losses_of_steps_by_hand_are_scaled_under_float16(run_federation):
    losses = []
    for manual in (False, True):
        plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))]}
        loop = run_federation(lambda manual=manual: FedAvg(wrapped(Net(manual=manual))), rounds=1, trainer=plugins)
        assert set(inner(loop).scales[-3:]) == {512.0}
        losses.append([loop.diary.rows[0]["loss"], loop.exchange.global_message().weights["model.head.weight"].sum()])
    assert losses[0] == losses[1]


def test_optimizer_that_goes_back_by_itself_is_refused_in_half_precision(run_federation):
    class Searching(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch

            def passes():
                self.optimizers().zero_grad()
                self.loss = F.cross_entropy(self(x).float(), y)
                self.manual_backward(self.loss)
                return self.loss

            self.optimizers().step(passes)
            return self.loss

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    make = lambda: FedAvg(wrapped(Searching(manual=True)))  # noqa: E731
    run_federation(make, rounds=1)
    with pytest.raises(ConfigError, match=r"^trainer\.precision: under LBFGS must be 32-true, 64-true or bf16-mixed"):
        run_federation(make, rounds=1, trainer={"precision": "bf16-true"})


# --- modes and schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"cohort": 4}], ids=["alone", "stacked"])
def test_batch_norm_that_the_module_rests_rests_in_every_phase(options, run_federation):
    loop = run_federation(lambda: FedCPD(wrapped(Net(rests=True)), gamma=0.0), rounds=1, local_epochs=2, **options)
    assert set(inner(loop).seen) == {False}
    assert not loop.exchange.global_message().weights["model.body.neck.norm.running_mean"].any()


def test_schedules_are_tried_out_at_the_length_that_a_fit_has(set_up_federation):
    class Restarts(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [CosineAnnealingWarmRestarts(optimizer, T_0=self.trainer.max_epochs // 2)]

    make = lambda: FedAvg(wrapped(Restarts()))  # noqa: E731
    set_up_federation(make, rounds=1, local_epochs=4).run()
    with pytest.raises(ConfigError, match="Expected positive integer T_0, but got 0"):
        set_up_federation(make, rounds=1, local_epochs=1)


def test_what_cannot_be_configured_is_not_laid_to_the_training_step():
    class Broken(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    with pytest.raises(ConfigError, match=r"Broken's configure_optimizers fails \(AttributeError"):
        wrapped(Broken())


@pytest.mark.parametrize("strict", [False, True])
def test_a_plateau_of_what_is_not_logged_is_passed_over_where_that_is_allowed(strict, set_up_federation):
    class Plateau(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss", "strict": strict}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    loop = set_up_federation(lambda: FedAvg(wrapped(Plateau())), rounds=1)
    if not strict:
        loop.run()
        assert loop.done
        return
    with pytest.raises(Exception, match="schedulers can watch what training_step logs"):
        loop.run()
