"""Everything that wants a GPU, in under 8 minutes: checks, then a table; written to `benchmarks/results/gpu.md`.

    make gpu                             or: python benchmarks/gpu.py [--methods FedAvg FedCPD] [--seconds 460]
    python benchmarks/gpu.py --rehearse  the same without one, small, written nowhere: does the script itself work?

Checks: every method on the GPU in float32 against the CPU (two rounds of five steps on the same random numbers, see
`same_draws.py`, shared and private weights within 1e-4), and whether a step waits for the device
(`torch.cuda.set_sync_debug_mode`); bf16 and fp16 beside float32; one client over two devices where there are two.
Without a GPU it says so in one line and exits with code 2; `--rehearse` checks methods on an emulated one
(`emulated_gpu.py`), where tensors on the wrong device and steps that wait show, too.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cohort import Rows
from emulated_gpu import WAITS, emulated_gpu
from results import RESULTS, machine
from same_draws import SameDraws
from workloads import HandWritten, federation, noise, seconds

from fl_lightning.catalog import entries
from fl_lightning.core.step import Step
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.parser import configured

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "experiments" / "quickstart.yaml"
SMALL = ("--data.num_clients", "4", "--federation.rounds", "3")
SMALL += ("--federation.checkpoint.every", "0", "--federation.evaluate")
NOTHING, CLIENTS = "{globally: false, trained: false, received: false}", "{globally: false}"
CLOSE = 1e-4
LOSSES = {"32-true": 0.0, "bf16-mixed": 0.05, "16-mixed": 0.1}  # float16's scaler leaves the first few steps out
EXACT = 1e-9  # where float32's rounding grows beyond that: the same in float64
NEAR = 1e-3  # stacked clients: what rounding does, and a method may divide by a small learning rate
MIXED = ("FedAvg", "FedRep", "FedProto", "FedCPD", "MOON")
NO_TIME = "left out: no time"
Row = tuple[str, str]


class Clock:
    """What is left of the time that the whole may take."""

    def __init__(self, limit: float) -> None:
        self.end = time.perf_counter() + limit

    @property
    def is_over(self) -> bool:
        """Whether to leave the rest out."""
        return time.perf_counter() > self.end


# --- checks ---------------------------------------------------------------------------------------------------------


def exact() -> None:
    """Multiply in float32 where it is asked for."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def silence() -> None:
    """Let Lightning say nothing of which device it takes."""
    warnings.filterwarnings("ignore", message="GPU available but not used")
    logging.getLogger("lightning.pytorch.accelerators.cuda").setLevel(logging.WARNING)


def quickstart(method: str, accelerator: str, *options: str) -> FederatedLoop:
    """The quickstart of four clients, set up in memory."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", str(QUICKSTART), "--method", method, *SMALL, NOTHING, "--output", folder, *options]
        _, config = configured("fit", "", [*words, "--trainer.accelerator", accelerator], imports_own=True)
        experiment = BuiltExperiment(config)
        experiment.setup(in_memory=True)
    experiment.loop.callbacks = [Rows()]
    return experiment.loop


def weights(loop: FederatedLoop) -> dict[str, torch.Tensor]:
    """All that a federation has learnt: what its first client hears, and what the clients keep."""
    found = {f"shared/{name}": value.cpu() for name, value in loop.exchange.inbox(0).weights.items()}
    for client in range(loop.num_clients):
        for name, value in (loop.runner.pool.get(client) or {}).items():
            found[f"{client}/{name}"] = value.cpu()
    return {name: value.double() for name, value in found.items() if value.is_floating_point()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a value, relative to the largest of its tensor where that is above 1."""
    if one.keys() != other.keys():
        return float("inf")
    gaps = (float((one[n] - other[n]).abs().max()) / max(1.0, float(one[n].abs().max())) for n in one if one[n].numel())
    return max(gaps, default=0.0)


def waiting_steps(loop: FederatedLoop) -> tuple[int, int]:
    """In how many steps of a round something waits for the GPU, and of how many."""
    take, counts = Step.take, [0, 0]

    def watched(step: Step) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                take(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts[0] += any(WAITS in str(each.message) for each in caught)
        counts[1] += 1

    Step.take = watched  # type: ignore[method-assign]
    try:
        loop.advance()
    finally:
        Step.take = take  # type: ignore[method-assign]
    return counts[0], counts[1]


def compared(name: str, emulated: bool, *options: str) -> tuple[float, FederatedLoop]:
    """The largest difference of two rounds on the GPU from the same on the CPU, and the former's federation.

    Adam divides by the root of a mean square plus eps: where gradients are nearly 0 the usual one of 1e-8 makes whole
    steps out of rounding, which two devices do differently.
    """
    options = ("--optimizer.eps", "1e-3", *options)
    with SameDraws():
        here = quickstart(name, "cpu", *options)
        here.advance()
        here.advance()
    with emulated_gpu() if emulated else nullcontext(), SameDraws():
        there = after_two_rounds(name, *options)
        return difference(weights(here), weights(there)), there


def after_two_rounds(name: str, *options: str) -> FederatedLoop:
    """A federation on the GPU."""
    loop = quickstart(name, "gpu", *options)
    loop.advance()
    loop.advance()
    return loop


def checked(name: str, emulated: bool) -> str:
    """One method on the GPU beside the CPU; its clients stacked, and their steps recorded, beside one by one."""
    steps = "--federation.local_steps", "5"
    stacked = *steps, "--optimizer.eps", "1e-3", "--federation.cohort", "2", "--federation.graph", "auto"
    try:
        gap, there = compared(name, emulated, *steps)
        exactly = 0.0 if gap <= CLOSE else compared(name, emulated, *steps, "--trainer.precision", "64-true")[0]
        with emulated_gpu() if emulated else nullcontext():
            with SameDraws():
                together = after_two_rounds(name, *stacked)
            stacks = together.cohort.stacks  # of what is not, two runs may differ by the order of a GPU's sums
            apart = difference(weights(there), weights(together)) if stacks else 0.0
            waits, of = waiting_steps(there)  # with the GPU's own draws, which wait for nothing
    except Exception as error:  # one method's failure is a line of the table
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    said = f"{'ok' if exactly <= EXACT and apart <= NEAR else 'DIFFERS'}, {gap:.1e}"
    said += f" (in float64 {exactly:.1e})" if gap > CLOSE else ""
    kind = "alone" if together.cohort.apart else "stacked"
    kind += "" if emulated or together.cohort.unrecorded else " and recorded"
    said += f"; {kind} {apart:.1e}" if stacks else f"; one by one: {together.cohort.reason}"
    said += "".join(f" ({own})" for own in together.cohort.unrecorded)
    return f"{said}; {waits} of {of} steps wait" if waits else f"{said}; no step waits"


def _alone_here() -> None:
    torch.set_num_threads(1)
    exact()
    silence()


def method_checks(names: list[str], emulated: bool, clock: Clock, jobs: int) -> Iterator[Row]:
    """Every method on the GPU beside the CPU, some at a time."""
    if jobs == 1:
        yield from ((name, NO_TIME if clock.is_over else checked(name, emulated)) for name in names)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _alone_here) as pool:
        waiting = {name: pool.submit(checked, name, emulated) for name in names}
        for name, own in waiting.items():
            try:
                yield name, own.result(max(0.0, clock.end - time.perf_counter()))
            except TimeoutError:
                own.cancel()
                yield name, NO_TIME


def mixed_checks(accelerator: str, clock: Clock) -> Iterator[Row]:
    """Half precision: the mean loss of the second round beside float32's."""
    precisions = ("bf16-mixed", "16-mixed") if accelerator == "gpu" else ("bf16-mixed",)
    for name in MIXED if not clock.is_over else ():
        try:
            losses = {}
            for precision in ("32-true", *precisions):
                loop = quickstart(name, accelerator, "--trainer.precision", precision)
                loop.advance()
                loop.advance()
                losses[precision] = float(loop.callbacks[0].rows[-1]["loss"])
            said = ", ".join(f"{precision} {value:.4f}" for precision, value in losses.items())
            full = losses["32-true"]
            near = all(abs(value - full) <= LOSSES[precision] * abs(full) for precision, value in losses.items())
            yield f"{name}, loss of round 2", f"{'ok' if near else 'DIFFERS'}: {said}"
        except Exception as error:
            yield f"{name}, mixed precision", f"FAILED: {' '.join(str(error).split())[:150]}"


def lane_checks(clock: Clock) -> Iterator[Row]:
    """Clients side by side, each on a stream of its own, beside one by one: weights after three rounds."""
    few = "--data.num_clients", "8", "--federation.local_steps", "5"
    for name in MIXED if not clock.is_over else ():
        try:
            loops = [quickstart(name, "gpu", *few, *own) for own in ((), ("--federation.graph", "auto"))]
            for loop in loops:
                for _ in range(3):
                    loop.advance()
            gap = difference(*map(weights, loops))
            cohort = loops[1].cohort
            said = f"{gap:.1e}, {max(map(len, cohort.lanes.values()), default=0)} streams"
            yield f"{name}, side by side", f"{'ok' if gap <= NEAR and cohort.stacks else 'DIFFERS'}: {said}"
        except Exception as error:
            yield f"{name}, side by side", f"FAILED: {' '.join(str(error).split())[:150]}"


def device_checks() -> Iterator[Row]:
    """One client over two devices."""
    if torch.cuda.device_count() < 2:
        yield "trainer.devices: 2, ddp", "left out: one GPU"
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", str(QUICKSTART), *SMALL, CLIENTS, "--output", folder, "--trainer.accelerator", "gpu"]
        words += ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--quiet"]
        ended = subprocess.run([sys.executable, "-m", "fl_lightning", "fit", *words], capture_output=True, text=True)
    yield "trainer.devices: 2, ddp", "ok" if ended.returncode == 0 else f"FAILED: {ended.stderr[-150:]}"


def worker_checks() -> Iterator[Row]:
    """Several workers on the GPUs there are: the figures of one."""
    wanted = 2 * torch.cuda.device_count()
    if not wanted:
        yield "federation.workers", "left out: no GPU"
        return
    with tempfile.TemporaryDirectory() as folder:
        rows, ended = [], []
        for workers in (1, wanted):
            words = [
                "--config",
                str(QUICKSTART),
                *SMALL,
                CLIENTS,
                "--output",
                f"{folder}/{workers}",
                "--trainer.accelerator",
                "gpu",
            ]
            words += ["--federation.workers", str(workers), "--name", "own", "--quiet"]
            command = [sys.executable, "-m", "fl_lightning", "fit", *words]
            ended.append(subprocess.run(command, capture_output=True, text=True, timeout=LONGEST))
            found = sorted(Path(folder).glob(f"{workers}/**/metrics.csv"))
            rows.append([own for path in found for own in csv.DictReader(path.open())])
    for own in (row for each in rows for row in each):
        for name in [name for name in own if name.startswith("seconds")]:
            del own[name]
    said = "ok: the same bits" if rows[0] and rows[0] == rows[1] else "DIFFERS"
    failed = next((own.stderr.strip()[-150:] for own in ended if own.returncode), None)
    yield f"federation.workers: {wanted}", said if failed is None else f"FAILED: {failed}"


# --- the table ------------------------------------------------------------------------------------------------------


def round_seconds(loop: FederatedLoop, rounds: int = 2, warm: int = 1) -> float:
    """Of a round, after some that warm up."""
    for _ in range(warm):
        loop.advance()
    return min(seconds(loop.advance) for _ in range(rounds))


class Busy:
    """The share of time in which some of the GPU computes, as its driver samples it."""

    def __enter__(self) -> Busy:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        lines = (self._process.communicate()[0] or "").split()
        values = [float(line) for line in lines if line.replace(".", "").isdigit()]
        self.mean = sum(values) / max(1, len(values))


YAML = """
method: FedAvg
model: {{class_path: ResNet18}}
optimizer: {{class_path: SGD, init_args: {{lr: 0.01}}}}
data:
  dataset: {{class_path: workloads.Noise, init_args: {{samples: {samples}, channels: 3, side: 32}}}}
  partition: IID
  num_clients: {clients}
  batch_size: 64
federation:
  rounds: {rounds}
  workers: {workers}
  cohort: {cohort}
  graph: {graph}
  evaluate: {{trained: false, received: false, globally: false, server: false}}
  checkpoint: {{every: 0}}
trainer: {{accelerator: {accelerator}, precision: bf16-mixed}}
name: own
"""
FEW, MANY, LONGEST = 4, 16, 100.0


def by_workers(workers: int, size: int, accelerator: str, recorded: bool) -> str:
    """ResNet-18's federation by several workers: seconds of its later rounds, and how busy the GPU was in all of it."""
    with tempfile.TemporaryDirectory() as folder:
        path, clients, rounds = Path(folder) / "own.yaml", max(workers, 20 // size), MANY if size == 1 else FEW
        values = {"samples": 320 * clients, "clients": clients, "rounds": rounds, "workers": workers}
        values |= {"cohort": 1 if recorded else "null", "graph": "auto" if recorded else "null"}
        path.write_text(YAML.format(**values, accelerator=accelerator))
        words = ["fit", "--config", str(path), "--output", folder, "--quiet"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "fl_lightning", *words]
        ended = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        metrics, shares = Path(folder) / "own" / "metrics.csv", []
        end = time.perf_counter() + LONGEST
        while ended.poll() is None:
            time.sleep(0.2)
            if time.perf_counter() > end:
                ended.kill()
            rows = list(csv.DictReader(metrics.open())) if metrics.exists() else []
            if len(rows) > 1 and accelerator == "gpu" and not shares and len(rows) < rounds - 4:
                with Busy() as busy:
                    time.sleep(2.0)
                shares.append(busy.mean)
        if ended.returncode:
            raise RuntimeError((ended.stderr.read() if ended.stderr else "")[-150:])
        took = min(float(row["seconds"]) for row in list(csv.DictReader(metrics.open()))[1:])
    return f"{took:.2f} s a round" + (f", GPU busy {shares[0]:.0f} %" if shares else "")


def table(accelerator: str, small: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """What is measured, and how."""
    size, trainer = (10 if small else 1), {"accelerator": accelerator, "devices": 1}
    device = "cuda" if accelerator == "gpu" else "cpu"
    grey = noise(4000 // size, 20 // size, 10)
    graph: dict[str, Any] = {"graph": "auto"}
    known: dict[str, float] = {}

    def ours(method: Any = FedAvg, data: Any = grey, model: str = "CNN", **options: Any) -> FederatedLoop:
        return federation(data, model, method, trainer={**trainer, **options.pop("trainer", {})}, **options)

    def timed(name: str, rounds: int = 2, warm: int = 1, of: str = "", **options: Any) -> str:
        known[name] = took = round_seconds(ours(**options), rounds, warm)
        return f"{took:.3f} s a round" + (f", {known[of] / took:.1f} times as fast" if of and of in known else "")

    hand = HandWritten(grey, device=device)
    yield "CNN, 20 x 200, batch 10: by hand", lambda: f"{seconds(lambda: hand.fit_all(20 // size)):.3f} s a round"
    for method in (FedAvg, FedRep, FedProto, FedCPD):
        own, name = {"method": method}, method.__name__
        yield f"the same, {name}", lambda own=own, name=name: timed(name, 1, **own)  # type: ignore[misc]
        lone = {**own, "cohort": 1, **graph}
        yield f"the same, {name}, cohort 1, graph", lambda own=lone, n=name: timed("", 2, 2, n, **own)  # type: ignore[misc]
        own = {**own, "cohort": max(2, 20 // size)}
        yield f"the same, {name}, cohort 20", lambda own=own, n=name: timed("", 2, 1, n, **own)  # type: ignore[misc]
        own = {**own, **graph}
        yield f"the same, {name}, cohort 20, graph", lambda own=own, n=name: timed("", 2, 3, n, **own)  # type: ignore[misc]
    blaze = noise(50_000 // size**2, 100 // size, 50, channels=3, side=32)
    blazing: dict[str, Any] = {"data": blaze, "local_epochs": 5, "cohort": max(2, 100 // size), **graph}
    yield (
        "CNN, 100 x 500, batch 50, 5 epochs, cohort 100, graph: 5 rounds",
        lambda: f"{5 * round_seconds(ours(**blazing), 2, 2):.2f} s",
    )
    many = noise(50_000 // size**2, 1000 // size, 10)
    few: dict[str, Any] = {"data": many, "participation": 0.05, "cohort": max(2, 50 // size), **graph}
    yield (
        "CNN, 1,000 x 50, batch 10, 50 a round, cohort 50, graph: 1,500 rounds",
        lambda: f"{1500 * round_seconds(ours(**few), 10, 4):.0f} s",
    )
    colour = noise(6400 // size, 20 // size, 64, channels=3, side=32)

    def resnet(**options: Any) -> str:
        loop = ours(data=colour, model="ResNet18", trainer={"precision": "bf16-mixed"}, **options)
        took = round_seconds(loop, 2, 3 if options else 1)
        if accelerator != "gpu":
            return f"{took:.2f} s a round"
        with Busy() as busy:
            loop.advance()
            loop.advance()
        return f"{took:.2f} s a round, GPU busy {busy.mean:.0f} %"

    yield "ResNet-18, 20 x 320, batch 64, bf16-mixed", resnet
    yield "the same, cohort 1, graph", lambda: resnet(cohort=1, **graph)
    for workers in (2,) if small else (2, 4):
        yield (
            f"the same, {workers} workers on the GPU",
            lambda workers=workers: by_workers(workers, size, accelerator, True),  # type: ignore[misc]
        )
    yield "CNN, 20 x 200, batch 10, FedAvg, compiled", lambda: timed("", of="FedAvg", compile=True)


# --- all of it ------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, write: Callable[[str], None]) -> bool:
    """Write the result down as it grows; returns whether all checks went well."""
    accelerator, clock = ("cpu" if options.rehearse else "gpu"), Clock(options.seconds)
    known = sorted(entry.name for entry in entries("methods"))
    device = torch.cuda.get_device_name() if accelerator == "gpu" else "CPU, a rehearsal"
    lines = ["# On a GPU", "", f"{device}; torch {torch.__version__}; {machine()['processor']}.", ""]
    whole = True

    def section(title: str, head: str, rows: Iterator[Row]) -> None:
        nonlocal whole
        lines.extend([f"## {title}", "", f"| {head} | |", "|---|---|"])
        for name, said in rows:
            whole = whole and not said.startswith(("FAILED", "DIFFERS"))
            lines.append(f"| {name} | {said.replace('|', '/')} |")
            write("\n".join([*lines, ""]))
            print(f"{name}: {said}", flush=True)
        lines.append("")

    def measured() -> Iterator[Row]:
        for name, measure in table(accelerator, options.rehearse):
            try:
                yield name, NO_TIME if clock.is_over else measure()
            except (ConfigError, RuntimeError) as error:
                yield name, f"FAILED: {' '.join(str(error).split())[:150]}"

    names = options.methods or known
    checks = method_checks(names, options.rehearse, Clock(0.5 * options.seconds), options.jobs)

    def together() -> list[Row]:
        try:
            return [*device_checks(), *worker_checks()]
        except subprocess.TimeoutExpired as error:
            return [("several devices, or workers", f"FAILED: {error}")]

    if "checks" in options.parts:
        beside = ThreadPoolExecutor(1).submit(together)  # in processes of their own
        section("Methods: two rounds in float32, largest difference from the CPU", "method", checks)
        section("Half precision", "method", mixed_checks(accelerator, clock))
        if accelerator == "gpu":
            section("Streams", "method", lane_checks(clock))
        section("Several devices, several workers", "what", iter(beside.result()))
    if "times" in options.parts:
        torch.backends.cudnn.allow_tf32 = True  # as torch has it
        section("Times", "what", measured())
    return whole


def main() -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], help="some methods; all by default")
    parser.add_argument("--seconds", type=float, default=460.0, help="after so many nothing more is begun")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)), help="checks at a time")
    parser.add_argument("--parts", nargs="+", default=["checks", "times"], choices=["checks", "times"])
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: this machine has no GPU that torch can use; --rehearse tries the script",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    exact()
    silence()
    written = RESULTS / "gpu.md"
    return 0 if report(options, lambda text: None if options.rehearse else written.write_text(text) and None) else 1


if __name__ == "__main__":
    raise SystemExit(main())
