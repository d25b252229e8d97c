"""What ties a worker to the process that started it: it ends when that one does, and takes signals from nobody else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from lightning.fabric.strategies import DDPStrategy
from typing_extensions import override

from fl_lightning.federation.signals import exit_code

PERIOD = 0.5  # seconds between two looks at the parent, where the system does not tell
_PR_SET_PDEATHSIG = 1
_tethered = False


class TetheredDDP(DDPStrategy):
    """Lightning's DDP, whose processes are tied to the one that started them before they meet."""

    starter: int | None = None
    """Process id of who starts the workers; None for processes that torchrun or SLURM started."""

    @override
    def setup_environment(self) -> None:
        if self.starter is not None:
            tether(self.starter)
        super().setup_environment()


def tether(starter: int) -> None:
    """Tie this process to the one that started it.

    Args:
        starter: its process id.
    """
    global _tethered
    _tethered = True
    os.setpgid(0, 0)  # the terminal's signals go to the starter alone, which hands the first one on
    _answer_only(starter)  # first, for threads take over what is blocked
    end_with(starter)


def is_tethered() -> bool:
    """Whether `launch` started this process, which then hears of signals through a SIGINT alone."""
    return _tethered


def end_with(starter: int) -> None:
    """End this process as soon as `starter`, its parent, is gone.

    Linux is asked to do so, which works in the middle of a message, too; elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def look() -> None:
        while os.getppid() == starter:
            time.sleep(PERIOD)
        os._exit(exit_code(signal.SIGKILL))

    if os.getppid() != starter:  # it was gone before
        os._exit(exit_code(signal.SIGKILL))
    threading.Thread(target=look, daemon=True, name="parent").start()


def _answer_only(starter: int) -> None:
    """Take SIGTERM from `starter` alone, as the order to end at once, and leave the other signals to it.

    Schedulers send a signal to every process of a job. The starter gets it, too, and asks the first worker to stop
    after the round, with a SIGINT: so the workers must not end by themselves before that.
    """
    asked = os.environ.get("LOCAL_RANK", "0") == "0"  # the others would only die of it
    signal.signal(signal.SIGINT, signal.SIG_DFL if asked else _leave)
    for name in ("SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _leave)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=_hear_everybody)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != starter:
            pass
        os._exit(exit_code(signal.SIGTERM))

    threading.Thread(target=wait, daemon=True, name="order-to-end").start()


def _hear_everybody() -> None:
    """Let processes that a worker forks, as a pool of its own does, end by a SIGTERM: what is blocked is inherited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _leave(*_: object) -> None:
    """Do nothing; unlike an ignored signal, this is not inherited by programs that the process starts."""
