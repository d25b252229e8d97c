"""Which runs are one line, and what a line is called and drawn like."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.report.colours import PALETTE, colours_of
from fl_lightning.report.recorded_run import RecordedRun, read_run
from fl_lightning.report.series import Member, in_one_picture, series_of


def member(method="A", seed=0, name="run", lr=0.1, beta=0.5, value=0.5, **federation):
    config = {
        "federation": federation,
        "seed": seed,
        "name": name,
        "method": {"class_path": f"package.{method}"},
        "optimizer": {"class_path": "SGD", "init_args": {"lr": lr}},
        "data": {"partition": {"class_path": "Dirichlet", "init_args": {"beta": beta}}, "num_clients": 2},
    }
    return Member(
        RecordedRun(Path(name), config, {}, {}, [{"round": 1, "Local-T": value}, {"round": 2, "Local-T": None}])
    )


def test_runs_that_differ_in_the_seed_alone_are_one_line():
    (line,) = series_of([member(seed=1, name="b", value=0.7), member(seed=0, name="a", value=0.5)])
    assert line.label == "A"
    assert [run.seed for run in line.runs] == [0, 1]
    curve = line.curve("Local-T")
    assert curve.rounds.tolist() == [1]
    assert curve.mean[0] == pytest.approx(0.6)
    assert curve.std[0] == pytest.approx(np.std([0.5, 0.7], ddof=1))


def test_lines_of_one_method_say_what_differs_and_share_its_color():
    one, two, other = series_of([member(lr=0.1), member(lr=0.2), member(method="B")])
    assert [one.label, two.label, other.label] == ["A (lr 0.1)", "A (lr 0.2)", "B"]
    assert one.colour == two.colour != other.colour
    assert one.dash != two.dash


def test_keys_of_one_last_word_are_told_apart_in_a_name():
    """The rate of clients and that of the server were both "lr"."""
    one, other = (
        member(lr=lr, server_optimizer={"class_path": "ServerSGD", "init_args": {"lr": server}})
        for lr, server in ((0.1, 1.0), (0.2, 0.5))
    )
    labels = [line.label for line in series_of([one, other])]
    assert labels == [
        "A (server_optimizer.lr 1.0, optimizer.lr 0.1)",
        "A (server_optimizer.lr 0.5, optimizer.lr 0.2)",
    ]


@pytest.mark.parametrize(
    ("key", "one", "other", "labels"),
    [
        ("rounds", 3, 6, ["A (rounds 3)", "A (rounds 6)"]),
        ("cohort", None, 4, ["A (cohort none)", "A (cohort 4)"]),
        ("graph", False, "auto", ["A (graph none)", "A (graph auto)"]),
        ("early_stopping", None, {"patience": 2}, ["A (patience none)", "A (patience 2)"]),
    ],
)
def test_runs_of_other_lengths_are_no_repeats(key, one, other, labels):
    lines = series_of([member(seed=0, **{key: one}), member(seed=2, **{key: other})])
    assert [line.label for line in lines] == labels


@pytest.mark.parametrize(("key", "other"), [("rounds", 6), ("cohort", 4)])
def test_a_tables_seeds_are_one_line_though_one_was_rounded_otherwise(key, other):
    """They were torn apart, and the line had another name than the row, by which a ranking did not find it."""
    cells = [replace(member(seed=s, **{key: v}), label="Row", setting="Column") for s, v in ((0, 3), (2, other))]
    apart = replace(member(seed=0, lr=0.2, **{key: 3}), label="Other", setting="Column")
    lines = series_of([*cells, apart])
    assert [(line.label, [run.seed for run in line.runs]) for line in lines] == [("Row", [0, 2]), ("Other", [0])]
    twice = series_of([cells[0], cells[0]])
    assert [len(line.runs) for line in twice] == [1, 1]


def test_a_run_that_is_under_way_is_a_repeat_of_those_that_are_done():
    done, begun = member(seed=0, rounds=2), member(seed=1, rounds=2)
    begun.run.rows.pop()
    (line,) = series_of([done, begun])
    assert [run.seed for run in line.runs] == [0, 1]


def test_lines_that_are_all_of_one_method_have_colors_of_their_own():
    lines = series_of([member(lr=0.1 * place) for place in range(6)])
    assert len({line.colour for line in lines}) == 6
    assert {line.dash for line in lines} == {0}
    (alone,) = series_of([member(lr=0.1)])
    assert alone.colour == series_of([member(lr=0.1), member(method="B")])[0].colour


def test_no_two_lines_look_the_same_though_a_method_has_more_than_there_are_dashes():
    lines = series_of([*(member(lr=0.1 * place) for place in range(8)), member(method="B")])
    assert len({(line.colour, line.dash) for line in lines}) == 9
    assert {line.colour for line in lines[:5]} == {lines[0].colour}
    assert lines[8].colour not in {line.colour for line in lines[:8]}


def test_the_same_run_twice_is_two_lines():
    labels = [line.label for line in series_of([member(name="a"), member(name="b")])]
    assert labels == ["A (a)", "A (b)"]


def test_other_data_is_another_setting():
    one, two = series_of([member(beta=0.1), member(beta=0.5)])
    assert one.label == two.label == "A"
    assert "beta=0.1" in one.setting
    assert one.setting != two.setting
    assert one.dash == two.dash == 0


def test_in_one_picture_lines_of_other_data_say_so_and_have_colors_of_their_own():
    lines, title = in_one_picture([member(beta=0.1).run, member(beta=0.5).run], "Runs")
    assert title == "Runs"
    assert [line.label for line in lines] == ["A (beta 0.1)", "A (beta 0.5)"]
    assert len({line.colour for line in lines}) == 2
    repeats, title = in_one_picture([member(seed=0).run, member(seed=1).run], "Runs")
    assert [line.label for line in repeats] == ["A"]
    assert title == "Dirichlet(beta=0.5), 2 clients"


def test_in_one_picture_lines_of_several_methods_say_their_settings():
    """Nothing said that FedAvg was on other data than Local."""
    lines, _ = in_one_picture([member("A", beta=0.1).run, member("B", beta=0.5).run], "Runs")
    assert [line.label for line in lines] == ["A (beta 0.1)", "B (beta 0.5)"]

    more, far = member("B"), member("B", name="far")
    more.run.config["data"]["num_clients"] = 9
    far.run.config["data"]["shift"] = {"class_path": "NoiseSkew", "init_args": {"std": 0.3}}
    lines, _ = in_one_picture([member("A", lr=0.1).run, member("A", lr=0.2).run, more.run, far.run], "Runs")
    assert [line.label for line in lines] == [
        "A (lr 0.1, num_clients 2, no shift)",
        "A (lr 0.2, num_clients 2, no shift)",
        "B (num_clients 9, no shift)",
        "B (num_clients 2, NoiseSkew(std=0.3))",
    ]
    else_ = member("B", name="else", lr=0.2, beta=0.1)  # too many keys: its name, and all of the setting's
    lines, _ = in_one_picture([member("A").run, more.run, far.run, else_.run], "Runs")
    assert lines[3].label == "B (else, beta 0.1, num_clients 2, no shift)"
    bare, empty = (
        replace(member("B").run, path=Path(name), config=said) for name, said in (("c", {}), ("d", {"data": None}))
    )
    lines, _ = in_one_picture([member("A").run, bare, empty], "Runs")
    assert lines[0].label == "A (num_clients 2, Dirichlet(beta=0.5))"
    assert lines[1].label.startswith("c (")


def test_another_rule_of_partition_is_named_whole():
    plain, other = member(), member()
    other.run.config["data"]["partition"] = {"class_path": "x.Shards", "init_args": {"shards": 2, "distinct": True}}
    lines, _ = in_one_picture([plain.run, other.run], "Runs")
    assert [line.label for line in lines] == ["A (Dirichlet(beta=0.5))", "A (Shards(shards=2, distinct=True))"]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("shift", {"class_path": "NoiseSkew", "init_args": {"std": 0.3}}, "shift NoiseSkew(std=0.3)"),
        ("dataset", {"class_path": "Sample", "init_args": {"dataset": {"class_path": "x.MNIST"}, "samples": 9}},
         "Sample(dataset=MNIST, samples=9)"),
    ],
)  # fmt: skip
def test_a_shift_and_what_a_sample_is_drawn_from_are_of_the_setting(key, value, named):
    plain, other = member("Local"), member("B")
    other.run.config["data"][key] = value
    one, two = series_of([plain, other])
    assert named in two.setting
    assert one.setting != two.setting


def test_color_of_a_method_does_not_depend_on_the_others():
    names = [f"method {place}" for place in range(40)]
    alone = {name: colours_of([name])[name] for name in names}
    pair = colours_of(names[:2])
    assert sorted(pair.values()) == sorted(alone[name] for name in names[:2]) or alone[names[0]] == alone[names[1]]
    ten = colours_of(names[: len(PALETTE)])
    assert sorted(ten.values()) == list(range(len(PALETTE)))
    assert max(list(colours_of(names).values()).count(place) for place in range(len(PALETTE))) == 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"a: [b"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("summary.json", b"[1, 2]"),
        ("partition.json", b"{"),
    ],
)
def test_damaged_files_are_noted(tmp_path, name, content):
    (tmp_path / "metrics.csv").write_text("round,Local-T\n1,0.5\n2,0.6\n3,0")
    for file in ("config.yaml", "summary.json", "partition.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).write_bytes(content)
    run = read_run(tmp_path, "test")
    assert run.notes == (f"{name} is damaged",)
    assert run.method == run.name == tmp_path.name


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"beta": 0.1, "min_samples": 10, "balance": True, "fill_empty": False}, "Dirichlet(beta=0.1)"),
        ({"beta": 0.1, "balance": False}, "Dirichlet(beta=0.1, balance=False)"),
    ],
)
def test_what_a_partition_takes_anyway_is_not_said(given, shown):
    own = member()
    own.run.config["data"]["partition"] = {"class_path": "fl_lightning.data.partitions.Dirichlet", "init_args": given}
    assert shown in series_of([own])[0].setting.split(", 2 clients")[0]
