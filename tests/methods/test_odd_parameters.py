"""Parameters that are a single number, or none at all, in body and head."""

import math

import pytest
import torch
from tiny_optimizers import adam
from torch import nn

from fl_lightning.methods.dispfl import DisPFL
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.fedpac import FedPAC
from fl_lightning.models.split import Body, SplitModel


class Scaled(nn.Module):
    """A layer under a temperature that is learned, and a parameter without entries."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.inner(x) * self.temperature


def model():
    body = Body([], Scaled(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU())))
    return SplitModel(body, Scaled(nn.Linear(6, 4)), 6, 4, (1, 8, 8))


@pytest.mark.parametrize("kind", [FedAvg, FedAMP, FedPAC, FedKD, DisPFL])
def test_methods_train_them(kind, run_federation):
    """Those that take weights apart: into combinations, low-rank changes, masks."""
    loop = run_federation(lambda: kind(model()), rounds=2, optimizer=adam)
    assert all(math.isfinite(row["loss"]) for row in loop.diary.rows)
    temperatures = {
        float(state[name])
        for client in range(loop.num_clients)
        for state in [{**loop.exchange.inbox(client).weights, **(loop.runner.pool.get(client) or {})}]
        for name in state
        if name.startswith("model.") and name.endswith("temperature")
    }
    assert temperatures - {1.0}
    assert all(math.isfinite(value) for value in temperatures)
