"""Steps in few operations are torch's own, bit for bit, whoever has a gradient when."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from fl_lightning.core.bare_steps import bare_step
from fl_lightning.core.facts import Fit
from fl_lightning.models.own_training import Counter

OPTIMIZERS = {
    "sgd": lambda own: SGD(own, lr=0.1),
    "decay": lambda own: SGD(own, lr=0.1, weight_decay=0.01),
    "momentum": lambda own: SGD(own, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda own: SGD(own, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda own: SGD(own, lr=0.1, momentum=0.5, nesterov=True),
    "adam": lambda own: Adam(own, lr=0.01),
    "adam, decay": lambda own: Adam(own, lr=0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
    "adamw": lambda own: AdamW(own, lr=0.01, weight_decay=0.1),
}
WHO = {
    "all": lambda step: (0, 1, 2),
    "some come late": lambda step: (0, 1, 2) if step > 2 else (0, 2),
    "turns": lambda step: (step % 3, (step + 1) % 3),
    "nobody at times": lambda step: () if step % 3 == 1 else (0, 1, 2),
}
STEPS = 9


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((7, 5), (7,), ())]


def with_gradients(own, who, seed):
    torch.manual_seed(seed)
    for place, parameter in enumerate(own):
        gradient = torch.randn_like(parameter)
        parameter.grad = gradient if place in who else None


def made(name, own):
    optimizer = OPTIMIZERS[name](own)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_torch(name, who):
    ours, theirs = parameters(), parameters()
    bare, own = made(name, ours), OPTIMIZERS[name](theirs)
    fit = Fit()
    step = bare_step(bare, fit)
    for number in range(STEPS):
        lr = 0.05 / (1 + number)
        bare.param_groups[0]["lr"] = own.param_groups[0]["lr"] = lr  # as a schedule does
        with_gradients(ours, WHO[who](number), number)
        with_gradients(theirs, WHO[who](number), number)
        step()
        own.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), number
        assert all(parameter.grad is None for parameter in ours)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_torch_goes_on_where_this_left_off(name):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    bare, own = made(name, ours), OPTIMIZERS[name](theirs)
    step = bare_step(bare, Fit())
    for number in range(4):
        with_gradients(ours, (0, 1, 2), number)
        with_gradients(theirs, (0, 1, 2), number)
        step()
        own.step()
    bare.load_state_dict(copy.deepcopy(own.state_dict()))  # other groups, and other state, than it began with
    for number in range(4):
        with_gradients(ours, (0, 1, 2), 10 + number)
        with_gradients(theirs, (0, 1, 2), 10 + number)
        step()
        own.step()
    bare.state.clear()
    own.state.clear()
    with_gradients(ours, (0, 1, 2), 20)
    with_gradients(theirs, (0, 1, 2), 20)
    step()
    own.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_state_that_is_cleared_begins_anew(name):
    ours, theirs = parameters(), parameters()
    bare, own = made(name, ours), OPTIMIZERS[name](theirs)
    step = bare_step(bare, Fit())
    for number in range(6):
        if number == 3:
            bare.state.clear()
            own.state.clear()
        with_gradients(ours, (0, 1, 2), number)
        with_gradients(theirs, (0, 1, 2), number)
        step()
        own.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_steps_are_counted_once_whoever_makes_them():
    own, fit = parameters(), Fit()
    optimizer = OPTIMIZERS["adam"](own)

    def count(*_):
        fit.num_steps += 1

    optimizer.register_step_post_hook(count)
    step = bare_step(optimizer, fit)
    for number in range(STEPS):
        with_gradients(own, WHO["turns"](number), number)
        step()
    assert fit.num_steps == STEPS


def test_sparse_gradients_are_steps_of_torchs_own():
    tables = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    ours, theirs = (SGD(table.parameters(), lr=0.1) for table in tables)
    ours.register_step_post_hook(lambda *_: None)
    step = bare_step(ours, Fit())
    for rows in ([0, 1], [1, 4]):
        for table in tables:
            table.zero_grad()
            table(torch.tensor(rows)).sum().backward()
        step()
        theirs.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_counter_beside_is_called_and_any_other_hook_takes_the_whole_step(name):
    """A configured optimizer of a user's module took a quarter longer for its count of steps."""
    own, seen = parameters(), []
    optimizer = made(name, own)
    optimizer.register_step_post_hook(Counter(seen.append))
    step = bare_step(optimizer, Fit())
    for number in range(3):
        with_gradients(own, (0, 1, 2), number)
        step()
    assert seen == [optimizer] * 3
    optimizer.register_step_post_hook(lambda *_: None)
    assert bare_step(optimizer, Fit()) is None
