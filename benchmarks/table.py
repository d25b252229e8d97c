"""The table of what this package costs, each figure beside what it is compared with, measured in one run.

    python benchmarks/table.py [--root FOLDER] [--parts rounds thousand …] [--repetitions 5] [--quick]

Variants that are compared take turns within each repetition; a ratio is the median over repetitions of ratios within
one. `--quick` shrinks everything to see that it runs; its figures mean nothing, and nothing is saved. The machine
should have nothing else to do: its load before and after is saved with the figures. Parts:

  rounds       FashionMNIST, 20 clients Dirichlet(0.1), CNN, batch 10, Local-T_received every round: seconds a round of
               FedAvg with one worker and of FedAvg, FedRep and FedProto with two, each of one thread, and of a
               hand-written loop
  thousand     1,000 clients of 50 images, 50 a round, CNN, batch 10, FedAvg, no evaluation
  hardware     what two independent hand-written loops of one thread reach over one: the limit of two workers
  trainer      fits through the Trainer over hand-written ones: CNN batch 10, ResNet-18 batch 64
  precision    bf16-mixed over 32-true, CNN batch 64
  layout       channels last over contiguous: CNN batch 10, ResNet-18 batch 64, both precisions
  evaluation   batch sizes of an evaluation, CNN
  augmentation crops, flips and rotations a mini-batch
  gpu          20 clients, CNN batch 10 and ResNet-18 batch 64 under bf16-mixed, where there is a GPU
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commandline
import torch
from results import machine, read, save
from workloads import HandWritten, federation, fit_all, interleaved, noise, ratio, seconds

from fl_lightning.data.augmentation import Augmentation, build_augmentation
from fl_lightning.data.datasets import FashionMNIST
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.data.sample import Sample

PUBLISHED = {"FedAvg": 37.9, "FedRep": 50.0, "FedProto": 42.0}
"""PFLlib's seconds a round (commit d832e76) on a 2-core machine of this project, same model, data and work."""
GOALS = {"FedAvg": 15.0, "FedRep": 20.0, "FedProto": 17.0}
Row = dict[str, Any]


def row(what: str, value: float, unit: str, goal: str = "", **more: Any) -> Row:
    return {"what": what, "value": round(value, 4), "unit": unit, **({"goal": goal} if goal else {}), **more}


def spread(values: list[float]) -> Row:
    return {"each": [round(value, 4) for value in values]}


# --- rounds of a federation, by the command line --------------------------------------------------------------------


def fashion_mnist(options: argparse.Namespace) -> Row:
    where = {"root": str(Path(options.root).resolve())} if options.root else {}
    whole = {"class_path": "FashionMNIST", "init_args": where}
    if options.quick:
        return {"class_path": "Sample", "init_args": {"samples": 1000, "dataset": whole}}
    return whole


def rounds_config(method: str, workers: int, options: argparse.Namespace) -> Row:
    received = {"trained": False, "received": True, "globally": False, "server": False}
    spread_out = {"workers": workers, "threads": 1} if workers > 1 else {}
    least = 5 if options.quick else 40
    return {
        "method": {"class_path": method},
        "model": {"class_path": "CNN"},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01}},
        "data": {
            "dataset": fashion_mnist(options),
            "partition": {"class_path": "Dirichlet", "init_args": {"beta": 0.1, "min_samples": least}},
            "num_clients": 20,
            "batch_size": 10,
        },
        "federation": {"rounds": 1, "evaluate": received, "checkpoint": {"every": 0}, **spread_out},
        "trainer": {"accelerator": "cpu"},
    }


def measure_rounds(options: argparse.Namespace) -> list[Row]:
    """Every repetition is a run of one round, whose processes and data are there before it begins."""
    data = _fashion_mnist_data(options)
    runs: dict[str, list[commandline.Run]] = {}

    def one(method: str, workers: int) -> float:
        run = commandline.fit(rounds_config(method, workers, options))
        runs.setdefault(f"{method}, {_workers(workers)}", []).append(run)
        return run.seconds[-1]

    textbook = HandWritten(data, tuned=False)
    most = 1 if options.one_worker else 2
    cases = {("FedAvg", 1): None, **{(method, most): None for method in PUBLISHED}}
    variants: dict[str, Callable[[], float | None]] = {
        "hand-written fits": lambda: _single_thread(lambda: textbook.fit_all(20))
    }
    for method, workers in cases:
        variants[f"{method}, {_workers(workers)}"] = lambda m=method, w=workers: one(m, w)  # type: ignore[misc]
    times = interleaved(variants, options.repetitions)
    hand = times["hand-written fits"]
    found = [row("hand-written fits of the 20 clients, 1 thread", statistics.median(hand), "s", **spread(hand))]
    for method, workers in cases:
        name = f"{method}, {_workers(workers)}"
        own, published = times[name], PUBLISHED[method]
        goal = f"<= {GOALS[method]:g} s"
        found.append(row(f"{name}: a round", statistics.median(own), "s", goal, published=published, **spread(own)))
        over = ratio(times, name, "hand-written fits")
        found.append(row(f"{name}: a round over hand-written fits of one epoch, 1 thread", over, "x"))
    if most == 2:
        both = ratio(times, f"FedAvg, {_workers(1)}", f"FedAvg, {_workers(2)}")
        found.append(row("FedAvg: two workers, times as fast as one", both, "x", ">= 1.9"))
        peaks = {w: statistics.median(r.peak_mib for r in runs[f"FedAvg, {_workers(w)}"]) for w in (1, 2)}
        found.append(row("FedAvg: peak memory, one worker", peaks[1], "MiB"))
        found.append(row("FedAvg: peak memory, two workers", peaks[2], "MiB"))
        store = (data.arrays.x.nbytes + data.arrays.y.nbytes) / 2**20
        more = "<= 1 more resident model and data cache"
        extra = peaks[2] - peaks[1]
        found.append(row("FedAvg: peak memory, two workers less one", extra, "MiB", more, data_mib=round(store, 1)))
    return found


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''} x 1 thread"


def _fashion_mnist_data(options: argparse.Namespace) -> FederatedData:
    least = 5 if options.quick else 40
    whole = FashionMNIST(root=options.root)
    dataset = Sample(whole, 1000) if options.quick else whole
    data = FederatedData(dataset, Dirichlet(0.1, min_samples=least), num_clients=20, batch_size=10)
    data.setup(0)
    return data


def _single_thread(work: Callable[[], Any]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(work)
    finally:
        torch.set_num_threads(threads)


def measure_thousand(options: argparse.Namespace) -> list[Row]:
    clients, drawn = (20, 2) if options.quick else (1000, 50)
    noises = {"class_path": "workloads.Noise", "init_args": {"samples": 50 * clients}}
    rounds = options.repetitions + 2

    def config(workers: int) -> Row:
        spread_out = {"workers": workers, "threads": 1} if workers > 1 else {}
        evaluate = {"trained": False, "received": False, "globally": False, "server": False}
        return {
            "method": {"class_path": "FedAvg"},
            "model": {"class_path": "CNN"},
            "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01}},
            "data": {
                "dataset": noises,
                "partition": {"class_path": "IID"},
                "num_clients": clients,
                "test_fraction": 0.0,
                "batch_size": 10,
            },
            "federation": {
                "rounds": rounds,
                "participation": drawn / clients,
                "evaluate": evaluate,
                "checkpoint": {"every": 0},
                **spread_out,
            },
            "trainer": {"accelerator": "cpu"},
        }

    found = []
    cases = [("1 worker x 1 thread", 1, 1), ("1 worker, torch's own threads", 1, None)]
    if not options.one_worker:
        cases.append(("2 workers x 1 thread", 2, 1))
    for name, workers, threads in cases:
        run = commandline.fit(config(workers), threads)
        own = run.seconds[2:]
        what = f"{clients} clients x 50 images, {drawn} a round, {name}"
        found.append(row(what, statistics.median(own), "s", "< 1.2 s", peak_mib=round(run.peak_mib), **spread(own)))
    return found


# --- the hardware's own limit ---------------------------------------------------------------------------------------


def steps_a_second(duration: float) -> float:
    """Hand-written steps of the CNN with batch 10 on one thread."""
    torch.set_num_threads(1)
    hand = HandWritten(noise(400, 4, 10))
    hand.fit(0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < duration:
        steps += hand.fit(steps % 4)
    return steps / (time.perf_counter() - start)


def measure_hardware(options: argparse.Namespace) -> list[Row]:
    duration = 1.0 if options.quick else 10.0

    def together(count: int) -> float:
        command = [sys.executable, __file__, "--steps-a-second", str(duration)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)
        ]
        return sum(float(process.communicate()[0].split()[-1]) for process in processes)

    pairs = [(together(1), together(2)) for _ in range(options.repetitions)]
    gains = [two / one for one, two in pairs]
    return [
        row("one hand-written loop, 1 thread", statistics.median(one for one, _ in pairs), "steps/s"),
        row("two such loops at once, times as fast", statistics.median(gains), "x", **spread(gains)),
    ]


# --- what the framework adds to a fit -------------------------------------------------------------------------------


def fit_cases(options: argparse.Namespace) -> dict[str, tuple[str, FederatedData, int]]:
    """Name -> model, data, clients that are fitted."""
    few = options.quick
    return {
        "CNN batch 10": ("CNN", noise(200 if few else 4000, 4, 10), 1 if few else 4),
        "ResNet18 batch 64": ("ResNet18", noise(64 if few else 512, 2, 64, 3, 8 if few else 32), 1 if few else 2),
    }


def measure_trainer(options: argparse.Namespace) -> list[Row]:
    found = []
    for name, (model, data, clients) in fit_cases(options).items():
        loop = federation(data, model)
        textbook, tuned = HandWritten(data, model, tuned=False), HandWritten(data, model)
        times = interleaved(
            {
                "ours": lambda loop=loop, n=clients: fit_all(loop, n),
                "hand-written": lambda hand=textbook, n=clients: hand.fit_all(n),
                "hand-written, our layout": lambda hand=tuned, n=clients: hand.fit_all(n),
            },
            options.repetitions,
        )
        steps = sum(data.clients[client].num_steps(data.batch_size) for client in range(clients))
        for variant, own in times.items():
            found.append(row(f"{name}, {variant}: a step", 1000 * statistics.median(own) / steps, "ms"))
        goal = "<= 1.15" if model == "CNN" else "<= 1.03"
        for variant in ("hand-written", "hand-written, our layout"):
            found.append(row(f"{name}: Trainer-driven fit over {variant}", ratio(times, "ours", variant), "x", goal))
    return found


def measure_precision(options: argparse.Namespace) -> list[Row]:
    samples, precisions = 128 if options.quick else 640, ("32-true", "bf16-mixed", "bf16-true")
    # Data of its own for each: a federation tells its data in which type and layout batches are wanted.
    loops = {p: federation(noise(samples, 1, 64), trainer={"precision": p}) for p in precisions}
    times = interleaved({p: lambda loop=loop: fit_all(loop, 1) for p, loop in loops.items()}, options.repetitions)
    steps = loops["32-true"].data.clients[0].num_steps(64)
    found = [row(f"CNN batch 64, {p}: a step", 1000 * statistics.median(t) / steps, "ms") for p, t in times.items()]
    amx = ">= 2 where the processor has amx_bf16"
    gain = ratio(times, "32-true", "bf16-mixed")
    return [*found, row("CNN batch 64: bf16-mixed, times as fast as 32-true", gain, "x", amx)]


def measure_layout(options: argparse.Namespace) -> list[Row]:
    found = []
    precisions = ("32-true",) if options.quick else ("32-true", "bf16-mixed")
    for model, size, steps, shape in (("CNN", 10, 20, (1, 28)), ("ResNet18", 64, 1, (3, 8 if options.quick else 32))):
        for precision in precisions:
            loops = {
                layout: federation(
                    noise(steps * size, 1, size, *shape), model, trainer={"precision": precision}, channels_last=last
                )
                for layout, last in (("channels last", True), ("contiguous", False))
            }
            variants = {layout: lambda loop=loop: fit_all(loop, 1) for layout, loop in loops.items()}
            times = interleaved(variants, options.repetitions)
            each = {f"{name}, ms a step": round(1000 * statistics.median(t) / steps, 2) for name, t in times.items()}
            gain = ratio(times, "contiguous", "channels last")
            name = f"{model} batch {size}, {precision}"
            found.append(row(f"{name}: channels last, times as fast as contiguous", gain, "x", **each))
    return found


# --- data path ------------------------------------------------------------------------------------------------------


def measure_evaluation(options: argparse.Namespace) -> list[Row]:
    data = noise(512 if options.quick else 4096, 1, 10)
    loop = federation(data)
    module, indices = loop.runner.load(0), data.clients[0].train
    sizes = (256, 512) if options.quick else (64, 128, 256, 512, 1024, 2048, 4096)

    def evaluate(size: int) -> None:
        loop.runner.evaluator.batch_size = size
        loop.runner.evaluator.correct(module, indices, 0, "trained")

    times = interleaved({str(size): lambda size=size: evaluate(size) for size in sizes}, options.repetitions)
    return [
        row(f"evaluation of {len(indices)} images, CNN, batches of {size}", 1000 * statistics.median(own), "ms")
        for size, own in times.items()
    ]


def measure_augmentation(options: argparse.Namespace) -> list[Row]:
    from torchvision.transforms import v2

    crop, flip, rotation = v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.RandomRotation(15)
    found = []
    for size in (10, 64):
        x = noise(size, 1, size, 3, 32).arrays.x
        ours = build_augmentation([crop, flip])
        rotated = Augmentation([rotation])
        assert ours is not None
        times = interleaved(
            {
                "crop and flip": lambda x=x, ours=ours: [ours(x, seed) for seed in range(20)] and None,
                "crop and flip, torchvision image by image": lambda x=x: (
                    [torch.stack([flip(crop(image)) for image in x]) for _ in range(20)] and None
                ),
                "rotation": lambda x=x, rotated=rotated: [rotated(x, seed) for seed in range(20)] and None,
            },
            options.repetitions,
        )
        for name, own in times.items():
            found.append(row(f"augmentation of {size} images 3x32x32: {name}", 50 * statistics.median(own), "ms"))
    return found


# --- GPU ------------------------------------------------------------------------------------------------------------


def measure_gpu(options: argparse.Namespace) -> list[Row]:
    if not torch.cuda.is_available():
        return []
    found = []
    trainer = {"accelerator": "gpu", "precision": "bf16-mixed"}
    for model, size, channels, side in (("CNN", 10, 1, 28), ("ResNet18", 64, 3, 32)):
        data = noise((20 if options.quick else 200) * size, 20, size, channels, side)
        loop = federation(data, model, trainer=trainer)
        hand = HandWritten(data, model, device="cuda", bfloat16=True)
        variants = {"ours": lambda loop=loop: loop.advance(), "hand-written": lambda hand=hand: hand.fit_all(20)}
        times = interleaved(variants, options.repetitions)
        steps = sum(client.num_steps(size) for client in data.clients)
        name = f"GPU, 20 clients, {model} batch {size}, bf16-mixed"
        found.append(row(f"{name}: a round of {steps} steps", statistics.median(times["ours"]), "s"))
        found.append(row(f"{name}: over hand-written fits", ratio(times, "ours", "hand-written"), "x"))
        found.append(row(f"{name}: share of a round in which the GPU computes", _busy(loop.advance), ""))
    return found


def _busy(work: Callable[[], Any]) -> float:
    """Share of the wall's time in which at least one kernel runs (intervals of kernels, overlaps counted once)."""
    from torch.profiler import ProfilerActivity, profile

    wall = seconds(work)  # without the profiler, which slows the host down and not the kernels
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        seconds(work)
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in record.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, last = 0.0, float("-inf")
    for start, end in kernels:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy / 1e6 / wall


# --- the table ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "rounds": measure_rounds,
    "thousand": measure_thousand,
    "hardware": measure_hardware,
    "trainer": measure_trainer,
    "precision": measure_precision,
    "layout": measure_layout,
    "evaluation": measure_evaluation,
    "augmentation": measure_augmentation,
    "gpu": measure_gpu,
}


def show(rows: list[Row]) -> None:
    width = max((len(r["what"]) for r in rows), default=0)
    for r in rows:
        print(f"{r['what']:{width}}  {r['value']:>10.4g} {r['unit']:8} {r.get('goal', '')}".rstrip(), flush=True)


def load() -> float:
    """Processes that ran or waited in the last minute, this one included."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--one-worker", action="store_true", help="leave the rows of two workers out")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is saved")
    parser.add_argument("--steps-a-second", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps_a_second is not None:
        print(steps_a_second(options.steps_a_second))
        return
    if options.quick:
        options.repetitions = min(options.repetitions, 2)
    parts: dict[str, Any] = read("table").get("parts", {})  # a part that is measured again replaces itself alone
    for part in options.parts:
        print(f"--- {part}", flush=True)
        before = load()
        rows = PARTS[part](options)
        show(rows)
        measured = {"repetitions": options.repetitions, "load before": before, "load after": load(), **machine()}
        parts[part] = {**measured, "rows": rows}
        if not options.quick:
            save("table", {"parts": parts}, quiet=True)


if __name__ == "__main__":
    main()
