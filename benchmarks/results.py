"""What a benchmark writes down: its numbers, with the machine that they were measured on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The processor's name with the vector units that decide how fast it multiplies, cores and threads.

    One name is given to processors of several generations ("AMD EPYC"), so that family and model stand beside it.
    """
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    units = [unit for unit in ("avx2", "avx512f", "amx_bf16") if unit in text]
    of = f"family {told['cpu family']}, model {told['model']}" if {"cpu family", "model"} <= told.keys() else ""
    processor = " ".join([told.get("model name") or platform.machine(), *([f"({of})"] if of else []), *units])
    return {"processor": processor, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


RESULTS = Path(__file__).parent / "results"


def save(name: str, numbers: dict[str, Any], quiet: bool = False) -> None:
    """Write the numbers to `benchmarks/results/<name>.json`, and print them unless `quiet`."""
    text = json.dumps({"machine": machine(), "torch": torch.__version__, **numbers}, indent=2)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    if not quiet:
        print(text)


def read(name: str) -> dict[str, Any]:
    """What `save` wrote; empty if it did not."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}
