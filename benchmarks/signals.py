"""Stop a run by every signal, in every surrounding, at several moments; resume it, and `fl-lightning compare` the two.

    python benchmarks/signals.py [--moments 5] [--orphans 20]

TERM, USR1, HUP and INT, each plain, under SLURM and with two workers: one line a cell. Then the process that started
six workers is killed, at random moments: how many of them are left two seconds later.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from typing import Any

from workplaces import workplaces

ROUNDS = 6


def main() -> int:
    """Run all cells; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=5, help="moments between the first and the last round, a cell")
    parser.add_argument("--orphans", type=int, default=20, help="kills of who started the workers")
    options = parser.parse_args()
    failed = 0
    with workplaces() as make:
        from cli.test_signals import PLACES, SIGNALS

        straight = make("straight")
        straight.draws = False
        straight.fit("--quiet", "--federation.rounds", str(ROUNDS))
        for where in PLACES if options.moments else ():
            for name in SIGNALS:
                said = [case(make("stopped"), straight, where, name, moment) for moment in range(options.moments)]
                wrong = [what for what in said if what]
                failed += bool(wrong)
                print(f"{name:5} {where:8} {'; '.join(wrong) or f'{len(said)} of {len(said)} bit for bit'}", flush=True)
        if options.moments:
            print(f"{12 - failed} of 12 cells", flush=True)
        left = [orphans(make("killed"), seed) for seed in range(options.orphans)]
        print(f"workers left after {len(left)} kills: {sum(left)}")
    return 1 if failed or any(left) else 0


def orphans(place: Any, seed: int) -> int:
    """Kill who started six workers, at a random moment from the first of them on; how many are left after 2 s."""
    from cli.processes import children, working_in

    words = ("--federation.rounds", "400", "--federation.workers", "6")
    run = place.start("fit", "--config", "exp.yaml", "--quiet", *words)
    run.wait_until(lambda: children(run.process.pid))
    time.sleep(random.Random(seed).choice([0.02, 0.2, 2.0]) * random.Random(seed).random())
    run.kill()
    run.process.join()
    until = time.monotonic() + 2
    while working_in(place.path) and time.monotonic() < until:
        time.sleep(0.01)
    return len(working_in(place.path))


def case(place: Any, straight: Any, where: str, name: str, moment: int) -> str:
    """Stop a run `moment` × 15 ms after its first round, resume it; returns what is wrong, empty if nothing is."""
    from cli.test_signals import PLACES, SIGNALS

    place.draws = False
    environment, words = PLACES[where]
    said = place.path / "scontrol.txt"
    place.write("bin/scontrol", f'#!/bin/sh\necho "$@" >> {said}\n').chmod(0o755)
    environment = {**environment, "PATH": f"{place.path}/bin{os.pathsep}{os.environ['PATH']}"}
    run = place.start("fit", "--config", "exp.yaml", "--federation.rounds", str(ROUNDS), *words, env=environment)
    run.wait_until((place.run / "checkpoints" / "round-0001.ckpt").exists)
    time.sleep(0.015 * moment)
    try:
        run.signal(getattr(signal, f"SIG{name}"))
    except ProcessLookupError:
        return "finished before the signal"
    code, _, err = run.result()
    if code not in (SIGNALS[name], 0):  # 0 where the last round was the present one
        return f"exit code {code}: {err}"
    if said.exists() or list(place.path.rglob("hpc_ckpt*")):
        return "Lightning has saved or requeued"
    place.fit("--quiet", "--federation.rounds", str(ROUNDS), "--resume", "auto", *words, env=environment)
    code, out, _ = place.call("compare", place.run, straight.run)
    return "" if code == 0 else out.strip()


if __name__ == "__main__":
    raise SystemExit(main())
