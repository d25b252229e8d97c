"""A quickstart round with clients stacked (`federation.cohort`) over one by one, and how nearly they are the same.

    OMP_NUM_THREADS=1 python benchmarks/cohort.py [--methods FedAvg FedCPD] [--cohort 20] [--graph auto] [--rounds 20]

Two federations of the quickstart are set up in this process, one by one and stacked, and do a round in turns, saved
nowhere: the ratio is the median over neighbouring rounds, by the wall's clock and by the processor's; three rounds
before them warm up, and 30 more where steps are recorded. After three it says how far weights that are shared have come
apart in float32 (the largest difference), and the largest of any figure of `metrics.csv`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.parser import configured

QUICKSTART = Path(__file__).resolve().parent.parent / "experiments" / "quickstart.yaml"
GOALS = {"FedAvg": 4.0, "FedCPD": 3.0}
WARM, RECORDED = 3, 30
"""Rounds before those that are timed; more of them until steps of all sizes are recorded and compared."""


class Rows(FederationCallback):
    """Remembers the rounds' rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_round_end(self, loop: FederatedLoop, row: dict[str, Any]) -> None:
        """One more."""
        self.rows.append(dict(row))


def federation(method: str, cohort: str, folder: str, threads: int, graph: str = "null") -> tuple[FederatedLoop, Rows]:
    """The quickstart, set up."""
    words = ["--config", str(QUICKSTART), "--method", method, "--federation.cohort", cohort, "--output", folder]
    words += ["--federation.graph", graph]
    _, config = configured("fit", "", words, imports_own=True)
    experiment = BuiltExperiment(config)
    experiment.setup(in_memory=True)
    torch.set_num_threads(threads)
    watch = Rows()
    experiment.loop.callbacks = [watch]
    return experiment.loop, watch


def seconds_of_a_round(loop: FederatedLoop) -> tuple[float, float]:
    """By the wall's clock and by the processor's."""
    wall, processor = time.perf_counter(), time.process_time()
    loop.advance()
    return time.perf_counter() - wall, time.process_time() - processor


def apart(loops: list[FederatedLoop], watches: list[Rows]) -> tuple[float, float]:
    """The largest difference of any shared weight, and of any figure, so far."""
    one, other = (loop.exchange.global_message() for loop in loops)
    weights = max(float((one.weights[n] - other.weights[n]).abs().max()) for n in one.weights) if one and other else 0.0
    pairs = [(a[name], b[name], name) for a, b in zip(*(w.rows for w in watches), strict=True) for name in a]
    numbers = [abs(a - b) for a, b, n in pairs if isinstance(a, float) and a == a and not n.startswith("seconds")]
    return weights, max(numbers, default=0.0)


def measure(method: str, cohort: str, graph: str, rounds: int, threads: int) -> None:
    """Print one line."""
    with tempfile.TemporaryDirectory(prefix="fl-lightning-bench-") as folder:
        kinds = ("null", "null"), (cohort, graph)
        made = [federation(method, own, folder, threads, recorded) for own, recorded in kinds]
        loops, watches = [loop for loop, _ in made], [watch for _, watch in made]
        for _ in range(WARM):
            for loop in loops:
                loop.advance()
        weights, figures = apart(loops, watches)
        for _ in range(0 if graph == "null" else RECORDED):
            for loop in loops:
                loop.advance()
        times = [[seconds_of_a_round(loop) for loop in loops] for _ in range(rounds)]
    wall, processor = ([(one[clock], other[clock]) for one, other in times] for clock in (0, 1))
    ratios = [statistics.median(one / other for one, other in own) for own in (wall, processor)]
    medians = [1000 * statistics.median(own[index] for own in wall) for index in (0, 1)]
    goal = f"goal {GOALS[method]}" if method in GOALS else "no goal"
    print(
        f"{method}: one by one {medians[0]:.1f} ms, cohort {medians[1]:.1f}; ratio {ratios[0]:.2f} by the wall's, "
        f"{ratios[1]:.2f} by the processor's clock ({goal}); after {WARM} rounds shared weights differ by "
        f"{weights:.1e}, figures by {figures:.1e}. {loops[1].cohort.reason} {' '.join(loops[1].cohort.unrecorded)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(GOALS))
    parser.add_argument("--cohort", default="20", help="federation.cohort: a number, or auto")
    parser.add_argument("--graph", default="null", help="federation.graph: auto, or null")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for method in options.methods:
        measure(method, options.cohort, options.graph, options.rounds, options.threads)


if __name__ == "__main__":
    main()
