"""A run of the command line, with its rounds' seconds and the memory of its processes."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

HERE = Path(__file__).resolve().parent


class Run(NamedTuple):
    """What a run took.

    Args:
        seconds: of each round, as `metrics.csv` has them.
        peak_mib: largest memory of all its processes together, what they share counted once (proportional set size).
        processes: most processes that held more than 100 MiB at once.
    """

    seconds: list[float]
    peak_mib: float
    processes: int


def fit(config: dict[str, Any], threads: int | None = 1) -> Run:
    """Run `fl-lightning fit` on a configuration.

    Args:
        config: the experiment's sections.
        threads: of torch in each process (OMP_NUM_THREADS); None leaves torch's own choice.
    """
    folder = Path(tempfile.mkdtemp(prefix="fl-lightning-bench-"))
    try:
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "output": str(folder), "name": "run"}))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        environment.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, "-m", "fl_lightning", "fit", "--config", str(folder / "config.yaml"), "--quiet"]
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(command, cwd=HERE, env=environment, stderr=errors)
            watch = _Memory(process.pid)
            code = process.wait()
            watch.end()
        if code:
            raise SystemExit(f"{' '.join(command)} failed: {(folder / 'errors').read_text()[-2000:]}")
        with (folder / "run" / "metrics.csv").open() as file:
            seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
        return Run(seconds, watch.peak / 2**20, watch.processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Memory(threading.Thread):
    """Looks at a process and its children four times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.peak, self.processes = 0, 0
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.25):
            sizes = [size for size in map(_size, _family(self.root)) if size]
            self.peak = max(self.peak, sum(sizes))
            self.processes = max(self.processes, sum(size > 100 * 2**20 for size in sizes))

    def end(self) -> None:
        self.over.set()
        self.join()


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _size(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(full, "pss", full.rss)
