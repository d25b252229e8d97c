"""Random schedules of federations without training, as `tests/federation/simulator.py` plays them.

    python benchmarks/schedules.py                   seeds 0 to 99,999
    python benchmarks/schedules.py 500 2000          seeds 500 to 1,999
    python benchmarks/schedules.py 1234 --show       one of them, and what it is

One line for each seed whose federation breaks an invariant; the seed repeats it. A line a minute says how far it is, so
that it can go on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60.0  # between two lines on how far it is


def main() -> int:
    """Play all schedules; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("end", type=int, nargs="?", help="the first seed that is left out")
    parser.add_argument("--show", action="store_true", help="print every schedule before it is played")
    options = parser.parse_args()
    end = options.end or (options.first + 1 if options.show else 100_000)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from federation.simulator import Refused, Schedule, play

    torch.set_num_threads(1)
    start = said = time.monotonic()
    failed = refused = 0
    for seed in range(options.first, end):
        schedule = Schedule(seed)
        if options.show:
            print(schedule)
        try:
            wrong = play(schedule)
        except Refused as error:
            refused += 1
            wrong = []
            print(f"seed {seed} is refused: {error}", flush=True)
        if wrong:
            failed += 1
            print(f"seed {seed}: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""), flush=True)
        if time.monotonic() - said > SECONDS:
            said = time.monotonic()
            print(f"seeds {options.first} to {seed}: {failed} failed, {said - start:.0f} s", flush=True)
    done = f"{end - options.first} schedules, {failed} failed, {refused} refused"
    print(f"{done}, {time.monotonic() - start:.0f} s, {time.process_time():.0f} s of a core")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
