"""The dashboard as data, as a workspace of W&B's own package, and as a picture."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from fl_lightning.errors import ConfigError
from fl_lightning.report import dashboard
from fl_lightning.report.panels import draw_panel_grid
from fl_lightning.report.record import MetricsFile
from fl_lightning.report.recorded_run import read_run
from fl_lightning.report.series import Member, series_of

ROOT = Path(__file__).parents[2]
PANELS = [panel for section in dashboard.SECTIONS for panel in section.panels]


def test_file_in_the_repository_is_what_the_code_writes(tmp_path):
    dashboard.write_definition(tmp_path / "dashboard.json")
    assert (ROOT / "experiments" / "dashboard.json").read_text() == (tmp_path / "dashboard.json").read_text()


def test_panels_show_accuracies_at_both_moments_clients_losses_communication_and_time():
    shown = {metric for panel in PANELS if panel.kind == "line" for metric in panel.metrics}
    accuracies = {f"{scope}{moment}" for scope in ("Local-T", "Global-T") for moment in ("", "_received")}
    others = {"Local-T_min", "Local-T_std", "Server-T", "receive_drop", "loss", "loss/*", "uplink_bytes", "seconds"}
    assert accuracies | others <= shown


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the package's own imports
def test_workspace_holds_every_panel_and_groups_by_method():
    pytest.importorskip("wandb_workspaces")
    made = dashboard.workspace("project", "entity")
    spec = json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    text = json.dumps(spec)
    for panel in PANELS:
        for metric in panel.metrics:
            assert (f"^{metric[:-1]}" if metric.endswith("*") else metric) in text
        assert panel.kind == "table" or panel.title in text
    grouping = json.dumps(spec["section"]["runSets"][0]["grouping"])
    assert "method_name" in grouping
    assert "config" in grouping


def make_run(folder, method, rows):
    folder.mkdir(parents=True)
    file = MetricsFile(folder / "metrics.csv", list(rows[0]))
    file.start(file.lines(rows))
    (folder / "summary.json").write_text(json.dumps({"method": method}))
    return folder


def has(image, color):
    return bool((abs(image - color).max(-1) < 0.02).any())


def rgb(color):
    return tuple(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))


ROWS = [{"round": r, "Local-T": r / 10, "loss": 10.0**-r, "loss/a": None, "uplink_bytes": 5000} for r in (1, 2, 3)]


def test_picture_draws_every_method_in_its_color(tmp_path):
    runs = [make_run(tmp_path / name, name, ROWS) for name in ("One", "Two")]
    one, two = (series_of([Member(read_run(run, "test"))])[0].light for run in runs)
    assert one != two
    alone, both = (
        matplotlib.image.imread(dashboard.draw(folders, tmp_path / "picture.png"))[..., :3]
        for folders in (runs[:1], runs)
    )
    assert has(alone, rgb(one))
    assert not has(alone, rgb(two))
    assert has(both, rgb(one))
    assert has(both, rgb(two))


def test_picture_of_four_methods_and_three_seeds_draws_four_lines_with_bands(tmp_path, monkeypatch):
    runs, legend = [], Figure.legend
    for method in ("One", "Two", "Three", "Four"):
        for seed in range(3):
            rows = [{**row, "Local-T": row["Local-T"] + seed / 100} for row in ROWS]
            runs.append(make_run(tmp_path / f"{method}-{seed}", method, rows))
            config = {"seed": seed, "method": {"class_path": f"m.{method}"}, "data": {"num_clients": 2}}
            (runs[-1] / "config.yaml").write_text(json.dumps(config))
    drawn = []
    monkeypatch.setattr(Figure, "legend", lambda self, **kept: drawn.append(self) or legend(self, **kept))
    path = dashboard.draw(runs, tmp_path / "picture.png")
    figure = drawn[0]
    panel = figure.axes[0]
    assert len(panel.lines) == len(panel.collections) == 4
    assert len({line.get_color() for line in panel.lines}) == 4
    figure.draw_without_rendering()
    key, title = figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= key.x0
    assert key.x1 <= figure.bbox.x1
    assert not key.overlaps(title)
    assert not any(key.overlaps(axes.get_tightbbox()) for axes in figure.axes if axes.axison)
    assert matplotlib.image.imread(path).shape[1] == 1280


def test_picture_of_many_rounds_shows_where_they_go(tmp_path):
    """Values that jump each round are a solid band."""
    rows = [{"round": round, "Local-T": round % 2 / 2, "loss": 1.0} for round in range(1, 1001)]
    lines = series_of([Member(read_run(make_run(tmp_path / "a", "One", rows), "test"))])
    figure = draw_panel_grid([("Local-T", ("Local-T",), True)], lines, "runs")
    assert [np.ptp(line.get_ydata()) for line in figure.axes[0].lines] == pytest.approx([50 / 11, 50])
    assert figure.get_suptitle() == "runs: running means over 2 % of the rounds, each value faintly"


def test_picture_of_many_rounds_that_are_tested_seldom_says_nothing_of_means(tmp_path):
    """All its curves are drawn as they are."""
    rows = [{"round": round, "Local-T": None if round % 2 else 0.5} for round in range(1, 401)]
    lines = series_of([Member(read_run(make_run(tmp_path / "a", "One", rows), "test"))])
    assert draw_panel_grid([("Local-T", ("Local-T",), True)], lines, "runs").get_suptitle() == "runs"


def test_band_of_many_rounds_lies_around_its_curve(tmp_path):
    """The second seed has come to so few rounds that a mean over those alone would be another one."""
    rows = [{"round": round, "Local-T": round % 2 / 2} for round in range(1, 1001)]
    runs = [read_run(make_run(tmp_path / str(last), "One", rows[:last]), "test") for last in (1000, 100)]
    lines = [replace(series_of([Member(runs[0])])[0], runs=tuple(runs))]
    (axes,) = draw_panel_grid([("Local-T", ("Local-T",), True)], lines, "runs").axes
    band = axes.collections[0].get_paths()[0].vertices
    assert np.ptp(band[band[:, 0] > 20, 1]) < 5


def test_picture_says_that_seeds_have_come_to_other_rounds(tmp_path, monkeypatch):
    """From where one of them ends on, the mean is that of the others."""
    said: list[str] = []
    monkeypatch.setattr(
        "fl_lightning.report.picture.add_legend", lambda axes, handles, labels, **kept: said.extend(labels)
    )
    for seed in range(2):
        run = make_run(tmp_path / str(seed), "One", ROWS[: len(ROWS) - seed])
        config = {"seed": seed, "method": {"class_path": "m.One"}, "data": {"num_clients": 2}}
        (run / "config.yaml").write_text(json.dumps(config))
    dashboard.draw([tmp_path / "0", tmp_path / "1"], tmp_path / "picture.png")
    assert said[-1] == f"One, 2 seeds of {len(ROWS) - 1} to {len(ROWS)} rounds"


def test_bands_of_what_is_no_share_fit_into_their_panel(tmp_path):
    """The axis ended at 1.08 of the largest mean, and bands that reach higher were cut off."""
    runs = []
    for seed in range(2):
        rows = [{**row, "seconds": 1.0 + seed} for row in ROWS]
        run = make_run(tmp_path / str(seed), "One", rows)
        (run / "config.yaml").write_text(json.dumps({"seed": seed, "method": {"class_path": "m.One"}}))
        runs.append(Member(read_run(run, "test")))
    figure = draw_panel_grid([("Seconds", ("seconds",), False)], series_of(runs), "Runs")
    low, high = figure.axes[0].get_ylim()
    assert len(figure.axes[0].collections) == 1
    assert low == 0
    assert high > 1.5 + 0.5**0.5  # mean and sample deviation


def test_picture_leaves_out_what_no_run_has(tmp_path, monkeypatch):
    drawn, legend = [], Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda self, **kept: drawn.append(self) or legend(self, **kept))
    dashboard.draw([make_run(tmp_path / "run", "Some", ROWS)], tmp_path / "picture.png")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes if axes.axison]
    assert titles == ["Local-T, after the fit, %", "Loss", "Bytes a round"]  # loss/a is there and empty


def test_losses_over_decades_fill_their_panel(tmp_path, monkeypatch):
    drawn, legend = [], Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda self, **kept: drawn.append(self) or legend(self, **kept))
    rows = [{**row, "loss": 10.0 ** (1 - 2 * row["round"])} for row in ROWS]
    dashboard.draw([make_run(tmp_path / "run", "Some", rows)], tmp_path / "picture.png")
    panel = next(axes for axes in drawn[0].axes if axes.get_title(loc="left") == "Loss")
    low, high = panel.get_ylim()
    assert panel.get_yscale() == "log"
    assert 1e-6 < low <= 1e-5 < 0.1 <= high < 1


def of_seeds(folder, *repeats):
    """One line, of the rows of each seed."""
    for seed, rows in enumerate(repeats):
        run = make_run(folder / str(seed), "One", rows)
        (run / "config.yaml").write_text(json.dumps({"seed": seed, "method": {"class_path": "m.One"}}))
    return series_of(Member(read_run(folder / str(seed), "test")) for seed in range(len(repeats)))


def looks(lines):
    return [(line.get_linestyle(), line.get_marker()) for line in lines]


@pytest.mark.parametrize(("columns", "rounds"), [(9, 3), (9, 1), (3, 1)])
def test_a_panels_columns_are_told_apart_by_their_legend(tmp_path, columns, rounds):
    """Nine had four styles, and of one round all were the same dot, in one colour."""
    rows = [{"round": r + 1} | {f"loss/{n}": n + r for n in range(1, columns + 1)} for r in range(rounds)]
    lines = of_seeds(tmp_path, [{**row, "loss/none": None} for row in rows])
    (axes,) = draw_panel_grid([("Loss terms", ("loss/*",), False)], lines, "Runs").axes
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [str(n) for n in range(1, columns + 1)]  # none has none
    assert looks(legend.get_lines()) == looks(axes.lines)
    assert len(set(looks(axes.lines))) == columns
    assert len({mark for _, mark in looks(axes.lines)}) == columns


def test_a_panel_names_the_only_one_of_its_columns_that_there_is(tmp_path):
    """Without figures after the fit nothing said that those as received were drawn."""
    lines = of_seeds(tmp_path, [{**row, "Local-T": None, "Local-T_received": 0.5} for row in ROWS])
    panels = [("Both", ("Local-T", "Local-T_received"), True), ("Loss", ("loss",), False)]
    both, loss = draw_panel_grid(panels, lines, "Runs").axes
    assert [text.get_text() for text in both.get_legend().get_texts()] == ["Local-T_received"]
    assert loss.get_legend() is None


def test_one_round_of_several_seeds_has_its_spread(tmp_path):
    """The title speaks of ± std, and a band of one round cannot be seen."""
    lines = of_seeds(tmp_path, [{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 2.0}])
    (axes,) = draw_panel_grid([("Loss", ("loss",), False)], lines, "Runs").axes
    (bar,) = axes.collections
    np.testing.assert_allclose(bar.get_segments()[0][:, 1], [1.5 - 0.5**0.5, 1.5 + 0.5**0.5])
    assert "o" in [line.get_marker() for line in axes.lines]
    assert axes.get_ylim()[1] > 1.5 + 0.5**0.5


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_panel_of_several_columns_has_their_spread_over_seeds(tmp_path, rounds):
    """The title speaks of ± std, and such panels had none."""
    seeds = [
        [{"round": n + 1, "loss": 1.0 + seed, "loss/a": 4.0 + 2 * seed} for n in range(rounds)] for seed in range(2)
    ]
    (axes,) = draw_panel_grid([("Losses", ("loss", "loss/a"), False)], of_seeds(tmp_path, *seeds), "Runs").axes
    reach = [np.ptp(band.get_datalim(axes.transData).intervaly) for band in axes.collections]
    np.testing.assert_allclose(reach, [2**0.5, 2 * 2**0.5])
    assert axes.get_ylim()[1] > 5 + 2**0.5


def test_lines_of_one_colour_that_are_points_differ_in_their_mark(tmp_path):
    runs = [make_run(tmp_path / str(place), name, [{"round": 1, "loss": 1.0}]) for place, name in enumerate("AAB")]
    lines = series_of(Member(read_run(run, "test")) for run in runs)
    figure = draw_panel_grid([("Loss", ("loss",), False)], lines, "Runs")
    assert [line.get_marker() for line in figure.axes[0].lines] == ["o", "D", "o"]
    assert [line.get_marker() for line in figure.legends[0].get_lines()] == ["o", "D", ""]


def test_a_long_name_stays_within_the_picture(tmp_path):
    runs = [make_run(tmp_path / name, "One", ROWS) for name in ("fedavg_digits_" * 14, "short")]
    figure = draw_panel_grid(
        [("Loss", ("loss",), False)], series_of(Member(read_run(run, "t")) for run in runs), "Runs"
    )
    figure.draw_without_rendering()
    key = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= key.x0
    assert key.x1 <= figure.bbox.x1
    assert not key.overlaps(figure.axes[0].get_tightbbox())


@pytest.mark.parametrize(("name", "head"), [("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_picture_is_what_its_ending_says(tmp_path, name, head):
    run = make_run(tmp_path / "run", "Some", ROWS)
    assert dashboard.draw([run], tmp_path / name).read_bytes().startswith(head)


def test_picture_of_another_ending_is_refused(tmp_path):
    run = make_run(tmp_path / "run", "Some", ROWS)
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        dashboard.draw([run], tmp_path / "a.jpg")
    assert not (tmp_path / "a.jpg").exists()


def test_picture_works_on_a_run_without_accuracies(tmp_path):
    run = make_run(tmp_path / "a", "Some", [{"round": 1, "loss": float("nan"), "seconds": 0.0}])
    assert dashboard.draw([run], tmp_path / "picture.png").is_file()


@pytest.mark.parametrize("folders", [[], ["nowhere"]])
def test_picture_without_runs_is_refused(tmp_path, folders):
    with pytest.raises(ConfigError, match="dashboard: "):
        dashboard.draw([tmp_path / name for name in folders], tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []
