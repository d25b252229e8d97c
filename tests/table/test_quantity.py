import math

import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.table.quantity import Figure, best_round, moments, read_figure

ROWS = [
    {"round": 1, "Local-T": 0.5, "Local-T_weighted": 0.7, "Local-T_std": 0.9, "seconds": 3.0, "Global-T": None},
    {"round": 2, "Local-T": 0.8, "Local-T_weighted": 0.6, "Local-T_std": 0.2, "seconds": 1.0, "Global-T": 0.25},
    {"round": 3, "Local-T": 0.8, "Local-T_weighted": 0.4, "Local-T_std": 0.1, "seconds": 2.0, "Global-T": None},
]
SUMMARY = {
    "final_received": {"Local-T_received": 0.9, "Local-T_received/b": 0.4},
    "communication": {"uplink_params_Mi_per_round": 213.5, "name": "up"},
    "seconds": 6.0,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Local-T.last", 0.8),
        ("Local-T.best", 0.8),
        ("Local-T.mean", 0.7),
        ("Local-T.mean_last_10", 0.7),
        ("Local-T_received.final_received", 0.9),
        ("Local-T_received/b.final_received", 0.4),
        ("Local-T_std.best", 0.2),  # in the earliest round in which Local-T is best, not the largest or smallest spread
        ("Local-T_std.best@Local-T_weighted", 0.9),
        ("Local-T.best@Local-T_weighted", 0.5),
        ("seconds.best", 1.0),  # of what is better when less, the least
        ("Local-T.best@seconds", 0.8),
        ("Global-T.last", 0.25),  # evaluated in round 2 only
        ("summary.communication.uplink_params_Mi_per_round", 213.5),
        ("summary.seconds", 6.0),
        ("summary.communication.uplink_params", None),
        ("summary.parameters.personal", None),
        ("Global-T.best@Local-T_weighted", None),  # not evaluated in that round
        ("Server-T.last", None),
        ("Server-T.best", None),
    ],
)
def test_a_figure_is_read_off_a_run(text, value):
    figure = read_figure(text, "figure")
    found = moments(figure, ROWS, SUMMARY)
    assert found.get(figure.report) == (None if value is None else pytest.approx(value))
    assert str(figure) == text


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_a_figure_that_ran_away_is_not_that_of_an_earlier_round(end):
    """The last finite round stood for the last one, and a run that had diverged looked as good as before."""
    rows = [{"round": i, "eval_loss/Local-T": loss} for i, loss in enumerate((2.0, 1.0, end, None), 1)]
    found = moments(read_figure("eval_loss/Local-T.last", "figure"), rows, {})
    assert found == {"best": 1.0}


def test_the_last_round_has_no_value_of_a_round_before_it():
    """An AUROC of round 1 stood beside the accuracy of round 2, under one name."""
    first, second = {"Local-T": 0.5, "AUROC/Local-T": 0.91, "Local-T_hurt": 0.8}, {"Local-T": 0.6}
    rows = [{"round": 1, **first}, {"round": 2, **dict.fromkeys(first), **second}, {"round": 3, **dict.fromkeys(first)}]
    for name, last in (("Local-T", 0.6), ("AUROC/Local-T", None), ("Local-T_hurt", None)):
        found = moments(read_figure(f"{name}.last", "figure"), rows, {})
        assert found.get("last") == last
        assert found["mean_last_10"] == pytest.approx(0.55 if last else first[name])


def test_ten_rounds_of_many():
    rows = [{"round": i, "Local-T": float(i)} for i in range(1, 21)]
    found = moments(read_figure("Local-T.last", "figure"), rows, {})
    assert found == {"last": 20.0, "mean_last_10": 15.5, "mean": 10.5, "best": 20.0}
    best = best_round(Figure("Local-T", "best"), rows, {})
    assert best is not None
    assert best["round"] == 20
    assert best_round(Figure("Local-T", "best"), [], {}) is None


def test_best_round_is_the_one_that_the_run_says():
    """Early stopping may watch another figure than the first one on validation parts."""
    rows = [{"round": i, "Local-T": i / 10, "Local-T_std": i / 100, "Local-V": i / 10} for i in range(1, 4)]
    said = {"best_by": "eval_loss/Local-V", "best": {"Local-T": {"value": 0.2, "round": 2}}}
    assert moments(read_figure("Local-T.best", "figure"), rows, said)["best"] == 0.2
    assert moments(read_figure("Local-T_std.best", "figure"), rows, said)["best"] == 0.02
    assert moments(read_figure("Local-T.best@Local-V", "figure"), rows, said)["best"] == 0.3


def test_best_round_of_a_run_that_does_not_say_is_the_one_of_what_it_watches():
    """Of a cell that was extended since, the summary is of more rounds than the cell's."""
    rows = [{"round": i, "Local-T": i / 10, "Local-V": i / 10, "odd": abs(i - 2)} for i in range(1, 4)]
    watched = ("odd", True)
    assert moments(read_figure("Local-T.best", "figure"), rows, {}, watched)["best"] == 0.2
    assert moments(read_figure("Local-T.best@Local-V", "figure"), rows, {}, watched)["best"] == 0.3
    assert moments(read_figure("Local-T.best", "figure"), rows, {}, ("nothing", True))["best"] == 0.3


def test_what_is_less_and_what_is_of_clients():
    assert read_figure("Local-T_received_weighted.best", "f").of_clients == "Local-T_received"
    assert read_figure("Local-T/classifier.last", "f").of_clients == "Local-T/classifier"
    less = [
        "receive_drop.mean",
        "seconds.mean",
        "Local-T_std.last",
        "Global-T_gini.last",
        "loss/x.last",
        "summary.communication.uplink_params",
        "summary.last.Local-T_std",
        "summary.mean_last_10.Local-T_gini",
        "summary.last.Local-T_hurt",
        "summary.final_received.Local-T_received_std",
        "summary.best.eval_loss/Local-T.value",
    ]
    for text in less:
        figure = read_figure(text, "f")
        assert figure.less_is_better, text
        assert figure.of_clients == "", text
    loss = read_figure("eval_loss/Local-T_weighted.last", "f")
    assert (loss.less_is_better, loss.of_clients) == (True, "eval_loss/Local-T")

    assert not read_figure("summary.last.Local-T", "f").less_is_better
    assert not read_figure("summary.best.Local-T.value", "f").less_is_better


@pytest.mark.parametrize("column", ["FBetaScore_beta_0.5/Local-T", "a.b.c/Local-T", "Local-T"])
def test_names_of_columns_may_hold_dots(column):
    summary = {"best": {column: {"value": 0.81, "round": 3}}, "last": {column: 0.7}}
    for text, found in ((f"summary.best.{column}.value", 0.81), (f"summary.last.{column}", 0.7)):
        figure = read_figure(text, "f")
        assert moments(figure, [], summary) == {figure.report: found}
    rows = [{"round": round, column: own} for round, own in enumerate((0.9, 0.8, 0.81), 1)]
    assert best_round(Figure(column, "best"), rows, summary) is rows[2]  # as the run says


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("Local-T.last", 100),
        ("Local-T_received_std.final_received", 100),
        ("balanced_accuracy/Server-T.best", 100),
        ("receive_drop.mean", 100),
        ("summary.last.Local-T_hurt", 100),
        ("summary.best.Local-T.value", 100),
        ("summary.best.Local-T.round", 1),
        ("eval_loss/Local-T.last", 1),
        ("summary.last.eval_loss/Local-T", 1),
        ("F1Score/Local-T.last", 1),
        ("balanced_accuracy/Local-T_undefined.last", 1),
        ("loss.mean", 1),
        ("seconds.mean", 1),
        ("summary.communication.uplink_params_Mi_per_round", 1),
        ("summary.rounds", 1),
        ("uplink_params.mean", 1),
    ],
)
def test_what_is_no_share_is_printed_as_it_is(text, scale):
    assert read_figure(text, "f").usual_scale == scale


def test_a_figure_may_have_a_scale_of_its_own():
    figure = read_figure({"of": "seconds.mean", "scale": 40}, "figure")
    assert figure == Figure("seconds", "mean", scale=40.0)
    assert str(figure) == "seconds.mean × 40"


@pytest.mark.parametrize(
    ("node", "key", "word"),
    [
        ("A", "f", "Local-T.last"),
        ("Local-T.newest", "f", "mean_last_10"),
        (".last", "f", "a column"),
        (3, "f", "a column"),
        ("summary.", "f", "summary.ENTRY"),
        ("Lokal-T.last", "f", "no column Lokal-T; did you mean Local-T?"),
        ("Local-T_recieved.best", "f", "did you mean Local-T_received?"),
        ("Local-T.best@Local-Z", "f", "no column Local-Z"),
        ("second.mean", "f", "did you mean seconds?"),
        ("Local-T.final_received", "f", "right after the receive"),
        ("seconds.final_received", "f", "right after the receive"),
        ("summary.parameter.personal", "f", "did you mean parameters.personal?"),
        ("summary.communication", "f", "no number communication"),
        ("summary.best.Local-T", "f", "best.Local-T.value or best.Local-T.round"),
        ("summary.best.Local-T_std.value", "f", "no Local-T_std under best"),
        ("summary.last.Local-X", "f", "no Local-X under last"),
        ("summary.mean_last_10.loss", "f", "no loss under mean_last_10"),
        ("summary.final_received.Local-T", "f", "right after the receive"),
        ("summary.privacy.epsilom", "f", "did you mean privacy.epsilon?"),
        ("Server-T_std.last", "f", "no column Server-T_std"),
        ("Global-T_hurt.last", "f", "no column Global-T_hurt"),
        ("Local-T.last@Local-V", "f", "Local-T.best@Local-V"),
        ("Local-T.best@", "f", "Local-T.best@Local-V"),
        ({"of": "Local-T.last", "scal": 1}, "f.scal", "did you mean scale"),
        ({"of": "Local-T.last", "scale": "1"}, "f.scale", "a finite number"),
        ({"scale": 1}, "f.of", "a column"),
    ],
)
def test_a_wrong_figure_is_named(node, key, word):
    with pytest.raises(ConfigError) as caught:
        read_figure(node, "f")
    assert caught.value.key == key
    assert word in str(caught.value)
