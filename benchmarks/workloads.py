"""What the benchmarks run: federations, made-up data, and the same local fits written by hand."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_lightning.core.method import Method
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import IID
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.cnn import CNN
from fl_lightning.models.resnet import ResNet18
from fl_lightning.models.split import SplitModel

warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # lightning 2.6 on torch 2.15
MODELS: dict[str, Callable[..., SplitModel]] = {"CNN": CNN, "ResNet18": ResNet18}
NOTHING = EvaluationPolicy(trained=False, received=False, globally=False, server=False)


class Noise(Dataset):
    """Random images of ten classes: speed and memory do not depend on what they show.

    Args:
        samples: how many.
        channels: of an image.
        side: rows and columns of an image.
    """

    def __init__(self, samples: int = 20_000, channels: int = 1, side: int = 28) -> None:
        self.samples = samples
        self.channels = channels
        self.side = side

    def arrays(self) -> Arrays:
        """Pixels from a seeded generator, classes in turn."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.samples, self.channels, self.side, self.side)
        x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        y = torch.arange(self.samples) % 10
        return Arrays(x, y, self.samples, tuple("0123456789"), (0.5,) * self.channels, (0.25,) * self.channels)


def noise(
    samples: int, clients: int, batch_size: int, channels: int = 1, side: int = 28, **options: Any
) -> FederatedData:
    """Random images, shared out evenly, without test parts."""
    split = {"test_fraction": 0.0, **options}
    data = FederatedData(Noise(samples, channels, side), IID(), num_clients=clients, batch_size=batch_size, **split)
    data.setup(0)
    return data


def federation(
    data: FederatedData,
    model: str = "CNN",
    method: Callable[..., Method] = FedAvg,
    trainer: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    **options: Any,
) -> FederatedLoop:
    """A federation that never ends, on the CPU unless the Trainer's flags say otherwise; SGD 0.01."""
    loop = FederatedLoop(Federation(rounds=10**6, **{"evaluate": NOTHING, **options}))
    spec = data.spec
    loop.setup(
        lambda _: method(MODELS[model](spec.input_shape, spec.num_classes)),
        data,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        seed=0,
        trainer={"accelerator": "cpu", **(trainer or {})},
        folder=folder,
    )
    return loop


class HandWritten:
    """Local fits as one writes them by hand: batches indexed from a tensor, no framework.

    Args:
        data: whose clients are fitted.
        model: CNN or ResNet18.
        tuned: with this package's order of layers and layout in memory; else as in a textbook.
        device: where it runs.
        bfloat16: whether forward passes run under autocast to bfloat16.
    """

    def __init__(
        self, data: FederatedData, model: str = "CNN", tuned: bool = True, device: str = "cpu", bfloat16: bool = False
    ) -> None:
        spec, arrays = data.spec, data.arrays
        self.data, self.tuned, self.device, self.bfloat16 = data, tuned, device, bfloat16
        if tuned or model != "CNN":
            network: nn.Module = MODELS[model](spec.input_shape, spec.num_classes)
        else:
            channels, side, _ = spec.input_shape
            flat = 64 * ((((side - 4) // 2) - 4) // 2) ** 2
            network = nn.Sequential(
                nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, spec.num_classes),
            )  # fmt: skip
        layout = torch.channels_last if tuned else torch.contiguous_format
        self.model = network.to(device, memory_format=layout)
        self.layout = layout
        self.x, self.y = arrays.x.to(device), arrays.y.to(device)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (arrays.mean, arrays.std))

    def fit(self, client: int) -> int:
        """One epoch over a client's training part; returns the steps."""
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        indices = self.data.clients[client].train
        batches = indices[torch.randperm(len(indices))].to(self.device).split(self.data.batch_size)
        for batch in batches:
            x = self.x[batch].float().div_(255).sub_(self.mean).div_(self.std).contiguous(memory_format=self.layout)
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bfloat16):
                logits = self.model(x)
            loss = nn.functional.cross_entropy(logits.float(), self.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return len(batches)

    def fit_all(self, clients: int) -> None:
        """One epoch of so many clients, one after another."""
        for client in range(clients):
            self.fit(client)


def fit_all(loop: FederatedLoop, clients: int) -> None:
    """Ours: one epoch of so many clients and nothing else."""
    for client in range(clients):
        loop.runner.fit(loop.runner.load(client), loop.data.clients[client], 1)


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes, by the wall's clock, a GPU's work included."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(variants: Mapping[str, Callable[[], float | None]], repetitions: int) -> dict[str, list[float]]:
    """Measure each variant once a repetition, in an order that turns, after one round of warming up.

    Args:
        variants: name -> what is measured; it returns its own seconds, or nothing to be timed from outside.
        repetitions: how often.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for repetition in range(repetitions + 1):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            own: list[float | None] = []
            outside = seconds(lambda name=name, own=own: own.append(variants[name]()))  # type: ignore[misc]
            if repetition:  # the first one warms up
                times[name].append(outside if own[0] is None else own[0])
    return times


def ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """Median over repetitions of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))
