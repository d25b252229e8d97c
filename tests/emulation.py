"""The emulated GPU of `benchmarks/emulated_gpu.py`, for tests."""

import importlib.util
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "benchmarks" / "emulated_gpu.py"


def _emulator():
    spec = importlib.util.spec_from_file_location("emulated_gpu", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emulated_gpu"] = module
    spec.loader.exec_module(module)
    return module


emulator = _emulator()
