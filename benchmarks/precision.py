"""Local-T under bf16-mixed against fp32: the quickstart with every method, and Fashion-MNIST over ten rounds.

    OMP_NUM_THREADS=1 python benchmarks/precision.py [--root FOLDER] [--samples 5000] [--parts quickstart fmnist]

Every run is one of the command line's own (`fl-lightning fit`). The quickstart runs as it is. Fashion-MNIST runs under
`experiments/fedcpd/fmnist_dirichlet01.yaml` with Local-T and Local-T_received every round; FedProto as in
`experiments/fedproto/pfllib.yaml`, DRDFL with Adam 0.001, as in its own experiments. `--samples` takes a stratified,
seeded sample of so many images instead of all 70,000: on a processor without bf16 units a step costs 7 to 13 times as
much in bf16. Runs that ended are not run again: their folders stay in `--output`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import read, save

from fl_lightning import catalog

HERE = Path(__file__).resolve().parent
PRECISIONS = ("32-true", "bf16-mixed")
COLUMNS = ("Local-T", "Local-T_received")
OVERLAYS: dict[str, list[str]] = {
    "FedCPD": ["--method", "FedCPD"],
    "FedDW": ["--method", "FedDW"],
    "DRDFL": ["--method", "DRDFL", "--optimizer", "torch.optim.Adam", "--optimizer.lr", "0.001"],
    "FedProto": ["--config", str(HERE.parent / "experiments/fedproto/pfllib.yaml")],
}
"""What stands beside the Fashion-MNIST protocol for each method."""


def quickstart(method: str) -> list[str]:
    return ["--config", str(HERE.parent / "experiments/quickstart.yaml"), f"--method={method}"]


def fashion_mnist(method: str, options: argparse.Namespace) -> list[str]:
    words = ["--config", str(HERE.parent / "experiments/fedcpd/fmnist_dirichlet01.yaml"), *OVERLAYS[method]]
    words += ["--federation.rounds", str(options.rounds), "--trainer.accelerator", "cpu"]
    dataset = "--data.dataset"
    if options.samples:
        words += [dataset, "Sample", f"{dataset}.samples", str(options.samples), "--data.partition.min_samples", "10"]
        dataset += ".dataset"
        words += [dataset, "FashionMNIST", f"{dataset}.normalize", "half"]
    if options.root:
        words += [f"{dataset}.root", str(Path(options.root).resolve())]
    return words


def run(words: list[str], output: Path, name: str) -> Path:
    """Run one federation, unless it has ended already; returns its folder."""
    folder = output / name
    summary = folder / "summary.json"
    if not (summary.is_file() and json.loads(summary.read_text())["finished"]):
        again = ["--resume", "auto"] if (folder / "config.yaml").is_file() else []
        command = [sys.executable, "-m", "fl_lightning", "fit", *words, "--output", str(output), "--name", name]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        start = time.perf_counter()
        # From this folder, so that the class of the sample is found.
        subprocess.run([*command, "--quiet", *again], cwd=HERE, check=True, env={**os.environ, "PYTHONPATH": path})
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return folder


def figures(folder: Path) -> dict[str, dict[str, float]]:
    """Per cent in the last round and in the mean of the last ten, and the seconds of all rounds."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for column in COLUMNS:
        values = [100 * float(row[column]) for row in rows if row.get(column)]
        found[column] = {"last": values[-1], "mean of the last ten": sum(values[-10:]) / len(values[-10:])}
    seconds = sum(float(row["seconds"]) for row in rows)
    return {**found, "seconds": {"all rounds": seconds}}


def compare(runs: dict[str, Path]) -> dict[str, Any]:
    """Both precisions' figures and their differences in points."""
    found = {precision: figures(folder) for precision, folder in runs.items()}
    wide, narrow = (found[precision] for precision in PRECISIONS)
    difference = {c: {key: round(narrow[c][key] - wide[c][key], 3) for key in wide[c]} for c in COLUMNS}
    rounded = {p: {c: {k: round(v, 3) for k, v in row.items()} for c, row in own.items()} for p, own in found.items()}
    return {**rounded, "bf16-mixed less 32-true, points": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["quickstart", "fmnist"], choices=["quickstart", "fmnist"])
    parser.add_argument("--root", default=None, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--samples", type=int, default=0, help="images of a stratified sample; 0 takes all 70,000")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--methods", nargs="*", default=None)
    parser.add_argument("--output", default=str(HERE.parent / "runs" / "precision"), help="folder of the runs")
    options = parser.parse_args()
    every = [entry.name for entry in catalog.entries("methods")]
    numbers: dict[str, Any] = {}
    for part in options.parts:
        for method in options.methods or (every if part == "quickstart" else list(OVERLAYS)):
            words = quickstart(method) if part == "quickstart" else fashion_mnist(method, options)
            size = f"-{options.samples or 'all'}-{options.rounds}" if part == "fmnist" else ""
            runs = {}
            for precision in PRECISIONS:
                name = f"{part}{size}-{method}-{precision}"
                runs[precision] = run([*words, "--trainer.precision", precision], Path(options.output).resolve(), name)
            numbers.setdefault(part, {})[method] = compare(runs)
            print(part, method, numbers[part][method], flush=True)
    about = {"Fashion-MNIST images": options.samples or 70_000, "Fashion-MNIST rounds": options.rounds}
    kept = {key: value for key, value in read("precision").items() if key not in ("machine", "torch")}
    save("precision", {**kept, **(about if "fmnist" in options.parts else {}), **numbers})


if __name__ == "__main__":
    main()
