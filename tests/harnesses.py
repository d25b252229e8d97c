"""Scripts of `benchmarks/`, which is no package, as modules for tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def harness(name: str) -> ModuleType:
    """The script of that name, imported once a process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
