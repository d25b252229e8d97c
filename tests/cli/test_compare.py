"""`compare`: are two runs equal, and where do they first differ?"""

import shutil
import subprocess
import sys

import pytest

METRICS = "round,loss,Local-T,seconds\n1,0.5,0.25,1.0\n2,0.4,,1.1\n3,nan,0.75,1.2\n"
CLIENTS = "round,client,Local-T\n1,0,0.2\n1,1,0.3\n2,0,0.4\n2,1,0.5\n3,0,0.7\n3,1,0.8\n"
CONFIG = "seed: 0\nname: a\nmethod: {class_path: FedAvg}\nmodel: [{class_path: MLP}, {class_path: CNN}]\n"


@pytest.fixture
def runs(workplace):
    """Writes folders `a` and `b`; the second with changes: file -> (old, new)."""

    def write(**changes):
        for run in ("a", "b"):
            for name, content in (("metrics", METRICS), ("clients", CLIENTS), ("config", CONFIG)):
                old, new = changes.get(name, ("", "")) if run == "b" else ("", "")
                assert old in content
                workplace.write(f"{run}/{name}.{'yaml' if name == 'config' else 'csv'}", content.replace(old, new))
        return workplace.call("compare", "a", "b")

    return write


def test_run_equals_its_repetition(finished, workplace):
    shutil.copytree(finished.path / "runs", workplace.path / "first")
    workplace.draws = False
    workplace.fit("--quiet", "--name", "again", "--seed", "0")
    code, out, err = workplace.call("compare", "first/run", "runs/again")
    assert (code, err) == (0, "")
    assert out.startswith("name: 'run' | 'again'\nequal: 3 rounds, ")
    assert out.endswith(" figures, bit for bit\n")


@pytest.mark.parametrize("metrics", [("1.1\n", "7.7\n"), ("seconds\n", "seconds_fit\n")])
def test_equal_runs_may_differ_in_seconds_and_nan_equals_nan(runs, metrics):
    code, out, err = runs(metrics=metrics, config=("name: a", "name: b"))
    assert (code, err) == (0, "")
    assert out == "name: 'a' | 'b'\nequal: 3 rounds, 11 figures, bit for bit\n"


def test_first_differing_round_is_shown_with_both_values(runs):
    code, out, _ = runs(metrics=("0.4,,", "0.40000000000000002,0.5,"), clients=("2,1,0.5", "2,1,0.6"))
    assert code == 1
    assert "first differing round: 2" in out
    rows = [line.split() for line in out.splitlines() if ".csv" in line]
    assert [[cell for cell in row if cell != "│"] for row in rows] == [
        ["metrics.csv", "Local-T", "–", "0.5"],
        ["clients.csv", "client", "1:", "Local-T", "0.5", "0.6"],
    ]
    assert out.endswith("different in 1 of the 2 rounds from round 2 on, of 3\n")


@pytest.mark.parametrize("stopped", [False, True])
def test_what_runs_end_with_is_compared(stopped, workplace, runs):
    """A rule that only the last exchange shows was none: equal, bit for bit, of runs whose final figures were apart."""
    for run, figure in (("a", 0.8456), ("b", 0.8261)):
        final = "null" if stopped and run == "b" else f'{{"Local-T_received": {figure}}}'
        workplace.write(f"{run}/summary.json", f'{{"rounds": 3, "final_received": {final}}}')
    code, out, err = runs()
    assert (code, err) == (0 if stopped else 1, "")
    assert ("first differing round: 3" in out) is not stopped
    assert ("final_received.Local-T_received" in out) is not stopped


def test_who_sends_to_whom_is_compared(workplace, runs):
    for run, share in (("a", 0.5), ("b", 0.25)):
        workplace.write(f"{run}/topology.csv", f"round,sender,receiver,share\n1,0,1,0.5\n2,1,0,{share}\n")
    code, out, _ = runs()
    assert code == 1
    assert "client 1 to client 0: share" in out


@pytest.mark.parametrize(
    "changes",
    [{"metrics": ("2,0.4,,1.1\n", "2,0.9,,1.1\n2,0.4,,1.1\n")}, {"clients": ("2,0,0.4\n", "2,0,0.4\n2,0,0.4\n")}],
)
def test_a_row_that_stands_there_twice_is_a_difference(changes, runs):
    """The last of them was compared, whatever the others said."""
    code, out, _ = runs(**changes)
    assert code == 1
    assert "written twice" in out
    assert "first differing round: 2" in out


def test_difference_in_the_last_bit_is_found(runs):
    code, out, _ = runs(clients=("2,0,0.4", "2,0,0.4000000000000001"))
    assert code == 1
    assert "client 0: Local-T" in out
    assert "0.4000000000000001" in out


def test_runs_that_differ_from_some_round_on(runs):
    code, out, _ = runs(metrics=("2,0.4,,1.1\n3,nan", "2,0.3,,1.1\n3,0.2"))
    assert code == 1
    assert "different in every round from round 2 on, of 3" in out


def test_shorter_run_is_equal_as_far_as_it_goes(runs):
    code, out, _ = runs(metrics=("3,nan,0.75,1.2\n", ""), clients=("3,0,0.7\n3,1,0.8\n", ""))
    assert code == 1
    assert "a has 3 rounds, b has 2" in out
    assert "equal as far as both go: 2 rounds, 7 figures, bit for bit" in out
    assert "equal: " not in out


def test_keys_of_the_configuration_that_differ_are_dotted(runs):
    _, out, _ = runs(config=(", {class_path: CNN}]", ", {class_path: MLP, clients: 2}]"))
    assert out.splitlines()[:2] == ["model.1.class_path: 'CNN' | 'MLP'", "model.1.clients: – | 2"]


@pytest.mark.parametrize("broken", ["", "method: [", "- 1", b"\xff\xfe"], ids=["missing", "broken", "list", "binary"])
def test_folder_that_holds_no_run_is_refused(runs, workplace, broken):
    runs()
    (workplace.path / "b" / "config.yaml").unlink()
    if broken:
        workplace.write("b/config.yaml", broken)
    code, out, err = workplace.call("compare", "a", "b")
    assert (code, out) == (2, "")
    assert err.startswith("fl-lightning: error: compare: ")
    assert err.count("\n") == 1


def test_one_folder_is_not_enough(workplace):
    code, _, err = workplace.call("compare", "a")
    assert code == 2
    assert err.count("\n") == 1


def test_compare_imports_no_torch(runs, workplace):
    runs()
    command = (
        "from fl_lightning.cli import main; import sys, atexit; atexit.register(lambda: print('torch' in sys.modules))"
    )
    argv = [sys.executable, "-c", f"{command}; main(['compare', 'a', 'b'])"]
    done = subprocess.run(argv, cwd=workplace.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")
