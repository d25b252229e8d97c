"""Two workers over one: seconds by the clock and of the processor, and how long workers wait for each other.

    OMP_NUM_THREADS=1 python benchmarks/workers.py [--rounds 4] [--pairs 3] [--parts thousand twenty]

thousand: 1,000 clients of 50 made-up images, 50 a round, batch 10. twenty: 20 clients of 500, all of them. FedAvg, the
2 conv + 2 fc CNN, without evaluation, saved nowhere. One worker and two in turns, each in processes of its own; the
ratio is the median over neighbouring pairs. The processor's seconds tell the work apart from the waiting. Last, what
the machine itself gives: two runs of one worker at once, which have nothing to tell each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from workloads import federation, noise

from fl_lightning.federation import transport
from fl_lightning.federation.launch import launch
from fl_lightning.federation.team import Team

PARTS: dict[str, tuple[int, int, float]] = {"thousand": (50_000, 1000, 0.05), "twenty": (10_000, 20, 1.0)}
CALLS = ("gather", "tell", "send", "receive", "broadcast")


def counted(call: Callable[..., Any], totals: dict[str, float]) -> Callable[..., Any]:
    """The same call, with its number, seconds and seconds of the processor taken down, unless another one makes it."""

    def do(*given: Any, **options: Any) -> Any:
        if totals["open"]:
            return call(*given, **options)
        totals["open"], clock, processor = 1, time.perf_counter(), time.process_time()
        try:
            return call(*given, **options)
        finally:
            totals["open"] = 0
            totals["calls"] += 1
            totals["talking"] += time.perf_counter() - clock
            totals["talking, processor"] += time.process_time() - processor

    return do


def work(folder: Path, part: str, rounds: int) -> int:
    """Some rounds, after one that warms up; each process writes down what they took, a round."""
    torch.set_num_threads(1)
    samples, clients, share = PARTS[part]
    loop = federation(noise(samples, clients, 10), participation=share)
    loop.advance()
    totals = dict.fromkeys(("open", "calls", "talking", "talking, processor"), 0.0)
    for name in CALLS:
        setattr(transport, name, counted(getattr(transport, name), totals))
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        loop.advance()
    del totals["open"]
    totals |= {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}
    figures = {name: value / rounds for name, value in totals.items()}
    (folder / f"{loop.workers.rank}.json").write_text(json.dumps(figures))
    return 0


def measured(size: int, part: str, rounds: int) -> dict[str, float]:
    """The figures of the worker that takes most of the processor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if launch(work, Team(size, threads=1), folder, part, rounds):
            raise SystemExit(f"{size} workers failed")
        found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return dict(max(found, key=lambda own: float(own["processor"])))


def at_once(part: str, rounds: int) -> dict[str, float]:
    """The figures of the slower of two runs of one worker that go on beside each other."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = list(pool.map(measured, (1, 1), (part, part), (rounds, rounds)))
    return max(found, key=lambda own: own["seconds"])


def main() -> None:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    for part in options.parts:
        runs = [
            (*(measured(size, part, options.rounds) for size in (1, 2)), at_once(part, options.rounds))
            for _ in range(options.pairs)
        ]
        for kind, own in zip(("1", "2", "1 and 1 at once"), zip(*runs, strict=True), strict=True):
            figures = {name: statistics.median(each[name] for each in own) for name in own[0]}
            print(f"{part}, {kind}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)
        for name in ("seconds", "processor"):
            ratio = statistics.median(one[name] / two[name] for one, two, _ in runs)
            print(f"{part}: one worker over two, {name}: {ratio:.2f}", flush=True)
        most = statistics.median(2 * one["seconds"] / both["seconds"] for one, _, both in runs)
        print(f"{part}: two runs at once over one of them: {most:.2f}", flush=True)


if __name__ == "__main__":
    main()
