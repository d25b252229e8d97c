"""The page: what is in it, what is not, and what it does in a browser."""

import html
import itertools
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from report.run_folders import make_run

from fl_lightning.errors import ConfigError
from fl_lightning.files import WriteError
from fl_lightning.report.packed import packed
from fl_lightning.report.page import bundle
from fl_lightning.report.page.classifier import class_relation, heads_of
from fl_lightning.report.page.clients import bars, both_moments, hurt, last_of_clients, spread
from fl_lightning.report.page.curves import accuracies, communication, measures, over_rounds
from fl_lightning.report.page.document import ASSETS, _content
from fl_lightning.report.page.figure import Figure, Rows, largest_bubble
from fl_lightning.report.page.partition import bubbles
from fl_lightning.report.page.ranking import RankedRow, rankings
from fl_lightning.report.page.tables import COLUMNS, PublishedCell, PublishedTable, configurations, moments
from fl_lightning.report.page.writing import _named, figures_of, write_page
from fl_lightning.report.recorded_run import read_run
from fl_lightning.report.series import Member, series_of
from fl_lightning.sealed import save_tensors

pytest.importorskip("vl_convert")


def lines_of(*folders):
    return series_of(Member(read_run(folder, "test")) for folder in folders)


def members_of(*folders):
    return [Member(read_run(folder, "test")) for folder in folders]


@pytest.fixture
def comparison(tmp_path):
    """Two methods with two seeds each, one of which sends nothing."""
    runs = [make_run(tmp_path / f"a{seed}", "Alpha", seed, terms=("cross_entropy", "pull")) for seed in (0, 1)]
    return runs + [make_run(tmp_path / f"b{seed}", "Beta", seed, sends=False, level=0.7) for seed in (0, 1)]


class Page(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self._within = [], [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._within = dict(attributes).get("type", "script") if tag == "script" else None

    def handle_data(self, data):
        if self._within:
            self.scripts.append((self._within, data))

    def handle_endtag(self, tag):
        self._within = None

    @property
    def content(self):
        (text,) = [data for kind, data in self.scripts if kind == "application/json"]
        return json.loads(text)


# --- figures --------------------------------------------------------------------------------------------------------


def test_page_has_every_figure_that_the_runs_have_something_for(comparison):
    keys = [figure.key for figure in figures_of(lines_of(*comparison))]
    assert keys == [
        "local-t",
        "local-t-received",
        "global-t",
        "global-t-received",
        "server-t",
        "receive-drop",
        "received-trained",
        "worst-tenth",
        "clients",
        "hurt",
        "partition",
        "communication-local-t",
        "communication-local-t-received",
        "seconds",
        "loss",
    ]


def test_curve_is_the_mean_with_both_spreads(comparison):
    lines = lines_of(*comparison[:2])
    figure = next(accuracies(lines))
    rows = [run.rows[-1] for run in lines[0].runs]
    means = [100 * row["Local-T"] for row in rows]
    last = figure.rows(lines)[-1]
    assert last["y"] == pytest.approx(np.mean(means), rel=1e-4)
    assert last["sh"] - last["y"] == pytest.approx(np.std(means, ddof=1), rel=1e-2)
    assert last["ch"] - last["y"] == pytest.approx(100 * np.mean([row["Local-T_std"] for row in rows]), rel=1e-2)


def test_one_seed_has_no_spread_over_seeds(comparison):
    """An end of the band at 0 would make the axis begin there."""
    lines = lines_of(comparison[0])
    for figure in accuracies(lines):
        for row in figure.rows(lines):
            assert (row["sl"], row["sh"]) == (None, None)
            assert row["cl"] is None or row["cl"] > 20
    (figure,) = spread(lines)
    assert {(row["low"], row["high"]) for row in figure.rows(lines)} == {(None, None)}


def test_hurt_clients_are_those_below_the_run_that_sends_nothing(comparison):
    lines = lines_of(*comparison)
    (figure,) = hurt(lines)
    rows = [row for row in figure.rows(lines) if row["pick"] == 0]
    assert {row["label"] for row in rows} == {"Alpha"}
    below = 0
    for seed in (0, 1):
        own, alone = (read_run(comparison[at + seed], "test").client_rows[-5:] for at in (0, 2))
        below += sum(a["Local-T"] < b["Local-T"] for a, b in zip(own, alone, strict=True))
    assert sum(row["x"] < 0 for row in rows) == below
    assert f"Alpha, after the fit: {below} of 10 clients" in figure.facts[0]


def test_of_two_lines_that_send_nothing_one_is_the_bar_for_all_seeds(comparison, tmp_path):
    """Each seed was held against the last line that had it, two seeds of one line against two methods."""
    other = make_run(tmp_path / "c", "Gamma", 0, sends=False, level=0.2)
    lines = lines_of(*comparison, other)
    (figure,) = hurt(lines)
    (plain,) = hurt(lines_of(*comparison))
    held = [[row["alone"] for row in each.rows(lines) if row["label"] == "Alpha"] for each in (figure, plain)]
    assert held[0] == held[1]
    assert figure.facts[0] == f"{plain.facts[0].removesuffix('.')} (Beta)."


def test_a_run_in_which_nobody_came_through_a_fit_is_no_bar(comparison):
    """It sends nothing, too, and stays at chance: nobody was hurt beside it."""
    *methods, one, two = comparison
    for run in (one, two):
        header, *rows = (run / "metrics.csv").read_text().splitlines()
        rows = [f"{header},participants", *(f"{row},0" for row in rows)]
        (run / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert list(hurt(lines_of(*methods, one, two))) == []


def test_who_never_trained_alone_has_no_bar(comparison):
    """They were held against the networks that they started from."""
    *methods, one, two = comparison
    (before,) = hurt(lines_of(*comparison))
    for run in (one, two):
        header, *rows = (run / "clients.csv").read_text().splitlines()
        said = [f"{row},{int(row.split(',')[1] != '1')}" for row in rows]
        (run / "clients.csv").write_text("\n".join([f"{header},participated", *said]) + "\n")
    lines = lines_of(*methods, one, two)
    (figure,) = hurt(lines)
    assert {row["client"] for row in before.rows(lines)} - {row["client"] for row in figure.rows(lines)} == {1}
    assert all(" of 8 clients" in fact and "2 more never trained there." in fact for fact in figure.facts)


def test_all_clients_are_counted_though_not_all_are_drawn(tmp_path):
    runs = [make_run(tmp_path / method, method, clients=510, rounds=1, sends=method == "Beta", partition_hash="1" * 64)
            for method in ("Alone", "Beta")]  # fmt: skip
    lines = lines_of(*runs)
    (figure,) = hurt(lines)
    assert all(" of 510 clients" in fact for fact in figure.facts)
    assert len(figure.rows(lines)) == 2 * 500


def test_nobody_is_compared_with_another_partition(tmp_path):
    a = make_run(tmp_path / "a", "Alpha", partition_hash="1" * 64)
    b = make_run(tmp_path / "b", "Beta", sends=False, partition_hash="2" * 64)
    assert list(hurt(lines_of(a, b))) == []


def test_nobody_is_hurt_by_a_shift_that_the_other_run_has_not(comparison):
    shifted, other, *alone = comparison
    config = json.loads((shifted / "config.yaml").read_text())
    config["data"]["shift"] = {"class_path": "data.NoiseSkew", "init_args": {"std": 0.5}}
    (shifted / "config.yaml").write_text(json.dumps(config))
    (figure,) = hurt(lines_of(shifted, other, *alone))
    assert {row["seed"] for row in figure.rows(lines_of(shifted, other, *alone))} == {1}


def test_nobody_is_hurt_by_a_run_on_other_samples(comparison):
    """A table's columns are named alike whatever its rows' shifts are."""
    shifted, *others = comparison
    (plain,) = hurt(lines_of(shifted, *others))
    held = json.loads((shifted / "partition.json").read_text())
    (shifted / "partition.json").write_text(json.dumps({**held, "samples": "shifted"}))
    (figure,) = hurt(lines_of(shifted, *others))
    first, second = ({row["seed"] for row in each.rows(lines_of(shifted, *others))} for each in (plain, figure))
    assert (first, second) == ({0, 1}, {1})


def test_worst_tenth_of_twenty_clients_is_two(tmp_path):
    lines = lines_of(make_run(tmp_path / "a", clients=20))
    (figure,) = spread(lines)
    by_kind = {row["kind"]: row["x"] for row in figure.rows(lines) if row["pick"] == 0}
    values = sorted(row["Local-T"] for row in lines[0].runs[0].client_rows[-20:])
    assert by_kind["worst tenth"] == pytest.approx(100 * np.mean(values[:2]), rel=1e-4)
    assert by_kind["worst client"] == pytest.approx(100 * values[0], rel=1e-4)


def test_bars_over_seeds_are_the_sample_standard_deviation(comparison):
    lines = lines_of(*comparison[:2])
    (figure,) = spread(lines)
    row = next(row for row in figure.rows(lines) if row["kind"] == "mean" and row["pick"] == 0)
    means = [100 * run.rows[-1]["Local-T"] for run in lines[0].runs]
    assert row["high"] - row["x"] == pytest.approx(np.std(means, ddof=1), rel=1e-2)


def test_who_was_not_tested_in_the_last_round_is_in_no_figure_of_it():
    rows = packed(["round", "client", "Local-T"], [(1, 0, 0.5), (1, 1, 0.6), (2, 0, 0.7)])
    assert last_of_clients(SimpleNamespace(client_rows=rows), "Local-T") == {0: 0.7}


def test_newcomers_are_in_no_figure_of_clients(tmp_path):
    folder = make_run(tmp_path / "a", clients=6)
    config = json.loads((folder / "config.yaml").read_text())
    config["federation"] = {"newcomers": {"clients": 2, "after": 1}}
    (folder / "config.yaml").write_text(json.dumps(config))
    lines = lines_of(folder)
    founders = [row["Local-T"] for row in lines[0].runs[0].client_rows if row["round"] == 3]
    assert len(founders) == 4
    (figure,) = spread(lines)
    means = [row["x"] for row in figure.rows(lines) if row["pick"] == 0 and row["kind"] == "mean"]
    assert means == pytest.approx([100 * np.mean(founders)], rel=1e-4)
    (figure,) = bars(lines)
    assert {row["client"] for row in figure.rows(lines)} == {0, 1, 2, 3}


def test_accuracy_is_drawn_against_all_bytes_so_far(comparison):
    lines = lines_of(*comparison)
    figure = next(communication(lines))
    rows = figure.rows(lines)
    assert [row["x"] for row in rows if row["label"] == "Alpha"] == pytest.approx([0.002, 0.004, 0.006])
    assert [row["flat"] for row in rows if row["label"] == "Beta"] == [True]


def test_messages_between_clients_are_sent_once_though_one_sends_and_another_hears_them(comparison):
    for run in comparison[:2]:
        (run / "topology.csv").write_text("round,sender,receiver,share,num_params,num_bytes\n")
    lines = lines_of(*comparison)
    rows = next(communication(lines)).rows(lines)
    assert [row["x"] for row in rows if row["label"] == "Alpha"] == pytest.approx([0.001, 0.002, 0.003])


def test_classifier_is_read_from_models_and_the_checkpoint(tmp_path):
    run = make_run(tmp_path / "a", clients=2)
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    (run / "models").mkdir()
    (run / "checkpoints").mkdir()
    save_tensors(run / "models" / "00000.pt", {"model.head.weight": weight, "model.head.bias": torch.zeros(3)})
    save_tensors(run / "models" / "00001.pt", {"model.head.weight": 2 * weight})
    soft = {"kind": "ClassMeans", "mean": torch.eye(3), "count": torch.ones(3), "relates_classes": True}
    message = {"weights": {"model.head.weight": weight}, "artifacts": {"soft_labels": soft}}
    save_tensors(run / "checkpoints" / "round-0003.ckpt", {"exchange": {"message": message}})
    lines = lines_of(run)
    found = {figure.key: figure.rows(lines) for figure in figures_of(lines)}
    relation = {(row["i"], row["j"]): row["v"] for row in found["class-relation"] if row["what"] == "CR"}
    assert relation["1", "2"] == pytest.approx(class_relation(weight.numpy())[1, 2], rel=1e-4)
    assert {row["v"] for row in found["class-relation"] if row["what"] == "SL"} == {0, 1}
    first = [row for row in found["norms"] if row["client"] == 0]
    sizes = weight.norm(dim=1)
    assert [row["y"] for row in first] == pytest.approx((sizes / sizes.mean()).tolist(), rel=1e-4)


class Harm:
    """Pickled, it would be called."""

    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize("content", [b"no tensor", b"", None])
def test_models_that_are_damaged_or_code_are_left_out(tmp_path, capsys, content):
    run = make_run(tmp_path / "a")
    (run / "models").mkdir()
    file = run / "models" / "00000.pt"
    torch.save({"model.head.weight": Harm()}, file) if content is None else file.write_bytes(content)
    assert heads_of(read_run(run, "test")).own == {}
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "last"),
    [
        (("model.head.weight",), "model.head.weight"),
        (("model.head.1.weight",), "model.head.1.weight"),  # a dropout before it, as in FedProto's network
        (("model.head.0.weight", "model.head.3.weight"), "model.head.3.weight"),
        (("model.head.classifier.weight", "terms.old.teacher.head.weight"), "model.head.classifier.weight"),
        (("model.head.1.weight", "personal_head.weight"), "model.head.1.weight"),
        (("model.head.weight", "personal.head.weight"), "personal.head.weight"),
    ],
)
def test_classification_layer_is_the_last_of_the_own_head(tmp_path, head, last):
    run = make_run(tmp_path / "run")
    (run / "models").mkdir()
    state = {name: torch.full((3, 3), float(place)) for place, name in enumerate(head)}
    state |= {"model.head.0.bias": torch.zeros(3), "overhead.weight": torch.ones(3, 4)}
    save_tensors(run / "models" / "00000.pt", state)
    assert heads_of(read_run(run, "test")).own[0].tolist() == state[last].tolist()


def test_models_of_later_rounds_are_not_shown_as_those_of_earlier_ones(tmp_path):
    """A table's cell that was extended since: its figures are of the first rounds, its models of the last."""
    folder = make_run(tmp_path / "run", rounds=5)
    (folder / "models").mkdir()
    save_tensors(folder / "models" / "00000.pt", {"model.head.weight": torch.ones(3, 3)})
    run = read_run(folder, "test")
    assert list(heads_of(run.first(5)).own) == [0]
    assert heads_of(run.first(3)) == (None, {}, None)


@pytest.mark.parametrize(
    "sizes",
    [
        {"model.head.base.weight": (3, 9), "model.head.down": (2, 9), "model.head.up": (3, 2)},
        {"model.head.base.weight": (3, 9), "model.head.down.weight": (2, 9), "model.head.up.weight": (3, 2)},
    ],
)
def test_of_an_adapter_no_matrix_is_taken_for_the_classes(tmp_path, sizes):
    """Its frozen base was, which is the same for all clients whatever they have learned."""
    run = make_run(tmp_path / "run")
    (run / "models").mkdir()
    save_tensors(run / "models" / "00000.pt", {name: torch.ones(size) for name, size in sizes.items()})
    assert heads_of(read_run(run, "test")).own == {}


# --- the document ---------------------------------------------------------------------------------------------------


def test_page_names_nothing_outside_itself(comparison, tmp_path):
    (path,) = write_page(members_of(*comparison), tmp_path / "page.html", "Two methods")
    page = Page(path)
    named = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert all(value.startswith(("#", "data:")) for value in named)
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert policy.count("sha256-") == sum(kind == "script" for kind, _ in page.scripts) == 2


def test_page_can_be_read_without_seeing(comparison, tmp_path):
    (path,) = write_page(members_of(*comparison), tmp_path / "page.html", "Two methods")
    elements = Page(path).elements
    tags = [tag for tag, _ in elements]
    assert {"header", "nav", "main", "aside"} <= set(tags)
    assert tags.count("h1") == 1
    headings = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    plots = [a for _, a in elements if a.get("class") == "plot"]
    assert len(plots) == tags.count("figure") == sum("data-table" in a for _, a in elements)
    assert all(len(a["aria-label"]) > 40 and a["role"] == "img" for a in plots)
    ids = [a["id"] for _, a in elements if "id" in a]
    assert len(ids) == len(set(ids))
    references = [a[name] for _, a in elements for name in ("aria-labelledby",) if name in a]
    assert set(references) <= set(ids)
    assert all(a.get("scope") for tag, a in elements if tag == "th")


def ranked(row, first, last, mean, gap, ends=(None, None), column="Digits", figure="received"):
    return RankedRow(column, figure, row, first, last, mean, gap, *ends)


def test_ranking_shows_how_far_rows_are_behind_and_which_may_be_the_first(comparison, tmp_path):
    members = [Member(read_run(comparison[2 * n], "test"), label, "Digits") for n, label in enumerate("AB")]
    rows = [ranked("A", 1, 2, 90.0, 0.0, (0.0, 0.0)), ranked("B", 1, 2, 88.0, -2.0, (-5.0, 1.0))]
    rows += [ranked("gone", 3, 3, 50.0, -40.0), ranked("B", 1, 1, 70.0, 0.0, figure="trained")]
    (figure,) = rankings(series_of(members), rows)
    assert figure.picks == ["received", "trained"]
    columns = figure.columns
    assert columns["s"] == [0, 1, 1]  # a row without runs is in no picture
    assert columns["pick"] == [0, 0, 1]
    assert (columns["from_"], columns["to"]) == ([90, 85, None], [90, 91, None])
    assert columns["places"] == ["1–2", "1–2", "1"]
    assert figure.facts == ["Digits received: A and B may be the first.", "Digits trained: only B may be the first."]
    table = PublishedTable("T", [], [], [], rows)
    page = Page(write_page(members, tmp_path / "page.html", "Ranked", table)[0])
    assert page.content["figures"][0]["key"] == "ranking"


def test_where_best_was_chosen_is_said_of_each(tmp_path):
    """One run without validation parts made all of them chosen on the test split."""
    plain, checked = (make_run(tmp_path / name, name) for name in ("Alpha", "Beta"))
    summary = json.loads((checked / "summary.json").read_text())
    (checked / "summary.json").write_text(json.dumps({**summary, "best_by": "Local-V"}))
    assert "of runs that have Local-V, the round in which Local-V is best" in moments(lines_of(plain, checked))
    assert "of the others the highest round's, chosen on the test split" in moments(lines_of(plain, checked))
    assert "“Best” is the round in which Local-V is best" in moments(lines_of(checked))
    assert "“Best” is the highest round's" in moments(lines_of(plain))


def test_long_table_shows_other_moments_on_request(comparison, tmp_path):
    def boxes(rows, **moments):
        cell = PublishedCell("90.0", moments=moments)
        table = PublishedTable("T", [], ["a"], [(f"r{n}", [cell]) for n in range(rows)])
        page = Page(write_page(members_of(*comparison), tmp_path / "page.html", "T", table)[0])
        shown = [a for tag, a in page.elements if tag == "span" and "moments" in a.get("class", "")]
        assert len(shown) == (rows if moments else 0)
        return ["checked" in a for tag, a in page.elements if tag == "input" and "name" not in a]

    assert boxes(12, last="89.0") == [True]
    assert boxes(13, last="89.0") == [False]
    assert boxes(13) == []


def test_choice_of_many_runs_does_not_follow_the_reader(comparison, tmp_path):
    def kinds(members):
        (path,) = write_page(members, tmp_path / "page.html", "Runs")
        return next(a["class"] for tag, a in Page(path).elements if tag == "aside")

    run = read_run(comparison[0], "test")
    assert kinds([Member(run, f"M{n}", "") for n in range(16)]) == "controls"
    assert kinds([Member(run, f"M{n}", "") for n in range(17)]) == "controls many"


def test_names_are_text_wherever_they_come_from(tmp_path):
    bad = "</script><script>document.title='harm'</script><img src=x onerror=alert(1)>"
    run = make_run(tmp_path / "a", classes=(bad, "b", "c"), terms=(bad,))
    for name in ("summary.json", "config.yaml"):
        content = json.loads((run / name).read_text())
        content |= {"name": bad} | (
            {"method": bad, "versions": {bad: bad}, "git_commit": bad} if "rounds" in content else {}
        )
        (run / name).write_text(json.dumps(content))
    cell = PublishedCell(bad, bad, bad, "best", {"last": bad})
    table = PublishedTable(bad, [bad], [bad], [(bad, [cell, None])])
    (path,) = write_page(members_of(run), tmp_path / "page.html", bad, table, [bad])
    page = Page(path)
    assert "img" not in [tag for tag, _ in page.elements]
    assert sum(kind == "script" for kind, _ in page.scripts) == 2
    assert all("harm" not in data for kind, data in page.scripts if kind == "script")
    assert html.escape(bad) in path.read_text(encoding="utf-8")
    assert page.content["lines"][0]["label"] == bad


def test_runs_of_other_data_are_settings_of_their_own(tmp_path):
    runs = [make_run(tmp_path / f"{beta}", beta=beta) for beta in (0.1, 0.5)]
    (path,) = write_page(members_of(*runs), tmp_path / "page.html", "Two settings")
    page = Page(path)
    assert [line["setting"] for line in page.content["lines"]] == [0, 1]
    assert any(attributes.get("id") == "setting" for tag, attributes in page.elements if tag == "select")


def test_page_names_runs_that_are_not_finished(tmp_path):
    """They count in means over seeds with the round that they have reached."""
    runs = []
    for seed, stopped in enumerate((None, None, "no longer better")):
        run = make_run(tmp_path / str(seed), seed=seed, rounds=3 if seed else 6)
        for name, more in (("config.yaml", {"federation": {"rounds": 6}}), ("summary.json", {"stopped": stopped})):
            (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **more}))
        runs.append(run)
    (path,) = write_page(members_of(*runs), tmp_path / "page.html", "Three runs")
    assert len(Page(path).content["lines"]) == 1
    assert path.read_text().count("not finished") == 2  # above the figures, and where it is said how it is run again
    assert "<li>1: it is not finished: 3 of its 6 rounds are done</li>" in path.read_text()
    assert "its runs have 3 to 6 rounds; from round 4 on its curves are the means of those" in path.read_text()


def test_a_run_that_goes_on_has_no_last_round_beside_finished_ones(tmp_path):
    """Its round 3 stood beside their round 6, and the table above left it out."""
    runs = [make_run(tmp_path / str(seed), seed=seed, rounds=3 if seed == 2 else 6) for seed in range(3)]
    for run in runs:
        config = json.loads((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(json.dumps({**config, "federation": {"rounds": 6}}))
    (runs[2] / "summary.json").unlink()
    assert moments(lines_of(*runs)) == moments(lines_of(*runs[:2]))
    assert moments(lines_of(runs[2])).count("±") == 1  # in the head: alone, it is where it is

    def widths(*runs):
        return next(spread(lines_of(*runs))).columns["x"]

    assert widths(*runs) == widths(*runs[:2])


def test_page_says_what_is_missing(tmp_path):
    run = make_run(tmp_path / "a")
    (run / "partition.json").write_text("{")
    (run / "clients.csv").unlink()
    (path,) = write_page(members_of(run), tmp_path / "page.html", "One run")
    assert "a: partition.json is damaged" in path.read_text()
    keys = {figure["key"] for figure in Page(path).content["figures"]}
    assert "local-t" in keys
    assert keys.isdisjoint({"clients", "partition", "hurt"})


def test_further_ways_to_predict_have_rows_of_their_own_but_not_twice_the_same(tmp_path):
    run = make_run(tmp_path / "a", rounds=1)
    head, row = (run / "metrics.csv").read_text().splitlines()
    own = dict(zip(head.split(","), row.split(","), strict=True))
    ways = {"head": 0.125, "head_std": 0.25, "prototype": float(own["Local-T"])}
    also = {f"Local-T/{way}": str(value) for way, value in ways.items()}
    (run / "metrics.csv").write_text("\n".join([",".join([head, *also]), ",".join([row, *also.values()])]) + "\n")
    (run / "summary.json").unlink()
    text = moments(lines_of(run))
    assert re.findall(r'<span class="small">by ([^<]+)<', text) == ["head", "prototype"]
    assert text.count("<td>12.50</td>") == 3
    assert "25.00" not in text
    named = [f"{name}/prototype" for name in own if name in COLUMNS]
    copied = "\n".join([",".join([head, *named]), ",".join([row, *(own[name.split("/")[0]] for name in named)])]) + "\n"
    (run / "metrics.csv").write_text(copied)
    assert "by prototype" not in moments(lines_of(run))


def test_further_ways_to_predict_and_newcomers_are_drawn_but_nothing_twice(tmp_path):
    run = make_run(tmp_path / "a", rounds=2)
    head, *rows = (run / "metrics.csv").read_text().splitlines()
    own = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    new = [{"Local-T/head": "0.125", "Local-T/head_std": "0.25", "Local-T_newcomers": "0.5", "F1Score/Local-T": "0.75"}]
    new *= 2
    also = [{"Local-T/prototype": row["Local-T"], **added} for row, added in zip(own, new, strict=True)]
    also[0]["Local-T/head"] = own[0]["Local-T"]  # alike in one round, and not in the other
    lines = [f"{row},{','.join(added.values())}" for row, added in zip(rows, also, strict=True)]
    (run / "metrics.csv").write_text("\n".join([",".join([head, *also[0]]), *lines]) + "\n")
    (figure,) = measures(lines_of(run))
    assert figure.picks == ["Local-T/head", "F1Score/Local-T", "Local-T_newcomers"]
    assert [row["y"] for row in figure.rows(lines_of(run)) if row["pick"] == 0][1] == 0.125


@pytest.mark.parametrize(("mode", "chosen"), [("min", min), ("max", max), (None, max)])
def test_best_round_is_the_one_that_the_run_has_chosen(mode, chosen, tmp_path):
    """A figure of which less is better, though its name doesn't say so."""
    run = make_run(tmp_path / "a", rounds=5)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config.setdefault("federation", {})["early_stopping"] = {"monitor": "Local-T", "mode": mode} if mode else None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "best_by": "Local-T"}))
    figures = [row["Local-T"] for row in read_run(run, "test").rows]
    best = moments(lines_of(run)).split('<th scope="row">best')[1]
    assert best.index(f"<td>{100 * chosen(figures):.2f}</td>") < best.index("</tr>")


@pytest.mark.parametrize("mode", ["min", "auto"])
def test_best_round_of_a_run_that_goes_on_is_the_one_that_it_would_choose(mode, tmp_path):
    """Without a summary it was the worst: the direction of the loss that is watched was taken for Local-V's."""
    run = make_run(tmp_path / "a", rounds=4)
    names, *rows = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
    more = [("0.5", "0.9"), ("0.6", "0.7"), ("0.7", "0.3"), ("0.8", "0.4")]
    lines = [[*names, "Local-V", "eval_loss/Local-V"], *([*row, *own] for row, own in zip(rows, more, strict=True))]
    (run / "metrics.csv").write_text("".join(",".join(cells) + "\n" for cells in lines))
    config = yaml.safe_load((run / "config.yaml").read_text())
    stopping = {"monitor": "eval_loss/Local-V", "mode": mode}
    config["federation"] = {**config.get("federation", {}), "early_stopping": stopping}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "summary.json").unlink()
    read = read_run(run, "test")
    assert {own["round"] for own in read.figures["best"].values()} == {3}
    assert "the round in which eval_loss/Local-V is best" in moments(lines_of(run))
    stopping["monitor"] = None  # the first of the figures on validation parts; mode is for it
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_run(run, "test").figures["best"]["Local-T"]["round"] == (1 if mode == "min" else 4)


def test_numbers_that_are_not_finite_are_no_points(tmp_path):
    run = make_run(tmp_path / "a", rounds=2)
    text = (run / "metrics.csv").read_text().splitlines()
    cells = text[1].split(",")
    cells[1] = "nan"
    cells[-1] = "inf"
    (run / "metrics.csv").write_text("\n".join([text[0], ",".join(cells), *text[2:]]) + "\n")
    (path,) = write_page(members_of(run), tmp_path / "page.html", "One run")
    figures = {figure["key"]: figure for figure in Page(path).content["figures"]}
    assert figures["local-t"]["columns"]["x"] == [2]


def test_large_comparison_is_small_enough(tmp_path):
    runs = [make_run(tmp_path / f"{n}", f"M{n}", clients=20, rounds=200, terms="abc", sends=n > 0) for n in range(10)]
    (path,) = write_page(members_of(*runs), tmp_path / "page.html", "Ten methods")
    assert path.stat().st_size < 5e6


def test_figures_are_written_as_pictures(tmp_path):
    runs = [make_run(tmp_path / name, method) for name, method in (("a", "Alpha"), ("b", "Beta"))]
    _, *pictures = write_page(members_of(*runs), tmp_path / "p.html", "Two", pictures=tmp_path / "pictures")
    names = {path.name for path in pictures}
    assert {"local-t.svg", "local-t.png", "clients-1.png", "partition.svg", "loss.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures if path.suffix == ".png")
    curve = (tmp_path / "pictures" / "local-t.svg").read_text()
    assert "Alpha" in curve
    assert all(line.light in curve for line in lines_of(*runs))


def test_an_axis_of_one_value_names_it(tmp_path):
    """The library rounds it to a whole number: a loss of 0.41 was called 0."""
    run = make_run(tmp_path / "a", rounds=1)
    write_page(members_of(run), tmp_path / "p.html", "One", pictures=tmp_path / "pictures")
    head, row = (run / "metrics.csv").read_text().splitlines()
    value = 100 * float(dict(zip(head.split(","), row.split(","), strict=True))["Local-T"])
    for name in ("local-t", "communication-local-t"):
        assert f">{value:.4g}<" in (tmp_path / "pictures" / f"{name}.svg").read_text()
    assert ">0.002<" in (tmp_path / "pictures" / "communication-local-t.svg").read_text()  # MB


def test_missing_renderer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"pip install 'fl-lightning\[report\]'"):
        write_page(members_of(make_run(tmp_path / "a")), tmp_path / "page.html", "One run")
    assert not (tmp_path / "page.html").exists()


def test_page_that_a_full_disk_takes_no_more_is_no_missing_renderer(tmp_path):
    """A table said that it has no page, left the one of before, and ended well."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = make_run(tmp_path / "a")
    bundle.program()  # what it keeps must not be what fails
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(WriteError, match=r"cannot write .*page\.html: File too large"):
            write_page(members_of(run), tmp_path / "page.html", "One run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*page.html*"))


@pytest.fixture
def making(monkeypatch, tmp_path):
    """Puts the script together as another process would; says how often it was really done."""
    made = []
    tool = SimpleNamespace(__version__="9", javascript_bundle=lambda: made.append(1) or "script")
    monkeypatch.setattr(bundle, "renderer", lambda: tool)
    monkeypatch.setenv("FL_LIGHTNING_CACHE", str(tmp_path / "cache"))

    def make():
        assert bundle.program.__wrapped__() == "script"
        return len(made), tool

    return make


def test_script_is_put_together_once_for_all_processes(making, tmp_path):
    assert making()[0] == 1
    count, tool = making()
    assert count == 1
    tool.__version__ = "10"
    assert making()[0] == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"program": "harm"}', None])
def test_script_that_is_damaged_is_put_together_again(making, tmp_path, damage):
    making()
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"script", b"harmed") if damage is None else damage)
    assert making()[0] == 2
    assert making()[0] == 2


def test_script_needs_no_place_to_be_kept(making, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert [making()[0] for _ in range(2)] == [1, 2]

    def nobody(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", nobody)
    assert making()[0] == 3


def test_stand_ins_are_replaced_everywhere():
    assert bundle.filled({"a": ["$x", {"b": "$x"}], "c": "x"}, {"$x": 1}) == {"a": [1, {"b": 1}], "c": "x"}


@pytest.mark.parametrize(("rounds", "ticks"), [(2, [1, 2]), (3, [1, 2, 3]), (4, None)])
def test_a_short_run_has_no_ticks_between_its_rounds(tmp_path, rounds, ticks):
    lines = lines_of(make_run(tmp_path / "run", rounds=rounds))
    spec = bundle.drawn_alone(next(accuracies(lines)), lines, lines[0].setting, 0)
    assert spec["encoding"]["x"]["axis"].get("values") == ticks


def test_each_setting_has_the_ticks_of_its_own_rounds(hover, tmp_path):
    """One round beside a setting of three had ticks of them all, one on top of another."""
    lines = lines_of(make_run(tmp_path / "one", rounds=1), make_run(tmp_path / "three", rounds=3, beta=0.1))
    figure = next(accuracies(lines))
    drawn = [bundle.drawn_alone(figure, lines, line.setting, 0) for line in lines]
    assert [spec["encoding"]["x"]["axis"]["values"] for spec in drawn] == [[1], [1, 2, 3]]
    (shown,) = hover(lines, [figure], [])["specs"].values()  # of the first setting
    assert shown["encoding"]["x"]["axis"] == drawn[0]["encoding"]["x"]["axis"]


def marks_of(run, figure, kind):
    """How many marks of a kind a figure's picture has."""
    write_page(members_of(run), run.parent / "p.html", "One", pictures=run.parent / "pictures")
    picture = (run.parent / "pictures" / f"{figure}.svg").read_text()
    (group,) = re.findall(rf'<g class="mark-{kind} role-mark [^"]*marks"[^>]*>(.*?)</g>', picture, re.S)[:1]
    return group.count("<path") + group.count("<line")


def test_a_line_of_one_point_has_its_spread_and_a_point_that_is_seen(tmp_path):
    """There is no band of one round, and a dot of a line's is half behind the axis."""
    (figure,) = (own for own in accuracies(lines_of(make_run(tmp_path / "a", rounds=1))) if own.key == "local-t")
    sizes = [layer["mark"].get("size") for layer in figure.spec["layer"] if layer["mark"]["type"] == "point"]
    assert sizes == [60]
    kinds = [layer["mark"]["type"] for layer in figure.spec["layer"]]
    assert kinds == ["area", "rule", "line", "point", "rule"]
    assert marks_of(tmp_path / "a", "local-t", "symbol") == 1


def test_points_of_lines_of_one_colour_differ_in_their_shape(tmp_path):
    runs = [make_run(tmp_path / f"m{n}", f"Method{n}") for n in range(12)]
    lines = lines_of(*runs)
    figure = next(both_moments(lines))
    spec = bundle.drawn_alone(figure, lines, lines[0].setting, 0)
    (points,) = (layer["encoding"] for layer in spec["layer"] if layer["mark"]["type"] == "point")
    looks = list(zip(points["color"]["scale"]["range"], points["shape"]["scale"]["range"], strict=True))
    assert len(set(looks)) == len(looks) == 12
    assert len({colour for colour, _ in looks}) < 12


@pytest.mark.parametrize("draw", [spread, hurt])
def test_names_at_a_plots_side_leave_room_for_it(draw, comparison):
    spec = next(draw(lines_of(*comparison))).spec
    assert (spec["width"], spec["autosize"]["type"]) == ("$full", "fit-x")
    axes = [
        layer["encoding"]["y"]["axis"]
        for layer in (spec, *spec["layer"])
        if "axis" in layer.get("encoding", {}).get("y", {})
    ]
    assert [axis["labelLimit"] for axis in axes] == ["$limit"]


@pytest.mark.parametrize(
    ("width", "columns", "widest"), [(1300, 20, 28.1), (1300, 200, 8.1), (330, 200, 2.3), (300, 0, 28.1)]
)
def test_bubbles_of_many_clients_do_not_run_into_one_another(width, columns, widest):
    assert largest_bubble(width, columns) ** 0.5 * 2 / math.pi**0.5 <= widest


# --- the page's script, without a browser ----------------------------------------------------------------------------


@pytest.fixture
def hover(tmp_path):
    """What the page's script draws and says where one hovers: `hover(lines, figures, [(key, values), …])`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node is installed")

    def asked(lines, figures, places):
        (tmp_path / "content.json").write_text(json.dumps(_content(lines, figures)))
        files = Path(__file__).with_name("page_without_browser.js"), tmp_path / "content.json", ASSETS / "page.js"
        done = subprocess.run([node, *files, json.dumps(places)], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return asked


def test_hovering_says_the_whole_spread_of_what_is_shown_and_every_digit_of_a_seed(hover, tmp_path):
    run = make_run(tmp_path / "run", seed=20231107, level=0.97, classes=("constructor", "b"))
    lines = lines_of(run)
    figures = [*accuracies(lines), *both_moments(lines), *bubbles(lines)]
    rows = Rows("s", "pick", "x", "y", "sl", "sh")
    for pick in (0, 1):
        rows.add(s=0, pick=pick, x=1, y=0.25 + pick, sl=None, sh=None)
    heads = {"label": "run", "pick": "measure", "x": "round", "y": "mean"}
    figures.append(Figure("chosen", "", "", "", over_rounds(None, rows, True), rows.columns, heads, {}, ["one", "two"]))
    places = [("received-trained", {"seed": 20231107, "client": 12345}), ("chosen", {"x": 1})]
    found = hover(lines, figures, places)
    assert found["asked"] == [[["seed", "20231107"], ["client", "12345"]], [["round 1", ""], ["Alpha", "0.25"]]]
    assert found["specs"]["partition"]["encoding"]["y"]["sort"] == ["constructor", "b"]  # no function of JavaScript's

    last = figures[0].rows(lines)[-1]  # near 100 %, where the band is cut and its width is not
    assert last["ch"] - last["y"] == pytest.approx(100 * lines[0].runs[0].rows[-1]["Local-T_std"], rel=1e-2)


def test_a_partition_is_shown_in_every_setting_that_has_it(tmp_path):
    runs = [make_run(tmp_path / str(beta), beta=beta, partition_hash="1" * 64) for beta in (0.1, 0.5)]
    lines = lines_of(*runs)
    (figure,) = bubbles(lines)
    assert {row["g"] for row in figure.rows(lines)} == {0, 1}


def test_partition_of_the_first_of_many_clients_says_so(tmp_path):
    run = make_run(tmp_path / "a", clients=3)
    held = json.loads((run / "partition.json").read_text())
    picks = []
    for number in (3, 5000):
        (run / "partition.json").write_text(json.dumps({**held, "num_clients": number}))
        (figure,) = bubbles(lines_of(run))
        picks += figure.picks
    assert ["the first 3 clients" in pick for pick in picks] == [False, True]


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chromium():
    """A headless browser, where one is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no Chromium is installed")
        yield browser
        browser.close()


def test_page_works_in_a_browser(comparison, tmp_path, chromium):
    bad = "<img src=x onerror=\"document.title='harm'\">"
    others = make_run(tmp_path / "odd", bad), make_run(tmp_path / "elsewhere", beta=0.1)
    (path,) = write_page(members_of(*comparison, *others), tmp_path / "page.html", "Three methods")
    page = chromium.new_page(color_scheme="dark")
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_default_timeout(20_000)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.locator(".plot svg.marks").count() == page.locator("figure").count()
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 28)"

    lines = page.locator("#local-t .mark-line path")
    assert lines.count() == 3
    page.get_by_role("checkbox", name="Alpha").uncheck()
    page.wait_for_function("document.querySelectorAll('#local-t .mark-line path').length === 2")
    page.locator("#local-t summary", has_text="Data").click()
    table = page.locator("#local-t table")
    table.locator("tbody tr").first.wait_for()
    assert table.locator("tbody tr").count() == 2 * 3
    assert "Alpha" not in table.inner_text()
    assert bad in table.inner_text()

    page.locator("#clients-title").scroll_into_view_if_needed()
    page.locator("select[data-pick=clients]").select_option(label="seed 1, as received")
    page.get_by_label("none").check()
    page.locator("#local-t svg.marks").evaluate("node => node.scrollIntoView({block: 'center'})")
    box = page.locator("#local-t svg.marks").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#tip:not([hidden])")
    assert "Beta" in page.locator("#tip").inner_text()
    page.get_by_role("button", name="None").click()
    choices = page.locator("select[data-pick=clients] option")
    page.wait_for_function("document.querySelectorAll('select[data-pick=clients] option').length === 0")
    page.get_by_role("checkbox", name="Alpha").check()
    page.wait_for_function("document.querySelectorAll('select[data-pick=clients] option').length > 0")
    assert page.locator("#clients svg.marks").count() == 1
    assert choices.first.inner_text().startswith("seed 0")
    page.locator("#setting").select_option(label="Digits, Dirichlet(beta=0.1), 5 clients")
    page.wait_for_function("document.querySelectorAll('#local-t .mark-line path').length === 1")
    assert page.locator("#toggles").inner_text() == "Alpha"
    page.wait_for_selector("html[data-drawn=yes]")
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert page.title() == "Three methods"
    assert complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
    page.close()


def test_notes_of_runs_of_one_name_say_which_folder_is_meant(tmp_path):
    runs = [read_run(make_run(tmp_path / folder), "report") for folder in ("a", "b")]
    named = [replace(run, summary={**run.summary, "name": name}) for run, name in zip(runs, "xx", strict=True)]
    assert [name for name, _ in _named([*runs[:1], *named])] == [runs[0].name, str(tmp_path / "a"), str(tmp_path / "b")]


def test_dark_page_is_printed_light_and_large(comparison, tmp_path, chromium):
    """Grids were as dark as ink, charts half as large, and some were drawn again while they were printed."""
    (path,) = write_page(members_of(*comparison), tmp_path / "page.html", "Three methods")
    page = chromium.new_page(color_scheme="dark", viewport={"width": 1300, "height": 800})
    page.set_default_timeout(20_000)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    plot = page.locator("#local-t svg.marks")
    plot.evaluate("node => { node.dataset.kept = 'yes' }")
    page.emulate_media(media="print", color_scheme="light")
    page.wait_for_timeout(300)
    assert plot.evaluate("node => node.dataset.kept") == "yes"
    stroke = "node => getComputedStyle(node).stroke"
    assert page.locator("#local-t .role-axis-grid line").first.evaluate(stroke) == "rgb(221, 221, 221)"
    columns = "node => getComputedStyle(node).gridTemplateColumns.split(' ').length"
    assert page.locator(".grid").first.evaluate(columns) == 1


def test_a_run_that_was_extended_is_run_again_with_the_rounds_that_are_shown(tmp_path):
    """Its file says the later ones, so that the command gave other figures than the page."""
    run = read_run(make_run(tmp_path / "a b", rounds=3), "report")
    said = [html.unescape("".join(configurations(series_of([Member(own)])))) for own in (run, run.first(2))]
    command = f"fl-lightning fit --config '{tmp_path}/a b/config.yaml' --name 'a b-again'"
    assert f"<pre>{command}</pre>" in said[0]
    assert f"<pre>{command} --federation.rounds 2</pre>" in said[1]
