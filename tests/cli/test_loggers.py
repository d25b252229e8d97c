"""Lightning's loggers receive what metrics.csv holds."""

import csv
import importlib.util
import json

import pytest

from cli.test_bad_input import refused


def rows_of(path):
    with path.open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def expected(place):
    """round -> the values of metrics.csv."""
    return {int(row.pop("round")): row for row in rows_of(place.run / "metrics.csv")}


def test_csv_logger_receives_the_values(workplace):
    workplace.change(logger={"class_path": "CSVLogger"})
    workplace.draws = False
    workplace.fit("--quiet")
    file = next(workplace.run.rglob("lightning_logs/*/metrics.csv"))
    logged = {}
    for row in rows_of(file):
        logged.setdefault(int(row.pop("step")), {}).update(row)
    for round, values in expected(workplace).items():
        assert {name: logged[round][name] for name in values} == pytest.approx(values)
    summary = json.loads((workplace.run / "summary.json").read_text())
    for name, value in summary["final_received"].items():
        assert logged[3][f"final/{name}"] == pytest.approx(value)


@pytest.mark.parametrize(("name", "package"), [("MLFlowLogger", "mlflow"), ("CometLogger", "comet-ml")])
def test_logger_whose_package_is_not_installed_is_one_line(workplace, name, package):
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    line = refused(workplace, "--logger", name)
    assert line.startswith(f"logger.0: {name}: Requirement '{package}")
    assert f"pip install -U '{package}" in line


def test_labels_of_none_say_what_they_may_be(workplace):
    line = "logger.labels: must hold Labels's fields by name (group, tags, notes, job_type); leave it out for their"
    assert refused(workplace, "--logger", "wandb", "--logger.labels", "null").startswith(line)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_logger_receives_the_values(workplace):
    """Beside a CSVLogger in a folder of its own."""
    own = {"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere", "name": "mine"}}
    workplace.change(logger=[{"class_path": "TensorBoardLogger"}, own])
    workplace.draws = False
    workplace.fit("--quiet")
    assert list((workplace.path / "elsewhere" / "mine").rglob("metrics.csv"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(workplace.run.rglob("events.out.tfevents*")).parent))
    events.Reload()
    for round, values in expected(workplace).items():
        for name, value in values.items():
            logged = {event.step: event.value for event in events.Scalars(name)}
            assert logged[round] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", ["CSVLogger", "WandbLogger"])
def test_name_that_no_folder_can_have_is_refused_before_training(workplace, name):
    line = refused(workplace, "--logger", name, "--logger.name", "n" * 256)
    assert line.startswith(("logger.name: must be at most 255 bytes long", "logger.0.name: must be at most 255"))


def test_logger_named_on_the_command_line(workplace):
    workplace.draws = False
    workplace.fit("--quiet", "--logger", "CSVLogger", "--federation.rounds", "1")
    assert list(workplace.run.rglob("lightning_logs/*/metrics.csv"))


def test_resumed_run_goes_on_logging(workplace):
    workplace.change(logger={"class_path": "CSVLogger"})
    workplace.draws = False
    workplace.fit("--quiet", "--federation.rounds", "1")
    workplace.fit("--quiet", "--resume", "auto", "--federation.rounds", "2")
    logged = [row for file in workplace.run.rglob("lightning_logs/*/metrics.csv") for row in rows_of(file)]
    assert {row["step"] for row in logged} == {1, 2}


def test_run_with_a_logger_can_be_overwritten(workplace):
    workplace.change(logger={"class_path": "CSVLogger"}, federation={"rounds": 1})
    workplace.draws = False
    workplace.fit("--quiet")
    workplace.fit("--quiet", "--overwrite")
    assert list(workplace.run.rglob("lightning_logs/*/metrics.csv"))
