"""Text of a folder that somebody else made: it is shown, and nothing that shows it obeys it."""

import csv
import io
import json
import time

import pytest
import yaml
from matplotlib.lines import Line2D
from report.run_folders import make_run

from fl_lightning.report.compare import compare
from fl_lightning.report.console import print_evaluation
from fl_lightning.report.picture import Picture, add_legend
from fl_lightning.report.plain import PlainConsole
from fl_lightning.report.recorded_run import read_run
from fl_lightning.table.definition import read_definition
from fl_lightning.table.figures import Head, Value
from fl_lightning.table.page import cells_as_csv, read_results
from fl_lightning.table.writing import as_csv, write

BAD = "[/b]:bomb:\x1b]0;owned\x07\x1b[2J\x9b2J\u202e$\\frac{$"
SHOWN = "[/b]:bomb:\\x1b]0;owned\\x07\\x1b[2J\\x9b2J\\u202e$\\frac{$"


def in_a_terminal(show):
    """What is written to a terminal without colours."""
    file = io.StringIO()
    console = PlainConsole(file=file, width=200, force_terminal=True, color_system=None)
    show(console)
    return file.getvalue()


@pytest.fixture
def hostile(tmp_path):
    """Two runs that say the worst wherever a run's folder says something."""
    folders = [make_run(tmp_path / name, BAD, classes=(BAD, "b", "c")) for name in "ab"]
    for number, folder in enumerate(folders):
        about = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**about, "name": f"_{BAD}", "git_commit": BAD}))
        for file in ("metrics.csv", "clients.csv"):
            head, *rows = (folder / file).read_text().splitlines()
            text = "\n".join([f"{head},loss/{BAD}", *(f"{row},0.{number}" for row in rows), ""])
            (folder / file).write_text(text)
    return folders


def test_console_shows_markup_emoji_and_escape_sequences_as_they_are_written():
    assert in_a_terminal(lambda console: console.print(BAD, highlight=False)) == f"{SHOWN}\n"
    said = in_a_terminal(lambda console: print_evaluation(BAD, [(BAD, 0.5, 0.5)], console))
    assert said.count(SHOWN) == 2
    assert in_a_terminal(lambda console: console.print("two\nlines")) == "two\nlines\n"


def test_compare_shows_the_names_of_columns_as_they_are_written(hostile):
    said = in_a_terminal(lambda console: compare(*hostile, console))
    assert said.count(f"loss/{SHOWN}") == 6  # of the run and its clients
    assert not set(said) & set("\x1b\x07\x9b\u202e")


def test_what_is_read_of_a_run_can_be_shown(hostile):
    run = read_run(hostile[0], "test")
    assert (run.name, run.method) == (f"_{SHOWN}", SHOWN)
    assert run.partition["classes"] == [SHOWN, "b", "c"]
    assert f"loss/{SHOWN}" in run.rows[0]
    assert f"loss/{SHOWN}" in run.client_rows[0]
    assert not any("\x1b" in str(part) for part in (run.config, run.summary, run.partition, run.rows))


def test_legend_shows_dollar_signs_and_names_with_an_underscore():
    figure = Picture()
    handles = [Line2D([], []), Line2D([], [])]
    add_legend(figure, handles, [BAD[-8:], "_own"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [BAD[-8:], " _own"]
    assert figure._repr_png_()  # where what stands between dollar signs is parsed


def test_configuration_that_grows_through_aliases_is_damaged(hostile):
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    start = time.process_time()
    for text in (f"{bomb}method: *a59\n", "method: &a [*a]\n", f"method: {'[' * 100}{']' * 100}\n"):
        (hostile[0] / "config.yaml").write_text(text)
        run = read_run(hostile[0], "test")
        assert (run.config, run.notes) == ({}, ("config.yaml is damaged",))
        assert run.identity == {}
    assert time.process_time() - start < 1
    (hostile[0] / "config.yaml").write_text("method: &m {class_path: x.Y}\nother: [*m, *m]\n")
    assert read_run(hostile[0], "test").config["other"] == [{"class_path": "x.Y"}] * 2


# --- what other programs read ---------------------------------------------------------------------------------------

ROWS = ("=cmd|'/c calc'!A1", "@SUM(1)", "+a | b", "<script>harm</script>", r"\write18{ls} ~ 2^3", "'@SUM(1)", "\x1b[2J")


@pytest.fixture
def table(tmp_path):
    content = {
        "title": "<img src=x>\n# harm",
        "name": "nine",
        "columns": {"-1+1": {"figure": "Local-T.last"}},
        "rows": {name: {} for name in ROWS},
    }
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return read_definition(tmp_path / "t.yaml")


def test_table_s_files_hold_names_and_no_formulas_html_or_commands(table, tmp_path):
    values = {(row.name, Head("-1+1", "")): Value({0: -0.5}) for row in table.rows}
    write(tmp_path, table, values, ["<b>note"])
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert {row["row"][0] for row in rows[:3]} | {row["column"][0] for row in rows} == {"'"}
    assert {row["mean"] for row in rows} == {"-0.5"}  # a number is none
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("# &lt;img src=x> # harm\n")
    assert "<" not in text
    assert r"| +a \| b |" in text
    text = (tmp_path / "table.tex").read_text()
    assert r"\textbackslash{}write18\{ls\} \textasciitilde{} 2\textasciicircum{}3" in text
    assert "\x1b" not in text


def test_names_are_read_back_as_they_were_given(table, tmp_path):
    values = {(row.name, Head("-1+1", "")): Value({0: 0.5}) for row in table.rows}
    write(tmp_path, table, values, [])
    (tmp_path / "cells.csv").write_text(cells_as_csv([], tmp_path))
    shown, members, _ = read_results(tmp_path)
    assert (shown.title, shown.heads, members) == ("<img src=x> # harm", ["-1+1"], [])
    assert [name for name, _ in shown.rows] == [*ROWS[:-1], "\\x1b[2J"]
    assert as_csv(table, values).count("'=cmd") == 1


def test_a_table_says_how_many_seeds_it_is_of_and_what_is_missing(table, tmp_path):
    """LaTeX said nothing, and the page no number; of a folder that was moved it said that runs had no round yet."""
    values = {(row.name, Head("-1+1", "")): Value({0: 0.5}) for row in table.rows}
    values[table.rows[0].name, Head("-1+1", "")].seeds[1] = 0.75
    write(tmp_path, table, values, ["2 of 3 runs\nare not finished"])
    assert (tmp_path / "table.tex").read_text().startswith("% note: 2 of 3 runs are not finished\n")
    (tmp_path / "begun").mkdir()
    (tmp_path / "cells.csv").write_text("row,column,seed,folder\na,b,0,begun\na,b,1,gone\n")
    shown, _, notes = read_results(tmp_path)
    assert shown.notes[0].startswith("Means over 1 to 2 seeds, ")
    assert [note.split(", seen")[0] for note in notes] == [
        "2 of 3 runs are not finished",
        "1 of 2 runs are not where cells.csv says",
        "1 of 2 runs have no round yet: begun",
    ]
