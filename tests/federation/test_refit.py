"""Shortened fits against Lightning's whole way into one: the same hooks, Trainer, and bits."""

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging

from fl_lightning.core import client as client_module
from fl_lightning.errors import ConfigError
from fl_lightning.federation.refit import Fits
from fl_lightning.federation.trainers import check_kinds
from fl_lightning.losses.prototype import Prototypes
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep

HOOKS = [name for name, member in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")]


class Witness(Callback):
    """Writes down every hook, and what a callback can see of the Trainer there."""

    def __init__(self):
        self.seen = []

    def setup(self, trainer, pl_module, stage):
        self.note("setup", trainer, pl_module, stage)

    def teardown(self, trainer, pl_module, stage):
        self.note("teardown", trainer, pl_module, stage)

    def note(self, name, trainer, module, *arguments):
        loader, state = trainer.train_dataloader, trainer.state
        self.seen.append({
            "hook": name,
            "arguments": [repr(value) for value in arguments if isinstance(value, (int, str, Exception))],
            "state": (state.fn, state.status, state.stage, trainer.training, trainer.should_stop),
            "progress": (trainer.current_epoch, trainer.global_step, trainer.max_epochs, trainer.is_last_batch),
            "batches": (trainer.num_training_batches, None if loader is None else len(loader)),
            "module": (module is trainer.lightning_module, module.trainer is trainer, module.training),
            "optimizers": [(type(own).__name__, own.param_groups[0]["lr"]) for own in trainer.optimizers],
            "grads": [p.requires_grad for p in module.parameters()],
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "anomalies": torch.is_anomaly_enabled(),
            "log": self.log.__self__ is module if hasattr(self, "log") else None,
        })  # fmt: skip


def _noted(name):
    def hook(self, trainer, pl_module, *arguments):
        self.note(name, trainer, pl_module, *arguments)

    return hook


for _hook in HOOKS:
    if _hook not in ("on_save_checkpoint", "on_load_checkpoint"):
        setattr(Witness, _hook, _noted(_hook))


def all_fits(set_up_federation, mlp, shortened, **trainer):
    witness = Witness()
    options = {"trainer": {"callbacks": [witness], **trainer}, "architecture": [0, 1, 0, 1]}
    loop = set_up_federation(lambda _: FedRep(mlp(), head_epochs=2), **options)
    loop.runner.fits.shortens &= shortened
    for client in (0, 1, 2, 3, 0, 1):
        loop.runner.fit(loop.runner.load(client), loop.data.clients[client], 1)
    weights = [tensor.clone() for module in loop.runner.modules for tensor in module.entries.values()]
    return loop, witness.seen, weights


@pytest.mark.parametrize(
    "trainer", [{}, {"detect_anomaly": True, "gradient_clip_val": 0.1}, {"precision": "bf16-true"}]
)
def test_shortened_fits_call_what_whole_ones_do_and_train_the_same_bits(set_up_federation, mlp, trainer):
    loop, whole, expected = all_fits(set_up_federation, mlp, shortened=False, **trainer)
    assert not loop.runner.fits.shortens
    loop, short, weights = all_fits(set_up_federation, mlp, shortened=True, **trainer)
    assert loop.runner.fits.shortens
    for number, (own, other) in enumerate(zip(short, whole, strict=True)):
        assert own == other, number
    assert all(torch.equal(own, other) for own, other in zip(weights, expected, strict=True))


def test_shortened_fits_are_shorter(set_up_federation, mlp, monkeypatch):
    entered = []
    original = L.Trainer._run
    monkeypatch.setattr(L.Trainer, "_run", lambda *given, **named: entered.append(1) or original(*given, **named))
    all_fits(set_up_federation, mlp, shortened=True)
    assert len(entered) == 2  # one of each module


def test_fit_after_one_that_broke_off_goes_the_whole_way(set_up_federation, mlp):
    loop, _, _ = all_fits(set_up_federation, mlp, shortened=True)
    runner, module = loop.runner, loop.runner.load(0)
    original = module.method.local_step

    def fails(step):
        raise ArithmeticError("on purpose")

    module.method.local_step = fails
    with pytest.raises(ArithmeticError):
        runner.fit(module, loop.data.clients[0], 2)
    module.method.local_step = original
    assert runner.trainer.state.stage is None
    runner.fit(runner.load(0), loop.data.clients[0], 2)
    again = [tensor.clone() for tensor in module.entries.values()]
    runner.fit(runner.load(0), loop.data.clients[0], 2)
    assert all(torch.equal(a, b) for a, b in zip(module.entries.values(), again, strict=True))


@pytest.mark.parametrize(
    "flags", [{"limit_train_batches": 2}, {"profiler": "simple"}, {"max_steps": 3}, {"max_time": "00:01:00:00"}]
)
def test_flags_that_a_fit_must_look_at_again_go_the_whole_way(flags, tmp_path):
    flags = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(tmp_path), **flags}
    assert not Fits(L.Trainer(**flags), flags).shortens


@pytest.mark.parametrize("callback", [GradientAccumulationScheduler({0: 1}), StochasticWeightAveraging(1e-2)])
def test_lightnings_own_callbacks_see_the_same(set_up_federation, mlp, callback):
    """They look into the Trainer, and refuse manual optimization in both ways alike."""
    found = []
    for shortened in (False, True):
        try:
            all_fits(set_up_federation, mlp, shortened, callbacks=[callback])
        except Exception as error:
            found.append(str(error))
        else:
            found.append("")
    assert found[0] == found[1]


class Swa(StochasticWeightAveraging):
    """One of somebody's own, which Lightning's averaging is all the same."""


def test_what_derives_from_lightnings_averaging_is_refused_like_it():
    """It ended in a TypeError at the second client."""
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: Swa needs a copy of the whole fit"):
        check_kinds([Swa(1e-2)])


class Thaws(Callback):
    """Writes to a layer that came frozen."""

    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.method.model.body.stages[0][1].bias.add_(1)


class Follows(Callback):
    """Lets a layer that came frozen follow a mean, by `.data`, which no version counts."""

    def on_train_end(self, trainer, pl_module):
        bias = pl_module.method.model.body.stages[0][1].bias
        bias.data.lerp_(torch.ones_like(bias), 0.1)


@pytest.mark.parametrize("callback", [Thaws, Follows])
def test_fit_may_not_change_what_comes_frozen_and_is_put_back_by_nobody(set_up_federation, mlp, callback):
    def method():
        model = mlp()
        model.body.stages[0].requires_grad_(False)
        return FedAvg(model)

    set_up_federation(method, rounds=1).run()
    with pytest.raises(ConfigError, match=r"^model: model\.body\.stages\.0\.1\.bias comes frozen, .* on_fit_start"):
        set_up_federation(method, rounds=1, trainer={"callbacks": [callback()]}).run()


class Freezes(Callback):
    """Freezes the head before optimizers are made, in every second fit."""

    def __init__(self):
        self.fits, self.trained = 0, []

    def setup(self, trainer, pl_module, stage):
        self.fits += 1
        pl_module.method.model.head.requires_grad_(self.fits % 2 == 1)

    def on_train_start(self, trainer, pl_module):
        self.trained.append(sum(len(own["params"]) for made in trainer.optimizers for own in made.param_groups))


def test_what_a_callback_freezes_before_a_fit_has_no_optimizer(set_up_federation, mlp):
    callback = Freezes()
    loop = set_up_federation(lambda: FedAvg(mlp()), trainer={"callbacks": [callback]})
    for _ in range(4):
        module = loop.runner.load(0)
        module.requires_grad_(True)
        loop.runner.fit(module, loop.data.clients[0], 1)
    every, head = len(list(module.parameters())), len(list(module.method.model.head.parameters()))
    assert callback.trained == [every, every - head, every, every - head]


def test_a_fit_plans_its_phases_once_and_leaves_no_plan_where_it_breaks_off(set_up_federation, mlp, monkeypatch):
    planned, plan_of = [], client_module.plan_of
    monkeypatch.setattr(client_module, "plan_of", lambda *given: planned.append(1) or plan_of(*given))
    loop = set_up_federation(lambda: FedRep(mlp()))
    runner, module, data = loop.runner, loop.runner.load(0), loop.data.clients[0]
    planned.clear()
    for _ in range(3):
        runner.fit(runner.load(0), data, 1)
    assert len(planned) == 3

    def fails(*given):
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(runner.fits, "fit", fails)
    with pytest.raises(ArithmeticError):
        runner.fit(runner.load(0), data, 1)
    assert module.planned is None


class EndsFit(Callback):
    """Ends every fit after some epochs."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


@pytest.mark.parametrize(("epochs", "lines"), [(1, 1), (2, 1), (3, 0)])
def test_a_line_says_where_a_fit_ends_before_some_of_its_phases(epochs, lines, set_up_federation, mlp, capsys):
    """FedRep's bodies were never trained, in silence."""
    make = lambda: FedRep(mlp(), head_epochs=2)  # noqa: E731
    set_up_federation(make, rounds=2, local_epochs=2, trainer={"callbacks": [EndsFit(epochs)]}).run()
    said = "ended a fit of FedRep before its last epoch: nothing was trained in body\n"
    assert capsys.readouterr().err.count(said) == lines


@pytest.mark.parametrize("flags", [{"max_steps": 1}, {"callbacks": [EndsFit(1)]}], ids=["max_steps", "callback"])
def test_a_line_says_where_a_fit_ends_before_what_is_averaged_in_its_last_epoch(flags, set_up_federation, mlp, capsys):
    make = lambda: FedProto(mlp(), prototypes=Prototypes("running"))  # noqa: E731
    loop = set_up_federation(make, rounds=1, local_epochs=2, trainer=flags)
    loop.run()
    assert not loop.diary.sent[1, 0].artifacts["prototypes"].valid.any()
    said = "before its last epoch: there is nothing yet of what PrototypeAlignment averages in that epoch\n"
    assert capsys.readouterr().err.count(said) == 1
