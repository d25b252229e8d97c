"""Many processes behind one command: the same run, and an orderly end when one of them is lost."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.processes import children
from cli.run_files import read_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
TWO = ("--federation.workers", "2")
HASTE = 3


@pytest.fixture(autouse=True)
def _no_pictures(workplace):
    workplace.draws = False


def started(place, *argv, after="round-0002.ckpt"):
    """A long run on two workers that has saved a round; returns it with the processes of its workers."""
    run = place.start("fit", "--config", "exp.yaml", "--federation.rounds", "400", *TWO, *argv)
    run.wait_until(lambda: (place.run / "checkpoints" / after).exists() or done(place, after))
    return run, children(run.process.pid)


def done(place, name):
    """Whether a checkpoint of that round or a later one is there."""
    return any(path.name >= name for path in (place.run / "checkpoints").glob("round-*.ckpt"))


def rounds_saved(place) -> int:
    return max(int(path.stem.partition("-")[2]) for path in (place.run / "checkpoints").glob("round-*.ckpt"))


@pytest.fixture
def assert_resumes(make_workplace, assert_same_run):
    """A broken run goes on where it stopped and ends as one that was never broken, on one process."""

    def check(place):
        rounds = rounds_saved(place) + 2
        place.fit("--quiet", "--resume", "auto", "--federation.rounds", str(rounds), *TWO)
        straight = make_workplace("straight")
        straight.draws = False
        straight.fit("--quiet", "--federation.rounds", str(rounds), "--federation.workers", "1")
        assert_same_run(place.run, straight.run)

    return check


def test_two_workers_make_the_run_of_one(workplace, finished, assert_same_run):
    out = workplace.fit(*TWO)
    assert "Local-T" in out
    assert out.count("folder  runs/run") == 1
    assert_same_run(workplace.run, finished.run)


def test_summary_of_the_model_is_printed_by_one_of_the_workers(workplace):
    code, out, err = workplace.call("fit", "--config", "exp.yaml", "--trainer.callbacks", "[ModelSummary]", *TWO)
    assert code == 0, err
    assert (out + err).count("Trainable params") == 1


def test_all_workers_save_where_the_main_one_says_that_it_is_time(workplace):
    policy = ("--federation.checkpoint.every", "0", "--federation.checkpoint.keep", "9")
    workplace.fit("--quiet", *TWO, *policy, "--federation.checkpoint.seconds", "0.000001")
    assert len(list(workplace.run.glob("checkpoints/round-*.ckpt"))) == 3


def test_auto_is_as_many_as_keep_the_cores_busy(workplace, finished, assert_same_run):
    workplace.fit("--quiet", "--federation.workers", "auto", "--federation.threads", "1")
    assert_same_run(workplace.run, finished.run)


def test_killed_worker_ends_the_run_with_a_line_and_a_checkpoint(workplace, assert_resumes):
    run, workers = started(workplace)
    assert len(workers) == 2
    start = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    code, _, err = run.result()
    assert time.monotonic() - start < 60
    assert code == 1
    assert "Traceback" not in err
    line = next(line for line in err.splitlines() if "error" in line)
    assert line == (
        f"fl-lightning: error: worker 1 of 2 (process {workers[1]}) was killed by SIGKILL; "
        f"the rounds up to {rounds_saved(workplace)} are saved; continue with"
    )
    assert "fl-lightning fit --config runs/run/config.yaml --resume auto" in err
    assert_resumes(workplace)


def test_killed_main_worker_ends_the_run(workplace):
    run, workers = started(workplace)
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = run.result()
    assert code == 1
    assert "worker" in err
    assert "Traceback" not in err


@pytest.fixture
def in_haste(workplace):
    """A workplace in which 5 seconds of silence are over sooner."""
    workplace.haste = HASTE
    return workplace


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_that_hangs_ends_the_run(in_haste, rank):
    workplace = in_haste
    run, workers = started(workplace, "--federation.worker_timeout", "5")
    start = time.monotonic()
    os.kill(workers[rank], signal.SIGSTOP)
    code, _, err = run.result()
    assert time.monotonic() - start < 60
    assert code == 1
    assert f"worker {rank} of 2 (process {workers[rank]} on" in err
    assert f"gave no sign of life for 5 s; the rounds up to {rounds_saved(workplace)} are saved" in err
    assert rounds_saved(workplace) >= 2
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_run_that_was_suspended_as_a_whole_goes_on(in_haste):
    """Nobody is accused of the time in which nobody ran."""
    workplace = in_haste
    run, workers = started(workplace, "--federation.worker_timeout", "5")
    everybody = [run.process.pid, *workers]
    for process in everybody:
        os.kill(process, signal.SIGSTOP)
    time.sleep(6 / HASTE)
    saved = rounds_saved(workplace)
    for process in everybody:
        os.kill(process, signal.SIGCONT)
    until = time.monotonic() + 1.5 / HASTE
    run.wait_until(lambda: rounds_saved(workplace) > saved and time.monotonic() > until)
    assert "error" not in run.err.read_text()
    for process in everybody:
        os.kill(process, signal.SIGKILL)
    run.process.join()


def test_interrupt_stops_after_the_round(workplace, assert_resumes):
    run, _ = started(workplace)
    run.interrupt()
    code, out, err = run.result()
    assert code == 130
    assert re.search(r"stopping once round \d+ is saved", err)
    assert f"stopped after round {rounds_saved(workplace)}, which is saved" in out
    assert_resumes(workplace)


def test_second_interrupt_stops_at_once(workplace):
    run, workers = started(workplace)
    run.interrupt()
    run.interrupt()
    code, _, err = run.result()
    assert code == 130
    assert "stopped" in err or "stopping" in err
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_workers_do_not_outlive_the_command(in_haste):
    run, workers = started(in_haste)
    run.kill()
    run.process.join()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_failure_in_a_worker_shows_its_error(workplace):
    workplace.write(
        "mine.py",
        "from fl_lightning.methods.fedavg import FedAvg\n"
        "class Breaks(FedAvg):\n"
        "    def send(self, data):\n"
        "        if data.client == 3 and self.facts.round == 2:\n"
        "            raise ValueError('the sky fell')\n"
        "        return super().send(data)\n",
    )
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--method", "mine.Breaks", *TWO)
    assert code == 1
    assert "round 2, client 3, send: ValueError: the sky fell" in err
    assert "Traceback" not in err
    assert err.count("fl-lightning: error") == 1, err  # once, however many processes know it
    assert re.search(
        r"; last good checkpoint: runs/run/checkpoints/round-0001\.ckpt; fl-lightning fit .* --resume", err
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--federation.workers", "0"], "federation.workers: must be auto or a number >= 1, got 0"),
        (["--federation.workers", "1000"], "federation.workers: must be at most the clients of a round (6), got 1000"),
        (["--federation.threads", "0"], "federation.threads: must be from 1 to 1024, got 0"),
        (["--federation.worker_timeout", "1"], "federation.worker_timeout: must be >= 5 seconds, got 1.0"),
        (
            ["--federation.workers", "2", "--trainer.devices", "2"],
            "federation.workers: must be 1 where trainer.devices spreads one client over several devices, got 2",
        ),
        (
            ["--trainer.devices", "2", "--trainer.strategy", "fsdp"],
            "error: trainer.strategy: must be ddp where trainer.devices is above 1, got 'fsdp'",
        ),
        (
            ["--trainer.devices", "65"],
            "trainer.devices: must be at most data.batch_size (64), over which they share a mini-batch, got 65",
        ),
        ([*TWO, "--data.num_clients", "2000"], "data.num_clients: must be at most 89"),
        ([*TWO, "--trainer.precision", "16-mixed"], "trainer.precision"),
    ],
)
def test_bad_input_is_answered_once_before_anything_starts(workplace, options, line):
    before = workplace.files()
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *options)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert line in err
    assert workplace.files() == before


def test_occupied_folder_is_refused_by_one_line(workplace):
    workplace.fit("--quiet")
    code, _, err = workplace.call("fit", "--config", "exp.yaml", *TWO)
    assert code == 2
    assert err.count("\n") == 1
    assert "holds a run" in err


def test_one_client_on_two_devices(workplace, finished):
    """The same mini-batches in two parts: the same run, but for rounding."""
    workplace.fit("--quiet", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    shared, alone = read_run(workplace.run), read_run(finished.run)
    column = shared["metrics.csv"][0].index("loss")
    for here, there in zip(shared["metrics.csv"][1:], alone["metrics.csv"][1:], strict=True):
        assert float(here[column]) == pytest.approx(float(there[column]), rel=1e-3)


def test_torchrun_makes_the_same_run(workplace, finished, assert_same_run):
    """`torchrun --standalone --nproc-per-node 2`, whose agent forks the commands, so that each need not import all."""
    code, out, err = workplace.start("fit", "--config", "exp.yaml", torchrun=2).result()
    assert code == 0, err
    assert out.count("folder  runs/run") == 1
    assert_same_run(workplace.run, finished.run)


def tasks_of_slurm(place, *options, job=4242):
    """A `fit` as two tasks, as srun starts them: a command, and variables that say which one it is.

    Args:
        place: the workplace.
        options: each task's own.
        job: the job's number, by which its tasks find each other.
    """
    shared = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    shared |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    variables = [{**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    return [
        place.start("fit", "--config", "exp.yaml", *own, env=variables[rank], out=f"task-{rank}")
        for rank, own in enumerate(options)
    ]


def test_tasks_of_one_job_that_were_told_otherwise_are_refused_by_one_line(in_haste):
    """They trained together, one by another learning rate than the other, and ended with exit code 0."""
    tasks = tasks_of_slurm(in_haste, ("--optimizer.lr", "0.5"), ("--optimizer.lr", "0.25"), job=4243)
    results = [task.result() for task in tasks]
    rule = "must be the same in every process of the run; process 0 has 0.5, process 1 has 0.25"
    assert results == [(2, "", f"fl-lightning: error: optimizer.init_args.lr: {rule}\n"), (2, "", "")]


def test_killed_task_ends_the_others_with_a_line_that_says_how_to_go_on(in_haste):
    """They ended with exit code 70, and a line that named nobody."""
    long = ("--quiet", "--federation.rounds", "400")
    tasks = tasks_of_slurm(in_haste, long, long, job=4244)
    tasks[0].wait_until(lambda: done(in_haste, "round-0002.ckpt"))
    tasks[1].kill()
    code, _, err = tasks[0].result()
    tasks[1].result()
    assert code == 1
    saved = f"; the rounds up to {rounds_saved(in_haste)} are saved; continue with"
    assert re.fullmatch(rf"fl-lightning: error: worker 1 of 2 is gone \(.*\){saved}\n  fl-lightning fit .* auto\n", err)


def test_mistake_of_one_task_alone_is_said_by_it(in_haste):
    """It ended without a word, and the others waited for it."""
    code, out, err = in_haste.call("fit", "--config", "nosuch.yaml", env={"SLURM_PROCID": "1"})
    assert (code, out) == (2, "")
    assert err == "fl-lightning: error: --config: there is no such file, got 'nosuch.yaml' (process 1)\n"


def test_tasks_of_slurm_make_the_same_run(workplace, finished, assert_same_run):
    results = [task.result() for task in tasks_of_slurm(workplace, (), ())]
    assert [code for code, _, _ in results] == [0, 0], results
    assert ["folder  runs/run" in out for _, out, _ in results] == [True, False]
    assert_same_run(workplace.run, finished.run)
