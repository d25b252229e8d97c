"""Damaged runs' folders and files, as `tests/cli/damaged_folders.py` makes them, read by every command that reads any.

    python benchmarks/folders.py                        seeds 0 to 1,999
    python benchmarks/folders.py --number 300 --seed 7 --show
    python benchmarks/folders.py --only 1234            the one that failed, again; its folder stays
    python benchmarks/folders.py --command evaluate     one command alone

One line for each seed with which something is wrong, and the counts. Each command runs in a process forked from one
that has imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from cli.damaged_folders import COMMANDS, answer_of, build, clear, in_fork, make_case, warm_up  # noqa: E402

ENDS = {0: "right", 1: "said that something is wrong", 2: "refused"}


def main() -> int:
    """Try all, print what was wrong with each, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--only", type=int, help="one seed alone; its folder stays")
    parser.add_argument("--command", default="", choices=["", *(own.name for own in COMMANDS)])
    parser.add_argument("--show", action="store_true", help="print every answer")
    options = parser.parse_args()
    warm_up()
    found: Counter[str] = Counter()
    place = Path(tempfile.mkdtemp(prefix="folders-"))
    place.chmod(0o755)
    os.environ["FL_LIGHTNING_CACHE"] = str(place / "cache")
    (place / "cache").mkdir()
    base = place / "base"
    base.mkdir()
    build(base, in_fork)
    seeds = range(options.seed, options.seed + options.number) if options.only is None else [options.only]
    for seed in seeds:
        folder = place / str(seed)
        case = make_case(base, folder, seed, options.command)
        answer, wrong = answer_of(case, in_fork)
        found.update([*(word.partition(" ")[0] for word in wrong), ENDS.get(answer.code, "failed")])
        if wrong or options.show or options.only is not None:
            said = (answer.err.strip().splitlines() or answer.out.strip().splitlines() or [""])[-1][:330]
            told = (
                f"{seed} [{case.command.name}] {case.path} {case.what}: {answer.code}, {answer.seconds:.1f} s: {said}"
            )
            print(f"{wrong} {told}", flush=True)
        if options.only is None:
            clear(folder)
    print(json.dumps({"tried": len(seeds), **found}))
    if options.only is None:
        clear(place)
    else:
        print(f"left in {folder}")
    return 1 if sum(found[word] for word in found if word not in ENDS.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
