"""What `fit` understands and what it leaves behind."""

import csv
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
import yaml

from cli.run_files import without_seconds
from fl_lightning import catalog
from fl_lightning.command_line import SECTIONS
from fl_lightning.table.quantity import Figure, read_figure

ACCURACIES = ("Local-T", "Global-T", "Local-T_received", "Global-T_received")
SPREADS = ("", "_std", "_min", "_worst10", "_weighted", "_gini", "_jain")
MEASURES = [f"{measure}/{name}" for measure in ("eval_loss", "balanced_accuracy") for name in ACCURACIES]
OF_MEASURES = ("", "_std", "_weighted", "_undefined")
OWN_METHOD = """\
from fl_lightning.core.method import Method


class SharesTheHead(Method):
    \"\"\"Shares the head and keeps the body.\"\"\"

    shared = ("model.head",)

    def __init__(self, model, factor: float = 1.0) -> None:
        super().__init__(model)
        self.factor = factor
"""
OWN_DATASET = """\
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset


class Stripes(Dataset):
    def __init__(self, size: int = 120) -> None:
        self.size = size

    def arrays(self) -> Arrays:
        y = torch.arange(self.size) % 3
        x = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(0)) + y[:, None]
        return Arrays(x, y, self.size, ("a", "b", "c"))
"""
OWN_DIFFICULT = """\
import numpy as np
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partitions import Partition


class Difficult(Dataset):
    def arrays(self) -> Arrays:
        y = torch.tensor([0] + [1] * 12 + [0, 1, 2] + [0, 1, 2] * 20)
        x = torch.randn(len(y), 1, 8, 8, generator=torch.Generator().manual_seed(0)) + y[:, None, None, None]
        return Arrays(x, y, len(y), ("a", "b", "c"))


class Blocks(Partition):
    def assign(self, labels, num_clients, num_classes, rng):
        return np.split(np.arange(len(labels)), [1, 13, 16])
"""


@pytest.fixture(autouse=True)
def _no_pictures(workplace):
    """The run that all tests look at has them, and those that say so."""
    workplace.draws = False


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def resolved(place):
    return yaml.safe_load((place.run / "config.yaml").read_text())


def refit(place, *argv, **options):
    """Fit over whatever there is."""
    return place.fit("--quiet", "--overwrite", *argv, **options)


# --- the configuration --------------------------------------------------------------------------------------------


def test_later_configuration_wins(workplace):
    workplace.write("later.yaml", {"federation": {"rounds": 1}, "seed": 7, "optimizer": {"init_args": {"lr": 0.05}}})
    workplace.fit("--config", "later.yaml", "--quiet")
    config = resolved(workplace)
    assert (config["federation"]["rounds"], config["seed"]) == (1, 7)
    assert config["optimizer"]["class_path"].endswith("SGD")
    assert config["optimizer"]["init_args"]["lr"] == 0.05
    assert config["data"]["num_clients"] == 6


def test_options_win_over_files_and_the_last_one_wins(workplace):
    options = [
        "--federation.rounds",
        "5",
        "--federation.rounds=1",
        "--model.init_args.hidden=[4]",
        "--data.batch_size=128",
    ]
    workplace.fit("--quiet", *options, "--data.partition.beta", "0.7")
    config = resolved(workplace)
    assert config["federation"]["rounds"] == 1
    assert config["model"]["init_args"]["hidden"] == [4]
    assert config["data"]["batch_size"] == 128
    assert config["data"]["partition"]["init_args"] == {
        "beta": 0.7,
        "min_samples": 20,
        "balance": True,
        "fill_empty": False,
    }


def test_short_names_and_full_paths_are_the_same(workplace, finished):
    paths = {
        "method": {"class_path": "fl_lightning.methods.fedrep.FedRep"},
        "model": {"class_path": "fl_lightning.models.mlp.MLP", "init_args": {"hidden": [16, 8]}},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2}},
        "data": {"dataset": {"class_path": "fl_lightning.data.digits.Digits"}},
        "federation": {"exchange": {"class_path": "fl_lightning.federation.exchange.Star"}},
    }
    workplace.change(**paths)
    workplace.fit("--quiet")
    assert without_seconds(workplace.run / "metrics.csv") == without_seconds(finished.run / "metrics.csv")


@pytest.mark.parametrize("method", ["FedAvg", "FedProto", "Local", "fl_lightning.methods.fedavg.FedAvg"])
def test_class_on_the_command_line_drops_the_arguments_of_the_class_in_the_file(workplace, method):
    """As `--method FedAvg` does on the quickstart, whose file gives FedRep's arguments."""
    workplace.change(method={"class_path": "FedRep", "init_args": {"head_epochs": 1, "body_epochs": 1}})
    workplace.fit("--quiet", "--method", method, "--federation.rounds", "1")
    config = resolved(workplace)
    assert config["method"]["class_path"].rpartition(".")[2] == method.rpartition(".")[2]
    assert "head_epochs" not in config["method"].get("init_args", {})
    assert json.loads((workplace.run / "summary.json").read_text())["method"] == method.rpartition(".")[2]


@pytest.mark.parametrize("later", [["--method", "FedProto"], ["--config", "later.yaml"]])
def test_arguments_are_not_handed_on_to_another_method_that_has_some_of_the_same_name(workplace, later):
    """FedDW's weight means something else in FedProto; a model's arguments go with it as well."""
    extra = [{"class_path": "PrototypeContrast"}]
    workplace.change(method={"class_path": "FedDW", "init_args": {"weight": 10.0, "extra_terms": extra}})
    workplace.write("later.yaml", {"method": "FedProto"})
    options = ["--model", "FedProtoCNN", "--model", "MLP", "--print_config"]
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *later, *options)
    assert code == 0, err
    config = yaml.safe_load(out)
    arguments = config["method"]["init_args"]
    assert (arguments["weight"], arguments["extra_terms"]) == (1.0, None)
    assert config["model"]["init_args"]["hidden"] == [128, 64]


def test_same_class_named_again_keeps_its_arguments(workplace):
    workplace.write("later.yaml", {"method": {"init_args": {"body_epochs": 2}, "class_path": "FedRep"}})
    workplace.change(method={"class_path": "FedRep", "init_args": {"head_epochs": 3}})
    options = ["--config", "later.yaml", "--model", "fl_lightning.models.mlp.MLP", "--print_config"]
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *options)
    assert code == 0, err
    config = yaml.safe_load(out)
    assert config["method"]["init_args"] == {"head_epochs": 3, "body_epochs": 2, "extra_terms": None}
    assert config["model"]["init_args"]["hidden"] == [16, 8]


def test_environment_variables_set_what_the_file_does_not(workplace):
    config = yaml.safe_load((workplace.path / "exp.yaml").read_text())
    del config["seed"], config["federation"]
    workplace.write("exp.yaml", config)
    variables = {"FL_LIGHTNING_FIT__SEED": "3", "FL_LIGHTNING_FIT__FEDERATION__ROUNDS": "1"}
    workplace.fit("--quiet", env=variables)
    assert (resolved(workplace)["seed"], resolved(workplace)["federation"]["rounds"]) == (3, 1)


def test_options_win_over_environment_variables(workplace):
    workplace.fit("--quiet", "--seed", "4", "--federation.rounds", "1", env={"FL_LIGHTNING_FIT__SEED": "3"})
    assert resolved(workplace)["seed"] == 4


def test_printed_configuration_runs_to_the_same_numbers(workplace, finished):
    code, out, err = workplace.call("fit", "--config", "exp.yaml", "--print_config")
    assert code == 0, err
    assert not workplace.run.exists()
    workplace.write("printed.yaml", out)
    workplace.fit("--quiet", config="printed.yaml")
    assert without_seconds(workplace.run / "metrics.csv") == without_seconds(finished.run / "metrics.csv")


def test_configuration_in_the_folder_runs_to_the_same_numbers(workplace, finished):
    workplace.write("again.yaml", (finished.run / "config.yaml").read_text())
    workplace.fit("--quiet", config="again.yaml")
    for name in ("metrics.csv", "clients.csv", "config.yaml", "partition.json"):
        assert without_seconds(workplace.run / name) == without_seconds(finished.run / name)


def test_help_names_every_option_with_type_and_default(workplace):
    code, out, err = workplace.call("fit", "--help")
    assert code == 0
    assert err == ""
    text = " ".join(out.split())
    for section in SECTIONS:
        assert f"--{section}" in text
    for owner, path in catalog.GROUPS.items():
        assert catalog.options(path)
        for name in catalog.options(path):
            assert f"--{owner}.{name}" in text
    for name in catalog.options("fl_lightning.federation.settings.EvaluationPolicy"):
        assert f"--federation.evaluate.{name}" in text
    for name in catalog.options("fl_lightning.federation.checkpoint.CheckpointPolicy"):
        assert f"--federation.checkpoint.{name}" in text
    options = ("--resume", "--overwrite", "--quiet")
    for said in (*options, "(type: int, default: 20)", "fraction of the clients in a round"):
        assert said in text


def test_help_of_a_class_shows_its_arguments(workplace):
    code, out, _ = workplace.call("fit", "--method.help", "FedRep")
    assert code == 0
    assert "head_epochs" in out
    assert "default: 1" in out


def test_own_method_and_own_data_set_are_found_by_their_class_path(workplace):
    workplace.write("mine.py", OWN_METHOD + "\n\n" + OWN_DATASET)
    workplace.change(
        method={"class_path": "mine.SharesTheHead", "init_args": {"factor": 2.0}},
        data={"dataset": {"class_path": "mine.Stripes", "init_args": {"size": 90}}, "partition": {"class_path": "IID"}},
    )
    out = workplace.fit()
    summary = json.loads((workplace.run / "summary.json").read_text())
    assert summary["method"] == "SharesTheHead"
    assert summary["communication"]["uplink_params"] == 3 * 6 * (8 * 3 + 3)
    assert "SharesTheHead" in out
    code, out, err = workplace.call("evaluate", "runs/run", "--trust", "mine")
    assert code == 0, err + out


def test_extra_terms_are_added_from_the_configuration(workplace):
    term = {"class_path": "PrototypeAlignment", "init_args": {"weight": 0.5}}
    workplace.change(method={"class_path": "FedAvg", "init_args": {"extra_terms": [term]}})
    workplace.fit("--quiet")
    rows = table(workplace.run / "metrics.csv")
    assert float(rows[0]["loss/prototype_alignment"]) == 0
    assert float(rows[2]["loss/prototype_alignment"]) > 0
    last = {name: float(rows[2][name]) for name in ("loss", "loss/cross_entropy", "loss/prototype_alignment")}
    assert last["loss"] == pytest.approx(last["loss/cross_entropy"] + 0.5 * last["loss/prototype_alignment"], rel=1e-5)


@pytest.mark.parametrize("command", [["-m", "fl_lightning", "--version"], ["-m", "fl_lightning", "--help"]])
def test_real_command_answers(command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "fl-lightning" in done.stdout


def test_real_command_runs_an_experiment(workplace, finished, environment):
    """`python -m fl_lightning` without a server that forks: the same numbers; matplotlib's windows are none of it."""
    import os

    variables = {**os.environ, **{name: value for name, value in environment.items() if value is not None}}
    variables["MPLBACKEND"] = "Qt4Agg"  # which matplotlib no longer knows: its import ended, and the command
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "exp.yaml"]
    done = subprocess.run(command, cwd=workplace.path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert without_seconds(workplace.run / "metrics.csv") == without_seconds(finished.run / "metrics.csv")


# --- what it prints -------------------------------------------------------------------------------------------------


def test_run_prints_its_rounds_and_its_summary(finished):
    for said in ("1/3", "3/3", "Local-T", "Global-T", "loss", "communicated", "runs/run", "mean of", "best", "last"):
        assert said in finished.out


def test_run_ends_with_where_to_look(finished):
    *_, folder, report = finished.out.splitlines()
    assert folder == "folder  runs/run"
    assert report == "report  fl-lightning report runs/run"


def test_quiet_prints_nothing(workplace):
    workplace.draws = True
    assert workplace.fit("-q", "--federation.rounds", "1") == ""


BREAKS = """
from matplotlib.backends.backend_agg import FigureCanvasAgg
from fl_lightning.federation.callbacks import FederationCallback


class Breaks(FederationCallback):
    def on_round_end(self, loop, row):
        draw = FigureCanvasAgg.print_figure
        broken = iter([True, False])

        def print_figure(*args, **options):
            if next(broken):
                raise RuntimeError("latex could not be found")
            return draw(*args, **options)

        FigureCanvasAgg.print_figure = print_figure
"""


def test_a_picture_that_matplotlib_cannot_draw_ends_no_run(workplace):
    """It was a traceback and exit code 1, before the results were printed; the other picture was not drawn."""
    workplace.write("breaks.py", BREAKS)
    workplace.draws = True
    own = ("--federation.rounds", "1", "--federation.callbacks", "[breaks.Breaks]")
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *own)
    assert code == 0, err
    why = "matplotlib cannot draw it: RuntimeError: latex could not be found"
    assert err.splitlines()[1:] == [f"fl-lightning: runs/run/curves.png: {why}"]  # after what is imported
    assert "communicated" in out
    assert (workplace.run / "partition.png").is_file()
    assert not (workplace.run / "curves.png").exists()


# --- the run's folder -----------------------------------------------------------------------------------------------


def test_folder_holds_what_readers_of_runs_expect(finished):
    names = {path.name for path in finished.run.iterdir()} - {".lock"}
    assert names == {
        "config.yaml", "metrics.csv", "clients.csv", "partition.json", "summary.json",
        "checkpoints", "models", "curves.png", "partition.png",
    }  # fmt: skip
    assert {path.name for path in finished.path.iterdir()} == {"exp.yaml", "runs"}


def test_metrics_have_the_columns_of_the_design(finished):
    rows = table(finished.run / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    wanted = {name + spread for name in ACCURACIES for spread in SPREADS} | {
        "round", "Server-T", "receive_drop", "uplink_params", "downlink_params", "uplink_bytes", "downlink_bytes",
        "participants", "missing", "loss", "loss/cross_entropy",
        "seconds", "seconds_fit", "seconds_evaluate", "seconds_exchange", "seconds_save",
        "Local-T_hurt", "Local-T_received_hurt", "eval_loss/Server-T", "balanced_accuracy/Server-T",
    }  # fmt: skip
    wanted |= {name + spread for name in MEASURES for spread in OF_MEASURES}
    assert set(rows[0]) == wanted
    for row in rows:
        for name in ACCURACIES:
            low, worst, mean = (float(row[name + spread]) for spread in ("_min", "_worst10", ""))
            assert 0 <= low <= worst <= mean + 1e-12
            assert mean <= 1
        assert row["Server-T"] == ""  # FedRep has no global model
        assert float(row["loss"]) > 0
        assert int(row["uplink_params"]) == 6 * (64 * 16 + 16 + 16 * 8 + 8)
        assert int(row["uplink_bytes"]) == 4 * int(row["uplink_params"])
        assert int(row["participants"]) == 6
        assert int(row["missing"]) == 0
    assert rows[0]["receive_drop"] == ""
    for before, row in itertools.pairwise(rows):
        drop = float(before["Local-T"]) - float(row["Local-T_received"])
        assert float(row["receive_drop"]) == pytest.approx(drop, abs=1e-12)


def test_every_number_of_the_summary_may_stand_in_a_table(finished):
    summary = json.loads((finished.run / "summary.json").read_text())
    numbers = [key for key, value in summary.items() if type(value) in (int, float) and key not in ("seed", "format")]
    for group in ("communication", "parameters"):
        numbers += [f"{group}.{key}" for key in summary[group]]
    assert len(numbers) > 10
    for name in numbers:
        assert read_figure(f"summary.{name}", "figure") == Figure(name, "summary")


def test_clients_have_the_columns_of_the_design_and_agree_with_the_metrics(finished):
    rows = table(finished.run / "clients.csv")
    wanted = {"round", "client", "participated", "failed", "num_train", "num_test", *ACCURACIES, *MEASURES, "loss"}
    assert set(rows[0]) == wanted
    assert len(rows) == 3 * 6
    metrics = table(finished.run / "metrics.csv")
    for number, row in enumerate(metrics, start=1):
        own = [r for r in rows if r["round"] == str(number)]
        assert [r["client"] for r in own] == list(map(str, range(6)))
        for name in ACCURACIES:
            values = torch.tensor([float(r[name]) for r in own], dtype=torch.float64)
            weights = torch.tensor([float(r["num_test"]) for r in own], dtype=torch.float64)
            assert float(row[name]) == pytest.approx(float(values.mean()))
            assert float(row[f"{name}_std"]) == pytest.approx(float(values.std(correction=0)))
            assert float(row[f"{name}_weighted"]) == pytest.approx(float((values * weights).sum() / weights.sum()))
        assert float(row["loss"]) == pytest.approx(sum(float(r["loss"]) for r in own) / 6)


def test_partition_is_written_with_its_hash(finished):
    partition = json.loads((finished.run / "partition.json").read_text())
    summary = json.loads((finished.run / "summary.json").read_text())
    assert partition["hash"] == summary["partition_hash"]
    indices = [i for client in partition["clients"] for part in ("train", "validation", "test") for i in client[part]]
    assert sorted(indices) == list(range(1797))


def test_partition_does_not_depend_on_the_method(workplace, finished):
    workplace.fit("--quiet", "--method", "FedAvg", "--federation.rounds", "1", "--federation.participation", "0.5")
    assert (workplace.run / "partition.json").read_bytes() == (finished.run / "partition.json").read_bytes()


def test_summary_says_last_best_and_mean(finished):
    summary = json.loads((finished.run / "summary.json").read_text())
    rows = table(finished.run / "metrics.csv")
    assert summary["finished"] is True
    assert (summary["rounds"], summary["clients"], summary["method"], summary["seed"]) == (3, 6, "FedRep", 0)
    for name in ACCURACIES:
        values = [float(row[name]) for row in rows]
        assert summary["last"][name] == values[-1]
        assert summary["best"][name]["value"] == max(values)
        assert summary["best"][name]["round"] == values.index(max(values)) + 1
        assert summary["mean_last_10"][name] == pytest.approx(math.fsum(values) / 3)
    received = {n + s for n in ("Local-T_received", "Global-T_received") for s in SPREADS} | {"Local-T_received_hurt"}
    received |= {n + s for n in MEASURES if n.endswith("_received") for s in OF_MEASURES}
    assert set(summary["final_received"]) == received
    assert (summary["best_on"], "best_by" in summary, "stopped" in summary) == ("test", False, False)
    assert "Server-T" not in summary["last"]
    sent = summary["communication"]
    assert sent["uplink_params"] == sum(int(row["uplink_params"]) for row in rows)
    assert sent["uplink_params_per_client"] == sent["uplink_params"] / sum(int(row["participants"]) for row in rows)
    assert sent["uplink_params_Mi_per_round"] == pytest.approx(sent["uplink_params"] / len(rows) / 2**20)
    assert summary["clients_without_test"] == []


def test_what_does_not_apply_is_empty_and_never_zero(workplace):
    workplace.change(
        method={"class_path": "FedAvg"},
        data={"split": "global"},
        federation={"rounds": 4, "participation": 0.5, "evaluate_every": 2, "evaluate": {"received": False}},
    )
    workplace.fit("--quiet")
    rows = table(workplace.run / "metrics.csv")
    assert set(rows[0]) & {"Local-T", "Local-T_received", "Global-T_received"} == set()
    assert [row["Global-T"] != "" for row in rows] == [False, True, False, True]
    assert [row["Server-T"] != "" for row in rows] == [False, True, False, True]
    assert [row["receive_drop"] for row in rows] == [""] * 4
    clients = table(workplace.run / "clients.csv")
    assert {row["num_test"] for row in clients} == {"0"}
    for row in clients:
        assert (row["loss"] != "") == (row["participated"] == "1")
        assert (row["Global-T"] != "") == (row["round"] in ("2", "4"))
    summary = json.loads((workplace.run / "summary.json").read_text())
    assert "Local-T" not in summary["last"]
    assert summary["final_received"] == {}
    assert summary["participants_per_round"] == 3


def test_name_is_made_up_where_none_is_given(workplace):
    config = yaml.safe_load((workplace.path / "exp.yaml").read_text())
    del config["name"]
    workplace.write("exp.yaml", config)
    workplace.fit("--quiet", "--federation.rounds", "1", "--seed", "2")
    assert (workplace.path / "runs" / "fedrep-digits-2" / "metrics.csv").exists()


def test_overwrite_replaces_the_run_and_leaves_foreign_files_alone(workplace):
    workplace.draws = True
    refit(workplace, "--federation.rounds", "2")
    foreign = {"notes.txt": "mine", "checkpoints.bak/a": "mine too", "sub/metrics.csv": "round\n"}
    for name, content in foreign.items():
        workplace.write(f"runs/run/{name}", content)
    refit(workplace, "--federation.rounds", "1", "--seed", "1")
    assert {name: (workplace.run / name).read_text() for name in foreign} == foreign
    assert resolved(workplace)["seed"] == 1
    assert len(table(workplace.run / "metrics.csv")) == 1
    assert [path.name for path in (workplace.run / "checkpoints").glob("*.ckpt")] == ["round-0001.ckpt"]
    states = workplace.run / "checkpoints" / "clients"
    assert [path.name for path in states.iterdir()] == ["r0001-w0.states"]


def test_same_experiment_gives_the_same_files(workplace, finished, assert_same_run):
    workplace.fit("--quiet")
    assert_same_run(workplace.run, finished.run)


# --- difficult clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["FedAvg", "FedRep", "FedProto", "PerFedAvg", "DRDFL"])
def test_clients_of_one_sample_one_class_and_less_than_a_batch_are_trained_and_evaluated(workplace, method):
    """Client 0 has one sample and so no test sample, client 1 one class, client 2 fewer samples than a batch."""
    workplace.write("mine.py", OWN_DIFFICULT)
    dataset, partition = {"class_path": "mine.Difficult"}, {"class_path": "mine.Blocks"}
    workplace.change(
        method={"class_path": method},
        data={"dataset": dataset, "partition": partition, "num_clients": 4, "batch_size": 5},
        federation={"rounds": 1},
        optimizer={"init_args": {"lr": 0.001}},  # low enough for losses that are sums over an image's values
    )
    workplace.draws = method == "FedRep"
    out = workplace.fit()
    clients = [row for row in table(workplace.run / "clients.csv") if row["round"] == "1"]
    assert [int(row["num_train"]) for row in clients] == [1, 9, 2, 45]
    assert [int(row["num_test"]) for row in clients] == [0, 3, 1, 15]
    assert all(float(row["loss"]) >= 0 for row in clients)
    assert clients[0]["Local-T"] == ""
    values = [float(row["Local-T"]) for row in clients[1:]]
    last = table(workplace.run / "metrics.csv")[-1]
    assert float(last["Local-T"]) == pytest.approx(sum(values) / 3)
    assert json.loads((workplace.run / "summary.json").read_text())["clients_without_test"] == [0]
    assert "client 0" in " ".join(out.split())


def test_precision_flag_of_the_trainer_works(workplace, finished):
    workplace.fit("--quiet", "--trainer.precision", "bf16-mixed", "--federation.rounds", "1")
    row, exact = (table(place.run / "metrics.csv")[0] for place in (workplace, finished))
    assert float(row["loss"]) != float(exact["loss"])
    assert float(row["loss"]) == pytest.approx(float(exact["loss"]), rel=0.05)
