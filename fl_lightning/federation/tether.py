"""What ties a worker to the process that started it: it ends when that one does, and leaves signals to it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import parent_process
from typing import Any

import torch.multiprocessing as mp
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
)
from typing_extensions import override

from fl_lightning.federation.signals import KILLED, hear, held_back, stand_apart

PERIOD = 0.5  # seconds between two looks at the parent, where the system does not tell
_PR_SET_PDEATHSIG = 1
_tethered = False


class _Launcher(_MultiProcessingLauncher):
    """Lightning's, which starts the processes while signals are held back: one in a fork's middle would be lost."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """True: what spawned processes run stands in modules, and needs nothing of a notebook's cells."""
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (_check_missing_main_guard if self._start_method == "spawn" else _check_bad_cuda_fork)()
        assert self._strategy.cluster_environment is not None
        os.environ["MASTER_PORT"] = str(self._strategy.cluster_environment.main_port)
        returned = mp.get_context(self._start_method).SimpleQueue()
        state = [_GlobalStateSnapshot.capture()] if self._start_method == "spawn" else []
        with held_back():
            processes = mp.start_processes(
                self._wrapping_function,
                (function, args, kwargs, returned, *state),
                self._strategy.num_processes,
                join=False,
                start_method=self._start_method,
            )
        for process in processes.processes:  # torch ends those that are left, once one has failed, by a SIGTERM,
            process.terminate = process.kill  # which they leave to this process
        while not processes.join():
            pass
        return returned.get()


class TetheredDDP(DDPStrategy):
    """Lightning's DDP, whose processes are tied to the one that started them before they meet."""

    starter: int | None = None
    """Process id of who starts the workers; None for processes that torchrun or SLURM started."""
    meeting: Callable[[], AbstractContextManager[None]] = nullcontext
    """What bounds the time in which they meet, and says why they cannot."""

    @override
    def _configure_launcher(self) -> None:
        if self.starter is None:
            super()._configure_launcher()
        else:
            self._launcher = _Launcher(self, self._start_method)

    @override
    def setup_environment(self) -> None:
        if self.starter is not None:
            tether(self.starter)
        with self.meeting():
            super().setup_environment()


def tether(starter: int) -> None:
    """Tie this process to the one that started it.

    Args:
        starter: its process id.
    """
    global _tethered
    _tethered = True
    stand_apart()
    _answer_only()
    end_with(starter)


def is_tethered() -> bool:
    """Whether `launch` started this process, which then hears of signals through a SIGINT alone."""
    return _tethered


def be_interrupted() -> None:
    """Raise `KeyboardInterrupt` at a SIGINT from now on, as a process alone does: the main worker's run is over.

    A fit in a callback of a run leaves that run's own answer.
    """
    if _tethered and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with(starter: int) -> None:
    """End this process as soon as `starter`, its parent, is gone.

    Linux is asked to do so, which works in the middle of a message, too; elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    parent = parent_process() if sys.platform == "win32" else None

    def is_there() -> bool:
        """On Windows a process has its parent's id for ever; elsewhere Python asks a pipe, which others may close."""
        return os.getppid() == starter and (parent is None or parent.is_alive())

    def look() -> None:
        while is_there():
            time.sleep(PERIOD)
        os._exit(KILLED)

    if not is_there():  # it was gone before
        os._exit(KILLED)
    threading.Thread(target=look, daemon=True, name="parent").start()


def _answer_only() -> None:
    """Leave signals to the starter, which ends its workers by a SIGKILL (`launch`).

    Schedulers send a signal to every process of a job. The starter gets it, too, and asks the first worker to stop
    after the round, with a SIGINT: so the workers must not end by themselves before that. Nothing is blocked, for that
    would be inherited by every program that a worker starts.
    """
    asked = os.environ.get("LOCAL_RANK", "0") == "0"  # the others would only die of it
    signal.signal(signal.SIGINT, signal.SIG_DFL if asked else _leave)
    for name in ("SIGHUP", "SIGUSR1", "SIGTERM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _leave)
    if hasattr(signal, "SIGTSTP"):
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    hear()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_hear_everybody)


def _hold_back() -> None:
    """Let a SIGTERM wait: one that a forked process gets before it hears everybody would be left alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _hear_everybody() -> None:
    """Let processes that a worker forks, as a pool of its own does, end by a SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_through()


def _leave(*_: object) -> None:
    """Do nothing; unlike an ignored signal, this is not inherited by programs that the process starts."""
