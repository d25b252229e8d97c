import os

import pytest

from fl_lightning.report.best_so_far import BestSoFar
from fl_lightning.report.record import MetricsFile, num_evaluated, read_logged, read_rows, summarise

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def file(tmp_path):
    made = MetricsFile(tmp_path / "metrics.csv", ["round", "Local-T", "loss"])
    made.start()
    return made


def test_file_starts_with_its_columns(file):
    assert file.path.read_text() == "round,Local-T,loss\n"
    assert read_rows(file.path) == []


def test_rows_round_trip_to_the_last_bit(file):
    rows = [
        {"round": 1, "Local-T": 0.1 + 0.2, "loss": 1e-300},
        {"round": 2, "Local-T": 1 / 3, "loss": 12345678901234.5},
    ]
    file.append(file.lines(rows))
    assert read_rows(file.path) == rows


def test_what_does_not_apply_is_empty_and_never_zero(file):
    file.append(
        file.lines([{"round": 1, "Local-T": None, "loss": 0.5}, {"round": 2}, {"round": 3, "Local-T": 0.0, "loss": 0}])
    )
    assert file.path.read_text().splitlines()[1:] == ["1,,0.5", "2,,", "3,0.0,0"]
    assert read_rows(file.path)[1] == {"round": 2, "Local-T": None, "loss": None}
    assert read_rows(file.path)[2] == {"round": 3, "Local-T": 0.0, "loss": 0}


def test_loss_that_is_no_number_is_written_as_such(file):
    """A run that diverged is no run without a loss; a resumed run writes the same text again."""
    file.append(
        file.lines([{"round": 1, "Local-T": None, "loss": NAN}, {"round": 2, "Local-T": None, "loss": float("inf")}])
    )
    assert file.path.read_text().splitlines()[1:] == ["1,,nan", "2,,inf"]


def test_values_without_a_column_are_left_out(file):
    file.append(file.lines([{"round": 1, "other": 5}]))
    assert read_rows(file.path) == [{"round": 1, "Local-T": None, "loss": None}]


def test_start_puts_right_whatever_is_there(file):
    file.path.write_bytes(b"\xff\x00 no text")
    file.start("1,0.25,0.5\n")
    assert file.path.read_text() == "round,Local-T,loss\n1,0.25,0.5\n"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00,\x01\n\x80", b"a,b\n1,2\n3\n", b'"' * 200_000])
def test_file_that_is_no_table_is_read_without_a_traceback(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    assert all(isinstance(row, dict) for row in read_rows(path))


@pytest.mark.parametrize(
    ("cell", "value"), [("9" * 18, 10**18 - 1), ("-" + "9" * 30, -1e30), ("9" * 400, float("inf"))]
)
def test_a_whole_number_that_no_machine_word_holds_is_a_fraction(file, cell, value):
    """The page's arithmetic ended over it."""
    file.append(f"1,{cell},0.5\n")
    ((found,),) = [[row["Local-T"] for row in read_rows(file.path)]]
    assert (found, type(found)) == (value, type(value))


def test_a_mark_that_an_editor_puts_in_front_is_no_part_of_the_first_name(file):
    file.append("1,0.25,0.5\n")
    file.path.write_bytes(b"\xef\xbb\xbf" + file.path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_rows(file.path) == [{"round": 1, "Local-T": 0.25, "loss": 0.5}]


def test_a_column_may_have_a_comma_and_quotes_in_its_name(tmp_path):
    """No row was read."""
    row = {"round": 1, 'loss/a,"b"': 0.25}
    made = MetricsFile(tmp_path / "metrics.csv", list(row))
    made.start(made.lines([row]))
    assert read_rows(made.path) == [row]


def test_a_quote_that_is_lost_hides_no_other_row(tmp_path):
    """All behind it was one name, and too long for Python's reader."""
    file = tmp_path / "logged.csv"
    file.write_text(
        'round,client,value,name\r\n1,,0.5,"hits\n' + '2,,0.5,"a ""b"", c"\r\n' * 9000 + "3,,1,x,y\n4,,0.5,hits\n"
    )
    rows = read_logged(file)
    assert {(row["round"], row["name"]) for row in rows} == {(2, 'a "b", c'), (4, "hits")}
    assert len(rows) == 9001


@pytest.mark.parametrize("cut", range(1, 12))
def test_row_that_was_cut_short_is_not_read(file, cut):
    """A kill leaves any number of its last bytes out."""
    file.append(file.lines([{"round": 1, "Local-T": 0.25, "loss": 0.5}, {"round": 2, "Local-T": 0.5, "loss": 0.75}]))
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    rows = read_rows(file.path)
    assert rows[0] == {"round": 1, "Local-T": 0.25, "loss": 0.5}
    assert len(rows) == 1


def test_rows_are_synced(file, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor, call=os.fsync: (synced.append(1), call(descriptor)))
    file.append(file.lines([{"round": 1}]))
    assert synced


def test_start_is_atomic(file, monkeypatch):
    file.append(file.lines([{"round": 1, "Local-T": 0.5, "loss": 0.5}]))
    before = file.path.read_text()

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        file.start()
    assert file.path.read_text() == before


def test_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "nowhere.csv") == []


def rows_of(*values):
    return [
        {"round": round, "Local-T": value, "Local-T_std": 0.1, "loss": 9.0}
        for round, value in enumerate(values, start=1)
    ]


def test_summary_matches_hand_computed_values():
    summary = summarise(rows_of(0.2, 0.8, 0.5))
    assert summary["last"] == {"Local-T": 0.5, "Local-T_std": 0.1}
    assert summary["best"] == {"Local-T": {"value": 0.8, "round": 2}}
    assert summary["mean_last_10"] == pytest.approx({"Local-T": 0.5, "Local-T_std": 0.1})


def test_mean_is_over_the_last_ten_evaluated_rounds():
    """Rounds 1 to 24, every second one evaluated: the mean of rounds 6, 8, …, 24 is 15."""
    rows = rows_of(*(round / 100 if round % 2 == 0 else None for round in range(1, 25)))
    summary = summarise(rows)
    assert summary["mean_last_10"]["Local-T"] == pytest.approx(0.15)
    assert num_evaluated([{**row, "Local-T_std": None if row["round"] % 2 else 0.1} for row in rows]) == 12
    assert summary["last"]["Local-T"] == 0.24


def test_last_is_the_last_evaluated_round():
    assert summarise(rows_of(0.2, 0.4, None))["last"]["Local-T"] == 0.4


def test_last_is_of_one_round():
    """What is not defined in the last round stood beside its accuracy with another round's value."""
    rows = [
        {"round": 1, "Local-T": 0.6, "Local-T_hurt": 0.0, "AUROC/Local-T": 0.8, "Server-T": 0.5},
        {"round": 2, "Local-T": 0.8, "Local-T_hurt": None, "AUROC/Local-T": None, "Server-T": None},
        {"round": 3, "Local-T": None, "Local-T_hurt": None, "AUROC/Local-T": None, "Server-T": None},
    ]
    summary = summarise(rows)
    assert summary["last"] == {"Local-T": 0.8, "Server-T": 0.5}
    assert summary["mean_last_10"]["AUROC/Local-T"] == 0.8


def test_best_is_the_first_of_equals():
    assert summarise(rows_of(0.2, 0.8, 0.8))["best"]["Local-T"] == {"value": 0.8, "round": 2}


def test_column_that_never_applied_is_left_out():
    summary = summarise([{"round": 1, "Local-T": 0.5, "Server-T": None}])
    assert all("Server-T" not in part for part in summary.values())


@pytest.mark.parametrize(("values", "mean"), [((-INF, INF), "nan"), ((1e308, 1e308), "inf"), ((INF, 1.0), "inf")])
def test_mean_without_a_finite_sum_is_said_as_it_is(values, mean):
    """A metric of one's own may have any value; the run ended over its summary."""
    assert repr(summarise(rows_of(*values))["mean_last_10"]["Local-T"]) == mean


def test_summary_of_no_rounds_is_empty():
    assert summarise([]) == {"last": {}, "best": {}, "mean_last_10": {}}


def test_best_so_far_goes_by_a_spread_that_is_watched_too():
    """W&B was lost for the whole run: a spread has no best of its own."""
    best = BestSoFar("Local-V_std", True)
    assert best.see([{"round": 1, "Local-T": 0.5, "Local-V": 0.5, "Local-V_std": 0.2}])["best_round/Local-T"] == 1
    assert best.see([{"round": 2, "Local-T": 0.9, "Local-V": 0.9, "Local-V_std": 0.3}]) == {}
    assert best.see([{"round": 3, "Local-T": 0.4, "Local-V": 0.4, "Local-V_std": 0.1}])["best/Local-T"] == 0.4


def test_direction_is_of_the_column_that_is_watched_alone():
    rows = [{"round": 1, "Local-T": 0.1, "Local-V": 0.2}, {"round": 2, "Local-T": 0.3, "Local-V": 0.4}]
    assert summarise(rows, "eval_loss/Local-V", True)["best"]["Local-T"] == {"value": 0.3, "round": 2}
    assert summarise(rows, "Local-V", True)["best"]["Local-T"] == {"value": 0.1, "round": 1}


@pytest.mark.parametrize("never", [None, float("nan")])
def test_a_watched_figure_that_never_had_a_number_chooses_nothing(never):
    """`best` was each column's own, chosen on the test parts, and `best_on` said validation."""
    rows = [
        {"round": round, "Local-T": test, "Local-V": validation, "F1Score/Local-V": never}
        for round, (test, validation) in enumerate([(0.1, 0.6), (0.9, 0.4)], 1)
    ]
    summary = summarise(rows, "F1Score/Local-V")
    assert summary["best_by"] == "Local-V"
    assert summary["best"]["Local-T"] == {"value": 0.1, "round": 1}
    best = BestSoFar("F1Score/Local-V")
    assert best.see(rows[:1])["best/Local-T"] == 0.1
    assert best.see(rows[1:]) == {}


def test_best_so_far_goes_by_the_watched_figure_once_there_is_one():
    best = BestSoFar("Local-V_newcomers")
    assert best.see([{"round": 1, "Local-T": 0.9, "Local-V": 0.9, "Local-V_newcomers": None}])["best/Local-T"] == 0.9
    late = [{"round": 2, "Local-T": 0.5, "Local-V": 0.5, "Local-V_newcomers": 0.3}]
    assert best.see(late)["best/Local-T"] == 0.5
    assert best.see([{"round": 3, "Local-T": 0.9, "Local-V": 0.95, "Local-V_newcomers": None}]) == {}


def test_best_so_far_takes_back_what_the_best_round_lacks():
    """W&B had a figure of another round beside those of the best one, where `summary.json` has none."""
    rows = [
        {"round": 1, "Local-V": 0.3, "Local-T": 0.5, "AUROC/Local-T": 0.9, "Local-T_hurt": 0.0},
        {"round": 2, "Local-V": 0.6, "Local-T": 0.6, "AUROC/Local-T": None, "Local-T_hurt": 0.2},
        {"round": 3, "Local-V": 0.7, "Local-T": 0.7, "AUROC/Local-T": 0.8, "Local-T_hurt": None},
    ]
    best, said = BestSoFar(), dict[str, object]()
    for row in rows:
        said |= best.see([row])
    whole = {f"best/{name}": own["value"] for name, own in summarise(rows)["best"].items()}
    assert {name: value for name, value in said.items() if name.startswith("best/") and value is not None} == whole
    assert said["best/Local-T_hurt"] is None
    assert said["best_round/Local-T_hurt"] is None
    assert said["best_round/AUROC/Local-T"] == 3
