"""Peers beside ours, in turns on one machine: seconds a round of the same work, and how many times ours is as fast.

    python benchmarks/peers.py --python PYTHON [--pfllib DIR] [--pfl-research] [--repetitions 3] [--graph auto]

  --pfllib DIR     a checkout of PFLlib with `dataset/FashionMNIST` made by its generator (`generate_FashionMNIST.py
                   noniid - dir`): FashionMNIST, PFLlib's own split of 20 clients, its CNN, batch 10, lr 0.01, tested
                   every round; PFLlib with all cores, ours with two workers of one thread
  --pfl-research   1,000 clients of 50 images, 50 a round, the CNN, batch 10, no evaluation: pfl-research with one
                   process of one thread; ours with one worker and with two
  --python PYTHON  the interpreter in whose environment the peers run

How to get them is in `benchmarks/README.md`. A ratio is the median over repetitions of neighbouring runs' ratios.
Nothing of a peer is changed; what each reports of its own rounds is taken, the first round left out. Results of other
days are kept beside, each with the machine that it is of.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import commandline
from results import machine, read, save

HERE = Path(__file__).resolve().parent
GOALS = {"PFLlib": 3.0, "pfl-research, 1 worker": 1.25, "pfl-research, 2 workers": 2.3}


def peer_seconds(command: Sequence[str], folder: Path, pattern: str, threads: int | None) -> float:
    """Median seconds of a peer's rounds after the first, as it prints them.

    Raises:
        SystemExit: with its last lines, where it fails or prints none.
    """
    environment = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = [float(seconds) for seconds in re.findall(pattern, done.stdout)]
    if done.returncode or len(found) < 2:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return statistics.median(found[1:])


def pfllib(options: argparse.Namespace, method: str) -> float:
    """Seconds of PFLlib's rounds; it makes one more than it is asked for."""
    names = {"-data": "FashionMNIST", "-m": "CNN", "-algo": method, "-dev": "cpu", "-nc": "20", "-lbs": "10"}
    numbers = {"-lr": "0.01", "-gr": str(options.rounds), "-eg": "1", "-ls": "1", "-jr": "1.0"}
    words = [word for pair in {**names, **numbers}.items() for word in pair]
    system = Path(options.pfllib, "system").resolve()
    return peer_seconds([options.python, "main.py", *words], system, r"(?m)^-{20,}(?: time cost -+)? ([\d.]+)$", None)


def ours_on_its_split(options: argparse.Namespace, method: str) -> float:
    """Seconds of our rounds on PFLlib's files."""
    root = str(Path(options.pfllib, "dataset", "FashionMNIST").resolve())
    evaluate = {"trained": False, "received": True, "globally": False, "server": False}
    config = {
        "method": {"class_path": method},
        "model": {"class_path": "CNN"},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01}},
        "data": {
            "dataset": {"class_path": "PFLlibFolder", "init_args": {"root": root}},
            "partition": {"class_path": "ByGroup", "init_args": {"min_samples": 1}},
            "num_clients": 20,
            "split": "matched",
            "batch_size": 10,
        },
        "federation": {
            "rounds": options.rounds + 1,
            "evaluate": evaluate,
            "checkpoint": {"every": 0},
            "graph": options.graph,
            "workers": 2,
            "threads": 1,
        },
        "trainer": {"accelerator": "cpu"},
    }
    return statistics.median(commandline.fit(config).seconds[1:])


def pfl_research(options: argparse.Namespace) -> float:
    """Seconds of pfl-research's rounds."""
    script = str(HERE / "peer_pfl_research.py")
    command = [options.python, script, str(options.rounds * 3 + 1), "1000", "50"]
    return peer_seconds(command, HERE, r"seconds ([\d.]+)", 1)


def ours_of_a_thousand(options: argparse.Namespace, workers: int) -> float:
    """Seconds of our rounds of the same work."""
    nothing = {"trained": False, "received": False, "globally": False, "server": False}
    config = {
        "method": {"class_path": "FedAvg"},
        "model": {"class_path": "CNN"},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01}},
        "data": {
            "dataset": {"class_path": "workloads.Noise", "init_args": {"samples": 50_000}},
            "partition": {"class_path": "IID"},
            "num_clients": 1000,
            "test_fraction": 0.0,
            "batch_size": 10,
        },
        "federation": {
            "rounds": options.rounds * 3 + 1,
            "participation": 0.05,
            "evaluate": nothing,
            "checkpoint": {"every": 0},
            "graph": options.graph,
            **({"workers": workers, "threads": 1} if workers > 1 else {}),
        },
        "trainer": {"accelerator": "cpu"},
    }
    return statistics.median(commandline.fit(config).seconds[1:])


def in_turns(peer: Callable[[], float], ours: dict[str, Callable[[], float]], repetitions: int) -> dict[str, Any]:
    """The machine, seconds of the peer and of ours, and the ratios of each repetition."""
    times: dict[str, list[float]] = {"peer": [], **{name: [] for name in ours}}
    for _ in range(repetitions):
        times["peer"].append(peer())
        for name, run in ours.items():
            times[name].append(run())
            print(f"  peer {times['peer'][-1]:.2f} s, {name} {times[name][-1]:.2f} s", flush=True)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(times["peer"], times[name], strict=True)), 2)
        for name in ours
    }
    return {
        **machine(),
        "seconds": {name: [round(value, 3) for value in own] for name, own in times.items()},
        "ratio": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfllib")
    parser.add_argument("--pfl-research", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--methods", nargs="*", default=["FedAvg", "FedRep", "FedProto"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--graph", choices=["auto"], help="federation.graph of ours: steps recorded")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that are timed in each run")
    options = parser.parse_args()
    if not (options.pfllib or options.pfl_research):
        parser.error("give --pfllib DIR, --pfl-research or both: which peers are installed")
    found, said = read("peers").get("peers", {}), f", graph {options.graph}" if options.graph else ""
    if options.pfllib:
        for method in options.methods:
            name = f"PFLlib, {method}{said}"
            ours = {"ours, 2 workers": lambda method=method: ours_on_its_split(options, method)}
            found[name] = in_turns(lambda m=method: pfllib(options, m), ours, options.repetitions)  # type: ignore[misc]
            save("peers", {"peers": found}, quiet=True)
            print(f"PFLlib over ours, {method}{said}: {found[name]['ratio']} (goal {GOALS['PFLlib']})")
    if options.pfl_research:
        cases = {f"ours, {n} worker{'s' * (n > 1)}": lambda n=n: ours_of_a_thousand(options, n) for n in (1, 2)}
        name = f"pfl-research, FedAvg{said}"
        found[name] = in_turns(lambda: pfl_research(options), cases, options.repetitions)
        save("peers", {"peers": found}, quiet=True)
        print(f"pfl-research over ours{said}: {found[name]['ratio']} (goals 1.25 and 2.3)")


if __name__ == "__main__":
    main()
