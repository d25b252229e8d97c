"""Stretches of code in which parts of a module are frozen, rest, or keep what they have."""

import pytest
import torch
from torch import nn

from fl_lightning.core.freezing import (
    batch_norms,
    frozen,
    keeping_state,
    keeping_statistics,
    only,
    set_mode,
    single_sample,
    trainable,
    training,
)


@pytest.fixture
def net(conv_net):
    return conv_net()


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


def test_only_builds_a_graph_for_what_it_is_given_and_thaws_the_rest(net):
    stays = net.head.bias.requires_grad_(False)
    with only(net, [net.head.weight]):
        assert trained(net) == ["head.weight"]
    assert [p for p in net.parameters() if not p.requires_grad] == [stays]


def test_frozen_builds_no_graph_for_a_part_and_thaws_it(net):
    net.head.bias.requires_grad_(False)
    before = trained(net)
    with frozen(net.head):
        assert trained(net) == [name for name in before if not name.startswith("head")]
    assert trained(net) == before


@pytest.mark.parametrize("stretch", [frozen, lambda net: only(net, []), lambda net: training(net, False)])
def test_an_error_inside_leaves_nothing_changed(net, stretch):
    before = trained(net)
    with pytest.raises(KeyError), stretch(net):
        raise KeyError
    assert trained(net) == before
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("was", [True, False])
def test_training_goes_into_a_mode_and_back(net, was):
    net.train(was)
    for mode in (True, False):
        with training(net, mode):
            assert net.head.training is mode
        assert net.head.training is was


def test_keeping_statistics_puts_batch_norm_back(net):
    net(torch.rand(4, 1, 8, 8))
    (norm,) = batch_norms(net)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    with keeping_statistics(net):
        net(torch.rand(4, 1, 8, 8))
        assert not torch.equal(norm.running_mean, before["running_mean"])
    assert all(torch.equal(norm.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("batch_size", "rests"), [(1, True), (2, False)])
def test_batch_norm_rests_for_a_batch_of_one(net, batch_size, rests):
    layers = batch_norms(net)
    with single_sample(layers, batch_size):
        assert layers[0].training is not rests
        assert net.head.training
    assert layers[0].training


def test_batch_norm_that_rests_already_is_not_woken(net):
    layers = batch_norms(net)
    layers[0].eval()
    with single_sample(layers, 1):
        pass
    assert not layers[0].training


def test_keeping_state_puts_weights_and_statistics_back(net):
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with keeping_state(net), torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_trainable_are_the_parameters_that_are_not_frozen(net):
    net.head.bias.requires_grad_(False)
    assert [id(p) for p in trainable(net.head)] == [id(net.head.weight)]


class Resting(nn.Module):
    """A teacher, which stays in eval mode whatever is asked."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout()

    def train(self, mode=True):
        return super().train(False)


class Counting(nn.Module):
    """A module that takes its attributes by itself."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setattr__("count", vars(self).get("count", 0) + 1)


def test_mode_is_set_as_torch_does_and_as_a_module_wants_it():
    def make():
        return nn.Sequential(nn.Sequential(nn.BatchNorm1d(3), Resting()), None, Counting(), nn.Dropout())

    ours, torchs = make(), make()
    for mode in (False, True, True, False):
        set_mode(ours, mode)
        torchs.train(mode)
        assert [part.training for part in ours.modules()] == [part.training for part in torchs.modules()]
        assert ours[3].training is mode
        assert not ours[0][1].inner.training
    assert ours[2].count == torchs[2].count
