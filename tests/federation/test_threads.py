"""How many threads a run takes where nobody has said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fl_lightning import Experiment
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.team import num_cores
from fl_lightning.federation.threads import SMALL, choose_threads, operations


class Store:
    """Samples of one shape."""

    def __init__(self, *shape):
        self.shape = shape

    def gather(self, indices):
        return torch.zeros(len(indices), *self.shape), indices


def module(model, device="cpu"):
    return SimpleNamespace(method=SimpleNamespace(model=model), device=torch.device(device))


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """What was asked for; 1,000 at the beginning, more than any machine's cores."""
    asked = [1000]
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    return asked


def test_operations_are_a_product_and_a_sum_for_each_weight_of_dense_layers_and_more_for_others():
    dense = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    assert operations(module(dense), Store(6), 10) == 2 * 10 * (24 + 12)
    assert operations(module(nn.Conv2d(1, 2, 3)), Store(1, 8, 8), 5) == 2 * 5 * (6 * 6) * 2 * 9
    recurrent = nn.LSTM(8, 16)  # of which torch counts nothing
    assert operations(module(recurrent), Store(4, 8), 3) >= 2 * 3 * sum(p.numel() for p in recurrent.parameters())


def test_trying_a_model_changes_nothing_of_it_and_draws_nothing():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3).eval()).train()
    before, modes = {n: t.clone() for n, t in model.state_dict().items()}, [part.training for part in model.modules()]
    stream = torch.get_rng_state()
    operations(module(model), Store(6), 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_small_model_takes_one_thread_and_a_large_one_no_more_than_there_are_cores(threads):
    small, large = module(nn.Linear(6, 3)), module(nn.Linear(1000, 1000))
    choose_threads([small], Store(6), 10)
    assert threads[-1] == 1
    threads.append(1000)
    assert operations(large, Store(1000), 10) > SMALL
    choose_threads([large], Store(1000), 10)
    assert threads[-1] == num_cores()


def test_of_several_architectures_the_largest_counts_and_one_that_cannot_be_tried_is_large(threads):
    own = module(nn.Linear(7, 3))  # takes other inputs
    assert operations(own, Store(6), 10) == float("inf")
    choose_threads([module(nn.Linear(6, 3)), own], Store(6), 10)
    assert threads[-1] == num_cores()


def test_a_device_leaves_threads_alone(threads):
    choose_threads([module(nn.Linear(6, 3), "cuda")], Store(6), 10)
    assert threads == [1000]


@pytest.mark.parametrize(("said", "taken"), [(None, 1), (3, 1000)])
def test_a_run_chooses_unless_it_was_told(said, taken, threads):
    """What `federation.threads` says is set where processes start."""
    overrides = {} if said is None else {"federation.threads": said}
    experiment = Experiment.from_yaml("quickstart", **overrides)
    BuiltExperiment(experiment.config).setup(in_memory=True)
    assert threads[-1] == taken
