"""The processes of a run: how many there are, who starts them, and this one's place among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import current_process
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from fl_lightning.errors import ConfigError, require
from fl_lightning.federation import transport
from fl_lightning.terminal import say

_PLACE = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
"""What tells a process its place among those that torchrun or SLURM started."""


class Team(NamedTuple):
    """How many processes a run has, who starts them, and how many threads each may use on the CPU.

    Args:
        size: processes in all, on all machines.
        threads: threads of each; None leaves torch's own choice.
        nodes: machines; more than one only where `outside`.
        outside: whether torchrun or SLURM started the processes.
        cuda: whether each works on a GPU.
        shares_gpus: whether there are fewer GPUs than processes started here, so that some work on the same one.
    """

    size: int = 1
    threads: int | None = None
    nodes: int = 1
    outside: bool = False
    cuda: bool = False
    shares_gpus: bool = False


def plan(
    workers: int | str | None, threads: int | None, participants: int, trainer: Mapping[str, Any], in_turn: bool
) -> Team:
    """Decide on a run's processes.

    Args:
        workers: as configured: a number, ``auto``, or None for one, or for all that torchrun or SLURM started. Inside a
            run of several processes there is one.
        threads: as configured.
        participants: clients of a round.
        trainer: the Trainer's flags.
        in_turn: whether clients must wait for each other, so that there is no use for more than one.

    Raises:
        ConfigError: if there are fewer clients of a round than workers, or the number is not the one that was started,
            or is not one inside a run of several processes.
    """
    cuda = trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    size, nodes = started_outside()
    if size == 1:
        _say_whether_tasks_are_apart()
    devices = num_devices(trainer)
    if transport.in_a_run():
        alone = "must be 1 for a fit in a callback of a run of several processes"
        require(workers in (None, "auto", 1), "federation.workers", alone, workers)
        require(devices == 1, "trainer.devices", alone, devices)
        return Team(threads=threads, cuda=cuda)
    if devices > 1:
        one = "must be 1 where trainer.devices spreads one client over several devices"
        require(workers in (None, "auto", 1), "federation.workers", one, workers)
        return Team(max(size, devices), threads or (None if size > 1 else share(devices)), nodes, size > 1, cuda)
    if size > 1:
        same = f"must be auto or the number of processes that were started ({size})"
        require(workers in (None, "auto", size), "federation.workers", same, workers)
        _check_use(size, participants)
        return Team(size, threads, nodes, outside=True, cuda=cuda)
    if workers is None:
        return Team(threads=threads)
    gpus = torch.cuda.device_count() if cuda else 0
    if workers == "auto":
        number = 1 if in_turn or current_process().daemon else min(participants, gpus if cuda else num_cores())
        return Team(number, threads or (None if cuda else share(number)), cuda=cuda)
    number = int(workers)
    _check_use(number, participants)
    daemon = "must be 1 in a daemonic process (of a multiprocessing.Pool, say), which may start none"
    require(number == 1 or not current_process().daemon, "federation.workers", daemon, number)
    if cuda and number > gpus:
        return Team(number, threads or share(number), cuda=True, shares_gpus=True)
    return Team(number, threads or (None if cuda else 1), cuda=cuda)


def _say_whether_tasks_are_apart() -> None:
    """Say, in the first of several tasks that srun started, that each of them is a run of its own.

    So they are in a job that is called as one of `salloc`'s is, where Lightning takes no task for one of SLURM's.
    """
    name, tasks = os.environ.get("SLURM_JOB_NAME"), os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if name in ("bash", "interactive") and tasks != "1" and os.environ.get("SLURM_PROCID") == "0":
        why = f"each of the {tasks} tasks is a run of its own, for the SLURM job is called {name}"
        say(f"fl-lightning: note: {why}; SLURM_JOB_NAME=train before srun makes them one")


def _check_use(workers: int, participants: int) -> None:
    """Refuse workers that would never have a client."""
    some = f"must be at most the clients of a round ({participants})"
    require(workers <= participants, "federation.workers", some, workers)


def num_cores() -> int:
    """Cores that this process may use, by its affinity and its container's limit."""
    from joblib import cpu_count

    return cpu_count()


def share(processes: int) -> int:
    """Threads for each of so many processes; no more than OMP_NUM_THREADS, where it is set."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    most = int(said) if said.isdigit() else num_cores()
    return max(1, min(most, num_cores() // processes))


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Devices of one fit; 1 unless the Trainer's flags ask for a number of them."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        return max(1, torch.cuda.device_count())
    return len(devices) if isinstance(devices, (list, tuple)) else int(devices) if isinstance(devices, int) else 1


def started_outside() -> tuple[int, int]:
    """Processes that torchrun or SLURM started for this run, and on how many machines; (1, 1) where neither did."""
    if TorchElasticEnvironment.detect():
        size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return size, -(-size // local)  # where machines have different numbers, some number above 1
    if _by_slurm():
        try:
            size = SLURMEnvironment().world_size()
        except RuntimeError as error:  # Lightning's word on how the job was asked for
            each = -(-int(os.environ["SLURM_NTASKS"]) // _nodes_of_slurm())
            rule = f"SLURM must be told --ntasks-per-node={each}, and not --ntasks alone"
            raise ConfigError("federation.workers", rule) from error
        return size, _nodes_of_slurm() if size > 1 else 1
    return 1, 1


def _nodes_of_slurm() -> int:
    return max(1, int(os.environ.get("SLURM_NNODES", "1")))


def stand_alone() -> None:
    """Make this process an ordinary one: what torchrun or SLURM told the one that started it is not meant for it."""
    for name in list(os.environ):
        if name in _PLACE or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def gpu_here() -> int:
    """Which of the GPUs that this process sees it works on; its launcher may show it that one alone."""
    return local_rank() % torch.cuda.device_count()


def local_rank() -> int:
    """This process's place among those that torchrun or SLURM started on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def is_main() -> bool:
    """Whether this process is the run's only or first one; known before the processes have met."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment().global_rank() == 0
    return not _by_slurm() or SLURMEnvironment().global_rank() == 0


def _by_slurm() -> bool:
    """Whether SLURM started this process as a task, which a shell in its allocation is not."""
    return SLURMEnvironment.detect() and "SLURM_PROCID" in os.environ
