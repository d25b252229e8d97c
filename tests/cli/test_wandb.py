"""W&B's own offline record of a run, read back and compared with the run's files."""

import csv
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("wandb")

from fl_lightning.federation.stopwatch import COLUMNS
from fl_lightning.report.wandb_file import read_history, read_records, run_files

RUN = {
    "method": {
        "class_path": "FedAvg",
        "init_args": {
            "extra_terms": [
                {"class_path": "ClassRelation", "init_args": {"weight": 0.1}},
                {"class_path": "PrototypeAlignment", "init_args": {"weight": 0.1}},
            ]
        },
    },
    "federation": {"rounds": 4, "participation": 0.7, "evaluate_every": 2},
    "logger": {
        "class_path": "WandbLogger",
        "init_args": {"project": "tests", "labels": {"tags": ["a", "b"], "notes": "more", "job_type": "kind"}},
    },
}
OFFLINE = {"WANDB_API_KEY": None, "WANDB_MODE": None, "WANDB_DATA_DIR": None, "NETRC": "no-such-file"}


def rows_of(path):
    with path.open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def run_id(run):
    return json.loads((run / "wandb.json").read_text())["id"]


def history(run):
    """What W&B has of a run, process by process; a dict's own fields become keys with dots."""
    return [read_history(path) for path in run_files(run, run_id(run))]


def merged_records(run, kind):
    """The updates of one kind in the newest file, as a flat mapping."""
    found = {}
    for record in read_records(run_files(run, run_id(run))[-1]):
        if record.WhichOneof("record_type") == kind:
            for item in getattr(record, kind).update:
                found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def run_records(run):
    """What each process told W&B that the run is, oldest first."""
    files = run_files(run, run_id(run))
    kind = "run"
    return [next(r.run for r in read_records(path) if r.WhichOneof("record_type") == kind) for path in files]


def exit_codes(run):
    records = (record for path in run_files(run, run_id(run)) for record in read_records(path))
    return [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]


def assert_same_values(row, logged, but=()):
    """A row of metrics.csv and W&B's, both ways."""
    plain = {name: value for name, value in logged.items() if isinstance(value, (int, float))}
    plain = {name: value for name, value in plain.items() if not name.startswith(("_", "clients/", "shared/"))}
    assert plain.keys() == row.keys()
    assert logged["_step"] == row["round"]
    for name, value in row.items():
        assert name in but or plain[name] == value, name


@pytest.fixture(scope="module")
def recorded(make_workplace):
    """A finished run with W&B, offline because there is no key; what it printed is in `recorded.printed`."""
    place = make_workplace("wandb")
    place.draws = False
    place.change(**RUN)
    place.printed = place.call("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE)
    assert place.printed[0] == 0, place.printed[2]
    return place


# --- one run --------------------------------------------------------------------------------------------------------


def test_every_value_of_metrics_csv_is_logged_under_its_round(recorded):
    (logged,) = history(recorded.run)
    rows = rows_of(recorded.run / "metrics.csv")
    assert len(logged) == len(rows) == 4
    for row, values in zip(rows, logged, strict=True):
        assert_same_values(row, values)
    for name in ("Local-T", "Local-T_std", "Local-T_min", "Local-T_received", "Global-T", "Server-T"):
        assert name in logged[3]
    assert {"loss", "loss/class_relation", "loss/prototype_alignment", "uplink_bytes", "seconds"} <= logged[0].keys()


def test_round_is_the_step_axis_of_every_metric(recorded):
    records = read_records(run_files(recorded.run, run_id(recorded.run))[0])
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    named = {metric.name: metric.step_metric for metric in metrics if metric.name}  # W&B 0.19 names every metric itself
    assert named.pop("round") == ""
    assert set(named.values()) <= {"round"}
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["round"]


def test_summary_has_last_best_and_final_values(recorded):
    said, written = merged_records(recorded.run, "summary"), json.loads((recorded.run / "summary.json").read_text())
    for name, value in rows_of(recorded.run / "metrics.csv")[-1].items():
        assert said[name] == value
    for name, best in written["best"].items():
        assert (said[f"best/{name}"], said[f"best_round/{name}"]) == (best["value"], best["round"])
    rows = rows_of(recorded.run / "metrics.csv")
    costs = [name for name in rows[-1] if name.startswith(("loss", "receive_drop", "seconds", "uplink", "downlink"))]
    assert {"loss", "loss/class_relation", "seconds", "uplink_bytes", "downlink_params"} < set(costs)
    for name in costs:
        value, round = min((row[name], row["round"]) for row in rows if name in row)
        assert (said[f"best/{name}"], said[f"best_round/{name}"]) == (value, round)
    for part in ("mean_last_10", "final_received", "communication"):
        assert written[part]
        for name, value in written[part].items():
            assert said[f"{part}/{name}"] == value
    assert said["finished"] is True


def test_config_says_what_the_run_is(recorded):
    config, written = merged_records(recorded.run, "config"), json.loads((recorded.run / "summary.json").read_text())
    assert config["method_name"] == "FedAvg"
    for name in ("partition_hash", "git_commit", "versions", "seed"):
        assert config[name] == written[name]
    assert config["versions"]["torch"]
    resolved = yaml.safe_load((recorded.run / "config.yaml").read_text())
    assert {name: config[name] for name in ("method", "data", "federation", "model")} == {
        name: resolved[name] for name in ("method", "data", "federation", "model")
    }
    (run,) = run_records(recorded.run)
    assert (run.project, run.run_group, run.display_name) == ("tests", "FedAvg", "run")
    assert (list(run.tags), run.notes, run.job_type) == (["a", "b"], "more", "kind")


def test_table_and_histograms_of_the_clients(recorded):
    (logged,) = history(recorded.run)
    files = run_files(recorded.run, run_id(recorded.run))[0].parent / "files"
    counts = np.array(json.loads((recorded.run / "partition.json").read_text())["class_counts"])
    clients = rows_of(recorded.run / "clients.csv")
    for values in logged:
        own = [row for row in clients if row["round"] == values["round"]]
        if values["round"] % 2:
            assert not [name for name in values if name.startswith("clients/") and "partition" not in name]
            continue
        table = json.loads((files / values["clients/table.path"]).read_text())
        rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
        assert [row.pop("classes") for row in rows] == (counts > 0).sum(1).tolist()
        for row, written in zip(rows, own, strict=True):
            assert {name: value for name, value in row.items() if value is not None} == {
                name: value for name, value in written.items() if name != "round"
            }
        for name in ("Local-T", "Local-T_received"):
            assert values[f"clients/{name}._type"] == "histogram"
            expected, edges = np.histogram([row[name] for row in own if name in row], bins=20, range=(0, 1))
            assert values[f"clients/{name}.values"] == expected.tolist()
            assert values[f"clients/{name}.bins"] == pytest.approx(edges.tolist())


def test_pictures_of_the_partition_and_of_what_is_shared(recorded):
    (logged,) = history(recorded.run)
    files = run_files(recorded.run, run_id(recorded.run))[0].parent / "files"
    drawn = {}
    for values in logged:
        for name, value in values.items():
            if name.endswith("._type") and value == "image-file":
                assert (files / values[name.replace("_type", "path")]).read_bytes().startswith(b"\x89PNG")
                drawn.setdefault(name.removesuffix("._type"), []).append(values["round"])
    shared = ("shared/soft_labels", "shared/class_relation", "shared/prototypes")
    assert drawn == {"clients/partition": [1], **{name: [1, 4] for name in shared}}


def test_one_line_says_that_it_is_offline_and_how_to_send_it(recorded):
    _, out, err = recorded.printed
    assert out == ""
    line = f"wandb sync runs/run/wandb/offline-run-*-{run_id(recorded.run)}*"
    assert err.count("\n") == 1
    assert "no key" in err
    assert err.rstrip().endswith(line)
    assert len(list(recorded.path.glob(line.split()[-1]))) == 1


def test_files_of_wandb_lie_in_the_runs_folder(recorded):
    folder = run_files(recorded.run, run_id(recorded.run))[0].parent
    assert folder.parent == recorded.run / "wandb"
    staged = [
        Path(entry.local_path)
        for record in read_records(folder / f"run-{run_id(recorded.run)}.wandb")
        if record.WhichOneof("record_type") == "artifact"
        for entry in record.artifact.manifest.contents
    ]
    assert len(staged) == 2
    assert all(path.is_file() and recorded.run in path.parents for path in staged)


# --- more than one process ------------------------------------------------------------------------------------------


def fit(place, *argv, env=None):
    code, _, err = place.call("fit", "--config", "exp.yaml", "--quiet", *argv, env={**OFFLINE, **(env or {})})
    assert code == 0, err
    return err


@pytest.fixture
def place(workplace):
    workplace.draws = False
    workplace.change(logger={"class_path": "wandb", "init_args": {"project": "tests"}})
    return workplace


def assert_every_round_once(run, but=()):
    rows, logged = rows_of(run / "metrics.csv"), [row for part in history(run) for row in part]
    assert [row["_step"] for row in logged] == [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    for row, values in zip(rows, logged, strict=True):
        assert_same_values(row, values, but)


def test_run_killed_between_two_checkpoints_has_no_round_twice(place):
    """Rounds after the checkpoint are done again: W&B has some of them, and lacks those that the kill took from it."""
    place.change(federation={"rounds": 120, "evaluate_every": 60, "checkpoint": {"every": 5}, "newcomers": {}})
    running = place.start("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE)
    metrics = place.run / "metrics.csv"

    known = []

    def recorded_past_a_checkpoint():
        if (place.run / "wandb.json").exists():
            known[:] = [row["_step"] for part in history(place.run) for row in part]
        return known and known[-1] % 5 not in (0, 4)

    running.wait_until(recorded_past_a_checkpoint)
    running.kill()
    assert running.result()[0] == -9
    assert len(rows_of(metrics)) < 120
    first = run_id(place.run)
    assert "--federation" not in fit(place, "--resume", "auto")
    assert run_id(place.run) == first
    parts = history(place.run)
    # W&B's own process outlives ours by some milliseconds, and writes what it had been told.
    assert [row["_step"] for row in parts[0]][: len(known)] == known
    assert len(parts) == 2
    assert_every_round_once(place.run, but=COLUMNS)
    said, rows = merged_records(place.run, "summary"), rows_of(metrics)
    assert said["Local-T"] == rows[-1]["Local-T"]
    assert said["best/Local-T"] == max(row["Local-T"] for row in rows if "Local-T" in row)


def test_rounds_that_a_kill_took_from_wandb_are_logged_again(place):
    """Killed at the checkpoint's rename, sooner than W&B writes: the rounds before come from metrics.csv."""
    code, _, _ = place.call("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE, die_at="round-0002.ckpt")
    assert code == -9
    fit(place, "--resume", "auto")
    assert_every_round_once(place.run)
    tables = [row for part in history(place.run) for row in part if "clients/table.path" in row]
    assert [row["round"] for row in tables] == [1, 2, 3]


def test_run_that_began_without_wandb_is_logged_from_its_first_round(place):
    place.fit("--quiet", "--logger", "null", "--federation.rounds", "1")
    assert not (place.run / "wandb.json").exists()
    fit(place, "--resume", "auto")
    assert_every_round_once(place.run)
    assert any("clients/partition.path" in row for row in history(place.run)[0])


def test_run_goes_on_from_its_own_configuration_with_its_labels(place):
    labels = {"group": "mine", "tags": ["a"], "notes": "more", "job_type": "kind"}
    place.change(logger={"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"labels": labels}})
    fit(place, "--federation.rounds", "1")
    (kept,) = yaml.safe_load((place.run / "config.yaml").read_text())["logger"]
    assert kept["init_args"]["labels"] == labels
    again = ["--quiet", "--resume", "auto", "--federation.rounds", "2"]
    time.sleep(1.1)  # W&B names a record's folder by the second
    code, _, err = place.call("fit", "--config", "runs/run/config.yaml", *again, env=OFFLINE)
    assert code == 0, err
    assert_every_round_once(place.run)
    runs = run_records(place.run)
    said = [(run.run_group, list(run.tags), run.notes, run.job_type) for run in runs]
    assert said == [("mine", ["a"], "more", "kind")] * 2


def test_run_that_is_overwritten_starts_a_new_one(place):
    fit(place, "--federation.rounds", "1")
    first = run_id(place.run)
    fit(place, "--overwrite", "--federation.rounds", "1")
    assert run_id(place.run) != first
    assert len(list((place.run / "wandb").glob("offline-run-*"))) == 1


def test_run_that_is_stopped_is_recorded_to_its_last_round(place):
    place.change(federation={"rounds": 500})
    running = place.start("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE)
    running.wait_until((place.run / "checkpoints" / "round-0002.ckpt").exists)
    running.interrupt()
    code, _, err = running.result()
    assert code == 130
    assert "Traceback" not in err
    assert_every_round_once(place.run)
    assert merged_records(place.run, "summary")["finished"] is False
    assert exit_codes(place.run) == [1]


MINE = """
import wandb
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.recorder import Recorder


class Logs(FederationCallback):
    def __init__(self, past_us: bool = False) -> None:
        self.past_us = past_us

    def on_client_fit_end(self, loop, report):
        if self.past_us:
            wandb.run.log({"theirs": 1.0})
            return
        recorder = next(callback for callback in loop.callbacks if isinstance(callback, Recorder))
        recorder.loggers[0].log_metrics({"mine": float(report.client)})
"""


def test_values_that_a_callback_logs_are_in_their_rounds_row(place):
    place.write("mine.py", MINE)
    place.change(federation={"rounds": 3, "callbacks": [{"class_path": "mine.Logs"}]})
    fit(place)
    (logged,) = history(place.run)
    assert [(row["_step"], row["round"], row["mine"]) for row in logged] == [(r, r, 5.0) for r in (1, 2, 3)]
    assert all("loss" in row for row in logged)


def test_no_round_is_lost_where_a_callback_logs_to_wandb_itself(place):
    """W&B's own steps run ahead of the rounds, also over a resume."""
    place.write("mine.py", MINE)
    callback = {"class_path": "mine.Logs", "init_args": {"past_us": True}}
    place.change(federation={"rounds": 4, "callbacks": [callback]})
    code, _, _ = place.call("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE, die_at="round-0002.ckpt")
    assert code == -9
    fit(place, "--resume", "auto")
    rows, parts = rows_of(place.run / "metrics.csv"), history(place.run)
    logged = [row for part in parts for row in part if "seconds" in row]
    assert [row["round"] for row in logged] == [row["round"] for row in rows] == [1, 2, 3, 4]
    steps = [row["_step"] for row in logged]
    assert steps == sorted(set(steps))
    assert len([row for row in parts[-1] if "theirs" in row]) == 6 * 2


# --- failures -------------------------------------------------------------------------------------------------------


def assert_whole(place, err):
    """The run is done, and W&B's failure was one line."""
    assert json.loads((place.run / "summary.json").read_text())["finished"]
    lines = [line for line in err.splitlines() if line.startswith("W&B: failed")]
    assert len(lines) == 1
    assert "goes on" in lines[0]
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2, err


def test_wandb_that_cannot_start_does_not_end_the_run(place):
    err = fit(place, "--federation.rounds", "1", env={"WANDB_BASE_URL": "no address"})
    assert_whole(place, err)


def children(process_id):
    """The processes that a process started, by name."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if int(fields["PPid"]) == process_id:
            found[fields["Name"]] = int(status.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_wandb_that_dies_does_not_end_the_run(place):
    place.change(federation={"rounds": 12})
    running = place.start("fit", "--config", "exp.yaml", "--quiet", env=OFFLINE)
    running.wait_until((place.run / "checkpoints" / "round-0002.ckpt").exists)
    service = [number for name, number in children(running.process.pid).items() if name.startswith("wandb-core")]
    assert len(service) == 1
    os.kill(service[0], signal.SIGKILL)
    code, _, err = running.result()
    assert code == 0, err
    assert_whole(place, err)
    assert len(rows_of(place.run / "metrics.csv")) == 12


def test_server_that_cannot_be_reached_makes_the_run_offline(place):
    nobody = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    err = fit(place, "--federation.rounds", "1", env=nobody)
    assert err.count("\n") == 1
    assert "cannot be reached" in err
    assert "wandb sync" in err
    assert_every_round_once(place.run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"projekt": "p"}, ".init_args.projekt: there is no such key of WandbLogger; did you mean project?"),
        ({"tags": ["a"]}, ".init_args.tags: has moved, it is labels.tags of WandbLogger now"),
        ({"labels": {"tags": 5}}, ".init_args.labels.tags: must be list or null, got 5"),
        ({"labels": {"tag": ["a"]}}, ".init_args.labels.tag: there is no such key; did you mean tags?"),
        ({"labels": ["a"]}, ".init_args.labels: must hold"),
        ({"pictures_every": -1}, ".init_args.pictures_every: must be >= 0"),
    ],
)
@pytest.mark.parametrize(("name", "listed"), [("wandb", False), ("lightning.pytorch.loggers.WandbLogger", True)])
def test_bad_argument_is_refused_in_one_line(place, listed, name, arguments, said):
    logger = {"class_path": name, "init_args": arguments}
    place.change(logger=[logger] if listed else logger)
    before = place.files()
    code, _, err = place.call("fit", "--config", "exp.yaml", env=OFFLINE)
    assert code == 2
    assert err.count("\n") == 1
    assert f"{'logger.0' if listed else 'logger'}{said}" in err
    assert place.files() == before


@pytest.mark.parametrize("key", ["group", "tags", "notes", "job_type"])
def test_keyword_that_lightnings_own_would_hand_to_wandb_is_named_with_its_new_place(place, key):
    """Lightning's takes them behind ``**kwargs``, so its users write them under `dict_kwargs`."""
    place.change(logger={"class_path": "lightning.pytorch.loggers.WandbLogger", "dict_kwargs": {key: "a"}})
    code, _, err = place.call("fit", "--config", "exp.yaml", env=OFFLINE)
    assert code == 2
    moved = f"logger.dict_kwargs.{key}: has moved, it is labels.{key} of WandbLogger now"
    assert err == f"fl-lightning: error: {moved}\n"


def test_wandb_can_be_switched_off(place):
    err = fit(place, "--federation.rounds", "1", env={"WANDB_MODE": "disabled"})
    assert err == ""
    assert not list(place.run.glob("wandb/*run-*"))


def test_run_that_ends_with_a_sick_client_is_recorded_up_to_its_last_good_round(place):
    place.change(optimizer={"class_path": "SGD", "init_args": {"lr": 1e18}}, federation={"rounds": 2})
    code, _, err = place.call("fit", "--config", "exp.yaml", "--quiet")
    assert code == 1, err
    assert "is nan at step" in err or "is inf at step" in err
    assert not rows_of(place.run / "metrics.csv")  # no loss that is no number reaches a table
