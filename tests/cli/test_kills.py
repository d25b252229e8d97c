"""Kills before a sample of all file operations; before every one of them: `benchmarks/kills.py`."""

import random
import re

import pytest

from cli.kills import FIT, Undisturbed
from cli.run_files import read_run

SAMPLES = {"1": 4, "2": 2}


@pytest.mark.parametrize("workers", SAMPLES)
def test_run_killed_before_an_operation_resumes_bit_for_bit(make_workplace, workers):
    straight = Undisturbed(make_workplace(f"straight-{workers}"), "--federation.workers", workers)
    assert len({kill.what.split()[0] for kill in straight.kills}) >= 6  # opens, writes, syncs, renames, deletions …
    for kill in random.Random(0).sample(straight.kills, SAMPLES[workers]):
        assert straight.outcome(make_workplace("killed"), kill) == "", kill
    full_disk_resumes(straight, make_workplace("full"))


def full_disk_resumes(straight, place):
    """The disk is full in the middle of the second round's checkpoint: one line, and what it says goes on."""
    saves = [kill for kill in straight.kills if kill.what.startswith("write ") and "round-0002.ckpt" in kill.what]
    straight.prepare(place)
    fatal = {"folder": str(place.path / "runs"), "die": (saves[0].who, saves[0].number, "full")}
    code, _, err = place.call(*FIT, *straight.options, fatal=fatal)
    assert code == 1
    line = r"fl-lightning: error: cannot write runs/run/checkpoints/round-0002\.ckpt: No space left on device; "
    line += (
        r"the rounds up to 1 are saved; continue with (fl-lightning fit --config runs/run/config\.yaml --resume auto)\n"
    )
    told = re.fullmatch(line, err)
    assert told, err
    code, _, err = place.call(*told[1].split()[1:], "--quiet")
    assert (code, err) == (0, "")
    found = read_run(place.run)
    assert [name for name in straight.content if found[name] != straight.content[name]] == []
