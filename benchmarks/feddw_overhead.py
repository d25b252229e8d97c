"""What FedDW adds to FedAvg: to a local epoch, and after it for the soft labels.

One client, made-up 32x32 colour images, batch 128, Adam, mapping layers 256 and 128 and no bias in the head: ResNet-18
with 100 classes and FedDWCNN with 10, as on CIFAR-100 and CIFAR-10 in the paper. Run from the repository's root:

    OMP_NUM_THREADS=1 python benchmarks/feddw_overhead.py [--quick] [--repetitions 5]

Every repetition times one local fit of one epoch and one send of FedAvg and of FedDW with soft labels received
(`source: post` and `source: running`), in an order that turns from repetition to repetition; medians are over
repetitions of ratios within one. The processor's time is taken beside the wall's, because other programs lengthen it
less. The regulariser, with a backward pass of its own, and the observing of a batch are also timed alone: whole epochs
scatter by more than what these take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from results import save

from fl_lightning.core.facts import Fit
from fl_lightning.core.forward import Forward
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import IID
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.feddw import FedDW
from fl_lightning.models.cnn import FedDWCNN
from fl_lightning.models.resnet import ResNet18

MODELS = {"ResNet18": (ResNet18, 100), "FedDWCNN": (FedDWCNN, 10)}
METHODS = {
    "FedAvg": FedAvg,
    "FedDW": lambda model: FedDW(model, weight=10.0),
    "FedDW running": lambda model: FedDW(model, weight=10.0, source="running"),
}


class Noise(Dataset):
    """Random images of CIFAR's shape; every class has samples."""

    def __init__(self, samples: int, num_classes: int) -> None:
        self.samples = samples
        self.num_classes = num_classes

    def arrays(self) -> Arrays:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (self.samples, 3, 32, 32), generator=generator, dtype=torch.uint8)
        y = torch.arange(self.samples) % self.num_classes
        return Arrays(x, y, self.samples, tuple(map(str, range(self.num_classes))), (0.5,) * 3, (0.25,) * 3)


class Timed:
    """One method's client after its first round: it has received soft labels where it takes any."""

    def __init__(self, method: str, model: str, data: FederatedData, accelerator: str) -> None:
        kind, num_classes = MODELS[model]
        nothing = EvaluationPolicy(trained=False, received=False, server=False)
        self.loop = FederatedLoop(Federation(rounds=10**6, evaluate=nothing))
        self.loop.setup(
            lambda _: METHODS[method](kind((3, 32, 32), num_classes, mapping=[256, 128], head_bias=False)),
            data,
            lambda parameters: torch.optim.Adam(parameters, lr=0.001),
            seed=0,
            trainer={"accelerator": accelerator},
        )
        self.loop.advance()
        self.data = data.clients[0]
        self.module = self.loop.runner.load(0)

    def epoch_and_send(self, round: int) -> dict[str, float]:
        """Seconds of one epoch and of one send, by the wall's clock and by the processor's."""
        self.module.method.facts = replace(self.loop.runner.facts, round=round, client=0)
        self.module.receive(self.loop.exchange.inbox(0), self.data)
        epoch = _seconds(lambda: self.loop.runner.fit(self.module, self.data, round))
        send = _seconds(lambda: self.module.send(self.data))
        row = {}
        for clock, epoch_seconds, send_seconds in zip(("wall", "processor"), epoch, send, strict=True):
            row |= {f"epoch, {clock}": epoch_seconds, f"send, {clock}": send_seconds}
        return row

    def alone(self, batch_size: int, times: int = 200) -> dict[str, float]:
        """Processor seconds a step of the regulariser with its gradient, and of observing a batch."""
        method = self.module.method
        _, term = method.terms
        weight = method.model.classification_layer.weight
        z = torch.zeros(batch_size, weight.shape[1], device=weight.device)
        logits = torch.randn(batch_size, len(weight), device=weight.device)
        out = Forward(z, torch.arange(batch_size, device=weight.device) % len(weight), [], z, logits)
        self.module.receive(self.loop.exchange.inbox(0), self.data)
        method.fit = Fit(epochs=1)  # in its last epoch
        term(method, out).backward()
        regulariser = _seconds(lambda: [term(method, out).backward() for _ in range(times)])[1] / times
        observing = _seconds(lambda: [term.observe(method, out) for _ in range(times)])[1] / times
        weight.grad = None
        return {"regulariser": regulariser, "observing": observing}


def _seconds(work) -> tuple[float, float]:
    _wait()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    _wait()
    return time.perf_counter() - wall, time.process_time() - processor


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(model: str, samples: int, batch_size: int, repetitions: int, accelerator: str) -> dict[str, Any]:
    data = FederatedData(
        Noise(samples, MODELS[model][1]), IID(), num_clients=1, batch_size=batch_size, test_fraction=0.0
    )
    data.setup(0)
    clients = {method: Timed(method, model, data, accelerator) for method in METHODS}
    rows: list[dict[str, dict[str, float]]] = []
    for repetition in range(repetitions + 1):
        order = list(METHODS)[:: 1 if repetition % 2 else -1]
        order = order[repetition % 3 :] + order[: repetition % 3]
        row = {method: clients[method].epoch_and_send(repetition + 2) for method in order}
        print(model, {m: {n: round(s, 3) for n, s in own.items()} for m, own in row.items()}, flush=True)
        if repetition:  # the first one warms up
            rows.append(row)
    steps = data.clients[0].num_steps(batch_size)
    alone = [clients["FedDW running"].alone(batch_size) for _ in range(5)]
    epoch = statistics.median(row["FedAvg"]["epoch, processor"] for row in rows)
    numbers = {
        "samples": data.clients[0].num_train,
        "steps an epoch": steps,
        "repetitions": repetitions,
        "seconds": {
            method: {name: round(statistics.median(row[method][name] for row in rows), 4) for name in rows[0][method]}
            for method in METHODS
        },
    }
    for clock in ("wall", "processor"):
        numbers[f"per cent of an epoch, {clock}"] = {
            "extra time of the epoch": _spread([_extra(row, clock, "FedDW") for row in rows]),
            "soft labels, post": _spread([_collection(row, clock, "FedDW") for row in rows]),
            "soft labels, running": _spread([_collection(row, clock, "FedDW running") for row in rows]),
        }
    for name in ("regulariser", "observing"):
        seconds = statistics.median(row[name] for row in alone)
        numbers[f"{name} alone"] = {
            "microseconds a step": round(1e6 * seconds, 1),
            "per cent of an epoch": round(100 * seconds * steps / epoch, 4),
        }
    return numbers


def _extra(row: dict[str, dict[str, float]], clock: str, method: str) -> float:
    """How much longer the method's epoch is than FedAvg's, in per cent."""
    return 100 * (row[method][f"epoch, {clock}"] / row["FedAvg"][f"epoch, {clock}"] - 1)


def _collection(row: dict[str, dict[str, float]], clock: str, method: str) -> float:
    """The soft labels' share: what a send takes longer than FedAvg's and an observed epoch longer than FedDW's."""
    observed = row[method][f"epoch, {clock}"] - row["FedDW"][f"epoch, {clock}"]
    sent = row[method][f"send, {clock}"] - row["FedAvg"][f"send, {clock}"]
    return 100 * (observed + sent) / row["FedAvg"][f"epoch, {clock}"]


def _spread(values: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(values, n=4)
    return {"median": round(median, 2), "lower quartile": round(lower, 2), "upper quartile": round(upper, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--samples", type=int, default=128, help="ResNet-18's, 100 or more; FedDWCNN has 16 times as many"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="ResNet-18's, 5 or more; FedDWCNN has 5 times as many"
    )
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--quick", action="store_true", help="FedDWCNN alone; nothing is saved")
    options = parser.parse_args()
    samples, repetitions = max(options.samples, 100), max(options.repetitions, 5)
    sizes = {"ResNet18": (samples, repetitions), "FedDWCNN": (16 * samples, 5 * repetitions)}
    if options.quick:
        sizes = {"FedDWCNN": (16 * samples, repetitions)}
    numbers: dict[str, Any] = {"batch size": options.batch_size, "load of the machine before": round(_load(), 2)}
    for model, (own, times) in sizes.items():
        numbers[model] = measure(model, own, options.batch_size, times, options.accelerator)
    numbers["load of the machine after"] = round(_load(), 2)
    if options.quick:
        print(numbers)
    else:
        save("feddw_overhead", numbers)


def _load() -> float:
    """Processes that ran or waited in the last minute, this one included."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


if __name__ == "__main__":
    main()
