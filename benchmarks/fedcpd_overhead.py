"""FedCPD's round over FedRep's: Fashion-MNIST, the paper's CNN, batch 10, both phases, every client with a teacher.

    OMP_NUM_THREADS=1 python benchmarks/fedcpd_overhead.py [--root DIR] [--samples 4000] [--repetitions 5]

Both federations are set up once, have two rounds behind them (so that there are teachers and prototypes) and then do a
round in turns; medians are over ratios of neighbouring rounds, by the wall's clock and by the processor's. Evaluation
is left out. One thread. Beside them stands the ratio of what both rounds multiply and add (convolutions and matrix
products, forward and backward): what no faster code gets below without other arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from results import save
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.core.method import Method
from fl_lightning.data.idx import FashionMNIST
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.data.sample import Sample
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.cnn import CNN

GOAL = 3.0


def federation(kind: type[Method], samples: int, root: str | None) -> FederatedLoop:
    """Two rounds of a federation of 10 clients are done."""
    data = FederatedData(Sample(FashionMNIST(root, normalize="half"), samples), Dirichlet(0.5), 10, batch_size=10)
    data.setup(0)
    nothing = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
    loop = FederatedLoop(Federation(rounds=10**6, evaluate=nothing))
    loop.setup(
        lambda _: kind(CNN((1, 28, 28), 10)),
        data,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        seed=0,
        trainer={"accelerator": "cpu"},
    )
    loop.advance()
    loop.advance()
    return loop


def seconds_of_a_round(loop: FederatedLoop) -> tuple[float, float]:
    """By the wall's clock and by the processor's."""
    wall, processor = time.perf_counter(), time.process_time()
    loop.advance()
    return time.perf_counter() - wall, time.process_time() - processor


def operations_of_a_round(loop: FederatedLoop) -> int:
    """Multiplications and additions of convolutions and matrix products."""
    with FlopCounterMode(display=False) as counter:
        loop.advance()
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder that holds FashionMNIST/raw; default: the cache of datasets")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rep, cpd = (federation(kind, options.samples, options.root) for kind in (FedRep, FedCPD))
    pairs = [(seconds_of_a_round(rep), seconds_of_a_round(cpd)) for _ in range(options.repetitions)]
    found: dict[str, Any] = {}
    for at, clock in enumerate(("wall", "processor")):
        ratios = sorted(own[at] / other[at] for other, own in pairs)
        found[clock] = {"median": round(statistics.median(ratios), 2), "each": [round(each, 2) for each in ratios]}
        print(f"FedCPD over FedRep, a round, {clock}: {found[clock]['median']} (goal <= {GOAL})")
    found["operations"] = round(operations_of_a_round(cpd) / operations_of_a_round(rep), 2)
    print(f"FedCPD over FedRep, a round, operations: {found['operations']}")
    save("fedcpd_overhead", {"samples": options.samples, "ratio": found})


if __name__ == "__main__":
    main()
