"""A round with what networks at rest made of samples kept over epochs, beside the same round that makes it anew.

    OMP_NUM_THREADS=1 python benchmarks/recall.py [--root DIR] [--samples 2000] [--epochs 5] [--repetitions 3]

FashionMNIST, Dirichlet(0.5), 5 clients, the paper's CNN, batch 10; evaluation is left out. Both federations are set up
once, have two rounds behind them and then do a round in turns. The share of the first to the second is what
`federation.recall` gives, for methods with a teacher and for head phases of several epochs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fl_lightning.core.method import Method
from fl_lightning.data.idx import FashionMNIST
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import Dirichlet
from fl_lightning.data.sample import Sample
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.settings import EvaluationPolicy, Federation
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcp import FedCP
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedphp import FedPHP
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.moon import MOON
from fl_lightning.models.cnn import CNN

METHODS: dict[str, Callable[[CNN], Method]] = {
    "MOON": MOON,
    "FedNTD": FedNTD,
    "FedPHP": FedPHP,
    "FedCP": FedCP,
    "FedCPD": FedCPD,
    "FedRep, 10 epochs of the head, 1 of the body": lambda model: FedRep(model, head_epochs=10, body_epochs=1),
    "FedAvg, which has nothing at rest": FedAvg,
}


def federation(make: Callable[[CNN], Method], recall: int, options: argparse.Namespace) -> FederatedLoop:
    """Two rounds are done: every client has a teacher."""
    images = Sample(FashionMNIST(options.root, normalize="half"), options.samples)
    data = FederatedData(images, Dirichlet(0.5), 5, batch_size=10)
    data.setup(0)
    nothing = EvaluationPolicy(trained=False, received=False, globally=False, server=False)
    settings = Federation(rounds=10**6, evaluate=nothing, local_epochs=options.epochs, recall=recall)
    loop = FederatedLoop(settings)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)  # noqa: E731
    loop.setup(lambda _: make(CNN((1, 28, 28), 10)), data, sgd, seed=0, trainer={"accelerator": "cpu"})
    loop.advance()
    loop.advance()
    return loop


def seconds_of_a_round(loop: FederatedLoop) -> float:
    start = time.perf_counter()
    loop.advance()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder that holds FashionMNIST/raw; default: the cache of datasets")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in METHODS.items():
        kept, anew = (federation(make, recall, options) for recall in (Federation().recall, 0))
        shares = [seconds_of_a_round(kept) / seconds_of_a_round(anew) for _ in range(options.repetitions)]
        print(f"{statistics.median(shares):.2f}  {name}  ({', '.join(f'{share:.2f}' for share in sorted(shares))})")


if __name__ == "__main__":
    main()
