"""What counts as a sign of life; processes that are lost or suspended are in `tests/cli/test_workers.py`."""

import json
import os
import queue
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from fl_lightning.federation import watch
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.transport import Waiting
from fl_lightning.methods.fedavg import FedAvg


def test_disk_that_is_slow_counts_as_alive(set_up_federation, mlp, monkeypatch, tmp_path):
    depth, seen = [], []

    @contextmanager
    def waiting():
        depth.append(None)
        yield
        depth.pop()

    def noting(name, method):
        return lambda *arguments, **options: seen.append((name, bool(depth))) or method(*arguments, **options)

    loop = set_up_federation(lambda: FedAvg(mlp()), rounds=1, folder=tmp_path)
    monkeypatch.setattr(Waiting, "context", waiting)
    monkeypatch.setattr(Checkpoints, "save", noting("checkpoint", Checkpoints.save))
    monkeypatch.setattr(loop.runner.pool, "flush", noting("states", loop.runner.pool.flush))
    loop.advance()
    assert seen == [("states", True), ("checkpoint", True)]


def test_processes_tell_each_other_how_many_clients_are_done(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(watch, "PERIOD", 0.01)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    both = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        both.append(watch.Watch(60.0, ""))
    here, there = both
    there.note(3, 5)
    with here.waiting(), there.waiting():
        for each in both:
            each.start()
        end = time.monotonic() + 20
        while here.others_done(3) != 5 and time.monotonic() < end:
            time.sleep(0.01)
    for each in both:
        each.stop()
    for each in both:
        each.join(5)
    assert here.others_done(3) == 5
    assert here.others_done(4) == 0
    assert there.others_done(3) == 0


def test_a_fit_that_computes_in_another_thread_is_alive(monkeypatch):
    """The others ended the run, for the process's main thread, which waits for that one, did nothing."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    made, said, beats = queue.Queue(), threading.Event(), []

    def fit():
        made.put(watch.Watch(60.0, ""))
        while not said.is_set():
            sum(range(1000))

    fitting = threading.Thread(target=fit)
    fitting.start()
    own = made.get()
    for _ in range(2):
        own._say()
        beats.append(own._beat)
        before = time.clock_gettime(own.clock)
        said.wait(0.1)  # the present thread computes nothing
        assert time.clock_gettime(own.clock) - before > 0.01
    said.set()
    fitting.join()
    assert beats[1] > beats[0]


@pytest.mark.parametrize("started_here", [True, False])
def test_process_of_torchrun_that_is_left_says_so_whoever_went_with_the_first_one(monkeypatch, capsys, started_here):
    """A machine with the first two of four processes was lost, and those on the other one ended without a word."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(watch, "PERIOD", 0.0)
    monkeypatch.setattr(watch, "is_tethered", lambda: started_here)
    with pytest.raises(SystemExit) as ended:
        watch.Watch(20.0, lambda: "begin anew")._lose(0)
    assert ended.value.code == (watch.LOST if started_here else 1)
    line = "\nfl-lightning: error: worker 0 of 4 gave no sign of life for 20 s; begin anew\n"
    assert capsys.readouterr().err == ("" if started_here else line)


@pytest.mark.parametrize("is_here", [True, False])
def test_lost_process_of_another_machine_of_the_same_name_is_not_killed_here(monkeypatch, is_here):
    """Its number is here that of somebody else's process, which died in its place."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    own = watch.Watch(20.0, lambda: "begin anew")
    me = json.loads(own.store.get("who/0"))
    own._who = [me, {**me, "pid": 4242, **({} if is_here else {"machine": "another"})}]
    with pytest.raises(SystemExit):
        own._lose(1)
    assert killed == ([(4242, signal.SIGKILL)] if is_here else [])


@pytest.mark.parametrize(
    ("rank", "lost", "speaks"),
    [(2, 0, True), (3, 0, False), (3, 2, True), (2, 3, True), (2, None, True), (3, 1, False)],
)
def test_one_process_of_torchruns_on_each_machine_says_who_is_lost(monkeypatch, capsys, rank, lost, speaks):
    """Each did, and eight GPUs gave seven lines."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(watch, "PERIOD", 0.0)
    own = watch.Watch(20.0, lambda: "begin anew")
    own._who = [{"machine": "another"}] * 2 + [{"machine": watch.this_machine()}] * 2
    with pytest.raises(SystemExit, match="1"):
        own._end("a worker is gone", lost)
    assert capsys.readouterr().err == ("\nfl-lightning: error: a worker is gone; begin anew\n" if speaks else "")
