"""Kill a run before every one of its file operations, and in the middle of every write, resume it, and compare.

    python benchmarks/kills.py                       a run of 3 rounds with 1 and with 2 workers
    python benchmarks/kills.py --workers 2 --pool disk --every 5 --again

One line for each case that does not end as the undisturbed run, bit for bit, with the options that repeat it.
"""

from __future__ import annotations

import argparse
import random
import time

from workplaces import workplaces


def main() -> int:
    """Run all cases; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", default=["1", "2"], help="numbers of workers")
    parser.add_argument("--pool", default="memory", choices=["memory", "disk"])
    parser.add_argument("--every", type=int, default=1, help="take every n-th case")
    parser.add_argument("--only", nargs=2, metavar=("WHO", "NUMBER"), help="one process and one of its operations")
    parser.add_argument("--again", action="store_true", help="kill each resumed run, too, at a random operation")
    options = parser.parse_args()
    failed = 0
    with workplaces() as make:
        from cli.kills import Undisturbed

        for workers in options.workers:
            words = ("--federation.workers", workers, "--federation.pool", options.pool)
            straight = Undisturbed(make("straight"), *words)
            kills = straight.kills[:: options.every]
            if options.only:
                kills = [kill for kill in kills if [kill.who, str(kill.number)] == options.only]
            start, wrong = time.monotonic(), 0
            for index, kill in enumerate(kills):
                again = random.Random(index).choice(straight.kills) if options.again else None
                what = straight.outcome(make("killed"), kill, again)
                if what:
                    wrong += 1
                    torn = " (torn)" if kill.torn else ""
                    then = f", then {again.who} {again.number}" if again else ""
                    case = f"--workers {workers} --only {kill.who} {kill.number}{torn}{then}"
                    print(f"{case}: {kill.what}: {what}", flush=True)
                if (index + 1) % 25 == 0:
                    print(f"{index + 1} of {len(kills)}, {wrong} wrong, {time.monotonic() - start:.0f} s", flush=True)
            whole = f"{len(kills) - wrong} of {len(kills)} resumed bit for bit"
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{workers} worker(s), pool {options.pool}: {whole}, {took}", flush=True)
            failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
