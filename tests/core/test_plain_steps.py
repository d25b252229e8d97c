"""Plain fits against those that go through Lightning's strategy, plugin and hooks: the same bits and counts."""

import lightning as L
import pytest
import torch
from torch import nn

from fl_lightning.core.descent import Descent
from fl_lightning.core.facts import Fit
from fl_lightning.core.plain_steps import PlainDescent, bare_step, is_plain
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep


class Counts(L.Callback):
    """What the Trainer has counted when a fit ends."""

    def __init__(self):
        self.steps = []

    def on_train_end(self, trainer, pl_module):
        self.steps.append((trainer.global_step, pl_module.method.fit.num_steps))


class Onlooker(L.Callback):
    """Sees every step, which no plain fit has."""

    def __init__(self):
        self.seen = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen += 1


OPTIMIZERS = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1),
    "decay": lambda own: torch.optim.SGD(own, lr=0.1, weight_decay=0.01),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda own: torch.optim.Adam(own, lr=0.01),
}


def fits(set_up_federation, make, optimizer, callbacks, **trainer):
    counts = Counts()
    loop = set_up_federation(make, optimizer=optimizer, trainer={"callbacks": [counts, *callbacks], **trainer})
    losses = []
    for client in (0, 1, 0):
        module = loop.runner.load(client)
        loop.runner.fit(module, loop.data.clients[client], 1)
        losses.append(module.meter.means())
    return module, counts.steps, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "trainer",
    [{}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
     {"accumulate_grad_batches": 2}, {"precision": "64-true"}],
    ids=str,
)  # fmt: skip
def test_plain_fits_take_the_same_steps(set_up_federation, mlp, name, trainer):
    onlooker = Onlooker()
    make = lambda: FedRep(mlp())  # noqa: E731
    watched, expected_steps, expected_losses = fits(set_up_federation, make, OPTIMIZERS[name], [onlooker], **trainer)
    assert {type(own) for own in watched._descents} == {Descent}
    plain, steps, losses = fits(set_up_federation, make, OPTIMIZERS[name], [], **trainer)
    assert {type(own) for own in plain._descents} == {PlainDescent if "precision" not in trainer else Descent}
    assert (steps, losses) == (expected_steps, expected_losses)
    assert onlooker.seen == sum(counted for counted, _ in steps)
    pairs = zip(plain.entries.values(), watched.entries.values(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("flags", [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"profiler": "simple"}])
def test_fits_with_more_between_loss_and_parameters_are_not_plain(set_up_federation, mlp, flags):
    loop = set_up_federation(lambda: FedAvg(mlp()), trainer=flags)
    assert not is_plain(loop.runner.trainer)


def made(make, hook=True):
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.ones(2, 3)  # and none of the bias
    optimizer = make(layer.parameters())
    if hook:
        optimizer.register_step_post_hook(lambda *_: None)
    return layer, optimizer


def test_bare_step_is_sgds_and_leaves_alone_what_has_no_gradient():
    torch.manual_seed(0)
    layer, optimizer = made(OPTIMIZERS["decay"])
    whole, other = made(OPTIMIZERS["decay"])
    whole.load_state_dict(layer.state_dict())
    fit = Fit()
    bare_step(optimizer, fit)()
    other.step()
    assert torch.equal(layer.weight, whole.weight)
    assert torch.equal(layer.bias, whole.bias)
    assert layer.weight.grad is None
    assert fit.num_steps == 1


class OwnSGD(torch.optim.SGD):
    """May step as it likes."""


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.RMSprop(own, lr=0.1),
        lambda own: torch.optim.Adam(own, lr=0.1, amsgrad=True),
        lambda own: torch.optim.Adam(own, lr=0.1, fused=True),
        lambda own: OwnSGD(own, lr=0.1),
        lambda own: torch.optim.SGD(own, lr=torch.tensor(0.1)),
        lambda own: torch.optim.SGD(own, lr=0.1, maximize=True),
    ],
)
def test_other_steps_are_not_bare(make):
    assert bare_step(made(make)[1], Fit()) is None


def test_sgd_that_somebody_watches_is_not_bare():
    _, optimizer = made(OPTIMIZERS["sgd"])
    assert bare_step(optimizer, Fit()) is not None
    optimizer.register_step_pre_hook(lambda *_: None)
    assert bare_step(optimizer, Fit()) is None
    _, scheduled = made(OPTIMIZERS["sgd"])
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert bare_step(scheduled, Fit()) is None
