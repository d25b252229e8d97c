"""What a search writes down of its trials, and what an earlier start of it wrote."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.command_line import VARIABLES, CommandLine
from fl_lightning.errors import ConfigError
from fl_lightning.files import content_of
from fl_lightning.parser import resolve
from fl_lightning.trust import Trust
from fl_lightning.tune.trials import Trial

SETTINGS = "settings"
"""The column of `trials.csv` by which trials of one search are told from those of another."""
HEAD = ("method", "trial", "state", "choice", "runs", SETTINGS)
"""The columns of `trials.csv`; after the state stands the monitored figure."""


class Written(NamedTuple):
    """A row of `trials.csv`."""

    method: str
    trial: str
    state: str
    value: str
    choice: str
    runs: str
    settings: str


def runs_of(trial: Trial) -> str:
    """A trial's runs, as `trials.csv` has them; of one that has none what tells it from others."""
    if not trial.cells:
        return f"refused-{hashlib.sha256(repr(sorted(trial.point.items())).encode()).hexdigest()[:10]}"
    return " ".join(cell.name for cell in trial.cells)


def of_settings(rows: Iterable[Sequence[str]], settings: str) -> list[Written]:
    """Rows of the trials of one search, told by their settings; the figure that is monitored is among these."""
    own = (Written(*row) for row in rows if len(row) == len(Written._fields) and row[-1] == settings)
    return [row for row in own if row.trial.isdecimal() and _is_figure(row.value)]  # others somebody has edited


def _is_figure(text: str) -> bool:
    try:
        return text == "" or math.isfinite(float(text))
    except ValueError:
        return False


def with_those_before(rows: Sequence[Written], earlier: Iterable[Written], unfinished: bool) -> list[Written]:
    """The trials of a start, with what an earlier one of the same search knew of those that it has not ended.

    Args:
        rows: the trials.
        earlier: those of the earlier start. What was complete stands, though a run of it has failed since.
        unfinished: whether the start is not at its end, so that more may follow.
    """
    now = {row.runs: row.state for row in rows}

    def stands(row: Written) -> bool:
        if row.state == "complete" and now.get(row.runs) == "failed":
            return True
        return unfinished and row.state != "stopped" and now.get(row.runs, "stopped") == "stopped"

    kept = list(filter(stands, earlier))
    known = {row.runs for row in kept}
    return sorted([*(row for row in rows if row.runs not in known), *kept], key=lambda row: int(row.trial))


def written_before(folder: Path) -> tuple[dict[str, list[list[str]]], dict[str, list[str]]]:
    """What the files of an earlier search say of each method, by its name there."""
    rows: dict[str, list[list[str]]] = {}
    lines: dict[str, list[str]] = {}
    try:
        head, *known = csv.reader(content_of(folder / "trials.csv").decode().splitlines())
        table = content_of(folder / "tune.md").decode().splitlines()
    except (OSError, ValueError, csv.Error):
        return {}, {}
    if head[-1:] != [SETTINGS]:
        return {}, {}
    for row in known:
        rows.setdefault(row[0] if row else "", []).append(row)
    for line in table:
        lines[line.removeprefix("| ").partition(" | ")[0]] = [line]
    return rows, lines


# --- overlays -------------------------------------------------------------------------------------------------------

_SET_ASIDE = ("validation_fraction", "evaluate_on")
"""What a search says of `data` by itself."""


def as_chosen(node: Mapping[str, Any], config: Mapping[str, Any], under: Sequence[str]) -> dict[str, Any]:
    """An overlay's sections; whole those of which what lies under it would make something else than the trial had.

    Args:
        node: what the overlay would hold.
        config: the trial's, resolved.
        under: the command line that it is laid over.
    """
    try:
        found = resolve(CommandLine([*under, node], VARIABLES).tree, Trust(own=True))
    except ConfigError:  # what was found must not be lost over how it is written down
        found = {}
    own: dict[str, Any] = {}
    for section, content in node.items():
        left_out = _SET_ASIDE if section == "data" else ()
        mine, chosen = (
            {k: v for k, v in each.items() if k not in left_out} if isinstance(each, Mapping) else each
            for each in (found.get(section), config[section])
        )
        own[section] = content if mine == chosen else chosen
    return own


def is_name(node: Any) -> bool:
    """Whether a section is a class without arguments."""
    return isinstance(node, dict) and node.keys() == {"class_path"}
