"""What a benchmark writes down: its numbers, with the machine that they were measured on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The processor's name with the vector units that decide how fast it multiplies, cores and threads."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    units = [unit for unit in ("avx2", "avx512f", "amx_bf16") if unit in text]
    processor = " ".join([name or platform.machine(), *units])
    return {"processor": processor, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def save(name: str, numbers: dict[str, Any]) -> None:
    """Print the numbers and write them to `benchmarks/results/<name>.json`."""
    text = json.dumps({"machine": machine(), "torch": torch.__version__, **numbers}, indent=2)
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    print(text)
