import pytest

from fl_lightning.command_line import CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.parser import configured
from fl_lightning.table.definition import Published, read_definition
from fl_lightning.table.figures import Head, Value
from fl_lightning.table.overlays import Overlay, read_overlay, split_options
from fl_lightning.table.page import shown
from fl_lightning.table.writing import latex, markdown

GOOD = """
title: T
source: "Paper, Table 9"
seeds: [0, 1]
figure: Server-T.last
spread: seeds
base: {files: [base.yaml]}
columns:
  A: {set: {data.batch_size: 5}}
  B: {figures: {L: Local-T.best, G: Global-T.mean_last_10}}
rows:
  FedAvg: {set: {method: FedAvg}}
  Ours: {columns: {A: null}, figure: Local-T.last}
published:
  FedAvg: {A: 66.24 ± 0.6, B: {L: 50, G: [40.5, 1]}}
"""

LOSS = "Ours: {figures: {L: eval_loss/Local-T.last}}"


@pytest.fixture
def write(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "base.yaml").write_text("seed: 0\n")

    def write(text):
        path = tmp_path / "tables" / "nine.yaml"
        path.write_text(text)
        return path

    return write


def test_a_file_says_rows_columns_figures_and_what_was_published(write):
    table = read_definition(write(GOOD))
    assert (table.seeds, table.spread, table.scale) == ((0, 1), "seeds", None)
    assert table.name.endswith("-nine")
    assert [(column.name, name) for column, name in table.heads] == [("A", ""), ("B", "L"), ("B", "G")]
    assert str(table.columns[0].figures[""]) == "Server-T.last"
    assert str(table.figure(table.rows[1], table.columns[1], "G")) == "Local-T.last"
    assert table.rows[1].columns == {"A": None}
    assert table.published["FedAvg"]["A"][""] == Published(66.24, 0.6)
    assert table.published["FedAvg"]["B"] == {"L": Published(50.0), "G": Published(40.5, 1.0)}


def test_figures_of_the_table_of_a_column_and_of_a_row(write):
    text = GOOD.replace("figure: Server-T.last", "figures: {L: {of: Local-T.last}, S: {of: seconds.mean, scale: 40}}")
    text = text.replace("figures: {L: Local-T.best, G", "figures: {L: Local-T.best, S: seconds.last, G")
    text = text.replace("{columns: {A: null}, figure: Local-T.last}", "{figures: {L: Local-T_std.last, S: null}}")
    text = text.replace("A: 66.24 ± 0.6", "A: {L: 66.24 ± 0.6}")
    table = read_definition(write(text))
    (a, b), (fedavg, ours) = table.columns, table.rows
    assert [str(table.figure(fedavg, a, name)) for name in a.figures] == ["Local-T.last", "seconds.mean × 40"]
    assert [str(table.figure(fedavg, b, name)) for name in b.figures][:2] == ["Local-T.best", "seconds.last"]
    assert str(table.figure(ours, b, "L")) == "Local-T_std.last"
    assert table.figure(ours, a, "S") is None
    assert str(table.figure(ours, b, "G")) == "Global-T.mean_last_10"
    assert [row.name for row in table.rows] == ["FedAvg", "Ours"]
    with pytest.raises(ConfigError, match=r"^rows\.Ours\.figures\.K: "):
        read_definition(write(text.replace("S: null", "K: null")))


def test_figure_of_a_table_that_names_none_is_of_more_than_one_round(write):
    table = read_definition(write(GOOD.replace("figure: Server-T.last", "")))
    assert str(table.columns[0].figures[""]) == "Local-T.mean_last_10"


def test_a_figure_s_name_is_printed_so_that_it_stays_in_its_line(write):
    """A separator of lines in it cost the table its page, and an escape sequence was written as it is."""
    text = GOOD.replace("{L: Local-T.best", '{"L\\Lx\\e[31m": Local-T.best').replace("L: 50, ", "")
    table = read_definition(write(text))
    name = "L\\u2028x\\x1b[31m"
    assert [name for _, name in table.heads] == ["", name, "G"]
    values = {("FedAvg", Head("B", name)): Value({0: 50.0})}
    assert "\x1b" not in markdown(table, values)
    assert shown(table, values).heads == [f"B {name}"]


@pytest.mark.parametrize(
    ("said", "value", "spread"),
    [
        ("0.00001", 1e-5, None),
        ('"5e-4 ± 1e-5"', 5e-4, 1e-5),
        ("[5.0, 1]", 5.0, 1.0),
        ("1.0e+16", 1e16, None),
        ('"-3 +- .5"', -3.0, 0.5),
    ],
)
def test_published_figures_may_be_said_in_many_ways(write, said, value, spread):
    table = read_definition(write(GOOD.replace("66.24 ± 0.6", said)))
    assert table.published["FedAvg"]["A"][""] == Published(value, spread)


@pytest.mark.parametrize("said", [".nan", "[.nan, .inf]", "[1, .inf]", "[]", "[1, 2, 3]", "true", '"1 ±"', "inf"])
def test_published_figures_are_numbers(write, said):
    with pytest.raises(ConfigError, match=r"^published\.FedAvg\.A: must be a number"):
        read_definition(write(GOOD.replace("66.24 ± 0.6", said)))


def test_published_figures_keep_all_their_digits(write):
    """Numbers of values have eight."""
    table = read_definition(write(GOOD.replace("66.24 ± 0.6", "16986640 ± 1234567.5")))
    head = Head("A", "")
    values = {("FedAvg", head): Value({0: 16986641.0}, published=table.published["FedAvg"]["A"][""])}
    assert "| 16986641.00 [16986640 ± 1234567.5; +1.00] |" in markdown(table, values)
    assert "{\\scriptsize 16986640}" in latex(table, values)
    ((_, (cell,)), *_) = shown(table, values).rows
    assert cell.published == "16986640 ± 1234567.5"
    assert str(Published(66.20)) == "66.2"


def test_short_forms_of_a_section_are_those_of_a_configuration(tmp_path):
    """Rounds with the clients that are out of them were keys that there are not."""

    def words(failures):
        return list(
            read_overlay({"set": {"federation": {"failures": failures}}}, "rows.A", tmp_path / "t.yaml").words()
        )

    assert words({3: [0, 4], "5-8": [2]}) == [
        "--federation.failures.schedule.3=[0, 4]",
        "--federation.failures.schedule.5-8=[2]",
    ]
    assert words(0.2) == ["--federation.failures.probability=0.2"]
    with pytest.raises(ConfigError, match=r"^rows\.A\.set\.federation\.failures: must be a probability \(0\.3\)"):
        words("often")


def test_empty_arguments_of_a_class_say_as_little_as_in_a_file():
    """As options they take back what the base says: a row became another run than the same section in `files`."""
    section = {"method": {"class_path": "FedProx", "init_args": {}}}
    base = {"method": {"class_path": "FedProx", "init_args": {"mu": 0.5}}}
    trees = [CommandLine([base, *own]).tree["method"] for own in (Overlay((), section).words(), [section])]
    assert trees == [base["method"]] * 2


def test_a_class_inside_another_one_keeps_what_was_said_of_it_as_in_a_file():
    """A row that changed one argument of a wrapped module took the others back, in silence; so did its name alone."""
    module = {"class_path": "my.Net", "init_args": {"width": 32, "depth": 3}}
    base = {"model": {"class_path": "WrappedModel", "init_args": {"module": module}}}
    wider = {"model": {"init_args": {"module": {"class_path": "my.Net", "init_args": {"width": 5}}}}}

    def found(*later):
        return CommandLine([base, *later]).tree["model"]["init_args"]["module"]

    for row in ([wider], Overlay((), wider).words()):
        own = found(*row)
        assert (str(own["class_path"]), own["init_args"]["depth"]) == ("my.Net", 3)
        assert str(own["init_args"]["width"]) == "5"
    for name in ("--model.module=my.Net", {"model": {"init_args": {"module": "my.Net"}}}):
        assert found(name) == module


def test_an_empty_section_says_nothing_as_in_a_file(tmp_path):
    """A table's `evaluate: {}` took back what its base says of it."""
    (tmp_path / "base.yaml").write_text("federation: {evaluate: {received: false}, checkpoint: {keep: 5}}\n")
    own = {"federation": {"evaluate": {}, "checkpoint": {}, "early_stopping": {}}}
    words = read_overlay({"files": ["base.yaml"], "set": own}, "base", tmp_path / "t.yaml").words()
    found = configured("fit", "", ["--config", "quickstart", *words])[1]["federation"]
    assert (found["evaluate"]["received"], found["checkpoint"]["keep"]) == (False, 5)
    assert found["early_stopping"]["patience"] == 10


@pytest.mark.parametrize("own", ["method", "method.class_path"])
def test_a_class_may_stand_behind_its_arguments(own, tmp_path):
    """The order of YAML's keys means nothing: the weight was dropped with those of the base's method, in silence."""
    overlay = read_overlay({"set": {"method.weight": 3, own: "Ditto"}}, "rows.A", tmp_path / "t.yaml")
    base = {"method": {"class_path": "FedProx", "init_args": {"mu": 0.5}}}
    assert CommandLine([base, *overlay.words()]).tree["method"]["init_args"] == {"weight": "3"}
    assert list(overlay.layers()) == [(own, "Ditto"), ("method.weight", 3)]


def test_one_key_in_two_spellings_is_refused(tmp_path):
    """The later one won, in silence."""
    settings = {"data.partition.beta": 0.5, "data": {"partition": {"init_args": {"beta": 0.1}}}}
    with pytest.raises(ConfigError, match=r"^rows\.A\.set\.data\.partition\.beta: stands there twice"):
        read_overlay({"set": settings}, "rows.A", tmp_path / "t.yaml")


def test_a_section_of_a_table_of_comments_alone_says_nothing(tmp_path):
    """As in a configuration's file; it took back what the base says."""
    settings = {"federation": None, "method": {"init_args": None}}
    overlay = read_overlay({"set": settings}, "rows.A", tmp_path / "t.yaml")
    assert list(overlay.words()) in ([], ["--method={}"])


def resolved(label, **settings):
    data = {"dataset": {"class_path": "CSVTable", "init_args": {"path": "a.csv", "label": label}}, "partition": "IID"}
    overlay = Overlay((), {"method": "FedAvg", "model": "MLP", "data": data, **settings})
    return configured("fit", "", list(overlay.words()))[1]


@pytest.mark.parametrize("text", ["[a]", "a: b", "{x}", "[1, 2", "1", "null", "~", '"[a]"', "it's [a]", "a, b"])
def test_a_text_of_a_table_is_that_text(text):
    """As it is in a file; the command line would read some as lists."""
    assert resolved(text)["data"]["dataset"]["init_args"]["label"] == text


def test_a_list_of_a_table_may_stand_in_quotes():
    assert resolved("y", **{"model.hidden": "[8, 8]"})["model"]["init_args"]["hidden"] == [8, 8]


def test_a_table_says_what_its_figures_are_printed_in(write):
    """Accuracies are in percent and losses are not, where the file says nothing."""
    text = GOOD.replace("figure: Server-T.last", "figures: {L: Local-T.last, S: {of: seconds.mean, scale: 40}}")
    text = text.replace("A: 66.24 ± 0.6, ", "").replace("{L: Local-T.best, G", "{L: eval_loss/Local-T.best, G")
    table = read_definition(write(text))
    figures = [column.figures[name] for column, name in table.heads]
    assert [table.scale_of(figure) for figure in figures] == [100, 40, 1, 100]
    said = "Global-T.mean_last_10 in percent, Local-T.last in percent, eval_loss/Local-T.best, seconds.mean × 40,"
    assert said in markdown(table, {})
    table = read_definition(write(f"{text}\nscale: 2"))
    assert [table.scale_of(figure) for figure in figures] == [2, 40, 2, 2]
    assert "eval_loss/Local-T.best × 2," in markdown(table, {})


def test_rows_of_which_one_prints_a_loss_may_be_ranked_by_another_figure(write):
    text = GOOD.replace("Ours: {columns: {A: null}, figure: Local-T.last}", f"{LOSS}\nrank: [G]")
    assert read_definition(write(text)).rank == ("G",)


def test_a_column_s_name_may_hold_dots(write):
    text = GOOD.replace("  A: {set: {data.batch_size: 5}}", "  A (0.5 M.): {figure: Local-T.last}")
    text = text.replace("A: 66.24 ± 0.6, ", "").replace("{A: null}", '{"A (0.5 M.)": {set: {metrics: []}}}')
    assert str(read_definition(write(text)).columns[0].figures[""]) == "Local-T.last"


@pytest.mark.parametrize(
    ("old", "new", "key", "word"),
    [
        ("seeds: [0, 1]", "seeds: [0, 0]", "seeds", "differ"),
        ("seeds: [0, 1]", "seeds: 3", "seeds", "list"),
        ("seeds: [0, 1]", "seeds: [true]", "seeds", "whole"),
        ("seeds: [0, 1]", "seeds: [9223372036854775808]", "seeds", "below 2^63"),
        ("figure: Server-T.last", "figure: Server-T.newest", "figure", "mean_last_10"),
        ("figure: Server-T.last", "figure: 3", "figure", "Local-T.last"),
        ("B: {figures", "B: {figure: Local-T.last, figures", "columns.B.figure", "beside figures"),
        ("spread: seeds", "spread: rounds", "spread", "clients"),
        ("figures: {L: Local-T.best, G", "figures: {L: Local-T.finest, G", "columns.B.figures.L", "best"),
        ("title: T", "titel: T", "titel", "did you mean title"),
        ("title: T", "name: ../../up", "name", "not a path"),
        ("title: T", "title: [T]", "title", "a text"),
        ("title: T", "scale: .nan", "scale", "finite"),
        ("title: T", "scale: 0", "scale", "above 0"),
        ("title: T", "scale: -100", "scale", "above 0"),
        ("title: T", "rank: [H]", "rank", "L"),
        ("columns:\n", "columns:\n  B L: {}\n", "columns", "got 'B L'"),
        ("columns:\n", "columns:\n  on: {}\n", "columns", "by YAML as true"),
        ("  Ours:", "  No:", "rows", "put it in quotes"),
        ("{L: Local-T.best", "{null: Local-T.best", "columns.B.figures", "by YAML as null"),
        ("{L: Local-T.best", "{1: Local-T.last, '1': Local-T.best", "columns.B.figures", "must have names that differ"),
        ("title: T", "rank: 3", "rank", "a list"),
        ("Ours: {columns: {A: null}, figure: Local-T.last}", f"{LOSS}\nrank: [L]", "rank", "B has rows with figures"),
        ("figure: Server-T.last", "figure: {of: Server-T.last, scale: .inf}", "figure.scale", "finite"),
        ("{data.batch_size: 5}}", "0}", "columns.A.set", "sections"),
        ("base: {files: [base.yaml]}", "base: {files: ''}", "base.files", "list"),
        ("title: T", "name: true", "name", "a text"),
        ("base: {files: [base.yaml]}", "base: {files: [other.yaml]}", "base.files", "no such file"),
        ("base: {files: [base.yaml]}", "base: {files: base.yaml}", "base.files", "list"),
        ("{A: null}", "{C: null}", "rows.Ours.columns.C", "choose from A, B"),
        ("A: 66.24 ± 0.6", "C: 1", "published.FedAvg.C", "choose from A, B"),
        ("A: 66.24 ± 0.6", "A: high", "published.FedAvg.A", "a number"),
        ("A: 66.24 ± 0.6", "A: {L: 1}", "published.FedAvg.A.L", "one figure a column"),
        ("A: 66.24 ± 0.6, B: {L: 50, G: [40.5, 1]}", "B: 50", "published.FedAvg.B", "none of that name"),
        ("  FedAvg: {A:", "  FedProx: {A:", "published.FedProx", "FedAvg, Ours"),
        ("{data.batch_size: 5}}", "{data.batch_size: 5}, st: 1}", "columns.A.st", "did you mean set"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(write, old, new, key, word):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read_definition(write(GOOD.replace(old, new)))
    assert caught.value.key == key
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["rows: {A: }", "- 1", "", "columns: [\n"])
def test_no_table_at_all(write, text):
    with pytest.raises(ConfigError):
        read_definition(write(text))


def test_what_is_added_to_a_section_is_an_option_of_the_runs():
    """It was taken for an option of `table`, and refused."""
    words = ["t.yaml", "--metrics+", "AUROC", "--model+=CNN", "--trainer.callbacks+", "Timer", "--jobs", "2"]
    added = ["--metrics+=AUROC", "--model+=CNN", "--trainer.callbacks+=Timer"]
    assert split_options(words, "say --seeds") == (["t.yaml", "--jobs", "2"], added)
    with pytest.raises(ConfigError, match="--seed: each run has its own; say --seeds"):
        split_options(["--seed+", "1"], "say --seeds")
