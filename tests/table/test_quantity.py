import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.table.quantity import Figure, best_round, moments, read_figure

ROWS = [
    {"round": 1, "A": 0.5, "A_weighted": 0.7, "A_std": 0.9, "seconds": 3.0, "B": None},
    {"round": 2, "A": 0.8, "A_weighted": 0.6, "A_std": 0.2, "seconds": 1.0, "B": 0.25},
    {"round": 3, "A": 0.8, "A_weighted": 0.4, "A_std": 0.1, "seconds": 2.0, "B": None},
]
SUMMARY = {
    "final_received": {"A": 0.9, "A.b": 0.4},
    "communication": {"uplink_params_Mi_per_round": 213.5, "name": "up"},
    "seconds": 6.0,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A.last", 0.8),
        ("A.best", 0.8),
        ("A.mean", 0.7),
        ("A.mean_last_10", 0.7),
        ("A.final_received", 0.9),
        ("A.b.final_received", 0.4),
        ("A_std.best", 0.2),  # in the earliest round in which A is best, not the largest or smallest spread
        ("A_std.best@A_weighted", 0.9),
        ("A.best@A_weighted", 0.5),
        ("seconds.best", 1.0),  # of what is better when less, the least
        ("A.best@seconds", 0.8),
        ("B.last", 0.25),  # evaluated in round 2 only
        ("summary.communication.uplink_params_Mi_per_round", 213.5),
        ("summary.seconds", 6.0),
        ("summary.communication.name", None),
        ("summary.communication", None),
        ("summary.parameters.personal", None),
        ("B.best@A_weighted", None),  # not evaluated in that round
        ("C.last", None),
        ("C.best", None),
    ],
)
def test_a_figure_is_read_off_a_run(text, value):
    figure = read_figure(text, "figure")
    found = moments(figure, ROWS, SUMMARY)
    assert found.get(figure.report) == (None if value is None else pytest.approx(value))
    assert str(figure) == text


def test_ten_rounds_of_many():
    rows = [{"round": i, "A": float(i)} for i in range(1, 21)]
    found = moments(read_figure("A.last", "figure"), rows, {})
    assert found == {"last": 20.0, "mean_last_10": 15.5, "mean": 10.5, "best": 20.0}
    best = best_round(Figure("A", "best"), rows, {})
    assert best is not None
    assert best["round"] == 20
    assert best_round(Figure("A", "best"), [], {}) is None


def test_best_round_is_the_one_that_the_run_says():
    """Early stopping may watch another figure than the first one on validation parts."""
    rows = [{"round": i, "Local-T": i / 10, "Local-T_std": i / 100, "Local-V": i / 10} for i in range(1, 4)]
    said = {"best_by": "eval_loss/Local-V", "best": {"Local-T": {"value": 0.2, "round": 2}}}
    assert moments(read_figure("Local-T.best", "figure"), rows, said)["best"] == 0.2
    assert moments(read_figure("Local-T_std.best", "figure"), rows, said)["best"] == 0.02
    assert moments(read_figure("Local-T.best@Local-V", "figure"), rows, said)["best"] == 0.3


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
    ]
    for text in less:
        figure = read_figure(text, "f")
        assert figure.less_is_better, text
        assert figure.of_clients == "", text
    loss = read_figure("eval_loss/Local-T_weighted.last", "f")
    assert (loss.less_is_better, loss.of_clients) == (True, "eval_loss/Local-T")


def test_a_figure_may_have_a_scale_of_its_own():
    figure = read_figure({"of": "seconds.mean", "scale": 40}, "figure")
    assert figure == Figure("seconds", "mean", scale=40.0)
    assert str(figure) == "seconds.mean × 40"


@pytest.mark.parametrize(
    ("node", "key", "word"),
    [
        ("A", "f", "Local-T.last"),
        ("A.newest", "f", "mean_last_10"),
        (".last", "f", "a column"),
        (3, "f", "a column"),
        ("summary.", "f", "summary.ENTRY"),
        ("A.last@B", "f", "A.best@B"),
        ("A.best@", "f", "A.best@B"),
        ({"of": "A.last", "scal": 1}, "f.scal", "did you mean scale"),
        ({"of": "A.last", "scale": "1"}, "f.scale", "a number"),
        ({"scale": 1}, "f.of", "a column"),
    ],
)
def test_a_wrong_figure_is_named(node, key, word):
    with pytest.raises(ConfigError) as caught:
        read_figure(node, "f")
    assert caught.value.key == key
    assert word in str(caught.value)
