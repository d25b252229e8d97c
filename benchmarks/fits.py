"""What small fits cost beside their steps, each figure over the plainest code for the same values, in one run.

    OMP_NUM_THREADS=1 python benchmarks/fits.py [--parts sum …] [--repetitions 15] [--wall]

Variants take turns; a ratio is the median over repetitions of ratios within one. The processor's time is counted, so
that another process disturbs little; `--wall` counts the clock's. Parts:

  sum    messages of 20 clients into their weighted mean, over float64 `add_` of the same float32 values: the
         quickstart's MLP, the CNN, and four million values
  entry  what a fit of 50 samples takes beside its five steps (`training_step`), shortened (`federation/refit.py`), and
         Lightning's whole way into every fit: milliseconds a fit
  step   the quickstart's MLP on digits with batch 16, and the CNN with batch 10: a step over the best loop by hand,
         which has the same mini-batches and layout, and steps on all gradients at once: in the place of ours, in the
         same fits, whose entries leave a processor's caches with other things, and alone, pass after pass; and a
         recorded step (`federation.graph`) over the loop alone
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from unittest import mock

import torch
from check import digits
from torch import nn
from workloads import MODELS, federation, fit_all, noise

from fl_lightning.core.aggregation import WeightedMean
from fl_lightning.core.client import ClientModule
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.stacked import Outcome
from fl_lightning.core.stacked_graphs import PhaseGraphs
from fl_lightning.data.store import ClientData
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.mlp import MLP

Now = Callable[[], float]
GRAPHS: tuple[None, Literal["auto"]] = None, "auto"
RECORDED = 4
"""Rounds until steps are recorded and compared."""
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "quickstart's MLP": [(128, 64), (128,), (64, 128), (64,), (10, 64), (10,)],
    "CNN": [(32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1024), (512,), (10, 512), (10,)],
    "4 million": [(100_000,)] * 40,
}


def in_turns(variants: Mapping[str, Callable[[], object]], repetitions: int, now: Now) -> dict[str, list[float]]:
    """Seconds of each variant, once a repetition, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions + 1):
        for name, work in variants.items():
            start = now()
            work()
            if repetition:
                times[name].append(now() - start)
    return times


def printed(what: str, times: Mapping[str, list[float]], over: str, parts: int, unit: float = 1e6) -> None:
    """A line a variant: its time a part in microseconds, and its ratio to the one that it is compared with."""
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[over], strict=True))
        print(f"{what}: {name}: {unit * statistics.median(own) / parts:.1f} us, {ratio:.2f} x", flush=True)


def measure_sum(options: argparse.Namespace, now: Now) -> None:
    for name, shapes in SHAPES.items():
        clients = 20 if name != "4 million" else 8
        messages = [{str(i): torch.randn(shape) * 0.05 for i, shape in enumerate(shapes)} for _ in range(clients)]
        flat = [torch.cat([tensor.reshape(-1) for tensor in message.values()]) for message in messages]

        def plain(flat: list[torch.Tensor] = flat) -> None:
            total = torch.zeros(len(flat[0]), dtype=torch.float64)
            for values in flat:
                total.add_(values)

        def exact(flat: list[torch.Tensor] = flat) -> None:
            total = ExactSum()
            for values in flat:
                total.add(values, 49)

        def mean(messages: list[dict[str, torch.Tensor]] = messages) -> None:
            total = WeightedMean()
            for message in messages:
                total.add(message, 49)
            total.result()

        variants = {"plain add": plain, "exact sum": exact, "weighted mean of messages": mean}
        printed(f"sum, {name}", in_turns(variants, options.repetitions, now), "plain add", clients)


def fit_and_steps(loop: FederatedLoop, clients: int, now: Now) -> float:
    """Seconds that fits of so many clients take beside their steps."""
    steps = 0.0
    whole = ClientModule.training_step

    def timed(module: ClientModule, *arguments: Any) -> None:
        nonlocal steps
        start = now()
        whole(module, *arguments)
        steps += now() - start

    with mock.patch.object(ClientModule, "training_step", timed):
        start = now()
        fit_all(loop, clients)
        return now() - start - steps


def measure_entry(options: argparse.Namespace, now: Now) -> None:
    MODELS["MLP"] = MLP
    for model in ("MLP", "CNN"):
        loop = federation(noise(1000, 20, 10), model)
        found: dict[bool, list[float]] = {True: [], False: []}
        for repetition in range(options.repetitions + 1):
            for shortened, own in found.items():
                loop.runner.fits.shortens = shortened
                seconds = fit_and_steps(loop, 20, now) / 20
                own += [seconds] if repetition else []
        milliseconds = {shortened: 1000 * statistics.median(own) for shortened, own in found.items()}
        print(f"entry, {model}: {milliseconds[True]:.2f} ms, the whole way {milliseconds[False]:.2f} ms", flush=True)


def loop_by_hand(model: nn.Module) -> Callable[[Any], None]:
    """The best eager loop over a bundle's mini-batches."""
    parameters = list(model.parameters())

    def steps(bundle: Any) -> None:
        for x, y in bundle.steps():
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.01)
            for parameter in parameters:
                parameter.grad = None

    return steps


def by_hand(module: ClientModule, data: ClientData, batch_size: int, now: Now) -> float:
    """Seconds that one pass takes that is written by hand."""
    steps, spent = loop_by_hand(module.method.model), 0.0
    module.train()
    for bundle in data.bundles(0, batch_size, 64, False, False):
        start = now()
        steps(bundle)
        spent += now() - start
    return spent


def in_fits(loop: FederatedLoop, clients: int, step: Callable[[ClientModule, Any, int], None], now: Now) -> float:
    """Seconds that steps take in clients' fits, whoever makes them."""
    spent = 0.0

    def timed(module: ClientModule, batch: Any, index: int) -> None:
        nonlocal spent
        start = now()
        step(module, batch, index)
        spent += now() - start

    with mock.patch.object(ClientModule, "training_step", timed):
        fit_all(loop, clients)
    return spent


def recorded(loop: FederatedLoop, now: Now) -> float:
    """Seconds that a step takes in a round whose steps are recorded."""
    spent, count = 0.0, 0
    whole = PhaseGraphs.step

    def timed(*arguments: Any) -> Outcome:
        nonlocal spent, count
        start = now()
        outcome = whole(*arguments)
        spent, count = spent + now() - start, count + 1
        return outcome

    with mock.patch.object(PhaseGraphs, "step", timed):
        loop.advance()
    return spent / max(count, 1)


def measure_step(options: argparse.Namespace, now: Now) -> None:
    loops = {
        "MLP on digits, batch 16": [digits(FedAvg, graph=own) for own in GRAPHS],
        "CNN, batch 10": [federation(noise(2000, 4, 10), graph=own) for own in GRAPHS],
    }
    whole = ClientModule.training_step
    for name, (loop, taped) in loops.items():
        module = loop.runner.modules[0]
        steps_by_hand = loop_by_hand(module.method.model)

        def in_place(_: ClientModule, batch: Any, __: int, steps: Callable[[Any], None] = steps_by_hand) -> None:
            steps(batch)

        clients, size = loop.data.clients[:20], loop.data.batch_size
        steps = sum(client.num_steps(size, False, False) for client in clients)
        found: dict[str, list[float]] = {"ours": [], "in its place": [], "alone": [], "recorded": []}
        for _ in range(RECORDED):
            taped.advance()
        for repetition in range(options.repetitions + 1):
            own = [in_fits(loop, len(clients), step, now) for step in (whole, in_place)]
            own.append(sum(by_hand(module, client, size, now) for client in clients))
            for times, seconds in zip(found.values(), [*own, steps * recorded(taped, now)], strict=True):
                times += [seconds / steps] if repetition else []
        ratios = {n: statistics.median(a / b for a, b in zip(found["ours"], found[n], strict=True)) for n in found}
        said = f"{ratios['in its place']:.3f} x the best loop by hand in its place, {ratios['alone']:.3f} x that alone"
        pairs = zip(found["recorded"], found["alone"], strict=True)
        said += f"; recorded {statistics.median(a / b for a, b in pairs):.3f} x"
        each = ", ".join(f"{1e6 * statistics.median(times):.0f}" for times in found.values())
        print(f"step, {name}: {said} ({each} us)", flush=True)


PARTS = {"sum": measure_sum, "entry": measure_entry, "step": measure_step}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--wall", action="store_true", help="count waiting, too: for a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.parts:
        PARTS[part](options, time.perf_counter if options.wall else time.thread_time)


if __name__ == "__main__":
    main()
