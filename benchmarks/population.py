"""A million registered clients beside a thousand: start, memory and time of a round, FedRep, 100 clients a round.

    python benchmarks/population.py [--registered 1000000] [--rounds 5] [--pairs 3]

Each federation runs in a process of its own, in turns: `Population` of random 28x28 images, 50 samples a client, the
2 conv + 2 fc CNN, `pool: disk`, tables and checkpoints as a run of the command line writes them, and
`federation.evaluate.clients: participants`. Start is what follows the imports: data, clients, Trainer. Times are of the
processor, so that other work on the machine counts little. `--registered 10000` is the same of ten thousand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from workloads import Noise

from fl_lightning.data.module import FederatedData
from fl_lightning.data.population import Population
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.cnn import CNN

FEW, TAKING_PART = 1000, 100


def measure(registered: int, rounds: int) -> dict[str, Any]:
    """What one federation takes."""
    data = FederatedData(Noise(), Population(samples=50, beta=0.5), num_clients=registered, batch_size=10)
    evaluate = EvaluationPolicy(globally=False, clients="participants")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = Recorder(folder, {"name": "population"})
        start = time.process_time()
        share = TAKING_PART / registered
        loop = FederatedLoop(
            Federation(rounds=rounds, participation=share, evaluate=evaluate, pool="disk", callbacks=[recorder])
        )
        data.setup(0)
        loop.setup(
            lambda _: FedRep(CNN(data.spec.input_shape, data.spec.num_classes)),
            data,
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            seed=0,
            trainer={"accelerator": "cpu"},
            folder=folder,
        )
        started = time.process_time() - start
        ends, peaks = [time.process_time()], []
        with recorder, contextlib.redirect_stderr(io.StringIO()):
            recorder.on_run_start(loop)
            for _ in range(rounds):
                loop.advance()
                ends.append(time.process_time())
                peaks.append(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1))
    seconds = [after - before for before, after in pairwise(ends[1:])]  # the first one warms up
    return {"start": started, "round": statistics.median(seconds), "peak": peaks[-1], "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registered", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.rounds)))
        return

    def run(registered: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--measure", str(registered), "--rounds", str(options.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    pairs = [(run(options.registered), run(FEW)) for _ in range(options.pairs)]
    many, few = ([pair[side] for pair in pairs] for side in (0, 1))
    numbers: dict[str, Any] = {}
    for name, own in ((f"{options.registered} registered", many), (f"{FEW} registered", few)):
        numbers[name] = {what: round(statistics.median(each[what] for each in own), 2) for what in ("start", "round")}
        numbers[name] |= {
            "MiB at the peak": statistics.median(each["peak"] for each in own),
            "by round": own[0]["peaks"],
        }
    for what in ("peak", "round"):
        numbers[f"{what}, over"] = round(statistics.median(a[what] / b[what] for a, b in pairs), 3)
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
