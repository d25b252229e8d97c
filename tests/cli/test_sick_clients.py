"""A client that falls sick, as a user sees it."""

import csv
import shlex

import pytest

SICK = """\
from fl_lightning.methods.fedavg import FedAvg


class Sick(FedAvg):
    def send(self, data):
        message = super().send(data)
        if data.client == 2 and self.facts.round == 2:
            message.weights["model.head.bias"][0] = float("nan")
        return message
"""


@pytest.fixture
def workplace(workplace):
    workplace.write("mine.py", SICK)
    return workplace


def rows(workplace, name="metrics.csv"):
    with (workplace.run / name).open() as file:
        return list(csv.DictReader(file))


def test_run_stops_with_one_line_and_goes_on_without_the_client(workplace):
    arguments = ("fit", "--config", "exp.yaml", "--method", "mine.Sick", "--quiet")
    code, out, err = workplace.call(*arguments)
    assert code == 1
    assert out == ""
    assert err == (
        "fl-lightning: imports your own module mine for method\n"
        "fl-lightning: error: round 2, client 2, send: weight model.head.bias holds nan; last good checkpoint: "
        "runs/run/checkpoints/round-0001.ckpt; fl-lightning fit --config runs/run/config.yaml --resume auto continues "
        "there (--federation.on_client_error skip leaves sick clients out)\n"
    )
    assert [row["round"] for row in rows(workplace)] == ["1"]
    again = (*arguments, "--resume", "auto", "--federation.on_client_error", "skip")
    code, _, err = workplace.call(*again)
    assert code == 0, err
    told = "fl-lightning: round 2, client 2, send: weight model.head.bias holds nan; left out of the round\n"
    assert err.endswith(told)
    assert [row["skipped"] for row in rows(workplace)] == ["", "1", "0"]
    marked = [(row["round"], row["client"]) for row in rows(workplace, "clients.csv") if row["skipped"] == "1"]
    assert marked == [("2", "2")]
    code, _, err = workplace.call("evaluate", "runs/run", "--trust", "mine")
    assert code == 0, err


def test_sick_server_is_said_without_advice_on_clients(workplace):
    leaps = {"class_path": "ServerMomentum", "init_args": {"lr": 20.0}}
    workplace.change(method={"class_path": "FedAvg"}, federation={"server_optimizer": leaps, "max_growth": 20.0})
    workplace.change(federation={"on_client_error": "skip"})
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--quiet")
    assert code == 1
    assert "round 2, the server" in err
    assert "last good checkpoint" in err
    assert "on_client_error" not in err


def test_error_is_shown_as_it_was_raised_if_one_asks_for_it(workplace):
    arguments = ("fit", "--config", "exp.yaml", "--method", "mine.Sick", "--quiet")
    code, _, err = workplace.call(*arguments, env={"FL_LIGHTNING_TRACEBACK": "1"})
    assert code == 1
    assert "Traceback" in err


def test_client_that_falls_sick_in_its_last_round_counts_with_its_last_score(workplace):
    workplace.write("mine.py", SICK.replace("round == 2", "round == 3"))
    skip = ("--federation.on_client_error", "skip")
    workplace.fit("--method", "mine.Sick", "--quiet", *skip)
    code, out, err = workplace.call("evaluate", "runs/run", "--trust", "mine")
    assert code == 0, out + err
    assert "runs/run/models lacks the last model of client 2: counted as the run scored it, not computed again" in err


def test_growth_that_allows_nothing_is_refused(workplace):
    code, _, err = workplace.call("fit", "--config", "exp.yaml", "--federation.max_growth", "1")
    assert (code, err) == (2, "fl-lightning: error: federation.max_growth: must be > 1 and finite, got 1.0\n")


def test_code_of_ones_own_that_was_edited_or_taken_away_is_named_when_the_run_goes_on(workplace):
    arguments = ("fit", "--config", "exp.yaml", "--method", "mine.Sick", "--quiet")
    workplace.write("aside.py", "")
    workplace.write("mine.py", f"import aside\n{SICK}")
    assert workplace.call(*arguments)[0] == 1
    (workplace.run.parents[1] / "aside.py").unlink()
    workplace.write("mine.py", SICK.replace("== 2 and", "== 99 and"))
    code, _, err = workplace.call(*arguments, "--resume", "auto")
    assert code == 0, err
    assert "fl-lightning: your own code or files have changed (aside, mine): round 1 is of what it was before\n" in err
    last = str(int(rows(workplace)[-1]["round"]) + 1)
    code, _, err = workplace.call(*arguments, "--resume", "auto", "--federation.rounds", last)
    assert code == 0, err
    assert "changed" not in err


def test_error_in_a_callback_of_ones_own_is_one_line_with_its_place(workplace):
    base = "from fl_lightning.federation.callbacks import FederationCallback\n"
    watch = "class Watch(FederationCallback):\n    def on_round_end(self, loop, row):\n        {1: 0}[row['round']]\n"
    workplace.write("watch.py", base + watch)
    arguments = ("fit", "--config", "exp.yaml", "--federation.callbacks", "[watch.Watch]", "--quiet")
    code, _, err = workplace.call(*arguments)
    assert code == 1
    said = "fl-lightning: error: KeyError: 2 (watch.py:4); FL_LIGHTNING_TRACEBACK=1 shows the error as it was raised"
    [line] = err.splitlines()[1:]
    again = line.removeprefix(f"{said}; the rounds up to 1 are saved; continue with fl-lightning ")
    workplace.write("watch.py", base + watch.replace("{1: 0}", "{2: 0}"))
    code, _, err = workplace.call(*shlex.split(again), "--quiet", "--federation.rounds", "2")
    assert code == 0, err
    assert rows(workplace)[-1]["round"] == "2"
