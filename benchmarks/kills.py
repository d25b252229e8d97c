"""Kill a run before every one of its file operations, and in the middle of every write, resume it, and compare.

    python benchmarks/kills.py                       a run of 3 rounds with 1 and with 2 workers
    python benchmarks/kills.py --workers 2 --pool disk --every 5 --again
    python benchmarks/kills.py --workers 1 --change '{federation: {checkpoint: {keep: 1}}}'
    python benchmarks/kills.py --workers 1 --during-resume 6 --every 3
    python benchmarks/kills.py --command table       while a table writes its own files; likewise tune

One line for each case that does not end as the undisturbed run, bit for bit, with the options that repeat it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from workplaces import workplaces


def main() -> int:
    """Run all cases; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", default=["1", "2"], help="numbers of workers")
    parser.add_argument("--pool", default="memory", choices=["memory", "disk"])
    parser.add_argument("--change", type=yaml.safe_load, default={}, help="what else the configuration says, as YAML")
    parser.add_argument("--command", default="fit", choices=["fit", "table", "tune"])
    parser.add_argument("--every", type=int, default=1, help="take every n-th case")
    parser.add_argument("--only", nargs=2, metavar=("WHO", "NUMBER"), help="one process and one of its operations")
    parser.add_argument("--again", action="store_true", help="kill each resumed run, too, at a random operation")
    parser.add_argument(
        "--during-resume", type=int, default=0, metavar="COUNT", help="take so many first kills, and kill each resume"
    )
    options = parser.parse_args()
    failed = 0
    with workplaces() as make:
        from cli.kills import Undisturbed, UndisturbedCommand

        for workers in options.workers if options.command == "fit" else ("1",):
            if options.command == "fit":
                words = ("--federation.workers", workers, "--federation.pool", options.pool)
                straight: Any = Undisturbed(make("straight"), *words, changes=options.change)
                name = f"{workers} worker(s), pool {options.pool}" + (f", {options.change}" if options.change else "")
            else:
                straight, name = UndisturbedCommand(make("straight"), options.command), options.command
            cases = list(_cases(straight, make, options))
            failed += _play(straight, make, cases, name)
    return 1 if failed else 0


def _cases(straight: Any, make: Any, options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """First and second kill of every case; None for no second one."""
    kills = straight.kills
    if options.during_resume:
        for first in kills[:: max(1, len(kills) // options.during_resume)]:
            for second in straight.of_resume(make("killed"), first)[:: options.every]:
                yield first, second
        return
    if options.only:
        kills = [kill for kill in kills if [kill.who, str(kill.number)] == options.only]
    for index, kill in enumerate(kills[:: options.every]):
        yield kill, random.Random(index).choice(straight.kills) if options.again else None


def _play(straight: Any, make: Any, cases: Sequence[tuple[Any, Any]], name: str) -> int:
    start, wrong = time.monotonic(), 0
    for index, (kill, again) in enumerate(cases):
        what = straight.outcome(make("killed"), kill, again)
        if what:
            wrong += 1
            torn = " (torn)" if kill.torn else ""
            then = f", then {again.who} {again.number}" if again else ""
            print(f"{name}: --only {kill.who} {kill.number}{torn}{then}: {kill.what}: {what}", flush=True)
        if (index + 1) % 25 == 0:
            print(f"{index + 1} of {len(cases)}, {wrong} wrong, {time.monotonic() - start:.0f} s", flush=True)
    took = f"{time.monotonic() - start:.0f} s"
    print(f"{name}: {len(cases) - wrong} of {len(cases)} resumed bit for bit, {took}", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
