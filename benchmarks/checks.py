"""What looking after a run costs, in shares of a quickstart round: finite values and shapes, checksums and the journal.

    python benchmarks/checks.py                                 FedAvg, FedCPD and FedProto
    python benchmarks/checks.py --methods FedRep --pairs 5 --save

A clock stands around every check while the quickstart runs in this process, saved to disk every round; their sum over
the time of the rounds is the cost: medians over rounds, without the first. The vector that a message's weights are
looked at in is the one that they are summed in: its making is shown, as the sum's. The processor's time alone is
counted unless `--wall` is given, which counts waiting, too, for disks above all, and needs a quiet machine. With pairs,
runs with and without the checks of values follow one another: a second way to the same number, and a noisier one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from results import save

from fl_lightning import files
from fl_lightning.core import checkup
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.checkups import Checkups, Inbound
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.sickness import Ward
from fl_lightning.parser import configured
from fl_lightning.report import journal

QUICKSTART = Path(__file__).resolve().parent.parent / "experiments" / "quickstart.yaml"
VALUES = (
    (Checkups, "losses"),
    (Checkups, "state"),
    (Checkups, "message"),
    (Inbound, "check"),
    (Ward, "check_outgoing"),
)
FILES = ((journal.Journal, "append"), (journal.Journal, "sync"), (journal.Sum, "add"))


class Clock:
    """Seconds that were spent, by what on.

    Args:
        now: `time.perf_counter`, or `time.thread_time`, which counts no waiting, for a processor or a disk.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.spent: dict[str, float] = {}
        self._within = 0.0  # spent on what was called by what is timed now
        self._own = min(-now() + now() for _ in range(1000))  # of a look at it

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with the time that it takes taken down."""

        def timed(*arguments: Any, **options: Any) -> Any:
            before, self._within = self._within, 0.0
            start = self.now()
            try:
                return call(*arguments, **options)
            finally:
                whole = max(0.0, self.now() - start - self._own)
                self.spent[name] = self.spent.get(name, 0.0) + whole - self._within
                self._within = before + whole

        return timed


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Time all checks, for the length of a block."""

    def losses(checkups: Checkups) -> dict[str, float]:
        checkups.module.meter.means()  # a round reads them anyway
        return clock.around("values/losses", original)(checkups)

    original = Checkups.losses
    with ExitStack() as stack:
        for kind, places in (("values", VALUES), ("files", FILES)):
            for owner, name in places:
                own = losses if name == "losses" else clock.around(f"{kind}/{name}", getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, own))
        summed = SimpleNamespace(crc32=clock.around("files/crc32", zlib.crc32))
        stack.enter_context(mock.patch.object(files, "zlib", summed))
        stack.enter_context(mock.patch.object(checkup, "Flat", clock.around("sum/flat", checkup.Flat)))
        yield


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the checks of values, for the length of a block."""
    with ExitStack() as stack:
        for owner, name in VALUES[1:]:
            stack.enter_context(mock.patch.object(owner, name, autospec=True))
        yield


def rounds_of(method: str, rounds: int, clock: Clock) -> tuple[list[float], list[dict[str, float]]]:
    """The seconds of every round but the first, and what was spent on checks in each."""
    seconds, spent = [], []
    advance = FederatedLoop.advance

    def timed(loop: FederatedLoop) -> None:
        clock.spent = {}
        start = clock.now()
        advance(loop)
        seconds.append(clock.now() - start)
        spent.append(dict(clock.spent))

    with tempfile.TemporaryDirectory(prefix="fl-lightning-bench-") as folder:
        words = ["--config", str(QUICKSTART), "--method", method, "--federation.rounds", str(rounds + 1)]
        _, config = configured("fit", "", [*words, "--output", folder], imports_own=True)
        with mock.patch.object(FederatedLoop, "advance", timed):
            BuiltExperiment(config).fit()
    return seconds[1:], spent[1:]


def shares(method: str, rounds: int, now: Callable[[], float]) -> dict[str, float]:
    """Percent of a round, by check and in all: medians over rounds."""
    clock = Clock(now)
    with clocked(clock):
        seconds, spent = rounds_of(method, rounds, clock)
    names = sorted({name for own in spent for name in own})
    found = {name: _median([own.get(name, 0.0) / s for own, s in zip(spent, seconds, strict=True)]) for name in names}
    for kind in ("values", "files"):
        sums = [sum(v for n, v in own.items() if n.split("/")[0] == kind) for own in spent]
        found[kind] = _median([own / s for own, s in zip(sums, seconds, strict=True)])
    checks = [sum(v for n, v in own.items() if not n.startswith("sum/")) for own in spent]
    found["all"] = _median([own / s for own, s in zip(checks, seconds, strict=True)])
    return {"round_ms": round(1000 * statistics.median(seconds), 2), **found}


def in_pairs(method: str, rounds: int, pairs: int, now: Callable[[], float]) -> float:
    """Percent that rounds take longer with the checks of values: the median over pairs of runs."""
    ratios = []
    for _ in range(pairs):
        with unchecked():
            without, _ = rounds_of(method, rounds, Clock(now))
        checked, _ = rounds_of(method, rounds, Clock(now))
        ratios.append(statistics.median(checked) / statistics.median(without) - 1)
    return _median(ratios)


def _median(values: Sequence[float]) -> float:
    return round(100 * statistics.median(values), 3)


def main() -> None:
    """Measure, and print percents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["FedAvg", "FedCPD", "FedProto"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=0, help="pairs of runs with and without the checks of values")
    parser.add_argument("--wall", action="store_true", help="count waiting, too: for a quiet machine")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/checks.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # lightning 2.6 on torch 2.15
    now = time.perf_counter if options.wall else time.thread_time
    found: dict[str, Any] = {}
    for method in options.methods:
        found[method] = shares(method, options.rounds, now)
        if options.pairs:
            found[method]["values_in_pairs"] = in_pairs(method, options.rounds, options.pairs, now)
        print(method, *(f"{name} {value}" for name, value in found[method].items()), sep="\n  ", flush=True)
    if options.save:
        save("checks", {"percent_of_a_round": found, "clock": "wall" if options.wall else "processor"}, quiet=True)


if __name__ == "__main__":
    main()
