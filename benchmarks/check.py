"""Parts of a round over loops written by hand, in turns: kept as a history, drawn, and compared with what was before.

    OMP_NUM_THREADS=1 python benchmarks/check.py [--keep] [--draw] [--repetitions 15]

Without options: measures, compares with the newest of `results/history.jsonl` for the same processor, cores and torch,
and ends with 1 where a part became more than 10 % slower, as a ratio to the hand-written loop of the same run. `--keep`
adds what was measured, with its commit, to the history (say it on a commit, on a machine with nothing else to do);
`--draw` draws the history as `results/history.svg`, and measures nothing. The processor's time is counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from results import RESULTS, machine
from torch import nn
from workloads import HandWritten, federation, noise

from fl_lightning.core.aggregation import WeightedMean
from fl_lightning.data.digits import Digits
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.mlp import MLP

HISTORY = RESULTS / "history.jsonl"
ALLOWED = 1.10
CLIENTS = 20
Work = Callable[[], object]


def digits(method: Any, graph: Literal["auto"] | None = None, **evaluate: bool) -> FederatedLoop:
    """The quickstart's data and network, by `federation.graph`; two rounds are done."""
    data = FederatedData(Digits(), Dirichlet(0.5, min_samples=20), CLIENTS, batch_size=16)
    data.setup(0)
    tests = {"trained": False, "received": False, "globally": False, "server": False, **evaluate}
    loop = FederatedLoop(Federation(rounds=10**6, evaluate=EvaluationPolicy(**tests), graph=graph))
    loop.setup(
        lambda _: method(MLP((1, 8, 8), 10, [128, 64])),
        data,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        seed=0,
        trainer={"accelerator": "cpu"},
    )
    loop.advance()
    loop.advance()
    return loop


def small_fits(data: FederatedData) -> Work:
    """One epoch of every client of the digits, by hand."""
    arrays = data.arrays
    x, y = arrays.x.float().div(255), arrays.y
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )

    def fit() -> None:
        for client in data.clients:
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            for rows in client.train[torch.randperm(len(client.train))].split(data.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()

    return fit


def parts() -> dict[str, tuple[Work, Work]]:
    """Part -> ours and what is written by hand for it."""
    images = noise(2000, 4, 10)
    ours, hand = federation(images), HandWritten(images)
    cpd = federation(images, method=FedCPD)
    seen = federation(noise(3000, 20, 10, test_fraction=0.5), method=FedRep, evaluate=EvaluationPolicy())
    for _ in range(2):
        cpd.advance()
        seen.advance()
    by_hand = HandWritten(seen.data)
    mlp, proto, tested = digits(FedAvg), digits(FedProto), digits(FedAvg, trained=True, received=True)
    small = small_fits(mlp.data)
    messages = [{"w": torch.randn(600_000) * 0.05} for _ in range(CLIENTS)]

    def add() -> None:
        total = torch.zeros(600_000, dtype=torch.float64)
        for message in messages:
            total.add_(message["w"])

    def fold() -> None:
        mean = WeightedMean()
        for message in messages:
            mean.add(message, 50)
        mean.result()

    return {
        "CNN, batch 10: a round of FedAvg": (ours.advance, lambda: hand.fit_all(4)),
        "CNN, batch 10: a round of FedCPD": (cpd.advance, lambda: hand.fit_all(4)),
        "CNN, batch 10: a round of FedRep of 20 clients with tests": (seen.advance, lambda: by_hand.fit_all(20)),
        "MLP on digits: a round of FedAvg": (mlp.advance, small),
        "MLP on digits: a round of FedProto": (proto.advance, small),
        "MLP on digits: a round of FedAvg with tests": (tested.advance, small),
        "the mean of 20 CNNs": (fold, add),
    }


def measured(repetitions: int) -> dict[str, float]:
    """Part -> its time over that of what is written by hand; the median over repetitions."""
    found = {}
    for name, (ours, hand) in parts().items():
        ratios = []
        for repetition in range(repetitions + 1):
            spent = []
            for work in (ours, hand):
                start = time.process_time()
                work()
                spent.append(time.process_time() - start)
            if repetition:  # the first one warms up
                ratios.append(spent[0] / spent[1])
        found[name] = round(statistics.median(ratios), 3)
        print(f"{name}: {found[name]} x what is written by hand", flush=True)
    return found


def history() -> list[dict[str, Any]]:
    """All that was kept, oldest first."""
    return [json.loads(line) for line in HISTORY.read_text().splitlines()] if HISTORY.is_file() else []


def kind() -> str:
    """The machine's class: what is compared is of one class."""
    about = machine()
    return f"{about['processor']}, {about['cores']} cores, torch {torch.__version__}"


def slower(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """A line for each part that became slower than is allowed."""
    return [
        f"{name}: {value} x what is written by hand, it was {before[name]} (+{value / before[name] - 1:.0%})"
        for name, value in now.items()
        if name in before and value > ALLOWED * before[name]
    ]


def draw() -> None:
    """One panel a part, one line a class of machines, commits in their order."""
    import vl_convert

    rows = [
        {"at": place, "commit": entry["commit"], "machine": entry["machine"], "part": name, "ratio": value}
        for place, entry in enumerate(history())
        for name, value in entry["ratios"].items()
    ]
    line = {
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "commit", "type": "nominal", "sort": {"field": "at"}, "title": None},
            "y": {"field": "ratio", "type": "quantitative", "title": "x by hand", "scale": {"zero": True}},
            "color": {
                "field": "machine",
                "type": "nominal",
                "legend": {"orient": "bottom", "columns": 1, "labelLimit": 600},
            },
        },
        "width": 260,
        "height": 120,
    }
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": rows},
        "facet": {"field": "part", "type": "nominal", "title": None},
        "columns": 3,
        "resolve": {"scale": {"y": "independent"}},
        "spec": line,
        "config": {"background": "white", "font": "sans-serif"},
    }
    (RESULTS / "history.svg").write_text(vl_convert.vegalite_to_svg(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="add what was measured to the history")
    parser.add_argument("--draw", action="store_true", help="draw the history, and measure nothing")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    if options.draw:
        draw()
        return
    torch.set_num_threads(1)
    now = measured(options.repetitions)
    before = [entry for entry in history() if entry["machine"] == kind()]
    if options.keep:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        entry = {"commit": commit.stdout.strip(), "date": today, "machine": kind(), "ratios": now}
        with HISTORY.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    if not before:
        print(f"nothing was kept for {kind()}: nothing to compare with; --keep keeps this")
        return
    lines = slower(now, before[-1]["ratios"])
    print("\n".join(lines) or f"no part is more than 10 % slower than at {before[-1]['commit']}")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
