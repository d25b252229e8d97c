"""Recorded steps of stacked clients: a tape stands in for the GPU's graphs, with their rules.

What is on the tape is done again with the tensors that it was done with, whatever Python would decide or look up today.
"""

import copy

import pytest
import torch
from every_method import METHODS
from leaves import flatten
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_lightning.core import recording

EIGHT = [[6, 6, 6, 6]] * 4
"""Whole mini-batches of four alone."""


class Tape(TorchDispatchMode):
    """Takes operations down, to do them again on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def tapes(monkeypatch):
    """All tapes that were recorded."""
    found = []

    def record(work, known):
        before = [tensor.clone() for tensor in known]
        tape, reads = Tape(), recording._Reads(known)
        with reads, tape:
            work()
        reads.check()
        for tensor, own in zip(known, before, strict=True):  # a GPU does nothing of it yet
            with torch.no_grad():
                tensor.copy_(own)
        found.append(tape)
        return tape

    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr("fl_lightning.federation.cohort.can_record", lambda device: True)
    return found


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


@pytest.fixture
def both(run_federation, outcome, make_data, tapes):
    """A federation as it is and recorded, in double precision; returns the latter when the two are alike."""

    def run(make, rounds=3, tolerance=1e-9, counts=EIGHT, **options):
        options["trainer"] = {"precision": "64-true", **options.get("trainer", {})}
        options.setdefault("optimizer", adam)
        plain, recorded = (
            run_federation(make, rounds, data=make_data(counts), cohort=4, graph=own, **copy.copy(options))
            for own in (None, "auto")
        )
        assert plain.cohort.reason == recorded.cohort.reason == ""
        one, other = flatten(outcome(plain)), flatten(outcome(recorded))
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, (torch.Tensor, float)):
                torch.testing.assert_close(other[name], value, rtol=0, atol=tolerance, equal_nan=True)
            else:
                assert repr(other[name]) == repr(value), name
        steps = [{key: report.num_steps for key, report in loop.diary.reports.items()} for loop in (plain, recorded)]
        assert steps[0] == steps[1]
        return recorded

    return run


def reasons(loop):
    """Why nothing is recorded any more."""
    return [stack._graphs.reason for stack in loop.cohort._stacks.values()]


STACKED = sorted(
    set(METHODS) - {"APFL", "DRDFL", "DisPFL", "FedCP", "FedCVAE", "FedFed", "FedGen", "FedPA", "PerFedAvg", "pFedMe"}
)


@pytest.mark.parametrize("name", STACKED)
def test_every_stacked_method_is_the_same_recorded(name, both, mlp, tapes):
    loop = both(lambda: METHODS[name](mlp()))
    print(name, len(tapes), [t.replays for t in tapes], reasons(loop))
