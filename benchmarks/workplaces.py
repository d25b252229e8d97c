"""The tests' workplaces and warm processes, for what takes too long for a test."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"


@contextmanager
def workplaces() -> Iterator[Callable[[str], Any]]:
    """A function that makes an empty workplace (`tests/cli/conftest.py`), instead of an earlier one of that name."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    from cli.conftest import Workplace
    from cli.forked import start_server

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = Path(tempfile.mkdtemp(prefix="fl-lightning-bench-"))
    start_server()
    environment = {"FL_LIGHTNING_CACHE": str(root / "cache"), "FL_LIGHTNING_DATA": str(root / "data")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def make(name: str) -> Any:
        shutil.rmtree(root / name, ignore_errors=True)
        return Workplace(root / name / "work", environment)

    try:
        yield make
    finally:
        shutil.rmtree(root, ignore_errors=True)
