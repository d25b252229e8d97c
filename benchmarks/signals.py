"""Stop a run by every signal, in every surrounding, at several moments; resume it, and `fl-lightning compare` the two.

    python benchmarks/signals.py [--moments 5]

TERM, USR1, HUP and INT, each plain, under SLURM and with two workers: one line a cell.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

from workplaces import workplaces

ROUNDS = 6


def main() -> int:
    """Run all cells; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=5, help="moments between the first and the last round, a cell")
    options = parser.parse_args()
    failed = 0
    with workplaces() as make:
        from cli.test_signals import PLACES, SIGNALS

        straight = make("straight")
        straight.draws = False
        straight.fit("--quiet", "--federation.rounds", str(ROUNDS))
        for where in PLACES:
            for name in SIGNALS:
                said = [case(make("stopped"), straight, where, name, moment) for moment in range(options.moments)]
                wrong = [what for what in said if what]
                failed += bool(wrong)
                print(f"{name:5} {where:8} {'; '.join(wrong) or f'{len(said)} of {len(said)} bit for bit'}", flush=True)
    print(f"{12 - failed} of 12 cells")
    return 1 if failed else 0


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
