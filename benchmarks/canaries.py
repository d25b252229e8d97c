"""One-shot canary audits of 20 seeds: what they claim of ε, beside what the accountant allows. About 10 minutes.

The quickstart's digits among 20 clients under FedAvg with `ClipAndNoise`; 300 canaries; five ways to be private. An
audit's claim must never exceed the accountant's ε.

    python benchmarks/canaries.py [--seeds 20]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import yaml

from fl_lightning.audit.canaries import Estimate, audit_canaries
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.parser import configured

BASE = Path(__file__).parent.parent / "experiments" / "quickstart.yaml"
SETTINGS = {
    "server, z = 1, 1 round": (1, 1.0, {"noise_multiplier": 1.0}),
    "server, z = 1, 5 rounds": (5, 1.0, {"noise_multiplier": 1.0}),
    "server, z = 4, 12 rounds": (12, 1.0, {"noise_multiplier": 4.0}),
    "server, z = 1, Poisson 0.5, 5 rounds": (5, 0.5, {"noise_multiplier": 1.0}),
    "client, z = 4, 5 rounds": (5, 1.0, {"noise_multiplier": 4.0, "where": "client"}),
}


def audit(seed: int, rounds: int, participation: float, options: dict[str, object]) -> Estimate:
    wire = [{"class_path": "ClipAndNoise", "init_args": {"clip": 1.0, "accountant": "prv", **options}}]
    argv = [f"--config={BASE}", f"--seed={seed}", "--method=FedAvg", f"--federation.rounds={rounds}"]
    argv += [f"--federation.participation={participation}", "--federation.sampling=poisson"]
    argv += ["--federation.wire=" + yaml.safe_dump(wire, default_flow_style=True, width=10**6).strip()]
    _, config = configured("fit", "", argv)
    found = audit_canaries(BuiltExperiment(config), 300, lambda _: None)
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    beyond = 0
    for name, setting in SETTINGS.items():
        found = [audit(seed, *setting) for seed in range(seeds)]
        claims = [own.epsilon_at_least for own in found]
        points = [own.epsilon_point for own in found]
        accounted = [own.epsilon_accounted or 0.0 for own in found]
        over = sum(claim > own for claim, own in zip(claims, accounted, strict=True))
        over_points = sum(point > own for point, own in zip(points, accounted, strict=True))
        beyond += over
        sys.stdout.write(
            f"{name}: accountant {max(accounted):.2f}; claims {min(claims):.2f} to {max(claims):.2f}, above it in "
            f"{over} of {seeds}; point estimates {min(points):.2f} to {max(points):.2f}, above in {over_points}\n"
        )
        sys.stdout.flush()
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
