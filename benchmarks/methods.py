"""Every method under FedCPD's FashionMNIST protocol: accuracies and seconds a round, in one table.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--root FOLDER] [--samples 7000] [--rounds 20] [--methods FedProx …]

Every run is the command line's own (`fl-lightning fit --config experiments/fedcpd/fmnist_dirichlet01.yaml`) with the
method's defaults: 20 clients, Dirichlet(0.1), CNN, SGD 0.01, batch 10. `--samples` takes a stratified, seeded sample of
so many images instead of all 70,000. FedProto runs as `experiments/fedproto/pfllib.yaml` says, DRDFL with Adam 0.001 as
in its own experiments. Runs that ended are not run again: their folders stay in `--output`. `--jobs` run side by side,
one thread each; seconds are those of runs beside others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import save

from fl_lightning import catalog

HERE = Path(__file__).resolve().parent
PROTOCOL = HERE.parent / "experiments/fedcpd/fmnist_dirichlet01.yaml"
OVERLAYS: dict[str, list[str]] = {
    "FedProto": ["--config", str(HERE.parent / "experiments/fedproto/pfllib.yaml")],
    "DRDFL": ["--method=DRDFL", "--optimizer", "torch.optim.Adam", "--optimizer.lr", "0.001"],
}
COLUMNS = ("Local-T_received", "Local-T_received_weighted", "Local-T", "Server-T")


def words(method: str, options: argparse.Namespace) -> list[str]:
    found = ["--config", str(PROTOCOL), *OVERLAYS.get(method, [f"--method={method}"])]
    found += ["--federation.rounds", str(options.rounds), "--federation.evaluate_every", str(options.evaluate_every)]
    found += ["--federation.checkpoint.every", str(options.rounds), "--trainer.accelerator", "cpu"]
    if options.samples:
        found += ["--data.dataset", "subsets.FashionMNISTSample", "--data.dataset.samples", str(options.samples)]
        found += ["--data.dataset.normalize", "half", "--data.partition.min_samples", "10"]
    if options.root:
        found += ["--data.dataset.root", str(Path(options.root).resolve())]
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
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=HERE, check=True, env=environment)  # from here, so that the sample's class is found
    return output / name


def figures(folder: Path) -> dict[str, Any]:
    """Per cent of the last evaluated round, and seconds and values sent a round."""
    summary = json.loads((folder / "summary.json").read_text())
    last = {name: round(100 * summary["last"][name], 2) for name in COLUMNS if name in summary["last"]}
    final = summary["final_received"].get("Local-T_received")
    sent = summary["communication"]["uplink_params_per_client"]
    seconds = summary["seconds"] / summary["rounds"]
    return {
        **last,
        "final_received": None if final is None else round(100 * final, 2),
        "values sent": round(sent),
        "seconds": round(seconds, 1),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown, best received accuracy first."""
    columns = [*COLUMNS, "final_received", "values sent", "seconds"]
    lines = [f"| method | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for method in sorted(found, key=lambda method: -found[method].get("Local-T_received", 0)):
        cells = [found[method].get(column) for column in columns]
        lines.append(f"| {method} | {' | '.join('–' if cell is None else str(cell) for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--samples", type=int, default=0, help="images of a stratified sample; 0 takes all 70,000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", default=str(HERE.parent / "runs" / "methods"), help="folder of the runs")
    options = parser.parse_args()
    methods = options.methods or [entry.name for entry in catalog.entries("methods")]

    def one(method: str) -> dict[str, Any]:
        numbers = figures(run(method, options))
        print(method, numbers, flush=True)
        return numbers

    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(methods, pool.map(one, methods), strict=True))
    print(table(found))
    save("methods", {"images": options.samples or 70_000, "rounds": options.rounds, "methods": found})


if __name__ == "__main__":
    main()
