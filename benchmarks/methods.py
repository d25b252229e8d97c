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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import save

from fl_lightning.report.record import read_rows

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent / "experiments"


@dataclass(frozen=True)
class Protocol:
    """What is run and shown.

    Args:
        file: the experiment.
        images: of the whole data set.
        dataset: what samples are drawn from, and how it is normalised.
        options: options of every run.
        overlays: method -> options that choose it, where these are not its name alone.
        methods: those of the table.
        columns: columns of the last evaluated round, the one that sorts first.
        mean: columns whose mean over the last ten evaluated rounds is shown, too.
    """

    file: Path
    images: int
    dataset: tuple[str, str]
    options: tuple[str, ...] = ()
    overlays: dict[str, list[str]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()


def overlay(name: str) -> list[str]:
    return ["--config", str(EXPERIMENTS / name)]


DRDFL = Protocol(
    EXPERIMENTS / "drdfl/cifar10_dirichlet01.yaml",
    60_000,
    ("ImageFolder", "standard"),
    options=("--model", "CNN", "--model.channels", "[16, 32]", "--model.hidden", "128"),
    overlays={
        "DRDFL": [],
        **{
            name: overlay(f"drdfl/methods/{name.lower()}.yaml")
            for name in ("Local", "FedRep", "FedNova", "FedBN", "DFedPGP", "FedCVAE", "DisPFL")
        },
        # 15 rounds of feature distillation are for 300; a shortened table would show nothing else
        "FedFed": [*overlay("drdfl/methods/fedfed.yaml"), "--method.feature_rounds", "2"],
    },
    methods=("Local", "FedRep", "FedNova", "FedBN", "FedFed", "DFedPGP", "FedCVAE", "DisPFL", "DRDFL"),
    columns=("Local-T", "Global-T"),
    mean=("Local-T", "Global-T"),
)


def words(method: str, protocol: Protocol, options: argparse.Namespace) -> list[str]:
    found = ["--config", str(protocol.file), *protocol.overlays.get(method, [f"--method={method}"]), *protocol.options]
    found += ["--federation.rounds", str(options.rounds), "--federation.evaluate_every", str(options.evaluate_every)]
    found += ["--federation.checkpoint.every", str(options.rounds), "--trainer.accelerator", "cpu"]
    if options.epochs:
        found += ["--federation.local_epochs", str(options.epochs)]
    dataset = "--data.dataset"
    if options.samples:
        found += [dataset, "Sample", f"{dataset}.samples", str(options.samples), "--data.partition.min_samples", "10"]
        dataset, (name, normalize) = f"{dataset}.dataset", protocol.dataset
        found += [dataset, name, f"{dataset}.normalize", normalize]
    if options.root:
        found += [f"{dataset}.root", str(Path(options.root).resolve())]
    return found


def run(method: str, protocol: Protocol, options: argparse.Namespace) -> Path:
    """Run one method, unless its run has ended already; returns its folder."""
    output = Path(options.output).resolve()
    name = f"{method}-{options.samples or 'all'}-{options.rounds}"
    summary = output / name / "summary.json"
    if not (summary.is_file() and json.loads(summary.read_text())["finished"]):
        command = [sys.executable, "-m", "fl_lightning", "fit", *words(method, protocol, options)]
        command += ["--output", str(output), "--name", name, "--quiet", "--overwrite"]
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return output / name


def figures(folder: Path, protocol: Protocol) -> dict[str, Any]:
    """Per cent, values sent and seconds a round."""
    summary = json.loads((folder / "summary.json").read_text())
    found: dict[str, Any] = {}
    for heading, columns in (("last", protocol.columns), ("mean_last_10", protocol.mean)):
        for name in columns:
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


def table(found: dict[str, dict[str, Any]], protocol: Protocol) -> str:
    """The figures as Markdown, in the protocol's order, or best first."""
    columns = [name for name in next(iter(found.values())) if any(own[name] is not None for own in found.values())]
    lines = [f"| method | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    order = sorted(found, key=lambda method: -(found[method][protocol.columns[0]] or 0))
    for method in list(found) if protocol.methods else order:
        cells = [found[method][column] for column in columns]
        lines.append(f"| {method} | {' | '.join('–' if cell is None else str(cell) for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of the data: train/ and test/ in it")
    parser.add_argument("--samples", type=int, default=0, help="images of a stratified sample; 0 takes all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=0, help="local epochs; 0 takes the protocol's")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", default=str(HERE.parent / "runs" / "methods"), help="folder of the runs")
    options = parser.parse_args()
    protocol = DRDFL
    methods = options.methods or protocol.methods

    def one(method: str) -> dict[str, Any]:
        numbers = figures(run(method, protocol, options), protocol)
        print(method, numbers, flush=True)
        return numbers

    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(methods, pool.map(one, methods), strict=True))
    print(table(found, protocol))
    about = {"images": options.samples or protocol.images, "rounds": options.rounds, "epochs": options.epochs or None}
    save("methods_drdfl", {**about, "methods": found})


if __name__ == "__main__":
    main()
