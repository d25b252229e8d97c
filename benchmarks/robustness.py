"""What hostile clients cost, by rule of the server: the mean and robust rules under every attack, on the quickstart.

    OMP_NUM_THREADS=1 nice python benchmarks/robustness.py [--methods FedAvg …] [--rules Mean …] [--seconds 600]

Each run is the quickstart (20 clients, 12 rounds) with one method, one `federation.aggregator` and one
`federation.attack` of 20 % of the clients, or none; strengths are the defaults. Means are over honest clients; every
cell is compared with the mean's clean run over the same clients, so that the column `none` shows what a rule itself
costs. Global-T is not evaluated (`federation.evaluate.globally: false`), which changes no training. All runs share one
process and write nothing but a line in `results/robustness.csv` when they end; runs that are there are not run again,
so that this can be stopped at any time. `--seconds` begins no run after so long; `--write` only writes
`results/robustness.md` anew.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.attacks import STRENGTHS, Attack
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.sickness import RoundError
from fl_lightning.parser import configured

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "robustness.csv"
PAGE = RESULTS.with_suffix(".md")
METHODS = ("FedAvg", "FedRep", "FedProto", "FedCPD")
ATTACKS = ("none", "noise", "sign_flip", "scale", "label_flip", "same_value", "inner_product")
RULES: dict[str, list[str]] = {
    "Mean": [],
    "CoordinateMedian": ["--federation.aggregator", "CoordinateMedian"],
    "TrimmedMean": ["--federation.aggregator", "TrimmedMean"],
    "Krum": ["--federation.aggregator", "Krum"],
    "MultiKrum": ["--federation.aggregator", "{class_path: Krum, init_args: {select: null}}"],
    "Bulyan": ["--federation.aggregator", "Bulyan"],
    "NormClipping": ["--federation.aggregator", "NormClipping"],
    "GeometricMedian": ["--federation.aggregator", "GeometricMedian"],
    "CentredClipping": ["--federation.aggregator", "CentredClipping"],
}
"""A rule's options; Krum and MultiKrum are one rule with one and with n − f clients."""
CLIENTS, SHARE, SEED = 20, 0.2, 0
MOMENTS = ("received", "trained")
FIGURES = {
    "received_last": "as received, last round",
    "received_mean_of_10": "as received, mean of the last ten rounds",
    "trained_last": "after the fit, last round",
    "trained_mean_of_10": "after the fit, mean of the last ten rounds",
}
COLUMNS = ["method", "rule", "attack", "rounds", *FIGURES, "seconds", "said"]


class Case(NamedTuple):
    """One run."""

    method: str
    rule: str
    attack: str

    def words(self) -> list[str]:
        """The command line's words."""
        words = ["--config", str(HERE.parent / "experiments" / "quickstart.yaml"), "--method", self.method]
        words += ["--federation.evaluate.globally", "false", "--federation.checkpoint.every", "0", *RULES[self.rule]]
        if self.attack == "none":
            return words
        return [*words, "--federation.attack.share", str(SHARE), "--federation.attack.kind", self.attack]


class Honest(FederationCallback):
    """Takes down, after every round, the means over the clients that an attack would leave honest."""

    def __init__(self) -> None:
        hostile = Attack(share=SHARE).attackers(CLIENTS, SEED)
        self.honest = [client for client in range(CLIENTS) if client not in hostile]
        self.figures: dict[str, list[float]] = {moment: [] for moment in MOMENTS}

    def on_round_end(self, loop: Any, row: dict[str, Any]) -> None:
        """Add a round's."""
        for moment, own in self.figures.items():
            scores = loop.scores["Local-T" if moment == "trained" else "Local-T_received"]
            own.append(float(np.nanmean(scores[self.honest])))


def run(case: Case) -> dict[str, Any]:
    """Run a case in memory, and return its line."""
    torch.set_num_threads(1)
    start, seen = time.perf_counter(), Honest()
    _, config = configured("fit", "", case.words(), imports_own=True)
    experiment = BuiltExperiment(config)
    experiment.setup(in_memory=True)
    experiment.loop.callbacks.append(seen)
    try:
        experiment.loop.run()
        said = ""
    except RoundError as error:  # somebody's loss or model is no number any more: the attack has won
        said = str(error)[:200]
    line: dict[str, Any] = {**case._asdict(), "rounds": experiment.loop.round, "said": said}
    for moment, values in seen.figures.items():
        if values and not said:
            line |= {f"{moment}_last": values[-1], f"{moment}_mean_of_10": float(np.mean(values[-10:]))}
    return {**line, "seconds": round(time.perf_counter() - start, 2)}


def lines() -> dict[Case, dict[str, str]]:
    """What was run so far."""
    if not RESULTS.is_file():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {Case(line["method"], line["rule"], line["attack"]): line for line in csv.DictReader(file)}


def append(line: dict[str, Any]) -> None:
    """Write a line down, and the head before the first one."""
    RESULTS.parent.mkdir(exist_ok=True)
    new = not RESULTS.is_file()
    with RESULTS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(line)


# --- the page ---------------------------------------------------------------------------------------------------------


def value(line: dict[str, str] | None, figure: str) -> float | None:
    """A figure in percent; None where there is none."""
    return 100 * float(line[figure]) if line and line[figure] else None


def cell(line: dict[str, str] | None, clean: dict[str, str] | None, figure: str) -> str:
    """The figure and the points that it lost."""
    own, before = value(line, figure), value(clean, figure)
    if line and line["said"]:
        return f"ended in round {int(line['rounds']) + 1}"
    if own is None:
        return "–"
    return f"{own:.1f}" if line is clean or before is None else f"{own:.1f} ({before - own:+.1f})"


def in_short(found: dict[Case, dict[str, str]], method: str, attack: str) -> str:
    """What the mean loses under an attack, and the rule that loses least."""
    figure = "trained_mean_of_10"
    clean = value(found.get(Case(method, "Mean", "none")), figure)
    known = {rule: value(found.get(Case(method, rule, attack)), figure) for rule in RULES}
    lost = {rule: clean - own for rule, own in known.items() if clean is not None and own is not None}
    robust = [rule for rule in lost if rule != "Mean"]
    mean = f"{lost['Mean']:+.1f}" if "Mean" in lost else "–"
    best = min(robust, key=lambda rule: lost[rule], default=None)
    return mean if best is None else f"{mean}, {best} {lost[best]:+.1f}"


def tables(found: dict[Case, dict[str, str]]) -> Iterator[str]:
    """The page's lines."""
    strengths = ", ".join(f"{kind} {s:g}" for kind, s in STRENGTHS.items())
    yield "# Hostile clients: robust rules under attack"
    yield ""
    yield f"Written by `benchmarks/robustness.py`; seed {SEED}, {SHARE:.0%} of {CLIENTS} clients attack."
    yield "Local-T of the honest clients in percent, in brackets the points lost against the mean without an attack"
    yield "over the same clients. Ended: somebody's loss or model, or the server's, was no sound number any more."
    yield f"Strengths: {strengths}."
    yield from ("", "## Points lost after the fit, mean of the last ten rounds: by the mean, and by the best rule", "")
    yield f"| method | {' | '.join(ATTACKS[1:])} |"
    yield f"|---{'|---' * len(ATTACKS[1:])}|"
    for method in METHODS:
        yield f"| {method} | {' | '.join(in_short(found, method, attack) for attack in ATTACKS[1:])} |"
    for figure, title in FIGURES.items():
        for method in METHODS:
            yield from ("", f"## {method}, {title}", "", f"| rule | {' | '.join(ATTACKS)} |")
            yield f"|---{'|---' * len(ATTACKS)}|"
            clean = found.get(Case(method, "Mean", "none"))
            for rule in RULES:
                own = (cell(found.get(Case(method, rule, attack)), clean, figure) for attack in ATTACKS)
                yield f"| {rule} | {' | '.join(own)} |"


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, choices=ATTACKS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    begin, found = time.perf_counter(), lines()
    wanted = [Case(m, r, a) for a in options.attacks for m in options.methods for r in options.rules]
    for case in [] if options.write else wanted:
        if case in found or time.perf_counter() - begin > options.seconds:
            continue
        try:
            line = run(case)
        except ConfigError as error:
            print(*case, error, flush=True)
            continue
        append(line)
        print(*case, line["seconds"], line.get("received_last"), line.get("trained_last"), line["said"], flush=True)
    PAGE.write_text("\n".join(tables(lines())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
