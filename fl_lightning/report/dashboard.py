"""The dashboard: which panels it has, as data, as a W&B workspace and as a picture of runs' folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.files import write_text
from fl_lightning.terminal import say

NAME = "Federated learning"
STEP = "round"
GROUP_BY = "method_name"
"""Key of W&B's config by which runs are grouped."""

Kind = Literal["line", "histogram", "media", "table"]


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: above it.
        metrics: columns of ``metrics.csv``, or names of tables and pictures; ``loss/*`` stands for all that start so.
        kind: lines over rounds, a histogram over rounds (W&B draws it like lines), pictures, or a table.
        is_share: whether the values are fractions, in [0, 1].
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "line"
    is_share: bool = False


@dataclass(frozen=True)
class Section:
    """Panels that belong together, under a heading."""

    name: str
    panels: tuple[Panel, ...]


def _share(title: str, *metrics: str) -> Panel:
    return Panel(title, metrics, is_share=True)


SECTIONS = (
    Section(
        "Local-T and Global-T",
        (
            _share("Local-T, after the fit", "Local-T"),
            _share("Local-T, as received", "Local-T_received"),
            _share("Global-T, after the fit", "Global-T"),
            _share("Global-T, as received", "Global-T_received"),
            _share("Server-T", "Server-T"),
            _share("Receive drop", "receive_drop"),
        ),
    ),
    Section(
        "Clients",
        (
            _share("Worst client, Local-T", "Local-T_min"),
            _share("Spread of Local-T over clients", "Local-T_std"),
            Panel("Local-T over clients", ("clients/Local-T",), "histogram"),
            Panel("Local-T_received over clients", ("clients/Local-T_received",), "histogram"),
            Panel("Who holds what", ("clients/partition",), "media"),
            Panel("Clients", ("clients/table",), "table"),
        ),
    ),
    Section(
        "Fairness and other measures",
        (
            _share("Worst tenth, Local-T", "Local-T_worst10"),
            _share("Clients below what they reach alone", "Local-T_hurt", "Local-T_received_hurt"),
            Panel("Gini and Jain, Local-T", ("Local-T_gini", "Local-T_jain")),
            Panel("Test loss", ("eval_loss/Local-T", "eval_loss/Local-T_received", "eval_loss/Server-T")),
            _share("Balanced accuracy", "balanced_accuracy/Local-T", "balanced_accuracy/Local-T_received"),
            _share("Validation", "Local-V", "Local-V_received", "Server-V"),
            _share("Newcomers", "Local-T_newcomers", "Local-T_received_newcomers"),
        ),
    ),
    Section(
        "Losses", (Panel("Loss", ("loss",)), Panel("Loss terms", ("loss/*",)), Panel("Logged in the fits", ("log/*",)))
    ),
    Section(
        "Communication and time",
        (
            Panel("Bytes a round", ("uplink_bytes", "downlink_bytes")),
            Panel("Values a round", ("uplink_params", "downlink_params")),
            Panel("Seconds a round", ("seconds",)),
            Panel("Where they go", ("seconds_fit", "seconds_evaluate", "seconds_exchange", "seconds_save")),
        ),
    ),
    Section(
        "What is shared of the classes",
        (
            Panel("Soft labels and class relation", ("shared/soft_labels", "shared/class_relation"), "media"),
            Panel("Prototypes", ("shared/prototypes",), "media"),
        ),
    ),
)
DRAWN_APART = ("Values a round", "Logged in the fits")  # the picture has no room for them


def definition() -> dict[str, Any]:
    """The dashboard in plain containers."""
    sections = [asdict(section) for section in SECTIONS]
    return {"name": NAME, "step": STEP, "group_by": f"config.{GROUP_BY}", "sections": sections}


def write_definition(path: Path) -> None:
    """Write the dashboard as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(definition(), indent=2) + "\n")


# --- as a W&B workspace ---------------------------------------------------------------------------------------------


def workspace(project: str, entity: str) -> Any:
    """The dashboard as a workspace of `wandb_workspaces`; not saved yet.

    Raises:
        ConfigError: if the package is not installed.
    """
    absent = "needs the package wandb-workspaces: pip install 'fl-lightning[dashboard]'"
    with importing("wandb_workspaces", "dashboard", absent):
        import wandb_workspaces.workspaces as ws
    sections = [
        ws.Section(name=section.name, panels=[_panel(panel) for panel in section.panels], is_open=True)
        for section in SECTIONS
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=30),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(GROUP_BY)]),
        auto_generate_panels=False,
    )


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "media":
        return wr.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))
    if panel.kind == "table":
        return wr.WeavePanelSummaryTable(table_name=panel.metrics[0])
    wild = [name for name in panel.metrics if name.endswith("*")]
    regex = {"metric_regex": f"^{wild[0][:-1]}"} if wild else {"y": list(panel.metrics)}
    return wr.LinePlot(title=panel.title, x=STEP, title_x=STEP, **regex)


def publish(project: str, entity: str | None) -> str:
    """Save the dashboard as a new workspace of a W&B project.

    Returns:
        Its address.

    Raises:
        ConfigError: if the package is missing, there is no key, W&B cannot be reached or refuses.
    """
    workspace(project, entity or "-")  # a missing package is said first
    import wandb

    from fl_lightning.report.wandb_access import has_key, is_reachable, settings

    base = wandb.setup(settings=settings()).settings
    other = "or write the panels with --json FILE"
    require(has_key(base), "dashboard", f"there is no W&B key; say wandb login first, {other}")
    require(is_reachable(base.base_url), "dashboard", f"{base.base_url} cannot be reached; try later, {other}")
    try:
        entity = entity or wandb.Api().default_entity
        require(bool(entity), "dashboard", "W&B names no entity of yours; say --entity")
        saved = workspace(project, str(entity)).save()
    except ConfigError:
        raise
    except Exception as error:  # W&B raises a dozen types, from three packages
        first = (str(error).strip().splitlines() or [""])[0][:160]
        raise ConfigError("dashboard", f"W&B refused: {type(error).__name__} {first}") from error
    return str(saved.url)


# --- as a picture ---------------------------------------------------------------------------------------------------


def draw(folders: Sequence[Path], path: Path) -> Path:
    """Draw the dashboard's panels from runs' folders; those of which no run has a figure are left out.

    Args:
        folders: runs' folders; those that differ only in their seed are one line, with a band.
        path: the picture to write: PNG, SVG or PDF.

    Raises:
        ConfigError: if a folder holds no run, none was named, or there is no format of that ending.
    """
    from fl_lightning.report.figures import check_ending
    from fl_lightning.report.panels import has_any, panel_grid
    from fl_lightning.report.recorded_run import read_run
    from fl_lightning.report.series import in_one_picture

    require(bool(folders), "dashboard", "name the folders of the runs to draw: --picture FILE runs/a runs/b")
    check_ending(path, "dashboard --picture")
    found = [read_run(folder, "dashboard") for folder in folders]
    for own in found:
        for note in own.notes:
            say(f"fl-lightning: {own.path}: {note}")
    runs, title = in_one_picture(found, NAME)
    lines = [panel for section in SECTIONS for panel in section.panels if panel.kind == "line"]
    panels = [(panel.title, panel.metrics, panel.is_share) for panel in lines if panel.title not in DRAWN_APART]
    panels = [panel for panel in panels if has_any(panel[1], runs)] or panels[:1]
    return panel_grid(panels, runs, path, title)
