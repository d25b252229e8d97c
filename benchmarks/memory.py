"""Peak memory: from 20 to 1,000 clients of the same total data, and over 2,000 fits.

    python benchmarks/memory.py

Each federation runs in a process of its own, one round in which all take part: the 2 conv + 2 fc CNN, 20,000 random
28x28 images; FedAvg, and FedRep with `pool: disk`, both with evaluations and a checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import save
from workloads import federation, noise

from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep

SAMPLES = 20_000
EVALUATION = EvaluationPolicy(globally=False)
CLIENTS = (20, 200, 1000)
METHODS: dict[str, dict[str, Any]] = {"FedAvg": {"method": FedAvg}, "FedRep": {"method": FedRep, "pool": "disk"}}


def resident_mib() -> float:
    """Resident set of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """The largest resident set that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure_clients(clients: int, method: str) -> float:
    """Peak memory of one round, its checkpoint included."""
    data = noise(SAMPLES, clients, 64, test_fraction=0.25)
    with tempfile.TemporaryDirectory() as folder:
        federation(data, folder=Path(folder), evaluate=EVALUATION, **METHODS[method]).advance()
    return peak_mib()


def measure_fits(fits: int) -> list[float]:
    """Resident memory after every tenth of the fits, clients of 20 samples, one step each."""
    loop = federation(noise(SAMPLES, 1000, 20, test_fraction=0.25))
    readings = []
    for index in range(fits):
        client = index % loop.num_clients
        loop.runner.fit(loop.runner.load(client), loop.data.clients[client], 1 + index // loop.num_clients)
        if (index + 1) % (fits // 10) == 0:
            gc.collect()
            readings.append(round(resident_mib(), 1))
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--fits", type=int)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(measure_clients(options.clients, options.method)))
        return
    if options.fits:
        print(json.dumps(measure_fits(options.fits)))
        return

    def run(*arguments: str) -> Any:
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    numbers: dict[str, Any] = {}
    for method in METHODS:
        peaks = {clients: run("--clients", str(clients), "--method", method) for clients in CLIENTS}
        numbers |= {f"{method}: MiB, {clients} clients": round(peak, 1) for clients, peak in peaks.items()}
        numbers[f"{method}: 1000 over 20"] = round(peaks[1000] / peaks[20], 3)
    readings = run("--fits", "2000")
    numbers |= {
        "MiB over 2000 fits, each tenth": readings,
        "last over second reading": round(readings[-1] / readings[1], 4),
    }
    save("memory", numbers)


if __name__ == "__main__":
    main()
