"""Runs that end before their last round, by a figure on validation parts."""

import math

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.early_stopping import EarlyStopping, Patience
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.reexamination import reexamine
from fl_lightning.federation.settings import EvaluationPolicy
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.report.record import summarise

COLUMNS = ["round", "Local-T", "Local-V", "Local-V_worst10", "eval_loss/Local-T", "eval_loss/Local-V", "loss"]


def watched(values, on_validation=False, **options):
    """The round after which a run with these values ends; None for not at all."""
    settings = EarlyStopping(**options)
    patience = Patience(settings, COLUMNS, on_validation)
    for round, value in enumerate(values, 1):
        patience.see(round, {patience.monitor: value})
        if patience.reason:
            return round
    return None


def test_a_run_ends_once_nothing_has_become_better_for_so_many_rounds():
    assert watched([0.1, 0.3, 0.2, 0.3, 0.4], patience=2) == 4
    assert watched([0.1, 0.3, 0.2, 0.31, 0.4], patience=2) is None
    assert watched([0.1, 0.3, 0.31, 0.32, 0.4], patience=2, min_delta=0.05) == 4
    assert watched([0.5, 0.4, 0.45, 0.46], patience=2, monitor="eval_loss/Local-V") == 4
    assert watched([0.5, 0.4, 0.45, 0.46], patience=2, mode="min") == 4
    assert watched([None, math.nan, 0.1, None], patience=2) == 2
    assert watched([None, 0.2, None, 0.3], patience=2) is None
    assert watched([0.3, 0.2], patience=1, monitor="Local-T", on_validation=True) == 2


def test_figures_of_newcomers_are_waited_for_once_they_have_joined():
    """A run ended before they came."""
    columns = [*COLUMNS, "Local-V_newcomers"]
    patience = Patience(EarlyStopping(patience=2, monitor="Local-V_newcomers"), columns, False, after=3)
    for round, value in enumerate([None, None, None, 0.5, 0.4, 0.3], 1):
        assert not patience.reason
        patience.see(round, {"Local-V_newcomers": value})
    assert "since round 4 (0.5), for 2 evaluated rounds" in patience.reason
    others = Patience(EarlyStopping(patience=2), columns, False, after=3)
    for round in (1, 2):
        others.see(round, {"Local-V": None})
    assert others.reason


def test_nothing_is_seen_between_evaluations():
    patience = Patience(EarlyStopping(patience=1), COLUMNS, False)
    patience.see(1, {"Local-V": 0.5})
    patience.see(2, None)
    assert (patience.waited, patience.reason) == (0, "")


@pytest.mark.parametrize(
    ("options", "columns", "line"),
    [
        (
            {"monitor": "Local-T"},
            COLUMNS,
            "federation.early_stopping.monitor: is on the test parts, on which",
        ),
        ({"monitor": "loss"}, COLUMNS, "federation.early_stopping.monitor: there is no such column"),
        ({"monitor": "Local-W"}, COLUMNS, "federation.early_stopping.monitor: there is no such column; did you mean L"),
        ({}, ["round", "Local-T"], "federation.early_stopping: watches validation parts, and there are none: set data"),
        ({}, ["round", "loss"], "federation.early_stopping: watches evaluations, and there are none: federation"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line(options, columns, line):
    with pytest.raises(ConfigError) as caught:
        Patience(EarlyStopping(**options), columns, False)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(("name", "value"), [("monitor", ""), ("patience", 0), ("min_delta", -1.0), ("mode", "most")])
def test_numbers_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"^federation\.early_stopping\.{name}: "):
        EarlyStopping(**{name: value})


def test_a_run_without_a_validation_part_is_refused_before_it_begins(mlp, set_up_federation, make_data):
    with pytest.raises(ConfigError, match=r"data\.validation_fraction"):
        set_up_federation(lambda: FedAvg(mlp()), early_stopping=EarlyStopping())
    with pytest.raises(ConfigError, match=r"there are none: take a larger data\.validation_fraction, or fewer clients"):
        set_up_federation(
            lambda: FedAvg(mlp()), data=make_data(validation_fraction=0.01), early_stopping=EarlyStopping()
        )
    off = {"early_stopping": EarlyStopping(), "evaluate": EvaluationPolicy(validation=False)}
    with pytest.raises(ConfigError, match=r"parts, and federation\.evaluate\.validation switches them off"):
        set_up_federation(lambda: FedAvg(mlp()), data=make_data(validation_fraction=0.25), **off)


@pytest.mark.parametrize(
    ("method", "monitor", "policy", "line"),
    [
        (FedRep, "Server-V", {}, "federation.early_stopping.monitor: there is no such column"),
        (FedAvg, "Server-V", {"server": False}, "federation.early_stopping.monitor: there is no such column"),
        (FedRep, None, {"trained": False, "received": False}, "federation.early_stopping: watches evaluations, and"),
    ],
)
def test_a_global_model_that_is_not_there_is_not_watched(
    mlp, set_up_federation, make_data, method, monitor, policy, line
):
    """It ended the run after as many rounds as were waited for."""
    options = {"early_stopping": EarlyStopping(monitor), "evaluate": EvaluationPolicy(**policy)}
    with pytest.raises(ConfigError, match="^" + line):
        set_up_federation(lambda: method(mlp()), data=make_data(validation_fraction=0.25), **options)
    clients = {"trained": False, "received": False}
    options = {"early_stopping": EarlyStopping(), "evaluate": EvaluationPolicy(**clients)}
    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(validation_fraction=0.25), **options)
    assert loop.patience.monitor == "Server-V"


@pytest.fixture
def stopping(make_data, sgd):
    """Options of a run that does not learn, and so ends in round 3."""
    data = make_data(validation_fraction=0.25)
    return {"data": data, "optimizer": sgd(lr=0.0), "early_stopping": EarlyStopping(patience=2)}


def test_a_run_ends_early_as_a_whole_one(mlp, run_federation, stopping):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=9, **stopping)
    assert loop.round == 3
    assert loop.ended.startswith("early stopping: Local-V has not become better since round 1")
    short = run_federation(lambda: FedAvg(mlp()), rounds=3, **{**stopping, "early_stopping": None})
    assert loop.final == short.final
    assert short.ended == ""


def test_patience_counts_the_evaluated_rounds_of_a_run(mlp, run_federation, stopping):
    loop = run_federation(lambda: FedAvg(mlp()), rounds=9, evaluate_every=2, **stopping)
    assert (loop.round, loop.patience.waited) == (6, 2)


def test_a_round_in_which_nobody_is_tested_is_none_without_a_better_value(mlp, run_federation, stopping):
    """It ended the run, and did not where the same rounds were judged again."""
    policy = EvaluationPolicy(clients="participants", server=False)
    out = Failures(schedule={"2": [0, 1, 2, 3]})
    loop = run_federation(lambda: FedAvg(mlp()), rounds=9, evaluate=policy, failures=out, **stopping)
    assert (loop.round, loop.patience.waited) == (4, 2)


def test_patience_survives_a_stop(mlp, set_up_federation, stopping, tmp_path):
    options = {"rounds": 9, "folder": tmp_path, **stopping}
    first = set_up_federation(lambda: FedAvg(mlp()), **options)
    first.advance()
    first.advance()
    second = set_up_federation(lambda: FedAvg(mlp()), **options)
    second.load_state_dict(second.checkpoints.load(second.checkpoints.find("auto")))
    assert (second.patience.waited, second.done) == (1, False)
    assert second.run() is not None
    assert second.round == 3
    third = set_up_federation(lambda: FedAvg(mlp()), **options)
    third.load_state_dict(third.checkpoints.load(third.checkpoints.find("auto")))
    assert third.done
    assert third.run() is not None
    assert third.round == 3
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [f"{c:05d}.pt" for c in range(4)]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, {"patience": 4, "mode": "min"}),
        ({"patience": 4}, {"patience": 4, "mode": "min"}),
        ({"patience": 4}, {"patience": 4, "min_delta": 0.5}),
        ({"patience": 4}, {"patience": 4, "mode": "max", "monitor": "eval_loss/Local-V"}),
    ],
)
def test_what_stops_a_run_from_now_on_has_seen_the_rounds_that_are_done(
    before, now, mlp, set_up_federation, make_data, tmp_path
):
    """It counted from the resumption, and the run ended elsewhere than one that was begun so."""

    def stopping(options):
        return None if options is None else EarlyStopping(**options)

    def run(folder, options, rounds):
        recorder = Recorder(folder, {})
        data = make_data(validation_fraction=0.25)
        own = {"rounds": rounds, "folder": folder, "data": data, "early_stopping": stopping(options)}
        loop = set_up_federation(lambda: FedAvg(mlp()), **own, callbacks=[recorder])
        found = loop.checkpoints.find("auto")
        if found is not None:
            loop.load_state_dict(loop.checkpoints.load(found))
        with recorder:
            loop.run()
        return loop

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a", before, 3)
    resumed, straight = run(tmp_path / "a", now, 9), run(tmp_path / "b", now, 9)
    assert (resumed.round, resumed.ended) == (straight.round, straight.ended)
    assert resumed.patience.state_dict() == straight.patience.state_dict()


# --- the best round ---------------------------------------------------------------------------------------------------

ROWS = [
    {"round": 1, "Local-T": 0.9, "Local-V": 0.5, "eval_loss/Local-V": 0.3, "Local-T_std": 0.1},
    {"round": 2, "Local-T": 0.7, "Local-V": 0.8, "eval_loss/Local-V": 0.5, "Local-T_std": 0.2},
    {"round": 3, "Local-T": 0.8, "Local-V": 0.8, "eval_loss/Local-V": 0.2, "Local-T_std": 0.3},
]


def test_best_round_is_chosen_on_validation_with_its_test_figure():
    said = summarise(ROWS)
    assert said["best_by"] == "Local-V"
    assert said["best"]["Local-T"] == {"value": 0.7, "round": 2}
    assert said["last"]["Local-T"] == 0.8
    by_loss = summarise(ROWS, "eval_loss/Local-V")
    assert by_loss["best"]["Local-T"] == {"value": 0.8, "round": 3}
    assert summarise(ROWS, "eval_loss/Local-V", less=False)["best"]["Local-T"] == {"value": 0.7, "round": 2}


def test_without_validation_each_column_has_its_own_best_round():
    rows = [{name: value for name, value in row.items() if name != "Local-V"} for row in ROWS]
    rows = [{("eval_loss/Local-T" if "loss" in name else name): value for name, value in row.items()} for row in rows]
    said = summarise(rows)
    assert "best_by" not in said
    assert said["best"] == {
        "Local-T": {"value": 0.9, "round": 1},
        "eval_loss/Local-T": {"value": 0.2, "round": 3},
    }


class EndsIn(FederationCallback):
    def __init__(self, last):
        self.last = last

    def on_round_end(self, loop, row):
        if row["round"] == self.last:
            loop.stop(reason="enough")


def test_a_run_that_goes_on_leaves_no_model_of_its_earlier_end(mlp, set_up_federation, tmp_path):
    def run(rounds, *callbacks):
        recorder = Recorder(tmp_path, {})
        loop = set_up_federation(
            lambda: FedRep(mlp()), rounds=rounds, folder=tmp_path, callbacks=[recorder, *callbacks]
        )
        if rounds > 1:
            loop.load_state_dict(loop.checkpoints.load(loop.checkpoints.find("auto")))
        with recorder:
            loop.run()

    run(1)
    assert len(list((tmp_path / "models").iterdir())) == 4
    run(5, EndsIn(3))
    assert list((tmp_path / "models").iterdir()) == []
    figures = reexamine(set_up_federation(lambda: FedRep(mlp()), rounds=5, folder=tmp_path), tmp_path)
    written = {name: (then, now) for name, then, now in figures}
    assert written["Local-T"][0] == written["Local-T"][1]
