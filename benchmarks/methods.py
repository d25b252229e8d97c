"""The methods of DRDFL's tables under its protocol, shortened: accuracies, values sent, seconds a round.

    OMP_NUM_THREADS=1 python benchmarks/methods.py --root FOLDER [--samples 4000] [--rounds 10] …

Every run is the command line's own (`fl-lightning fit --config experiments/drdfl/…`): CIFAR-10 with 20 clients,
Dirichlet(0.1), Adam 0.001, batch 64 and 5 epochs a round, for the nine methods of its tables with their files in
`experiments/drdfl/methods`, on a small CNN instead of ResNet-18. `--samples` takes a stratified, seeded sample of so
many images. Runs that ended are not run again: their folders stay in `--output`. `--jobs` run side by side, one thread
each; seconds are the median round's, of runs beside others.

FedCPD's protocol with every method is a table: `fl-lightning table experiments/fedcpd/tables/methods.yaml`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import save

from fl_lightning.report.record import read_rows

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent / "experiments"


IMAGES = 60_000
CNN = ("--model", "CNN", "--model.channels", "[16, 32]", "--model.hidden", "128")
COLUMNS = ("Local-T", "Global-T")


def overlay(name: str) -> list[str]:
    return ["--config", str(EXPERIMENTS / name)]


METHODS = {
    **{name: overlay(f"drdfl/methods/{name.lower()}.yaml") for name in ("Local", "FedRep", "FedNova", "FedBN")},
    # 15 rounds of feature distillation are for 300; a shortened table would show nothing else
    "FedFed": [*overlay("drdfl/methods/fedfed.yaml"), "--method.feature_rounds", "2"],
    **{name: overlay(f"drdfl/methods/{name.lower()}.yaml") for name in ("DFedPGP", "FedCVAE", "DisPFL")},
    "DRDFL": [],
}
"""The rows, in the tables' order: options that choose them."""


def words(method: str, options: argparse.Namespace) -> list[str]:
    found = [*overlay("drdfl/cifar10_dirichlet01.yaml"), *METHODS[method], *CNN]
    found += ["--federation.rounds", str(options.rounds), "--federation.evaluate_every", str(options.evaluate_every)]
    found += ["--federation.checkpoint.every", str(options.rounds), "--trainer.accelerator", "cpu"]
    if options.epochs:
        found += ["--federation.local_epochs", str(options.epochs)]
    dataset = "--data.dataset"
    if options.samples:
        found += [dataset, "Sample", f"{dataset}.samples", str(options.samples), "--data.partition.min_samples", "10"]
        dataset = f"{dataset}.dataset"
        found += [dataset, "ImageFolder", f"{dataset}.normalize", "standard"]
    if options.root:
        found += [f"{dataset}.root", str(Path(options.root).resolve())]
    return found


def run(method: str, options: argparse.Namespace) -> Path:
    """Run one method, unless its run has ended already; returns its folder."""
    output = Path(options.output).resolve()
    name = f"{method}-{options.samples or 'all'}-{options.rounds}"
    summary = output / name / "summary.json"
    if not (summary.is_file() and json.loads(summary.read_text())["finished"]):
        command = [sys.executable, "-m", "fl_lightning", "fit", *words(method, options)]
        command += ["--output", str(output), "--name", name, "--quiet", "--overwrite"]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return output / name


def figures(folder: Path) -> dict[str, Any]:
    """Per cent, values sent and seconds a round."""
    summary = json.loads((folder / "summary.json").read_text())
    found: dict[str, Any] = {}
    for heading in ("last", "mean_last_10"):
        for name in COLUMNS:
            value = summary[heading].get(name)
            label = name if heading == "last" else f"{name} mean of ten"
            found[label] = None if value is None else round(100 * value, 2)
    final = summary["final_received"].get("Local-T_received")
    found["final received"] = None if final is None else round(100 * final, 2)
    found["personal params"] = round(summary["parameters"]["personal"])
    found["values sent"] = round(summary["communication"]["uplink_params_per_client"])
    found["comm. Mi"] = round(summary["communication"]["uplink_params_Mi_per_round"], 2)
    found["seconds"] = round(statistics.median(row["seconds"] for row in read_rows(folder / "metrics.csv")), 1)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown, in the order in which methods were named."""
    columns = [name for name in next(iter(found.values())) if any(own[name] is not None for own in found.values())]
    lines = [f"| method | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for method, own in found.items():
        cells = ("–" if own[column] is None else str(own[column]) for column in columns)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of the data: train/ and test/ in it")
    parser.add_argument("--samples", type=int, default=0, help="images of a stratified sample; 0 takes all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=0, help="local epochs; 0 takes the protocol's")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", default=str(HERE.parent / "runs" / "methods"), help="folder of the runs")
    options = parser.parse_args()

    def one(method: str) -> dict[str, Any]:
        numbers = figures(run(method, options))
        print(method, numbers, flush=True)
        return numbers

    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(options.methods, pool.map(one, options.methods), strict=True))
    print(table(found))
    about = {"images": options.samples or IMAGES, "rounds": options.rounds, "epochs": options.epochs or None}
    save("methods_drdfl", {**about, "methods": found})


if __name__ == "__main__":
    main()
