"""How signals are counted; what they do to a run is in `tests/cli/test_signals.py`."""

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from cli.processes import alive, paused

from fl_lightning.federation import signals, tether
from fl_lightning.federation.signals import (
    STOP_SIGNALS,
    StoppedAtOnce,
    StopSignals,
    exit_code,
    hand_on,
    held_back,
    pausing,
    stop_at_once,
)
from fl_lightning.terminal import say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="POSIX signals; processes are found through /proc")


@pytest.fixture(autouse=True)
def signals_count():
    """Also where the tests themselves run under nohup, or in the background of a script, which ignores SIGINT."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_a_child(work) -> int:
    """Do something in a forked process; returns its exit code, 0 where nothing ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_asks_second_ends(number):
    asked = []
    with StopSignals(asked.append, stop_at_once) as counted:
        signal.raise_signal(number)
        assert (asked, counted.first) == ([number], number)
        with pytest.raises(StoppedAtOnce) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(number) not in (counted._handle, signal.SIG_IGN)


def test_third_ends_the_process_whatever_it_does():
    def work():
        with StopSignals(lambda number: None, lambda number: None):
            for _ in range(3):
                signal.raise_signal(signal.SIGUSR1)

    assert in_a_child(work) == exit_code(signal.SIGUSR1) == 138


@pytest.mark.parametrize(("seconds", "ended"), [(0.5, []), (1.5, [signal.SIGHUP])])
def test_hangup_right_after_a_signal_is_its_echo(monkeypatch, seconds, ended):
    asked, at_once, now = [], [], [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with StopSignals(asked.append, at_once.append):
        signal.raise_signal(signal.SIGTERM)
        now[0] += seconds
        signal.raise_signal(signal.SIGHUP)
    assert (asked, at_once) == ([signal.SIGTERM], ended)


def test_hangup_stays_ignored_under_nohup(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(stop_at_once, stop_at_once):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_signal_in_the_first_ones_line_finds_that_line_whole(monkeypatch):
    """An unbuffered stream (PYTHONUNBUFFERED): what is written is there before the call is over."""

    class Stream(io.StringIO):
        def write(self, text):
            super().write(text)
            if counted.count == 1:
                signal.raise_signal(signal.SIGUSR1)

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with StopSignals(lambda number: say("stopping"), stop_at_once) as counted, pytest.raises(StoppedAtOnce):
        signal.raise_signal(signal.SIGTERM)
    say("stopped at once")
    assert stream.getvalue() == "stopping\nstopped at once\n"


def test_process_that_was_forked_in_between_just_ends():
    with StopSignals(lambda number: None, lambda number: None):
        assert in_a_child(lambda: signal.raise_signal(signal.SIGTERM)) == 143


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_wait_while_processes_are_started(number):
    """With other threads, too, by way of which they came."""
    asked, done = [], threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with StopSignals(asked.append, stop_at_once):
        with held_back():
            os.kill(os.getpid(), number)
            time.sleep(0.02)
            assert asked == []
        assert asked == [number]
        done.set()
        thread.join()


def test_what_a_process_started_pauses_and_goes_on_with_it():
    """Ctrl-Z stopped the command alone: its workers, which the terminal does not reach, ran on."""
    reader, writer = os.pipe()
    starter = os.fork()
    if starter == 0:
        os.setpgid(0, 0)
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            time.sleep(60)
            os._exit(0)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with pausing(lambda: [SimpleNamespace(pid=worker)]):
            os.write(writer, str(worker).encode())
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(reader, 20))
    try:
        for number in (signal.SIGTSTP, signal.SIGCONT) * 2:
            os.kill(starter, number)
            until = time.monotonic() + 10
            while not paused(starter) == paused(worker) == (number == signal.SIGTSTP):
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        for process in (worker, starter):
            os.kill(process, signal.SIGKILL)
        os.waitpid(starter, 0)
        os.close(reader)
        os.close(writer)


def orphan(work) -> int:
    """Do something in a process whose parent ends as soon as it is under way; returns its process id."""
    reader, writer = os.pipe()

    def parent():
        child = os.fork()
        if child == 0:
            work(os.getppid())
            os.write(writer, str(os.getpid()).encode())
            time.sleep(60)
            os._exit(0)
        select.select([reader], [], [])

    in_a_child(parent)
    child = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return child


@pytest.mark.parametrize("platform", ["linux", "another"])
def test_process_ends_with_its_parent(monkeypatch, platform):
    monkeypatch.setattr(tether, "sys", SimpleNamespace(platform=platform))
    child = orphan(tether.end_with)
    until = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_process_whose_parent_is_gone_already_does_not_begin():
    assert in_a_child(lambda: tether.end_with(os.getpid())) == 137


def test_process_ends_with_a_parent_whose_number_it_has_for_ever(monkeypatch):
    """As on Windows, where workers and a table's runs would have gone on alone."""
    monkeypatch.setattr(tether, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(tether, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    assert in_a_child(lambda: tether.end_with(os.getppid())) == 137


def test_process_lives_whatever_becomes_of_the_pipe_by_which_python_knows_its_parent(monkeypatch):
    """Where standard streams were closed it had their number: a table's runs ended as they opened their log."""
    monkeypatch.setattr(tether, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    assert in_a_child(lambda: (tether.end_with(os.getppid()), os._exit(5))) == 5


def test_workers_stand_alone_and_are_asked_by_the_terminal_where_there_are_no_groups_of_processes(monkeypatch):
    """Windows: neither workers nor a table's runs could start, and what was to let them stop would have ended them."""
    for there, name in ((os, "setpgid"), (os, "register_at_fork"), (signal, "SIGKILL"), (signal, "pthread_sigmask")):
        monkeypatch.delattr(there, name)
    monkeypatch.setattr(tether, "sys", SimpleNamespace(platform="win32"))
    assert in_a_child(lambda: (tether.tether(os.getppid()), os._exit(5))) == 5
    monkeypatch.setattr(signals, "os", SimpleNamespace(name="nt"))
    hand_on(signal.SIGINT, [SimpleNamespace(pid=os.getpid())])


def test_what_a_worker_forks_ends_by_a_signal():
    """A pool of a callback's own was never joined, as its processes had blocked the signal that ends them."""

    def fork_and_end():
        tether._answer_only()
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        os._exit(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert in_a_child(fork_and_end) == signal.SIGTERM


def test_a_program_that_a_worker_starts_ends_by_a_signal():
    """It had inherited that SIGTERM is blocked, and went on after `Popen.terminate`."""

    def start_and_end():
        tether._answer_only()
        program = subprocess.Popen(["sleep", "20"])
        program.terminate()
        os._exit(-program.wait(5))

    assert in_a_child(start_and_end) == signal.SIGTERM


def test_a_worker_leaves_a_schedulers_signal_to_its_starter():
    def hear():
        tether._answer_only()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.raise_signal(number)
        os._exit(3)

    assert in_a_child(hear) == 3
