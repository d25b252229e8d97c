"""Rounds of pfl-research's FedAvg: clients of 50 made-up images, some a round, the CNN, batch 10; seconds of each.

Started by `peers.py`, with the interpreter for which pfl-research is installed; nothing of this package is imported.

    python benchmarks/peer_pfl_research.py ROUNDS CLIENTS DRAWN
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

EACH = 50


class CNN(nn.Sequential):
    """Two convolutions of 5x5 and two linear layers, as `fl_lightning.models.cnn.CNN`."""

    def __init__(self) -> None:
        first = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def loss(self, x: Any, y: Any, eval: bool = False) -> torch.Tensor:
        """Cross-entropy of arrays or tensors."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(torch.as_tensor(x)), torch.as_tensor(y).long())

    @torch.no_grad()
    def metrics(self, x: Any, y: Any, eval: bool = True) -> dict[str, Any]:
        """The mean loss."""
        return {"loss": Weighted(float(self.loss(x, y, eval)) * len(y), len(y))}


class Stopwatch(TrainingProcessCallback):
    """Prints the seconds between the ends of rounds."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """One round is over."""
        now = time.perf_counter()
        print(f"seconds {now - self.last}", flush=True)
        self.last = now
        return False, Metrics()


def main() -> None:
    rounds, clients, drawn = map(int, sys.argv[1:])
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    data = {
        client: [rng.random((EACH, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, EACH)]
        for client in range(clients)
    }
    training = FederatedDataset.from_slices(data, get_user_sampler("random", list(data)))
    network = CNN()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, 10**9, drawn, None),
        backend=SimulatedBackend(training, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.01, local_batch_size=10),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Stopwatch()],
    )


if __name__ == "__main__":
    main()
