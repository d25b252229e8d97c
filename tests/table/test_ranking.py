import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from report.run_folders import make_run
from scipy import stats

from fl_lightning.errors import ConfigError
from fl_lightning.report.page.ranking import RankedRow, rankings
from fl_lightning.table.definition import read_definition
from fl_lightning.table.figures import Head, Value
from fl_lightning.table.page import cells_as_csv, members_of, read_results, shown
from fl_lightning.table.ranking import _gap, interval, ranked
from fl_lightning.table.writing import write

HEAD = Head("Digits", "received")
NOISE = {0: 0.0, 1: 30.0, 2: -20.0, 3: 5.0, 4: 1.0}


def value(mean, wobble=0.1, **options):
    """Seeds move all rows together, and each a little by itself."""
    return Value(seeds={s: mean + off + wobble * math.sin(7 * mean + s) for s, off in NOISE.items()}, **options)


def test_places_are_those_that_the_seeds_leave_open():
    rows = {"far": value(40), "good": value(60), "same": value(60.05, 0.5), "best": value(70)}
    found = ranked({(row, HEAD): own for row, own in rows.items()}, HEAD)
    assert [own.row for own in found][::3] == ["best", "far"]
    assert {own.row: (own.first, own.last) for own in found} == {
        "best": (1, 1), "good": (2, 3), "same": (2, 3), "far": (4, 4),
    }  # fmt: skip
    assert [own.gap for own in found] == pytest.approx([0, -10, -10, -30], abs=0.2)


def test_who_lacks_a_seed_is_not_the_first_for_it():
    """A row whose hardest seed diverged had the best mean of all; by the pairs it was behind, or the same."""
    rows = {"same": value(60), "better": value(62)}
    rows["lacks"] = Value(seeds={s: v for s, v in rows["same"].seeds.items() if s != 2})
    assert rows["lacks"].mean > rows["better"].mean
    found = ranked({(row, HEAD): own for row, own in rows.items()}, HEAD)
    assert [own.row for own in found] == ["better", "same", "lacks"]
    assert found[2].gap == pytest.approx(-2, abs=0.2)
    rows["lacks"].seeds = {seed: own + 5 for seed, own in rows["lacks"].seeds.items()}  # and ahead of all by the pairs
    found = ranked({(row, HEAD): own for row, own in rows.items()}, HEAD)
    assert {own.row: (own.first, own.last) for own in found} == {"better": (2, 2), "same": (3, 3), "lacks": (1, 1)}


def test_line_of_a_page_is_beside_the_first_rows_mean():
    lines = [SimpleNamespace(label=row, setting="Digits") for row in "pf"]
    rows = [RankedRow("Digits", "received", row, 1, 2, *own, "3 seeds") for row, own in LINES.items()]
    (figure,) = rankings(lines, rows)
    line = zip(*(figure.columns[name] for name in ("s", "from_", "to")), strict=True)
    assert list(line) == [(0, 97.0, 97.0), (1, 97.75, 98.25)]


LINES = {"p": (97.0, 0.0, 0.0, 0.0), "f": (94.5, 1.0, 0.75, 1.25)}
"""Mean, gap over the seeds that both have, and its interval."""


def test_interval_is_students_over_the_seeds_that_both_have():
    first, second = value(60, 1.0), value(61, 2.0)
    second.seeds[9] = 1000.0
    gap, low, high = interval(second, first)
    gaps = [second.seeds[seed] - first.seeds[seed] for seed in NOISE]
    told = stats.t.interval(0.95, 4, np.mean(gaps), stats.sem(gaps))
    assert (gap, low, high) == pytest.approx((np.mean(gaps), *told))


def test_gap_is_of_the_seeds_that_both_have_where_they_are_too_few_for_an_interval():
    first, second = Value(seeds={0: 50.0, 1: 90.0}), Value(seeds={0: 40.0})
    gap, low, _ = interval(second, first)
    assert gap == -10
    assert math.isnan(low)
    assert interval(Value(seeds={5: 40.0}), first)[0] == -30  # none in common: of the means


def test_a_tie_has_a_gap_of_nothing():
    first, other = ranked({("a", HEAD): value(50), ("b", HEAD): value(50)}, HEAD)
    assert (_gap(first), _gap(other)) == ("", "+0.00 [+0.00, +0.00] (5 seeds)")


def test_least_is_first_of_spreads_and_times_and_other_columns_stay_out():
    rows = {("slow", HEAD): value(9, less_is_better=True), ("fast", HEAD): value(3, less_is_better=True)}
    other = {("slow", Head("Digits", "all")): value(1), ("new", HEAD): Value()}
    assert [own.row for own in ranked({**rows, **other}, HEAD)] == ["fast", "slow"]


def test_one_seed_without_clients_says_nothing_of_the_gap():
    gap, low, high = interval(Value(seeds={0: 3.0}), Value(seeds={0: 1.0}))
    assert gap == 2
    assert math.isnan(low)
    assert math.isnan(high)


def test_page_reads_back_who_is_ahead(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "{title: T, name: t, figures: {received: Local-T.last, trained: Local-T.last}, rank: [received], "
        "columns: {Digits: {}}, rows: {good: {}, =best: {}, lone: {}}}"
    )
    table = read_definition(tmp_path / "t.yaml")
    values = {("good", HEAD): value(60), ("=best", HEAD): value(70), ("lone", HEAD): Value(seeds={9: 50.0})}
    values |= {(row, Head("Digits", "trained")): own for (row, _), own in values.items()}
    write(tmp_path, table, values, [])
    (tmp_path / "cells.csv").write_text(cells_as_csv([], tmp_path))
    found = read_results(tmp_path)[0].ranked
    assert found == shown(table, values).ranked
    assert {(own.column, own.figure) for own in found} == {("Digits", "received")}
    assert [(own.row, own.places) for own in found] == [("=best", "1–2"), ("good", "2–3"), ("lone", "1–3")]
    assert found[1].low < found[1].gap < found[1].high
    assert [own.pairs for own in found] == ["", "5 seeds", ""]
    assert found[2].low is None
    write(tmp_path, replace(table, rank=()), values, [])
    assert read_results(tmp_path)[0].ranked == ()  # not those of before
    write(tmp_path, table, values, [])
    file = tmp_path / "ranking.csv"
    file.write_text(file.read_text() + "Digits,received,odd,1,one,nan,inf,,\nDigits\n")
    assert read_results(tmp_path)[0].ranked == found


def test_page_of_a_folder_says_what_the_tables_own_page_says(tmp_path):
    """Validation figures and shortened runs stood there beside published ones, without a word; columns in any order."""
    (tmp_path / "t.yaml").write_text(
        "{title: T, name: t, source: S 2024, note: known, figures: {one: Local-T.last, two: Local-T.mean}, "
        "columns: {A: {}}, rows: {first: {}, second: {}}}"
    )
    table = read_definition(tmp_path / "t.yaml").noted("All figures are on\nvalidation parts.")
    values = {("first", Head("A", "two")): value(60), ("second", Head("A", "one")): value(50)}
    write(tmp_path, table, values, ["1 of 2 runs is\nnot finished"])
    (tmp_path / "cells.csv").write_text(cells_as_csv([], tmp_path))
    found, _, notes = read_results(tmp_path)
    own = shown(table, values)
    assert [" ".join(note.split()) for note in own.notes] == list(found.notes)
    assert found.notes[-2:] == ["Published figures: S 2024.", "known All figures are on validation parts."]
    assert list(own.heads) == list(found.heads) == ["A one", "A two"]
    assert notes[0] == "1 of 2 runs is not finished"
    tex = (tmp_path / "table.tex").read_text().splitlines()
    assert tex[:2] == ["% note: known All figures are on validation parts.", "% note: published figures: S 2024"]
    (tmp_path / "about.json").write_text("[")
    assert read_results(tmp_path)[0].notes[0] == found.notes[0]


def test_page_has_the_rounds_of_a_cell_and_no_others(tmp_path):
    """By the definition's cells, and by the folder of results; of earlier versions `cells.csv` has no rounds."""
    run = make_run(tmp_path / "run", rounds=5)
    cell = SimpleNamespace(row=SimpleNamespace(name="A"), column=SimpleNamespace(name="B"), seed=0, end=3, folder=run)
    (tmp_path / "t.yaml").write_text("{title: T, name: t, figure: Local-T.last, columns: {B: {}}, rows: {A: {}}}")
    write(tmp_path, read_definition(tmp_path / "t.yaml"), {("A", Head("B", "")): value(50)}, [])
    (shown_now,) = members_of([cell])
    assert len(shown_now.run.rows) == 3
    for text, rounds in ((cells_as_csv([cell], tmp_path), 3), ("row,column,seed,folder\nA,B,0,run\n", 5)):
        (tmp_path / "cells.csv").write_text(text)
        ((read_back,), _) = read_results(tmp_path)[1:]
        assert len(read_back.run.rows) == rounds
        assert (read_back.label, read_back.setting) == ("A", "B")


def test_page_shows_nothing_of_a_row_that_is_cut(tmp_path):
    """Of a number its first digits were shown, and a row that was cut off was missing without a word."""
    text = "{title: T, name: t, figure: Local-T.last, rank: [''], columns: {Digits: {}}, rows: {A: {}, B: {}}}"
    (tmp_path / "t.yaml").write_text(text)
    head = Head("Digits", "")
    write(tmp_path, read_definition(tmp_path / "t.yaml"), {("A", head): value(60), ("B", head): value(70)}, [])
    (tmp_path / "cells.csv").write_text("row,column,seed,rounds,folder\nA,Digits,0,1,a\nB,Digits,0,1,b\n")
    figures, ranks = ((tmp_path / name).read_text() for name in ("table.csv", "ranking.csv"))
    assert len(read_results(tmp_path)[2]) == 1  # the runs are not there
    (tmp_path / "ranking.csv").write_text(ranks[:-9])
    shown, _, (said, _) = read_results(tmp_path)
    assert said == f"a line of {tmp_path / 'ranking.csv'} is damaged"
    assert len(shown.ranked) == 1
    (tmp_path / "ranking.csv").write_text(ranks)
    last = figures.splitlines(keepends=True)[-1]
    (tmp_path / "table.csv").write_text(figures.removesuffix(last))
    assert read_results(tmp_path)[2][0] == "table.csv has no line of B; run the table again"
    for kept in (3, 4, 5, 9):
        (tmp_path / "table.csv").write_text(figures.removesuffix(last) + ",".join(last.split(",")[:kept])[:-1])
        with pytest.raises(ConfigError, match=r"^report: table\.csv is cut short; run the table again$"):
            read_results(tmp_path)
