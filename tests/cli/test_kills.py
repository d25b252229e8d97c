"""Kills before a sample of all file operations; before every one of them: `benchmarks/kills.py`."""

import random

import pytest

from cli.kills import Undisturbed

SAMPLES = {"1": 4, "2": 2}


@pytest.mark.parametrize("workers", SAMPLES)
def test_run_killed_before_an_operation_resumes_bit_for_bit(make_workplace, workers):
    straight = Undisturbed(make_workplace(f"straight-{workers}"), "--federation.workers", workers)
    assert len({kill.what.split()[0] for kill in straight.kills}) >= 6  # opens, writes, syncs, renames, deletions …
    for kill in random.Random(0).sample(straight.kills, SAMPLES[workers]):
        assert straight.outcome(make_workplace("killed"), kill) == "", kill
