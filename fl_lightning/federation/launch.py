"""Starting a run's processes: with Lightning's own launchers here, or by torchrun or SLURM, which did so already."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures.thread import _threads_queues
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import Process, active_children
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from fl_lightning.errors import GRACE, CommonError, ConfigError, line_of
from fl_lightning.federation import transport
from fl_lightning.federation.reach import INTERFACE, reachable
from fl_lightning.federation.signals import StoppedAtOnce, StopSignals, exit_code, hand_on, pausing
from fl_lightning.federation.team import Team, gpu_here, is_main, local_rank
from fl_lightning.federation.tether import TetheredDDP
from fl_lightning.federation.watch import LOST, give_up
from fl_lightning.terminal import outlived, say

NEVER = timedelta(days=365)  # a fit may take as long as it likes; `Watch` sees who is gone
MEETING = 600.0  # seconds in which all processes of a run must have met
PATIENCE = 60.0  # seconds of them after which those that are there say that they wait
MEET = f"see that each was started and reaches the others ({INTERFACE} names a network interface, MASTER_PORT a port)"
MEET_HERE = "see that each may open files enough (ulimit -n), and reaches 127.0.0.1"
FIRST_PORT = 15000  # of the ten thousand at which SLURM's tasks meet, Lightning's too
FILES = 17  # that torch opens in the first of several workers, beside two for each
SETTLE = 0.1  # seconds in which gloo's threads let the last tensors go


def _quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        for part in ("rank_zero", "distributed"):
            logging.getLogger(f"{name}.utilities.{part}").setLevel(logging.WARNING)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # whom it ends, when one has ended
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # lightning 2.6, torch 2.15


class OnThisMachine(LightningEnvironment):
    """Processes that are started here meet here, whatever variables a job of several machines has left."""

    def __init__(self) -> None:
        super().__init__()
        self._port = find_free_network_port()

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return self._port

    @override
    def node_rank(self) -> int:
        return 0


class _Spread(ClusterEnvironment):
    """Processes that were started from outside."""

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Machines may have more or fewer of them than others."""


class _OfTorchrun(_Spread, TorchElasticEnvironment):
    """Processes that torchrun started, as many on each machine as it was told there."""


class _OfSlurm(_Spread, SLURMEnvironment):
    """Tasks that SLURM started, as it spread them over the machines."""

    @property
    @override
    def main_port(self) -> int:
        """Lightning's by the job, but for each of its steps another: several runs may share an allocation."""
        said = (os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID"))
        job, step = (int(own) if own.isdecimal() else 0 for own in said)  # a step may have a name (`batch`)
        os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 97 * step) % 10_000))
        return super().main_port


def _fabric(team: Team, start_method: str) -> Fabric:
    _quiet()
    backend = "cpu:gloo,cuda:nccl" if team.cuda and not team.shares_gpus else "gloo"
    strategy = TetheredDDP(process_group_backend=backend, timeout=NEVER, start_method=start_method)  # type: ignore[arg-type]
    if not team.outside:
        strategy.starter, strategy.meeting = os.getpid(), partial(_meeting, team)
    outside = _OfTorchrun if TorchElasticEnvironment.detect() else _OfSlurm
    here = outside() if team.outside else OnThisMachine()
    devices = max(-(-team.size // team.nodes), local_rank() + 1 if team.outside else 1)
    sees_few = team.outside and torch.cuda.device_count() < devices
    lightning_chooses = team.cuda and not (sees_few or team.shares_gpus)  # it would look for a GPU for each process
    try:
        return Fabric(
            accelerator="cuda" if lightning_chooses else "cpu",
            devices=devices,
            num_nodes=team.nodes,
            strategy=strategy,
            plugins=here,
        )
    except MisconfigurationException as error:
        raise ConfigError("federation.workers", str(error)) from error


def join(team: Team) -> None:
    """Meet the other processes that torchrun or SLURM started; end this one if they do not come."""
    with speak_for_the_team(is_main()), _in_time(team):
        fabric = _fabric(team, "popen")
        with _refusals_said(team), reachable(team.nodes):
            fabric.launch()
        _take_gpu(team)
    use_threads(team)


def _take_gpu(team: Team) -> None:
    """Work on this process's GPU; once the processes have met, for NCCL refuses two of them on one.

    Only they know together whether each of those that see one GPU has one of its own.
    """
    if not team.cuda:
        return
    gpu = gpu_here()
    torch.cuda.set_device(gpu)
    transport.Wire.by_cpu = team.shares_gpus
    if team.outside:
        taken = transport.gather((platform.node(), str(torch.cuda.get_device_properties(gpu).uuid)))
        transport.Wire.by_cpu = len(set(taken)) < len(taken)


def leave() -> None:
    """Leave the team after a run that has ended in good order; nothing where there is none.

    Its threads end here: one that lives on while Python ends aborts the process now and then.
    """
    if dist.is_available() and dist.is_initialized():
        if torch.__version__ < "2.8":  # there the group's end waits for its threads and keeps Python's lock,
            time.sleep(SETTLE)  # which a thread needs that lets a tensor go: neither would ever end
        dist.destroy_process_group()


@contextmanager
def _in_time(team: Team) -> Iterator[None]:
    """End the process, with one line, where the team has not met in time.

    A bound on the group of processes itself would bound every later message, too.
    """
    met = threading.Event()
    speaks = _speaks(team)

    def wait() -> None:
        said = min(PATIENCE, MEETING)
        if met.wait(said):
            return
        if team.outside and local_rank() == 0 and said < MEETING:
            say(f"fl-lightning: note: waiting for all {team.size} processes to meet{_place()}; {MEET}")
        if met.wait(MEETING - said) or (not speaks and met.wait(GRACE)):
            return
        late = f"not all of the {team.size} processes that were expected have met within {MEETING:.0f} s"
        say(f"fl-lightning: error: {late}; {MEET if team.outside else MEET_HERE}")
        give_up()

    threading.Thread(target=wait, daemon=True, name="meeting").start()
    try:
        yield
    finally:
        met.set()


def _speaks(team: Team) -> bool:
    """Whether this process, which has not met the others yet, is the first of them."""
    return is_main() if team.outside else os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def _refusals_said(team: Team) -> Iterator[None]:
    """End the process, with one line, where it cannot meet the others: a port that is taken, an unknown interface."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's own types are children; a port that is no number
        if not _speaks(team):  # the first one may have met the same, and ends the others
            time.sleep(GRACE)
        why = str(error).partition("\n")[0][:170]
        advice = MEET if team.outside else MEET_HERE
        say(f"fl-lightning: error: the {team.size} processes of the run cannot meet ({why}); {advice}")
        give_up()


@contextmanager
def _meeting(team: Team) -> Iterator[None]:
    """The meeting of processes that are started here; one that is spawned has heard nothing of what is to be quiet."""
    _quiet()
    with _in_time(team), _refusals_said(team):
        yield


def _place() -> str:
    """Where the processes of torchrun or SLURM meet, and what the system says of it if it leads nowhere."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None:
        return ""
    why = ""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        why = f" ({getattr(error, 'strerror', None) or error})"
    return f" at {address}{why}, port {port}"


def _check_files(team: Team, start_method: str) -> None:
    """Refuse to start processes that may not open the files by which they meet: torch would try for ever.

    Raises:
        OSError: saying how many they need: the first one's own, and two for each that it meets.
    """
    if sys.platform != "linux":
        return
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    inherited = 0
    if start_method == "fork":
        with suppress(OSError):  # without /proc
            inherited = sum(int(number) < allowed for number in os.listdir("/proc/self/fd"))
    needed = inherited + FILES + 2 * team.size
    if 0 <= allowed < needed:
        raise OSError(errno.EMFILE, f"ulimit -n is {allowed}, and {team.size} workers need {needed}")


def use_threads(team: Team) -> None:
    """Take the team's number of threads."""
    if team.threads is not None:
        torch.set_num_threads(team.threads)


class _Started:
    """The processes that one launch starts. What else the caller has started is none of them.

    Python numbers the processes that it starts, and the launch starts one after another: theirs are the next numbers.

    Args:
        size: how many it starts.
    """

    def __init__(self, size: int) -> None:
        first = Process()._identity[-1] + 1
        self._numbers = range(first, first + size)

    def alive(self) -> list[BaseProcess]:
        """Those that have not ended, in the order in which they were started, which the system's ids need not keep."""
        own = {child._identity[-1]: child for child in active_children()}
        return [own[number] for number in self._numbers if number in own]

    def ask_main(self, number: int) -> None:
        """Let the main worker stop after the round, or end where there is none yet."""
        children = self.alive()
        if not children:
            raise StoppedAtOnce(number)
        hand_on(signal.SIGINT, children[:1])

    def end_at_once(self, number: int) -> None:
        """The answer to a second signal."""
        self.kill()
        say("stopped at once; what is saved stays, and --resume auto goes on from it")
        raise StoppedAtOnce(number)

    def kill(self) -> None:
        """End those that are left."""
        children = self.alive()
        for child in children:
            child.kill()
        for child in children:
            child.join(GRACE)


def launch(
    function: Callable[..., int],
    team: Team,
    *arguments: Any,
    advice: Callable[[], str] = str,
    start_method: str | None = None,
) -> int:
    """Run a function in every process of a team that is started here, and return what the main one returns.

    The first signal that asks to stop goes on to the main process, as a SIGINT; a second one ends all at once, and so
    does an exception.

    Args:
        function: a module's function; in each process the others are reached through `torch.distributed`.
        team: the processes.
        arguments: what the function is called with, to be pickled where processes are spawned.
        advice: says what the user can do when a worker is lost, for the error's line.
        start_method: ``fork`` or ``spawn``; None takes what works here.

    Returns:
        An exit code: the function's own, 2 after bad input, 1 if a process was lost, 128 + the signal that stopped it.
    """
    start_method = start_method or best_start_method(team)
    started = _Started(team.size)
    with StopSignals(started.ask_main, started.end_at_once) as signals, pausing(started.alive):
        try:
            _check_files(team, start_method)
            code = _fabric(team, start_method).launch(_enter, team, function, arguments)
            return exit_code(signals.first) if signals.first and code == exit_code(signal.SIGINT) else code
        except StoppedAtOnce as stopped:
            return exit_code(stopped.number)
        except OSError as error:  # of the system that starts them: no more processes, no memory to share
            if error.errno is None:  # somebody else's, in a signal handler
                raise
            why = f"processes cannot be started here ({error.strerror or error})"
            say(f"fl-lightning: error: federation.workers: {why}; one needs none")
            return 2
        except ProcessRaisedException as error:
            say(str(error))
            who = f"worker {error.error_index} of {team.size} failed"
        except ProcessExitedException as error:
            if signals.first and error.error_index == 0 and error.exit_code == -signal.SIGINT:
                say("stopped before a round was done")
                return exit_code(signals.first)
            if error.exit_code in (2, LOST):  # it has said why
                return 2 if error.exit_code == 2 else 1
            name = getattr(error, "signal_name", None)
            how = f"was killed by {name}" if name else f"ended with exit code {error.exit_code}"
            pid = getattr(error, "error_pid", None) or getattr(error, "pid", None)  # called so by older torch
            who = f"worker {error.error_index} of {team.size} (process {pid}) {how}"
        finally:
            started.kill()  # whatever ends this, nobody writes the run's folder any more
    say(f"\nfl-lightning: error: {who}; {advice()}")
    return 1


def best_start_method(team: Team) -> str:
    """``fork`` where that works, because a forked process has everything imported already."""
    forks = sys.platform == "linux" and not team.cuda and not torch.cuda._is_in_bad_fork()
    return "fork" if forks else "spawn"


def _enter(fabric: Fabric, team: Team, function: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    """What a started process does."""
    # Its one thread may be one of a pool's in the process that it was forked from; it would wait for itself as it ends.
    _threads_queues.pop(threading.current_thread(), None)  # type: ignore[attr-defined]
    _take_gpu(team)
    use_threads(team)
    with outlived(), speak_for_the_team(fabric.global_rank == 0):
        try:
            result = function(*arguments)
        except KeyboardInterrupt:  # its run was over, and is saved
            result = exit_code(signal.SIGINT)
    leave()
    # A forked process never takes Python down, a spawned one would: with the threads of libraries in it, which abort it
    # now and then. It ends as a forked one does, once its result is handed over and its output is flushed.
    atexit.register(os._exit, 0)
    return result


@contextmanager
def speak_for_the_team(is_main: bool, advice: Callable[[], str] = str) -> Iterator[None]:
    """End a process of a team that met bad input or lost another one: with one line in all, and at once.

    The others may be waiting for this one, so it does not end in good order.

    Args:
        is_main: whether this process is the run's first one.
        advice: says what the user can do when a worker is lost, where nobody else will.
    """
    try:
        yield
    except ConfigError as error:
        if not is_main:  # the main process says the same, unless it is only this one's machine that lacks something
            time.sleep(GRACE)
        if is_main or not isinstance(error, CommonError):
            say(f"fl-lightning: error: {error}")
        os._exit(2)
    except transport.WorkerLost as error:
        time.sleep(GRACE)  # who started the processes may know better how it ended
        say("; ".join(filter(None, (f"fl-lightning: error: {error}", advice()))))
        give_up()
    except Exception as error:
        if not line_of(error):
            raise
        if not is_main:
            time.sleep(GRACE)
        say(line_of(error))
        give_up()


def end_all() -> int:
    """End a run that cannot go on, once the reason was said: the exit code, for a process that is alone.

    One of a team ends at once, because the others may be waiting for it.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        give_up()
    return 1
