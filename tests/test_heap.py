"""What a step frees stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library's own way is set nowhere else")

_PAGES_A_STEP = """
import resource, sys
import numpy as np
from fl_lightning.heap import give_back, keep_freed_memory

set_now = keep_freed_memory() if sys.argv[1] == "keep" else False

def step():
    return sum(float(own[0]) for own in [np.ones(size) for size in (1_000_000, 1_000_000, 1_000_000, 8_000_000)])

def resident():
    return int(open("/proc/self/statm").read().split()[1])

def faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20

during = faults()
held = resident()
give_back()
print(int(set_now), during, held - resident(), faults())
"""


def pages_a_step(what: str, **environment: str) -> tuple[bool, float, int, float]:
    """Whether it was set, pages that a step asks the system for, that went back at the end, and asked for then."""
    command = [sys.executable, "-c", _PAGES_A_STEP, what]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    told = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    was_set, during, returned, after = told.stdout.split()
    return bool(int(was_set)), float(during), int(returned), float(after)


def test_a_step_asks_the_system_for_no_page_twice() -> None:
    was_set, faults, returned, after = pages_a_step("keep")
    assert was_set
    assert faults < 50
    assert returned > 1000  # of 4 KiB: 88 MB of arrays
    assert after > 100  # glibc does as it did before the run
    assert pages_a_step("as it comes")[1] > 1000


@pytest.mark.parametrize(
    "said", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}], ids=str
)
def test_what_the_environment_says_of_the_allocator_stands(said: dict[str, str]) -> None:
    was_set, faults, *_ = pages_a_step("keep", **said)
    assert not was_set
    assert faults > 1000
