"""Signals that ask a run to stop: what is saved, how the process ends, and that the run goes on to the same bits."""

import os
import pty
import signal
import sys
import time

import pytest

from cli.processes import children, working_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
ROUNDS = "6"
SIGNALS = {"TERM": 143, "USR1": 138, "HUP": 129, "INT": 130}
SLOW = ("--federation.local_epochs", "30")
TWO = ("--federation.workers", "2")
SLURM = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"}
SHORTENED = ("plain-TERM", "plain-HUP", "slurm-TERM", "slurm-USR1", "workers-USR1", "workers-INT")
PLACES = {"plain": ({}, ()), "slurm": (SLURM, ()), "workers": ({}, TWO)}


@pytest.fixture(autouse=True)
def _no_pictures(workplace):
    workplace.draws = False


@pytest.fixture(scope="module")
def straight(make_workplace):
    """A run that nobody stopped."""
    place = make_workplace("straight")
    place.draws = False
    place.fit("--quiet", "--federation.rounds", ROUNDS)
    return place


@pytest.fixture
def scontrol(workplace):
    """A `scontrol` on the PATH that writes down what it is asked; returns that file."""
    said = workplace.path / "scontrol.txt"
    workplace.write("bin/scontrol", f'#!/bin/sh\necho "$@" >> {said}\n').chmod(0o755)
    workplace.environment = {**workplace.environment, "PATH": f"{workplace.path}/bin{os.pathsep}{os.environ['PATH']}"}
    return said


def started(place, *options, **more):
    """A run that has saved a round and has some left."""
    run = place.start("fit", "--config", "exp.yaml", "--federation.rounds", ROUNDS, *options, **more)
    run.wait_until((place.run / "checkpoints" / "round-0001.ckpt").exists)
    return run


@pytest.mark.parametrize(
    ("where", "name"), [cell.split("-") for cell in SHORTENED], ids=SHORTENED
)  # all twelve, at more moments: benchmarks/signals.py
def test_signal_stops_a_run_that_then_goes_on_bit_for_bit(workplace, straight, scontrol, where, name):
    environment, options = PLACES[where]
    run = started(workplace, *options, env=environment)
    os.kill(run.process.pid, getattr(signal, f"SIG{name}"))
    code, out, err = run.result()
    assert code == SIGNALS[name], err
    assert err.count("stopping once round") == 1
    assert err.count("\n") == 1
    assert "--resume auto" in out
    assert not list(workplace.path.rglob("hpc_ckpt*"))
    assert not scontrol.exists()
    workplace.fit("--quiet", "--federation.rounds", ROUNDS, "--resume", "auto", *options, env=environment)
    code, out, err = workplace.call("compare", workplace.run, straight.run)
    assert code == 0, out + err


EARLY = """\
import os
import signal

from fl_lightning.federation.callbacks import FederationCallback


class Early(FederationCallback):
    def on_run_start(self, loop):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_signal_before_the_first_round_says_that_there_is_none(workplace):
    workplace.write("early.py", EARLY)
    code, out, err = workplace.call("fit", "--config", "exp.yaml", "--federation.callbacks", "[early.Early]")
    assert code == 143, err
    assert err.splitlines()[-1] == "stopping before round 1; again to stop at once"
    told = "stopped before round 1; start with\n  fl-lightning fit --config runs/run/config.yaml --resume auto\n"
    assert out.endswith(told)
    assert not list((workplace.run / "checkpoints").glob("*.ckpt"))


def test_second_signal_ends_at_once_with_its_own_code(workplace):
    run = started(workplace, *SLOW)
    run.signal(signal.SIGTERM)
    run.wait_until(lambda: "stopping once" in run.err.read_text())
    run.signal(signal.SIGUSR1)
    code, _, err = run.result()
    assert code == 138
    saved = sorted((workplace.run / "checkpoints").glob("*.ckpt"))
    newest = int(saved[-1].stem.removeprefix("round-")) if saved else 0
    assert err.splitlines()[1] == f"stopped at once; {f'round {newest} is' if saved else 'nothing is'} saved"
    assert err.count("\n") == 2


SIGNALLING = """\
import os
import signal

from fl_lightning.federation.callbacks import FederationCallback


class Signals(FederationCallback):
    def __init__(self, number: int = 1):
        self.number = number

    def on_round_end(self, loop, row):
        for _ in range(self.number):
            os.kill(os.getpid(), signal.SIGTERM)
"""


def with_signals(workplace, number, *options):
    workplace.write("signalling.py", SIGNALLING)
    own = f"[{{class_path: signalling.Signals, init_args: {{number: {number}}}}}]"
    return workplace.call("fit", "--config", "exp.yaml", "--quiet", "--federation.callbacks", own, *options)


def test_signal_after_a_rounds_row_names_the_round_that_is_saved(workplace):
    """It named the next one, which never began."""
    code, _, err = with_signals(workplace, 1)
    assert code == 143
    assert "stopping once round 1 is saved; again" in err
    assert [path.name for path in (workplace.run / "checkpoints").glob("*.ckpt")] == ["round-0001.ckpt"]


@pytest.mark.parametrize("every", [0, 1])
def test_second_signal_does_not_say_that_what_is_lost_is_saved(every, workplace):
    code, _, err = with_signals(workplace, 2, "--federation.checkpoint.every", str(every))
    assert code == 143
    assert err.splitlines()[-1] == "stopped at once; nothing is saved"
    assert not list(workplace.run.glob("checkpoints/*.ckpt"))


AT_THE_END = """\
import os
import signal
import time

from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.tether import is_tethered
from fl_lightning.files import write_atomically
from fl_lightning.report import figures


def draw(rows, path, title):
    write_atomically(path, interrupted)


def interrupted(file):
    os.kill(os.getppid() if is_tethered() else os.getpid(), signal.SIGINT)
    time.sleep(20)


class Draws(FederationCallback):
    def on_run_start(self, loop):
        figures.learning_curves = draw
"""


@pytest.mark.parametrize("options", [(), TWO], ids=["plain", "workers"])
def test_signal_while_pictures_are_drawn_leaves_a_whole_run(workplace, options):
    """With workers it was stopped before a round was done, as it said, and a temporary file stayed."""
    workplace.draws = True
    workplace.write("at_the_end.py", AT_THE_END)
    own = ("--quiet", "--federation.rounds", "2", "--federation.callbacks", "[at_the_end.Draws]")
    code, _, err = workplace.call("fit", "--config", "exp.yaml", *own, *options)
    assert code == 130, err
    assert "before a round" not in err
    assert err.splitlines()[-1] == "stopped; the run is whole, in runs/run"
    assert (workplace.run / "summary.json").exists()
    assert not list(workplace.run.glob(".*.tmp"))


def test_hangups_of_one_lost_terminal_count_once(workplace):
    """A shell that ends sends one, the terminal that it led another."""
    run = started(workplace, *SLOW)
    run.signal(signal.SIGHUP)
    run.wait_until(lambda: "stopping once" in run.err.read_text())
    run.signal(signal.SIGHUP)
    code, out, err = run.result()
    assert code == 129
    assert "stopped after round" in out
    assert "at once\n" in err
    assert "stopped at once" not in err


def test_signal_to_every_process_of_a_job_saves_the_round(workplace, straight):
    """As a scheduler sends it, which knows nothing of who started whom."""
    run = started(workplace, *TWO)
    for process in [*children(run.process.pid), run.process.pid]:
        os.kill(process, signal.SIGTERM)
    code, out, err = run.result()
    assert code == 143, err
    assert "stopped after round" in out
    workplace.fit("--quiet", "--federation.rounds", ROUNDS, "--resume", "auto", *TWO)
    assert workplace.call("compare", workplace.run, straight.run)[0] == 0


def test_file_that_lightning_left_under_slurm_is_not_loaded(workplace, straight):
    """`hpc_ckpt_1.ckpt` lay in the run's folder, and every fit began from it."""
    run = started(workplace, env=SLURM)
    run.signal(signal.SIGUSR1)
    assert run.result()[0] == 138
    (workplace.run / "hpc_ckpt_1.ckpt").write_bytes(b"somebody's")
    workplace.fit("--quiet", "--federation.rounds", ROUNDS, "--resume", "auto", env=SLURM)
    assert workplace.call("compare", workplace.run, straight.run)[0] == 0


def test_nothing_is_said_of_requeueing(workplace):
    code, out, err = workplace.call("fit", "--config", "exp.yaml", "--federation.rounds", "2", env=SLURM)
    assert code == 0
    assert "requeu" not in (out + err).lower()
    assert err == ""


def test_job_that_requeues_itself_finishes(workplace, straight, scontrol):
    """The script of docs/guides/stopping.md, run again as often as it asks for that."""
    code = SIGNALS["USR1"]
    for _ in range(20):
        fit = workplace.start(
            "fit", "--config", "exp.yaml", "--federation.rounds", ROUNDS, "--resume", "auto", env=SLURM
        )
        seen = {path.name for path in workplace.run.glob("checkpoints/round-*.ckpt")}
        while fit.process.is_alive() and {p.name for p in workplace.run.glob("checkpoints/round-*.ckpt")} <= seen:
            time.sleep(0.002)
        if fit.process.is_alive():
            fit.signal(signal.SIGUSR1)
        code, _, err = fit.result()
        assert code in (0, SIGNALS["USR1"]), err
        if code == 0:
            break
    assert code == 0
    assert workplace.call("compare", workplace.run, straight.run)[0] == 0


def test_run_outlives_its_terminal_until_it_is_saved(workplace, straight):
    """The terminal goes, a SIGHUP comes, and every line that is printed fails from then on."""
    master, slave = pty.openpty()
    run = started(workplace, *TWO, terminal=os.ttyname(slave))
    os.close(slave)
    os.close(master)
    run.signal(signal.SIGHUP)
    run.process.join(60)
    assert run.process.exitcode == 129
    workplace.fit("--quiet", "--federation.rounds", ROUNDS, "--resume", "auto")
    assert workplace.call("compare", workplace.run, straight.run)[0] == 0


@pytest.mark.parametrize("moment", [0.0, 0.03, 0.1, 0.3])
def test_workers_end_with_their_starter_at_any_moment(workplace, moment):
    """From the first process on that it has started: while they are prepared, while they meet, while they run."""
    run = workplace.start(
        "fit", "--config", "exp.yaml", "--quiet", "--federation.rounds", "400", "--federation.workers", "3"
    )
    run.wait_until(lambda: children(run.process.pid))
    time.sleep(moment)
    run.kill()
    run.process.join()
    until = time.monotonic() + 10
    while working_in(workplace.path):
        assert time.monotonic() < until, "workers outlived the command"
        time.sleep(0.005)
