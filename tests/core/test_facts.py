"""What servers and clients are told of the federation and of a local fit."""

import pytest
import torch

from fl_lightning.core.facts import Facts, Fit, Phase


def test_newcomers_are_the_last_clients():
    facts = [Facts(num_clients=5, newcomers=2, client=client) for client in range(5)]
    assert [own.is_newcomer for own in facts] == [False, False, False, True, True]
    assert not Facts(num_clients=5, newcomers=2).is_newcomer  # a server is nobody's newcomer
    assert not Facts(num_clients=5, client=4).is_newcomer


def test_last_epoch_is_the_one_that_none_comes_after():
    fit = Fit(epochs=2)
    assert not fit.in_last_epoch
    fit.epoch = 1
    assert fit.in_last_epoch


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def test_optimizer_is_the_phases_own_or_the_configurations(parameters, sgd):
    fit = Fit(sgd(0.1))
    assert rate(fit.make_optimizer(parameters)) == 0.1
    own = fit.make_optimizer(parameters, Phase("own", optimizer=lambda p: torch.optim.Adam(p, lr=0.3)))
    assert isinstance(own, torch.optim.Adam)
    assert rate(own) == 0.3
    assert fit.make_optimizer(parameters) is not fit.make_optimizer(parameters)


def test_a_phases_rate_stands_before_the_decay(parameters, sgd):
    fit = Fit(sgd(0.1), lr_factor=0.5)
    assert rate(fit.make_optimizer(parameters)) == 0.05
    assert rate(fit.make_optimizer(parameters, decays=False)) == 0.1
    assert rate(fit.make_optimizer(parameters, Phase("own", lr=0.8))) == 0.4
    assert rate(fit.make_optimizer(parameters, Phase("own", lr=0.8), decays=False)) == 0.8


def test_a_part_has_settings_of_its_own_before_the_decay(parameters, sgd):
    fit = Fit(sgd(0.1), lr_factor=0.5)
    phase = Phase("own", lr=0.8, parts={"a": (), "b": ()}, settings={"b": {"lr": 0.2, "weight_decay": 0.3}})
    one, other = (fit.make_optimizer(parameters, phase, part=part) for part in "ab")
    assert (rate(one), rate(other)) == (0.4, 0.1)
    assert (one.param_groups[0]["weight_decay"], other.param_groups[0]["weight_decay"]) == (0, 0.3)
    assert rate(fit.make_optimizer(parameters, decays=False, lr=0.7)) == 0.7


def test_tuning_sees_the_optimizer_as_it_will_step(parameters, sgd):
    seen = []
    phase = Phase("own", lr=0.8, tune=lambda made: seen.append(rate(made)))
    Fit(sgd(0.1), lr_factor=0.5).make_optimizer(parameters, phase)
    assert seen == [0.4]


def test_without_a_federation_there_is_no_optimizer(parameters):
    with pytest.raises(AssertionError, match="outside a federation"):
        Fit().make_optimizer(parameters)
