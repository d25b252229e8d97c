"""Seconds a round on real FashionMNIST, against the same work written by hand.

20 clients, Dirichlet(0.1), hold-out split, the 2 conv + 2 fc CNN, batch 10, SGD 0.01, one local epoch, FedAvg,
Local-T_received every round. Run from the repository's root, with the data in the default folder or given:

    python benchmarks/fashion_mnist_round.py [--root FOLDER] [--repetitions 5] [--methods FedAvg]

Repetitions of ours and of the hand-written loop alternate, so that both see the same machine; medians are printed and
written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from results import save
from torch import nn

from fl_lightning.data.datasets import FashionMNIST
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.federation.loop import EvaluationPolicy, FederatedLoop
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.cnn import CNN

METHODS = {"FedAvg": FedAvg, "FedRep": FedRep, "FedProto": FedProto}


def federation(method: str, data: FederatedData) -> FederatedLoop:
    loop = FederatedLoop(rounds=10**6, evaluate=EvaluationPolicy(trained=False, globally=False, server=False))
    spec = data.spec
    loop.setup(
        lambda _: METHODS[method](CNN(spec.input_shape, spec.num_classes)),
        data,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        seed=0,
        trainer={"accelerator": "cpu"},
    )
    return loop


class HandWritten:
    """FedAvg's local fits as one writes them by hand: batches indexed from a tensor, no framework."""

    def __init__(self, data: FederatedData, tuned: bool = False) -> None:
        self.data = data
        self.tuned = tuned
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip
        if tuned:  # the same function with our order of layers and layout in memory
            self.model = CNN(data.spec.input_shape, data.spec.num_classes).to(memory_format=torch.channels_last)
        arrays = data.arrays
        self.x, self.y = arrays.x, arrays.y
        self.mean, self.std = arrays.mean[0], arrays.std[0]

    def fit_all(self, clients: int) -> float:
        start = time.perf_counter()
        loss_function = nn.CrossEntropyLoss()
        for client in self.data.clients[:clients]:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            order = client.train[torch.randperm(len(client.train))]
            for batch in order.split(10):
                x = self.x[batch].float().div_(255).sub_(self.mean).div_(self.std)
                if self.tuned:
                    x = x.contiguous(memory_format=torch.channels_last)
                loss = loss_function(self.model(x), self.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return time.perf_counter() - start


def fits_only(loop: FederatedLoop, clients: int) -> float:
    """Ours: the fits of one round and nothing else."""
    start = time.perf_counter()
    for client in range(clients):
        module = loop.runner.load(client)
        loop.runner.fit(module, loop.data.clients[client], 1)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="methods whose whole rounds are timed")
    parser.add_argument("--fit-clients", type=int, default=20, help="clients whose fits are compared")
    options = parser.parse_args()
    data = FederatedData(FashionMNIST(root=options.root), Dirichlet(0.1, min_samples=40), num_clients=20)
    data.setup(0)
    loops = {name: federation(name, data) for name in options.methods}
    hand, tuned, ours = HandWritten(data), HandWritten(data, tuned=True), federation("FedAvg", data)
    times: dict[str, list[float]] = {}
    for repetition in range(options.repetitions + 1):
        row = {
            "hand-written fits": hand.fit_all(options.fit_clients),
            "hand-written fits, our layout": tuned.fit_all(options.fit_clients),
            "FedAvg fits": fits_only(ours, options.fit_clients),
        }
        for name, loop in loops.items():
            start = time.perf_counter()
            loop.advance()
            row[f"{name} round"] = time.perf_counter() - start
        if repetition:  # the first one warms up
            for name, seconds in row.items():
                times.setdefault(name, []).append(seconds)
        print({name: round(seconds, 2) for name, seconds in row.items()}, flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        f"FedAvg fits / {name}": round(
            statistics.median(a / b for a, b in zip(times["FedAvg fits"], times[name], strict=True)), 3
        )
        for name in ("hand-written fits", "hand-written fits, our layout")
    }
    numbers = {
        "seconds": {name: round(value, 2) for name, value in medians.items()},
        "clients whose fits are compared": options.fit_clients,
        "repetitions": options.repetitions,
        **ratios,
    }
    save("fashion_mnist_round", numbers)


if __name__ == "__main__":
    main()
