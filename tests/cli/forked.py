"""The command line in a real process of its own, forked from a server that has imported everything already."""

import atexit
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from cli.fatal import FatalOperations

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["cli.forked", "cli.warm"])  # this file, too: else each command imports pytest
TESTS = str(Path(__file__).parents[1])
LIMIT = 120  # seconds; nothing here takes a tenth of it


def start_server() -> None:
    """Start the server, under the present environment; it finds `cli.warm`, which the commands must not.

    It has imported everything by the end, which whoever takes the first command's time would count otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
        forkserver.ensure_running()
    first = CONTEXT.Process(target=os.getpid)
    first.start()
    first.join()


class Running:
    """A command that has been started.

    Args:
        argv: the command line.
        cwd: its working directory.
        env: environment variables on top of the usual ones; None unsets one.
        die_at: SIGKILL itself at the n-th moment (1-based) at which a file is about to be synced or renamed, or, given
            a file's name, as soon as a file has been renamed to it.
        draws: whether `fit` draws its pictures at the end, which takes about as long as a small run.
        terminal: the device that it writes to; None for files in `folder`.
        haste: how many of the seconds in which workers watch each other, and wait for each other's word, make one of
            the clock's.
        fatal: arguments of `FatalOperations`, which see.
        torchrun: how many processes torchrun's agent starts that do it; 0 for this one alone, without an agent.
    """

    def __init__(
        self, argv, cwd, env, folder: Path, die_at=None, draws=True, haste=1, terminal=None, fatal=None, torchrun=0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        for file in (self.out, self.err):
            file.unlink(missing_ok=True)
        if terminal is not None:
            self.out = self.err = terminal
        own = (list(map(str, argv)), str(cwd), env, str(self.out), str(self.err))
        self.process = CONTEXT.Process(target=child, args=(*own, die_at, draws, haste, fatal, torchrun))
        self.process.start()

    def kill(self) -> None:
        self.process.kill()

    def signal(self, number) -> None:
        os.kill(self.process.pid, number)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def wait_until(self, happened) -> None:
        """Return as soon as `happened()` is true."""
        until = time.monotonic() + LIMIT
        while not happened():
            assert self.process.is_alive(), f"ended too early: {self.err.read_text()}"
            assert time.monotonic() < until
            time.sleep(0.002)

    def result(self):
        """Wait for the end; returns (exit code, stdout, stderr). A killed process has the exit code -9."""
        self.process.join(LIMIT)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError("still running")
        code = self.process.exitcode
        self.process.close()
        out, err = (file.read_text() if file.exists() else "" for file in (self.out, self.err))
        return code, out, err


def child(argv, cwd, env, out, err, die_at, draws, haste, fatal, torchrun) -> None:
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    for name, value in {"PYTHONPATH": None, **env}.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup ignores it
    sys.dont_write_bytecode = True
    sys.path[:] = [path for path in sys.path if path not in ("", TESTS)]
    os.fsync = lambda descriptor: None  # nobody cuts the power
    if die_at is not None:
        die_at_file_operation(die_at)
    if fatal is not None:
        FatalOperations(**fatal)

    import torch

    from fl_lightning import cli, config_commands

    torch.set_num_threads(1)
    torch.cuda._is_in_bad_fork = lambda: False  # the server has looked for a GPU; there is none to be shared
    if not draws:
        config_commands.draw_run = lambda *arguments: None
    if haste != 1:
        watch_in_haste(haste)
    atexit._clear()  # the server's
    try:
        under_torchrun(cli.main, argv, torchrun) if torchrun else cli.main(argv)
    finally:
        # What interrupts Python's own end changes no exit code; it would change multiprocessing's, to 1.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit._run_exitfuncs()  # as in any other process


def under_torchrun(main, argv, size) -> None:
    """What `torchrun --standalone --nproc-per-node SIZE` does, with processes that are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = {"run_id": "standalone", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
    elastic_launch(LaunchConfig(1, 1, size, start_method="fork", **meeting), main)(argv)


def watch_in_haste(haste) -> None:
    """Let `federation/watch.py`, and who lets others speak first, in all of a run's processes believe it is late."""
    import threading
    from types import SimpleNamespace

    from fl_lightning import errors
    from fl_lightning.federation import launch, watch

    for module in (errors, launch):
        module.GRACE /= haste

    class Event(threading.Event):
        def wait(self, timeout=None):
            return super().wait(timeout and timeout / haste)

    watch.threading = SimpleNamespace(**{**vars(threading), "Event": Event})
    watch.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds / haste)})


def die_at_file_operation(moment) -> None:
    """Let the process kill itself before the `moment`-th sync or rename, or after the rename to that name."""
    count = 0

    def deadly(operation):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments, **options)
            if Path(str(arguments[-1])).name == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
