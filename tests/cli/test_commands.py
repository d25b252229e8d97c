"""`evaluate`, `partition` and `list`, and short forms of what a configuration says."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning import catalog, run_commands
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.sickness import ClientError
from fl_lightning.sealed import save_tensors

WAYS = (
    "FedAvg",
    "FedProto",
    "PerFedAvg",
    "FedALA",
    "FedBABU",
    "FedFed",
    "FeSEM",
    "DFedPGP",
    "DisPFL",
    "FedCVAE",
    "DRDFL",
)
"""A method for each way to receive and to predict."""


@pytest.mark.parametrize("method", WAYS)
def test_evaluate_finds_the_figures_of_the_run_again(workplace, method):
    """With clients that sat out and rounds that were not evaluated."""
    workplace.draws = False
    workplace.change(method={"class_path": method}, federation={"rounds": 2, "participation": 0.5, "evaluate_every": 2})
    if method in ("FedCVAE", "DRDFL"):  # their sums over an image's values diverge under SGD at 0.2
        workplace.change(optimizer={"init_args": {"lr": 0.001}})
    workplace.fit("--quiet")
    before = workplace.files()
    code, out, err = workplace.call("evaluate", "runs/run")
    assert code == 0, err + out
    assert workplace.files() == before
    assert_all_equal(out)
    for name in ("Local-T", "Global-T", "Local-T_received", "Global-T_received"):
        line = next(line for line in out.splitlines() if f" {name} " in line)
        assert line.count("%") == 2, out


def assert_all_equal(out, at_least=10):
    line = next(line for line in out.splitlines() if "figures are equal" in line)
    equal, _, compared = line.split()[:3]
    assert equal == compared
    assert int(equal) >= at_least


def test_evaluate_compares_every_accuracy_of_a_full_run(finished):
    code, out, _ = finished.call("evaluate", "runs/run")
    assert code == 0
    assert_all_equal(out, at_least=4 * 5)


def test_evaluate_says_in_a_line_who_falls_sick_in_it(trial, monkeypatch, capsys):
    """As where the last receive of all had ended the run itself: it was a traceback."""
    run = trial(federation__rounds=1, name="sick-again").fit()

    def evaluate(self, checkpoint):
        raise ClientError("round 2, client 1, receive: went wrong")

    monkeypatch.setattr(BuiltExperiment, "evaluate", evaluate)
    assert run_commands.evaluate([str(run.folder)]) == 1
    assert capsys.readouterr().err.endswith("fl-lightning: error: round 2, client 1, receive: went wrong\n")


def test_evaluate_of_an_older_checkpoint_compares_what_the_next_round_received(finished):
    code, out, err = finished.call("evaluate", "runs/run", "--checkpoint", "runs/run/checkpoints/round-0002.ckpt")
    assert code == 0, err + out
    assert "round 2" in out
    assert_all_equal(out, at_least=2 * 5)


def test_evaluate_leaves_out_what_was_heard_in_the_round_itself(workplace):
    """Clients that train in turn receive in the next round what is only then sent; after the last nothing is."""
    ring = {"class_path": "Ring", "init_args": {"schedule": "sequential"}}
    workplace.change(method={"class_path": "FedAvg"}, federation={"exchange": ring})
    workplace.fit("--quiet")
    code, out, err = workplace.call("evaluate", "runs/run", "--checkpoint", "runs/run/checkpoints/round-0002.ckpt")
    assert code == 0, err + out
    assert "no figure" in out
    assert "Local-T_received" not in out
    code, out, err = workplace.call("evaluate", "runs/run")
    assert code == 0, err + out
    assert_all_equal(out, at_least=4 * 5)


@pytest.mark.parametrize("name", ["config.yaml", "none.ckpt"])
def test_evaluate_of_what_is_no_checkpoint_names_its_own_option(finished, name):
    code, _, err = finished.call("evaluate", "runs/run", "--checkpoint", f"runs/run/{name}")
    assert code == 2, err
    assert err.count("\n") == 1
    assert "error: --checkpoint: " in err


def test_evaluate_reports_a_figure_that_differs(finished, workplace):
    for name, content in finished.files().items():
        if content is not None:
            workplace.write(name, content)
    file = workplace.run / "models" / "00002.pt"
    model = torch.load(file, weights_only=True)
    model["model.head.weight"] *= -1
    save_tensors(file, model)
    code, out, err = workplace.call("evaluate", "runs/run")
    assert code == 1
    assert "Local-T" in err
    assert "Traceback" not in err
    assert "of 62 figures are equal" in out


def test_evaluate_says_that_a_table_was_cut(finished, workplace):
    """All figures that were left were equal, so that it ended with 0."""
    for name, content in finished.files().items():
        if content is not None:
            workplace.write(name, content)
    metrics = workplace.run / "metrics.csv"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    code, out, err = workplace.call("evaluate", "runs/run")
    assert code == 1, out
    assert f"{Path('runs/run/metrics.csv')} is not what the run wrote" in err
    code, _, err = workplace.call("dashboard", "--picture", "d.png", "runs/run")
    assert code == 0, err
    assert err == f"fl-lightning: {Path('runs/run')}: metrics.csv is not what the run wrote\n"
    lines[-1] = lines[-1].replace("0.", "0.1", 1)
    metrics.write_text("".join(lines))
    assert workplace.call("evaluate", "runs/run")[0] == 1


def test_evaluate_says_what_it_does_not_compute(finished, workplace):
    """Of what is missing it said nothing, and that all figures were equal."""
    for name, content in finished.files().items():
        if content is not None:
            workplace.write(name, content)
    whole = workplace.call("evaluate", "runs/run")
    assert whole[0] == 0
    assert "computed" not in whole[2]
    summary = workplace.run / "summary.json"
    summary.rename(workplace.run / "aside.json")
    code, _, err = workplace.call("evaluate", "runs/run")
    assert code == 0
    assert f"{Path('runs/run/summary.json')} is missing: nothing is compared with it" in err
    metrics = workplace.run / "metrics.csv"
    lines = metrics.read_text().splitlines(keepends=True)
    place = lines[0].split(",").index("Local-T")
    cells = lines[-1].split(",")
    cells[place] = "0.999"
    metrics.write_text("".join([*lines[:-1], ",".join(cells)]))
    assert workplace.call("evaluate", "runs/run")[0] == 1  # the models are there: it is computed
    metrics.write_text("".join(lines))
    (workplace.run / "aside.json").rename(summary)
    (workplace.run / "models").rename(workplace.run / "aside")
    code, _, err = workplace.call("evaluate", "runs/run")
    assert (code, err.count("are not computed: ")) == (0, 1)
    assert f"(Local-T, Global-T) are not computed: {Path('runs/run/models')} is missing" in err
    older = "runs/run/checkpoints/round-0002.ckpt"
    _, _, err = workplace.call("evaluate", "runs/run", "--checkpoint", older)
    assert "are not computed: round 2 is not the run's last, whose models alone are kept" in err


def test_evaluate_works_after_the_folder_was_moved(finished, workplace):
    for name, content in finished.files().items():
        if content is not None:
            workplace.write(name.replace("runs/run", "archive/other"), content)
    code, out, err = workplace.call("evaluate", "archive/other")
    assert code == 0, err + out
    assert_all_equal(out, at_least=20)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "config.yaml").unlink(), "no run"),
        (lambda run: (run / "config.yaml").write_text("method: ["), "config.yaml"),
        (lambda run: (run / "checkpoints" / "round-0003.ckpt").write_bytes(b"PK"), "cut short"),
        (lambda run: [path.unlink() for path in (run / "checkpoints").glob("*.ckpt")], "no checkpoint"),
        (lambda run: (run / "models" / "00002.pt").write_bytes(b""), "cut short"),
    ],
    ids=["no-config", "broken-config", "broken-checkpoint", "no-checkpoint", "broken-model"],
)
def test_evaluate_refuses_a_damaged_run(finished, workplace, damage, said):
    for name, content in finished.files().items():
        if content is not None:
            workplace.write(name, content)
    damage(workplace.run)
    code, _, err = workplace.call("evaluate", "runs/run")
    assert code == 2, err
    assert err.count("\n") == 1
    assert said in err


def test_partition_shows_a_table_and_draws_a_picture(workplace):
    code, out, err = workplace.call("partition", "--config", "exp.yaml", "--figure", "who.png")
    assert code == 0, err
    assert (workplace.path / "who.png").read_bytes().startswith(b"\x89PNG")
    assert set(workplace.files()) == {"exp.yaml", "who.png"}
    assert "who.png" in out


def test_partition_is_the_one_that_fit_uses(finished, workplace):
    code, out, _ = workplace.call("partition", "--config", "exp.yaml")
    assert code == 0
    record = json.loads((finished.run / "partition.json").read_text())
    assert record["hash"][:16] in out
    for counts in record["class_counts"]:
        assert any(all(str(n) in line for n in counts if n) for line in out.splitlines()), counts


def test_partition_refuses_bad_input(workplace):
    before = workplace.files()
    code, _, err = workplace.call("partition", "--config", "exp.yaml", "--data.partition.beta", "-1")
    assert code == 2
    assert err.startswith("fl-lightning: error: data.partition.beta")
    assert workplace.files() == before


@pytest.mark.parametrize("kind", list(catalog.KINDS))
def test_list_names_everything_with_one_line_and_the_paper(workplace, kind):
    code, out, err = workplace.call("list", kind)
    assert code == 0, err
    text = " ".join(out.split())
    entries = catalog.entries(kind)
    assert entries
    for entry in entries:
        line = next(line for line in out.splitlines() if line.split()[:1] == [entry.name])
        assert entry.summary, f"{entry.name} has no docstring"
        assert entry.summary.split()[0] in line
        for word in entry.paper.split():
            assert word in text


def test_list_of_exchanges_holds_what_a_configuration_may_name():
    assert [entry.name for entry in catalog.entries("exchanges")] == ["DirectedGraph", "RandomPeers", "Ring", "Star"]


def test_list_of_methods_cites_every_paper():
    without = [entry.name for entry in catalog.entries("methods") if not entry.paper and entry.name != "Local"]
    assert without == []


def test_list_of_terms_cites_every_paper_also_where_a_base_class_names_it():
    without = [entry.name for entry in catalog.entries("terms") if not entry.paper]
    assert without == []


@pytest.mark.parametrize("argv", [[], ["--help"], ["list", "--help"], ["evaluate", "--help"], ["partition", "--help"]])
def test_help_is_given(workplace, argv):
    code, out, err = workplace.call(*argv)
    assert code == 0
    assert err == ""
    assert "fl-lightning" in out


SCHEDULE = {3: [0, 4], "5-8": [2]}
NOBODY = {"probability": 0.0, "schedule": {}, "clients": []}
FORMS = [
    (0.3, {"probability": 0.3}),
    ("1e-1", {"probability": 0.1}),
    ([5], {"clients": [5]}),
    (SCHEDULE, {"schedule": {"3": [0, 4], "5-8": [2]}}),
    ({"probability": 0.1, "clients": [5]}, {"probability": 0.1, "clients": [5]}),
]


@pytest.mark.parametrize("written", ["file", "option"])
@pytest.mark.parametrize(("short", "whole"), FORMS)
def test_short_form_of_failures_stands_for_the_long_one(workplace, short, whole, written):
    workplace.write("failures.yaml", {"federation": {"failures": short}})
    flow = yaml.safe_dump(short, default_flow_style=True).split("\n")[0]
    argv = ["--config", "failures.yaml"] if written == "file" else ["--federation.failures", flow]
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *argv, "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["federation"]["failures"] == {**NOBODY, **whole}


def test_short_form_of_failures_is_kept_as_the_long_one(workplace):
    workplace.draws = False
    workplace.fit("--quiet", "--federation.failures", "{3: [0, 4], 5-8: [2]}", "--federation.rounds", "5")
    kept = yaml.safe_load((workplace.run / "config.yaml").read_text())["federation"]["failures"]
    assert kept == {**NOBODY, "schedule": {"3": [0, 4], "5-8": [2]}}
    assert workplace.call("evaluate", "runs/run")[0] == 0


def test_short_form_of_newcomers_is_their_number_and_leaves_the_rest_alone(workplace):
    workplace.draws = False
    workplace.change(federation={"rounds": 2, "newcomers": {"after": 1}, "failures": {"clients": [0]}})
    workplace.fit("--quiet", "--federation.newcomers", "2", "--federation.failures=0.2")
    federation = yaml.safe_load((workplace.run / "config.yaml").read_text())["federation"]
    assert federation["newcomers"] == {"clients": 2, "after": 1}
    assert federation["failures"] == {**NOBODY, "probability": 0.2, "clients": [0]}
