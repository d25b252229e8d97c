"""`model:` as a list: clients with different models in one federation."""

import csv
import json

import pytest
import torch
import yaml

from cli.run_files import without_seconds
from cli.test_bad_input import refused
from fl_lightning.building import architectures
from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.parser import resolve
from fl_lightning.precheck import check_names
from fl_lightning.reading import load_yaml
from fl_lightning.trust import Trust

NARROW = {"class_path": "MLP", "init_args": {"hidden": [16, 8]}}
WIDE = {"class_path": "MLP", "init_args": {"hidden": [24, 8]}}
MODELS = [{**NARROW, "clients": 4}, {**WIDE, "clients": 2}]
ROUNDS = 3


def entry(*hidden, **other):
    return {"class_path": "MLP", "init_args": {"hidden": list(hidden)}, **other}


def mixed(place, models=MODELS, method="FedProto"):
    """Give `exp.yaml` a list of models."""
    place.draws = False
    place.change(model=models, method={"class_path": method}, federation={"rounds": ROUNDS})
    return place


def resolved(place):
    return yaml.safe_load((place.run / "config.yaml").read_text())


def widths(place, clients=6):
    """Units of each client's first hidden layer, in the models that the run kept."""
    files = [place.run / "models" / f"{client:05d}.pt" for client in range(clients)]
    return [len(torch.load(file, weights_only=True)["model.body.stages.0.1.weight"]) for file in files]


@pytest.fixture(scope="module")
def straight(make_workplace):
    """A finished run of two MLP widths that was never stopped."""
    place = mixed(make_workplace("mixed"))
    place.fit("--quiet")
    return place


# --- runs -----------------------------------------------------------------------------------------------------------


def test_consecutive_clients_have_the_models_of_the_list(straight):
    assert widths(straight) == [16, 16, 16, 16, 24, 24]


def test_clients_take_turns_where_no_numbers_are_given(workplace):
    mixed(workplace, [NARROW, WIDE, entry(32, 8), "MLP"])
    workplace.change(method={"class_path": "Local"}, federation={"rounds": 1})
    workplace.fit("--quiet")
    assert widths(workplace) == [16, 24, 32, 128, 16, 24]


def test_clients_of_different_models_learn_from_each_other(straight):
    with (straight.run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["loss/prototype_alignment"]) == 0
    assert float(rows[-1]["loss/prototype_alignment"]) > 0
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_resolved_list_is_in_the_folder(straight):
    path = "fl_lightning.models.mlp.MLP"
    assert resolved(straight)["model"] == [
        {"class_path": path, "init_args": {"hidden": hidden, "head_bias": True}, "clients": clients}
        for hidden, clients in (([16, 8], 4), ([24, 8], 2))
    ]


def test_evaluate_finds_every_figure_again(straight):
    code, out, err = straight.call("evaluate", "runs/run")
    assert code == 0, err + out
    equal, _, compared = next(line for line in out.splitlines() if "figures are equal" in line).split()[:3]
    assert equal == compared
    assert int(equal) >= 20


@pytest.mark.parametrize("pool", ["memory", "disk"])
def test_killed_run_resumes_exactly(straight, workplace, assert_same_run, pool):
    mixed(workplace)
    argv = ["--quiet", "--federation.pool", pool]
    code, _, _ = workplace.call("fit", "--config", "exp.yaml", *argv, die_at="round-0002.ckpt")
    assert code == -9
    workplace.fit("--resume", "auto", *argv)
    assert_same_run(straight.run, workplace.run)


def test_configurations_in_the_folder_and_printed_run_to_the_same_numbers(straight, workplace):
    workplace.draws = False
    workplace.write("again.yaml", (straight.run / "config.yaml").read_text())
    code, printed, err = straight.call("fit", "--config", "exp.yaml", "--print_config")
    assert code == 0, err
    workplace.write("printed.yaml", printed)
    for config in ("again.yaml", "printed.yaml"):
        workplace.fit("--quiet", "--overwrite", config=config)
        for name in ("metrics.csv", "config.yaml"):
            assert without_seconds(workplace.run / name) == without_seconds(straight.run / name)


def test_small_number_in_the_list_stays_a_number(workplace):
    small = {"class_path": "FedProtoCNN", "init_args": {"dropout": 1e-5}}
    mixed(workplace, [small, small])
    code, out, err = workplace.call("fit", "--config", "exp.yaml", "--print_config")
    assert code == 0, err
    assert "dropout: 1.0e-05" in out


def test_list_of_one_model_is_that_model(workplace, finished):
    workplace.draws = False
    workplace.change(model=[NARROW])
    workplace.fit("--quiet")
    assert without_seconds(workplace.run / "metrics.csv") == without_seconds(finished.run / "metrics.csv")


def test_partition_works_with_a_list(workplace):
    mixed(workplace)
    code, out, err = workplace.call("partition", "--config", "exp.yaml", "--figure", "who.png")
    assert code == 0, err + out


# --- what replaces what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "hidden"),
    [
        (["--model", "MLP"], [128, 64]),
        (["--model", "MLP", "--model.init_args.hidden=[9]"], [9]),
        (["--model.class_path=fl_lightning.models.mlp.MLP", "--model.hidden", "[9]"], [9]),
        (["--config", "one.yaml"], [7]),
        (["--config", "one.yaml", "--config", "two.yaml"], [11, 8]),
    ],
)
def test_model_named_later_replaces_the_list_and_a_later_list_the_model(workplace, argv, hidden):
    mixed(workplace, method="Local")
    workplace.write("one.yaml", {"model": {"init_args": {"hidden": [7]}, "class_path": "MLP"}})
    workplace.write("two.yaml", {"model": [entry(11, 8), entry(12, 8)], "federation": {"rounds": 1}})
    code, out, err = workplace.call("fit", "--config", "exp.yaml", *argv, "--print_config")
    assert code == 0, err
    model = yaml.safe_load(out)["model"]
    first = model[0] if isinstance(model, list) else model
    assert first["init_args"]["hidden"] == hidden
    assert isinstance(model, list) == ("two.yaml" in argv)


@pytest.mark.parametrize(
    "argv",
    [["--model.init_args.hidden=[9]"], ["--model.hidden", "[9]"], ["--model.0.clients=3"], ["--config", "a.yaml"]],
)
def test_one_argument_for_a_whole_list_is_refused(workplace, argv):
    mixed(workplace)
    workplace.write("a.yaml", {"model": {"init_args": {"hidden": [9]}}})
    line = refused(workplace, *argv)
    assert [said for said in ("model.", "list", "--model NAME") if said not in line] == [], line


# --- bad input ------------------------------------------------------------------------------------------------------

BY_NAME = [
    ([NARROW, {"class_path": "MLPP"}], ["model.1", "MLPP", "did you mean MLP?"]),
    ([NARROW, "MLPP"], ["model.1", "MLPP", "did you mean MLP?"]),
    ([NARROW, {"class_path": "MLP", "init_args": {"hiden": [8]}}], ["model.1.init_args.hiden", "did you mean hidden?"]),
    ([NARROW, {**WIDE, "client": 2}], ["model.1.client", "did you mean clients?"]),
    ([NARROW, {"class_path": "MLP", "hidden": [8]}], ["model.1.hidden", "no such key", "init_args"]),
    ([{"init_args": {"hidden": [8]}}, NARROW], ["model.0", "class_path"]),
    ([NARROW, 3], ["model.1", "class_path", "3"]),
    ([NARROW, {"class_path": "MLP", "init_args": [8]}], ["model.1.init_args", "[8]"]),
    ([], ["model", "at least one"]),
]
BY_VALUE = [
    ([{**NARROW, "clients": 4}, {**WIDE, "clients": 1}], ["model", "clients", "data.num_clients (6)", "got 5"]),
    ([{**NARROW, "clients": 4}, WIDE], ["model.1.clients", "every entry", "none"]),
    ([{**NARROW, "clients": 6}, {**WIDE, "clients": 0}], ["model.1.clients", ">= 1", "got 0"]),
    ([{**NARROW, "clients": 6}, {**WIDE, "clients": "two"}], ["model.1.clients", ">= 1", "got 'two'"]),
    ([NARROW] * 7, ["model", "more entries", "6", "got 7"]),
    ([NARROW, entry("x")], ["model.1.init_args.hidden", "int", "x"]),
    ([NARROW, {**WIDE, "init_args": {"head_bias": 3}}], ["model.1.init_args.head_bias", "bool", "3"]),
    ([NARROW, entry(0)], ["model.1.init_args.hidden", ">= 1", "[0]"]),
    ([NARROW, "BiLSTM"], ["model.1", "BiLSTM", "tokens"]),
    ([NARROW, "nowhere.MLP"], ["model.1", "nowhere.MLP"]),
    ([NARROW, {**WIDE, "init_args": {"num_classes": 3}}], ["model.1.init_args.num_classes", "no such key"]),
    ([NARROW, entry(16, 9)], ["model", "FedProto", "prototypes", "(10, 8) at client 0", "(10, 9) at client 1"]),
]


@pytest.mark.parametrize(("models", "said"), BY_NAME, ids=[" ".join(said) for _, said in BY_NAME])
def test_wrong_name_in_the_list_is_refused_before_anything_is_imported(tmp_path, models, said):
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump({"model": models}))
    with pytest.raises(ConfigError) as error:
        check_names(CommandLine(["--config", str(path)]))
    assert [part for part in said if part not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(("models", "said"), BY_VALUE, ids=[" ".join(said) for _, said in BY_VALUE])
def test_wrong_value_in_the_list_is_refused(workplace, models, said):
    line = refused(mixed(workplace, models))
    assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize("method", ["FedAvg", "FedRep"])
def test_weights_of_different_shapes_are_refused_where_they_would_be_exchanged(workplace, method):
    line = refused(mixed(workplace, method=method))
    said = ("model", method, "one shape everywhere", "(16, 64) at client 0", "(24, 64) at client 4")
    assert [part for part in said if part not in line] == [], line


def test_weights_that_are_not_exchanged_may_differ(workplace):
    """FedRep's heads are private, so one may have a bias and the other none."""
    mixed(workplace, [NARROW, {"class_path": "MLP", "init_args": {"hidden": [16, 8], "head_bias": False}}], "FedRep")
    workplace.fit("--quiet", "--federation.rounds", "1")
    assert json.loads((workplace.run / "summary.json").read_text())["finished"] is True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([{**NARROW, "clients": 4}, {**entry(25, 8), "clients": 2}], ["model.1.init_args.hidden.0", "24", "25"]),
        ([{**NARROW, "clients": 3}, {**WIDE, "clients": 3}], ["model.0.clients", "4", "3"]),
        (NARROW, ["model."]),
    ],
)
def test_resuming_with_another_list_is_refused(straight, change, said):
    straight.write("other.yaml", {"model": change})
    line = refused(straight, "--resume", "auto", "--config", "other.yaml")
    assert [part for part in ("--resume", "another configuration", *said) if part not in line] == [], line


# --- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"), [([2, 1], [0, 0, 1]), ([None, None], [0, 1, 0]), ([None], [0, 0, 0]), ([3], [0, 0, 0])]
)
def test_architectures(counts, expected):
    models = [{"class_path": "MLP", **({} if count is None else {"clients": count})} for count in counts]
    assert architectures(models, 3) == expected


def test_one_model_needs_no_architectures():
    assert architectures({"class_path": "MLP"}, 3) is None


def test_entry_is_read_like_a_single_model():
    """Defaults filled in, and 1e-1 is a number, which YAML's own rules do not say."""
    path = "fl_lightning.models.cnn.FedProtoCNN"
    given = load_yaml(f"{{class_path: {path}, init_args: {{channels: 18, dropout: 1e-1}}, clients: 7}}")
    arguments = {"channels": 18, "embedding": 50, "dropout": 0.1, "kernel_size": 5, "head_bias": True}
    data = {"dataset": "MNIST", "partition": "IID"}
    config = resolve({"method": "FedProto", "model": [given], "data": data}, Trust())
    assert config["model"] == [{"class_path": path, "init_args": arguments, "clients": 7}]
