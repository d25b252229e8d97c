"""How many processes a run has, and who starts them."""

import atexit
import builtins
import io
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.errors import ConfigError
from fl_lightning.federation import launch as launching
from fl_lightning.federation import reach, tether, transport
from fl_lightning.federation import team as teams
from fl_lightning.federation.launch import launch, leave
from fl_lightning.federation.team import Team, is_main, num_cores, num_devices, plan, share, started_outside
from fl_lightning.federation.trainers import _place_among_workers
from fl_lightning.federation.transport import broadcast, gather
from fl_lightning.federation.watch import LOST

SLURM = {"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NNODES": "2"}
SLURM |= {"SLURM_NTASKS_PER_NODE": "4"}
TORCHRUN = {"RANK": "2", "LOCAL_RANK": "2", "GROUP_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
CPU = {"accelerator": "cpu"}


@pytest.fixture(autouse=True)
def _four_cores_and_nobody_else(monkeypatch):
    monkeypatch.setattr(teams, "num_cores", lambda: 4)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # which a task of SLURM's leaves, to loggers' tests
    others = [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC", "OMP_NUM_THREADS"))]
    for name in others + list(TORCHRUN):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def planned(workers=None, threads=None, participants=20, trainer=CPU, in_turn=False):
    return plan(workers, threads, participants, trainer, in_turn)


def test_a_shell_in_slurms_allocation_is_no_task_of_its_own(monkeypatch):
    """Asking for its rank ended in a KeyError."""
    for name in ("SLURM_NTASKS", "SLURM_JOB_NAME", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, SLURM[name])
    assert started_outside() == (1, 1)
    assert is_main()


def test_a_pools_process_has_no_workers(monkeypatch):
    """It ended in an AssertionError: daemonic processes are not allowed to have children."""
    monkeypatch.setattr(teams, "current_process", lambda: SimpleNamespace(daemon=True))
    assert planned("auto").size == planned(1).size == 1
    with pytest.raises(ConfigError, match=r"^federation.workers: must be 1 in a daemonic process"):
        planned(2)


def test_processes_that_cannot_be_started_end_in_one_line(monkeypatch, capsys):
    def refused(team, start_method):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(launching, "_fabric", refused)
    assert launch(end_with_a_message, Team(2, threads=1)) == 2
    said = "fl-lightning: error: federation.workers: processes cannot be started here (Read-only file system)"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.timeout(20)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_that_may_not_open_files_enough_are_refused(monkeypatch, capsys):
    """They tried to meet for ever."""
    monkeypatch.setattr("resource.getrlimit", lambda what: (20, 20))
    assert launch(end_with_a_message, Team(2, threads=1)) == 2
    why = r"processes cannot be started here \(ulimit -n is 20, and 2 workers need \d+\); one needs none"
    assert re.fullmatch(rf"fl-lightning: error: federation.workers: {why}\n", capsys.readouterr().err)


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_files_that_take_no_place_or_cannot_be_counted_refuse_no_workers(monkeypatch):
    """They ran before: in a container without /proc, and where what was opened under a higher limit stays open."""
    monkeypatch.setattr("resource.getrlimit", lambda what: (30, 30))
    monkeypatch.setattr(os, "listdir", lambda path: [*"012", *map(str, range(250, 270))])
    launching._check_files(Team(2), "fork")
    monkeypatch.setattr(os, "listdir", lambda path: os.stat("/nowhere/proc"))
    launching._check_files(Team(2), "fork")


@pytest.mark.timeout(30)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_worker_that_never_comes_ends_the_meeting(monkeypatch, capfd):
    """The others waited for ever."""
    meet = DDPStrategy.setup_environment

    def first_alone(strategy):
        return time.sleep(60) if strategy.local_rank else meet(strategy)

    monkeypatch.setattr(DDPStrategy, "setup_environment", first_alone)
    monkeypatch.setattr(launching, "MEETING", 0.6)
    assert launch(end_with_a_message, Team(2, threads=1)) == 1
    (said,) = [text for text in capfd.readouterr().err.splitlines() if "error" in text]
    assert said.startswith("fl-lightning: error: not all of the 2 processes that were expected have met within 1 s; ")
    assert said.endswith("see that each may open files enough (ulimit -n), and reaches 127.0.0.1")


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_that_cannot_meet_say_why_in_one_line(monkeypatch, capfd):
    """A variable of a cluster's, on a machine without that network: a traceback of torch's."""
    monkeypatch.setenv(reach.INTERFACE, "nosuch0")
    monkeypatch.setattr(launching, "GRACE", 20.0)
    assert launch(end_with_a_message, Team(2, threads=1)) == 1
    stderr = capfd.readouterr().err
    assert "Traceback" not in stderr
    (said,) = [line for line in stderr.splitlines() if "error" in line]
    assert re.match(r"fl-lightning: error: the 2 processes of the run cannot meet \(.*nosuch0.*\); see that", said)


def test_what_a_job_of_several_machines_left_is_not_asked(monkeypatch):
    """Workers waited for ever for a first machine that there is not."""
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(end_with_a_message, Team(2, threads=1)) == 2


def test_one_process_unless_told_otherwise():
    assert planned() == Team(1)


@pytest.mark.parametrize(
    ("workers", "participants", "size", "threads"),
    [("auto", 20, 4, 1), ("auto", 2, 2, 2), ("auto", 1, 1, 4), (1, 20, 1, 1), (2, 20, 2, 1), (6, 6, 6, 1)],
)
def test_cpu_workers_and_their_threads(workers, participants, size, threads):
    assert planned(workers, participants=participants) == Team(size, threads)


@pytest.mark.parametrize(
    ("said", "of_one", "of_two"),
    [("1", 1, 1), ("3", 3, 2), (" 2,1", 2, 2), ("16", 4, 2), ("0", 1, 1), ("", 4, 2), ("many", 4, 2)],
)
def test_threads_of_a_process_are_no_more_than_the_environment_allows(monkeypatch, said, of_one, of_two):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert (share(1), share(2)) == (of_one, of_two)
    assert planned("auto", participants=2).threads == of_two


@pytest.mark.parametrize("participants", [1, 6])
def test_more_workers_than_clients_of_a_round_are_refused(participants):
    rule = rf"federation\.workers: must be at most the clients of a round \({participants}\), got 1000"
    with pytest.raises(ConfigError, match=rule):
        planned(1000, participants=participants)


def test_configured_threads_win():
    assert planned("auto", threads=3).threads == 3
    assert planned(2, threads=3) == Team(2, 3)


def test_clients_that_wait_for_each_other_need_one_worker():
    assert planned("auto", in_turn=True) == Team(1, 4)


def test_every_gpu_has_a_worker(gpus):
    assert planned("auto", trainer={}) == Team(2, None, cuda=True)
    assert planned("auto", participants=1, trainer={}) == Team(1, None, cuda=True)
    assert planned("auto", trainer=CPU) == Team(4, 1)


def test_more_workers_than_gpus_share_them_and_the_cores(gpus):
    on_gpus = {"accelerator": "gpu"}
    assert planned(2, trainer=on_gpus) == Team(2, None, cuda=True)
    assert planned(3, trainer=on_gpus) == Team(3, 1, cuda=True, shares_gpus=True)
    assert planned(3, threads=2, trainer=on_gpus) == Team(3, 2, cuda=True, shares_gpus=True)
    with pytest.raises(ConfigError, match=r"must be at most the clients of a round \(2\), got 3"):
        planned(3, participants=2, trainer=on_gpus)


def own_place() -> int:
    """What the processes of the next test do; 1 if each has its GPU, and messages get to where they are promised."""
    there = torch.device("meta")
    own = {"own": torch.ones(2)}
    handed = []  # what the group was given, by kind of device
    for name in ("send", "recv", "broadcast"):
        setattr(dist, name, partial(hand_on, getattr(dist, name), handed))
    received = [broadcast(own, there)["own"].device]
    if dist.get_rank() == 0:
        transport.send(own, 1, there)
    elif dist.get_rank() == 1:
        received.append(transport.receive(0, there)["own"].device)
    places = gather((TAKEN, _place_among_workers({})["devices"], received, list(handed)))
    first, second = ([0], [0], [torch.device("cpu")], ["cpu"] * 5), ([1], [1], [there] * 2, ["cpu"] * 4)
    return int(places == [first, second, ([0], [0], [there], ["cpu"] * 2)])  # what is small goes first, to each


def hand_on(function, handed, tensor, other):
    """Note where a tensor is, then send or receive it."""
    handed.append(tensor.device.type)
    function(tensor, other)


TAKEN = []


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_processes_on_shared_gpus_talk_by_way_of_the_cpu(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", TAKEN.append)
    team = planned(3, trainer={})
    assert launching.best_start_method(team) == "spawn"
    assert launch(own_place, team, start_method="fork") == 1  # forked ones keep what is pretended


def letters() -> int:
    """1 if small things come whole to all, those that fill an envelope and those that take more than one, too."""
    rank, fits = dist.get_rank(), transport._ENVELOPE - transport._HEAD
    fills = 2 * fits - len(pickle.dumps(bytes(fits)))  # whose pickle is as long as an envelope has room
    for length in (0, 1, fills - 1, fills, fills + 1, 3 * fits):
        everyone = [bytes([own]) * length for own in range(3)]
        if gather(everyone[rank]) != everyone or transport.tell(everyone[rank]) != everyone[0]:
            return 0
    return 1


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_small_things_of_every_length_come_whole():
    assert launch(letters, Team(3, threads=1), start_method="fork") == 1


@pytest.mark.parametrize(("other", "by_cpu"), [("GPU-1", True), ("GPU-2", False)])
def test_processes_that_see_one_gpu_learn_whether_it_is_the_same(other, by_cpu, one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(transport, "gather", lambda own: [own, (own[0], other)])
    monkeypatch.setattr(transport.Wire, "by_cpu", not by_cpu)
    launching._take_gpu(Team(2, outside=True, cuda=True))
    assert transport.Wire.by_cpu == by_cpu


@pytest.mark.parametrize(("devices", "number"), [(1, 1), (3, 3), ("2", 2), ([0, 1], 2), ("auto", 1)])
def test_devices_of_one_fit(devices, number):
    assert num_devices({"devices": devices}) == number


def test_devices_of_one_fit_are_processes():
    assert planned(trainer={**CPU, "devices": 2}) == Team(2, 2)


def test_torchrun_decides_how_many(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert started_outside() == (4, 1)
    assert planned("auto") == planned() == planned(4) == Team(4, None, 1, outside=True)
    assert not is_main()
    with pytest.raises(ConfigError, match=r"must be auto or the number of processes that were started \(4\), got 2"):
        planned(2)


def test_a_fit_inside_a_run_of_several_processes_is_of_one(monkeypatch):
    """Whoever has started them: the others would have to take part in it, and do not know of it."""
    monkeypatch.setattr(transport.Waiting, "context", lambda: nullcontext())
    for name, value in (TORCHRUN | {"TORCHELASTIC_RUN_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    assert planned() == planned(workers="auto") == planned(workers=1) == Team()
    with pytest.raises(ConfigError, match=r"federation\.workers: must be 1 for a fit in a callback .*, got 4"):
        planned(workers=4)
    with pytest.raises(ConfigError, match=r"trainer\.devices: must be 1 for a fit in a callback .*, got 2"):
        planned(trainer={"accelerator": "cpu", "devices": 2})


def test_slurm_decides_how_many(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert started_outside() == (8, 2)
    assert planned("auto") == Team(8, None, 2, outside=True)
    assert not is_main()


@pytest.mark.parametrize(
    ("variables", "is_said"),
    [
        ({}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),  # a shell of the job, which may have had room for more
        ({"SLURM_JOB_NAME": "train"}, False),
    ],
)
def test_tasks_that_are_runs_of_their_own_are_told_so_once(variables, is_said, monkeypatch, capsys):
    """As in an allocation of salloc's: one trained alone, the others said that the folder was another's."""
    interactive = {"SLURM_JOB_NAME": "interactive", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}
    for name, value in (SLURM | interactive | variables).items():
        monkeypatch.setenv(name, value)
    assert planned("auto").outside == (variables.get("SLURM_JOB_NAME") == "train")
    line = "each of the 8 tasks is a run of its own, for the SLURM job is called interactive; SLURM_JOB_NAME=train"
    said = f"fl-lightning: note: {line} before srun makes them one\n"
    assert capsys.readouterr().err == (said if is_said else "")


def test_slurm_job_that_lightning_refuses_gives_one_line(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(ConfigError, match=r"federation\.workers: .*--ntasks-per-node=4"):
        planned("auto")


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        (TORCHRUN | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "1"}, 2),
        (TORCHRUN | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}, 3),
        (SLURM | {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, 2),
        (SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "3", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}, 2),
    ],
)
def test_machines_may_have_different_numbers_of_processes(variables, nodes, monkeypatch):
    """They ended with a traceback of Lightning's, and those on the other machine waited for them."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    size = int(variables.get("WORLD_SIZE", variables.get("SLURM_NTASKS")))
    team = planned("auto")
    assert team == Team(size, None, nodes, outside=True)
    strategy = launching._fabric(team, "popen").strategy
    strategy.cluster_environment.validate_settings(strategy.num_processes, strategy.num_nodes)
    assert strategy.root_device == torch.device("cpu")  # that of its place on its machine


def test_runs_that_share_a_job_of_slurm_meet_at_ports_of_their_own(monkeypatch):
    """The second one's tasks met the first one's."""
    ports = []
    for step in ("0", "1", "2", None):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        for name, value in (SLURM | {"SLURM_JOB_ID": "7654321", "SLURM_STEP_ID": step or "0"}).items():
            monkeypatch.setenv(name, value)
        if step is None:
            monkeypatch.delenv("SLURM_STEP_ID")
        ports += [launching._OfSlurm().main_port] * 2
        assert os.environ["MASTER_PORT"] == str(ports[-1])
    assert len(set(ports)) == 3
    assert ports[0] == ports[-1] == 19321  # Lightning's
    monkeypatch.setenv("MASTER_PORT", "29500")
    for step in ("3", "batch", ""):  # whatever a site's wrapper says
        monkeypatch.setenv("SLURM_STEP_ID", step)
        assert launching._OfSlurm().main_port == 29500


def test_slurm_job_of_one_task_is_an_ordinary_process(monkeypatch):
    for name, value in {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert planned("auto") == Team(4, 1)
    assert is_main()


def sum_of_ranks() -> int:
    """What the processes of `test_spawned_…` do."""
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total) if torch.get_num_threads() == 1 else -1


def sum_and_mark(path: str) -> int:
    """The same in a process that Python would take down in the end, and abort where a library's thread still runs."""
    atexit.register(open, path, "w")
    return sum_of_ranks()


@pytest.mark.slow
def test_spawned_processes_meet_and_end_as_forked_ones_do(tmp_path, monkeypatch, capfd):
    """As on a GPU, and on other systems; from a notebook, too, where Lightning refused them."""
    monkeypatch.setattr("lightning.fabric.connector._IS_INTERACTIVE", True)
    assert launch(sum_and_mark, Team(2, threads=1), str(tmp_path / "mark"), start_method="spawn") == 3
    assert not (tmp_path / "mark").exists()
    assert "Initializing distributed" not in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_forked_processes_meet():
    assert launch(sum_of_ranks, Team(3, threads=1)) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_pools_thread_starts_processes(capfd):
    """Their one thread was in the pool's list, and waited for itself as they ended: exit code 1 after a whole run."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch, sum_of_ranks, Team(2, threads=1)).result() == 3
    assert "cannot join" not in capfd.readouterr().err


def fail_or_wait() -> int:
    """The second process fails, the first one would go on."""
    os._exit(3) if dist.get_rank() == 1 else time.sleep(60)
    return 0


@pytest.mark.timeout(20)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_process_that_fails_ends_the_others(capfd):
    """They leave a SIGTERM alone, which is torch's way to end them."""
    assert launch(fail_or_wait, Team(2, threads=1)) == 1
    assert "ended with exit code 3" in capfd.readouterr().err


def end_with_a_message() -> int:
    """Gloo's threads may still hold tensors of it."""
    for size in range(20):
        broadcast({"own": torch.zeros(1000 * size)}, torch.device("cpu"))
    return len(gather("here"))


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_processes_end_right_after_a_message():
    """Under torch 2.6 and 2.7, whose groups end while they keep Python's lock, they waited for ever."""
    assert launch(end_with_a_message, Team(2, threads=1)) == 2


def send_to_the_starter(numbers) -> int:
    """Signals, from the main process; no process ends by itself."""
    if len(numbers) == 2:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # busy until the second one
    gather("here")
    for number in numbers if dist.get_rank() == 0 else ():
        os.kill(os.getppid(), number)
        time.sleep(0.1)
    time.sleep(60)
    return 0


@pytest.fixture(params=[None, "reader"])
def own_child(request):
    """A process that the caller has started for a purpose of its own."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name=request.param)
    child.start()
    yield child
    child.kill()
    child.join()


def times_out(*_):
    raise TimeoutError


@pytest.mark.timeout(30)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGUSR2]], ids=["once", "twice", "an exception"]
)
def test_whatever_ends_a_launch_ends_its_own_processes_alone(numbers, own_child):
    """The caller's own child was interrupted or killed, or its name came out as an error and the workers ran on."""
    before = signal.signal(signal.SIGUSR2, times_out)
    try:
        with pytest.raises(TimeoutError) if numbers == [signal.SIGUSR2] else nullcontext():
            assert launch(send_to_the_starter, Team(2, threads=1), numbers) == 130
    finally:
        signal.signal(signal.SIGUSR2, before)
        left = multiprocessing.active_children()
        for child in left:
            child.kill()  # what fails here must not run on
    assert left == [own_child]


HITS = {}  # signals that a process sends itself in the middle of the next fork, by who it is there


def hit_in_the_fork(who):
    for number in HITS.pop(who, ()):
        os.kill(os.getpid(), number)


@pytest.mark.timeout(30)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("who", ["starter", "worker and starter"])
def test_a_signal_in_the_middle_of_a_workers_fork_stops_the_run(monkeypatch, who, number):
    """It was lost, and the run went on to its end; from the terminal, which sends it to both, a worker was lost."""
    monkeypatch.setitem(HITS, "starter", [number])
    monkeypatch.setitem(HITS, "worker", [number] if "worker" in who else [])
    for_starter, for_worker = partial(hit_in_the_fork, "starter"), partial(hit_in_the_fork, "worker")
    os.register_at_fork(after_in_parent=for_starter, after_in_child=for_worker)
    assert launch(sum_of_ranks, Team(2, threads=1)) == 128 + number
    assert multiprocessing.active_children() == []


def test_cores_are_those_of_the_container(monkeypatch):
    """One core's worth of every period, as ``docker run --cpus 1`` writes it."""
    limit, exists, read = "/sys/fs/cgroup/cpu.max", os.path.exists, builtins.open
    monkeypatch.delenv("LOKY_MAX_CPU_COUNT", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == limit or exists(path))
    monkeypatch.setattr(
        builtins, "open", lambda path, *rest: io.StringIO("100000 100000") if path == limit else read(path, *rest)
    )
    assert num_cores() == 1


def test_cores_are_those_of_the_affinity(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert num_cores() <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_process_that_never_comes_ends_the_meeting(tmp_path):
    """The second of two processes, as torchrun starts them; the first one is not there."""
    meeting = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29987"}
    start = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=join_two, args=(meeting, tmp_path / "stderr"))
    process.start()
    process.join(40)
    code = process.exitcode
    process.kill()  # or Python would wait for it in the end
    assert time.monotonic() - start < 40
    assert code == 1
    line = "fl-lightning: error: not all of the 2 processes that were expected have met within 1 s; "
    stderr = (tmp_path / "stderr").read_text()
    (said,) = [text for text in stderr.splitlines() if "error" in text]
    assert said.startswith(line)
    assert "Traceback" not in stderr


def join_two(meeting, stderr):
    """What that process does."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - pytest's own is a file of its own
    os.environ.update(meeting)
    launching.MEETING, launching.GRACE = 0.6, 0.1
    launching.join(Team(2, outside=True))


def test_processes_that_wait_long_for_others_say_where(monkeypatch):
    """Nobody heard of a host that was lost, or of a name that leads nowhere, before ten minutes were over."""

    def unknown(name, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(launching, "PATIENCE", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name, value in {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    said = threading.Event()
    monkeypatch.setattr(launching, "say", lambda line: (lines.append(line), said.set()))
    lines = []
    with launching._in_time(Team(8, nodes=2, outside=True)):
        assert said.wait(20)
    (line,) = lines
    where = r"at first \(Name or service not known\), port 29500"
    assert re.match(rf"fl-lightning: note: waiting for all 8 processes to meet {where}; see that each was st", line)


def test_processes_that_do_not_reach_each_other_say_so(monkeypatch, capsys):
    """One ended with a traceback of torch's."""

    def refused():
        raise RuntimeError("Gloo connectFullMesh failed with: Connection refused, remote=[127.0.1.1]:8616\nmore")

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(launching, "_fabric", lambda *given: SimpleNamespace(launch=refused))
    with pytest.raises(SystemExit, match="1"):
        launching.join(Team(2, nodes=2, outside=True))
    line = (
        "fl-lightning: error: the 2 processes of the run cannot meet (Gloo .* remote=.*8616); .*GLOO_SOCKET_IFNAME.*\n"
    )
    assert re.fullmatch(line.replace("meet (", r"meet \(").replace("); ", r"\); "), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name_leads_to", "nodes", "set_before", "expected"),
    [
        ("127.0.1.1", 2, None, "eth7"),
        ("", 2, None, "eth7"),
        ("10.0.0.7", 2, None, None),
        ("127.0.1.1", 1, None, None),
        ("127.0.1.1", 2, "ib0", "ib0"),
    ],
)
def test_machine_whose_name_leads_to_itself_alone_is_reached(name_leads_to, nodes, set_before, expected, monkeypatch):
    """As Debian writes it into /etc/hosts: the other machines waited for it at an address of their own."""
    monkeypatch.setattr(reach, "_own_address", lambda: name_leads_to)
    monkeypatch.setattr(reach, "_address_towards", lambda other: {"first": "", reach._OUTSIDE: "10.0.0.7"}[other])
    monkeypatch.setattr(reach, "_interface_of", {"10.0.0.7": "eth7"}.get)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.delenv(reach.INTERFACE, raising=False)
    if set_before is not None:
        monkeypatch.setenv(reach.INTERFACE, set_before)
    with reach.reachable(nodes):
        assert os.environ.get(reach.INTERFACE) == expected
    assert os.environ.get(reach.INTERFACE) == set_before


class V6Alone:
    """A socket of a machine that has IPv6 alone, and its address on the way to any other one."""

    def __init__(self, family, kind):
        if family != socket.AF_INET6:
            raise OSError("Address family not supported by protocol")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def connect(self, other):
        pass

    def getsockname(self):
        return ("fd00:1::7", 40000, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked in Linux's way")
@pytest.mark.parametrize("name_leads_to", ["::1", "fe80::7%eth7", "127.0.1.1"])
@pytest.mark.parametrize("first", ["fd00:1::1", "first"])
def test_machine_of_ipv6_alone_is_reached(name_leads_to, first, monkeypatch, tmp_path):
    """Its name led to itself, or to a cable: the other machines tried 127.0.0.1."""
    known = tmp_path / "if_inet6"
    known.write_text(f"{'0' * 31}1 01 80 10 80       lo\nfd000001{'0' * 23}7 02 40 00 82     eth7\n")
    monkeypatch.setattr(reach, "_ADDRESSES_V6", known)
    monkeypatch.setattr(reach, "_own_address", lambda: name_leads_to)
    monkeypatch.setattr(socket, "socket", V6Alone)
    monkeypatch.setenv("MASTER_ADDR", first)
    monkeypatch.delenv(reach.INTERFACE, raising=False)
    with reach.reachable(2):
        assert os.environ.get(reach.INTERFACE) == "eth7"
    assert reach._interface_of("fd00:1::8") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked in Linux's way")
def test_address_of_a_machines_name_and_its_interface_are_found(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("192.0.2.9", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked: found)
    assert reach._own_address() == "127.0.0.1"  # the other one is no machine's
    assert reach._interface_of("127.0.0.1") == "lo"
    assert reach._interface_of("192.0.2.9") is None
    assert reach._address_towards("127.0.0.1") == ""


def test_worker_that_is_gone_is_named(monkeypatch):
    def gone(buffer, source):
        raise RuntimeError("[/far/away/gloo/transport/tcp/pair.cc:561] Connection closed by peer")

    for name, answer in {"recv": gone, "get_rank": lambda: 0, "get_world_size": lambda: 3}.items():
        monkeypatch.setattr(dist, name, answer)
    monkeypatch.setattr(transport, "_speaks_cpu", lambda: True)
    named = r"^worker 1 of 3 is gone \(Connection closed by peer\)$"
    with pytest.raises(transport.WorkerLost, match=named):
        gather("here")
    with pytest.raises(transport.WorkerLost, match=named):
        transport.receive(1, torch.device("cpu"))


@pytest.mark.parametrize(("started_here", "code"), [(False, 1), (True, LOST)])
def test_lost_worker_ends_the_others_with_advice_and_the_code_of_who_started_them(
    monkeypatch, capsys, started_here, code
):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(tether, "_tethered", started_here)
    monkeypatch.setattr(launching, "GRACE", 0.0)
    advice = () if started_here else (lambda: "begin anew",)
    with pytest.raises(SystemExit) as ended, launching.speak_for_the_team(False, *advice):
        raise transport.WorkerLost("worker 1 of 3 is gone")
    assert ended.value.code == code
    more = "" if started_here else "; begin anew"
    assert capsys.readouterr().err == f"fl-lightning: error: worker 1 of 3 is gone{more}\n"


@pytest.fixture
def one_gpu(monkeypatch):
    """Pretend that the launcher shows each process the one that is its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_process_that_sees_its_own_gpu_alone_takes_it(one_gpu, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert _place_among_workers({})["devices"] == [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _place_among_workers({})["devices"] == [3]


def test_processes_that_see_one_gpu_each_can_meet(one_gpu, monkeypatch):
    """Four tasks on each of two machines: Lightning counts four processes a machine, and looks for no GPU."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    fabric = launching._fabric(planned("auto", trainer={}), "popen")
    assert fabric.strategy.num_processes == 4
    assert fabric.strategy.process_group_backend == "cpu:gloo,cuda:nccl"
    fabric._connector.cluster_environment.validate_settings(fabric.strategy.num_processes, 2)


def test_gpus_that_lightning_refuses_give_one_line(one_gpu):
    with pytest.raises(ConfigError, match=r"federation\.workers: "):
        launching._fabric(Team(2, cuda=True), "fork")


def test_a_team_is_left_once():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        leave()
        assert not torch.distributed.is_initialized()
