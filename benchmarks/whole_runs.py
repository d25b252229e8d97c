"""Workloads that others publish a time of, from the command to its end: seconds, and the accuracy.

    python benchmarks/whole_runs.py flute --root DIR [--repeat 3] [-- --federation.cohort 10 …]
    python benchmarks/whole_runs.py blazefl --root DIR [-- --federation.workers 2 --federation.threads 1]

The experiment's file as it is, in a process of its own, imports, data and pictures included; how long the rounds alone
took stands beside it. What follows `--` is for `fl-lightning fit`.

  flute    `experiments/flute/lr_mnist.yaml`; FLUTE publishes, on a CPU, 3 min 20 s for itself and 30 min 14 s for
           Flower, at about 80 %. DIR holds MNIST/raw
  blazefl  `experiments/blazefl/cifar10.yaml`, from folders of images; BlazeFL publishes 25 s on 32 cores and 4 GPUs, of
           the rounds alone. DIR holds train/<class> and test/<class>
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def overlay(name: str) -> list[str]:
    """The option that lays an experiment's file over what stands before."""
    return ["--config", str(EXPERIMENTS / name)]


WORKLOADS = {
    "flute": overlay("flute/lr_mnist.yaml"),
    "blazefl": [
        *overlay("blazefl/cifar10.yaml"),
        *overlay("cifar10_folder.yaml"),
        *("--data.dataset.normalize", "half"),
    ],
}
"""Name -> options of the run."""


class Took(NamedTuple):
    """What a run took, and reached.

    Args:
        clock: seconds from the command to its end.
        processor: seconds of the processor.
        rounds: seconds of all rounds.
        accuracy: Server-T in the last round, in [0, 1].
    """

    clock: float
    processor: float
    rounds: float
    accuracy: float


def processor_seconds() -> float:
    """Seconds that ended child processes took of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(workload: str, words: list[str]) -> Took:
    """Run it once."""
    with tempfile.TemporaryDirectory() as folder:
        place = ["--output", folder, "--name", "run", "--quiet"]
        command = [sys.executable, "-m", "fl_lightning", "fit", *WORKLOADS[workload], *place, *words]
        clock, processor = time.perf_counter(), processor_seconds()
        subprocess.run(command, check=True)
        took = time.perf_counter() - clock, processor_seconds() - processor
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            rounds = sum(float(row["seconds"]) for row in csv.DictReader(file))
        return Took(*took, rounds, summary["last"]["Server-T"])


def main() -> None:
    """Run it some times, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--root", required=True, help="folder of the data")
    parser.add_argument("--repeat", type=int, default=3)
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    words = ["--data.dataset.root", os.path.abspath(options.root), "--trainer.accelerator", "cpu", *given[split + 1 :]]
    for number in range(options.repeat):
        took = run(options.workload, words)
        print(
            f"{number + 1}: {took.clock:.1f} s, rounds {took.rounds:.1f} s, processor {took.processor:.1f} s, "
            f"Server-T {100 * took.accuracy:.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
