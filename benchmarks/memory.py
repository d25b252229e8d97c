"""Resident memory: from 20 to 1,000 clients of the same total data, and over 2,000 fits.

    python benchmarks/memory.py

Each federation runs in a process of its own: FedAvg, the 2 conv + 2 fc CNN, 20,000 random 28x28 images, one round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from results import save
from workloads import federation, noise

SAMPLES = 20_000


def resident_mib() -> float:
    """Resident set of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_clients(clients: int) -> float:
    loop = federation(noise(SAMPLES, clients, 64, test_fraction=0.25))
    loop.advance()
    return resident_mib()


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
    parser.add_argument("--fits", type=int)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(measure_clients(options.clients)))
        return
    if options.fits:
        print(json.dumps(measure_fits(options.fits)))
        return

    def run(*arguments: str) -> object:
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    few, many = run("--clients", "20"), run("--clients", "1000")
    readings = run("--fits", "2000")
    assert isinstance(few, float)
    assert isinstance(many, float)
    assert isinstance(readings, list)
    numbers = {
        "MiB, 20 clients": round(few, 1),
        "MiB, 1000 clients": round(many, 1),
        "1000 over 20": round(many / few, 3),
        "MiB over 2000 fits, each tenth": readings,
        "last over second reading": round(readings[-1] / readings[1], 4),
    }
    save("memory", numbers)


if __name__ == "__main__":
    main()
