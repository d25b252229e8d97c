"""The dashboard as data, as a workspace of W&B's own package, and as a picture."""

import json
from pathlib import Path

import matplotlib.image
import pytest

from fl_lightning.errors import ConfigError
from fl_lightning.report import dashboard
from fl_lightning.report.record import MetricsFile

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
    file.start(0)
    file.append(rows)
    (folder / "summary.json").write_text(json.dumps({"method": method}))
    return folder


def has(image, color):
    return bool((abs(image - color).max(-1) < 0.02).any())


BLUE, ORANGE = (0, 0x72 / 255, 0xB2 / 255), (0xD5 / 255, 0x5E / 255, 0)


def test_picture_draws_every_run_in_its_color(tmp_path):
    rows = [{"round": r, "Local-T": r / 10, "loss": 10.0**-r, "loss/a": None, "uplink_bytes": 5000} for r in (1, 2, 3)]
    runs = [make_run(tmp_path / name, "Some", rows) for name in ("a", "b")]
    one, two = (
        matplotlib.image.imread(dashboard.draw(folders, tmp_path / "picture.png"))[..., :3]
        for folders in (runs[:1], runs)
    )
    assert has(one, BLUE)
    assert not has(one, ORANGE)
    assert has(two, ORANGE)


def test_picture_works_on_a_run_without_accuracies(tmp_path):
    run = make_run(tmp_path / "a", "Some", [{"round": 1, "loss": float("nan"), "seconds": 0.0}])
    assert dashboard.draw([run], tmp_path / "picture.png").is_file()


@pytest.mark.parametrize("folders", [[], ["nowhere"]])
def test_picture_without_runs_is_refused(tmp_path, folders):
    with pytest.raises(ConfigError, match="dashboard: "):
        dashboard.draw([tmp_path / name for name in folders], tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []
