"""The loggers that a configuration names: those of a resumed run go on under the versions that they had."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.building import build
from fl_lightning.errors import ConfigError
from fl_lightning.federation.loggers import Loggers
from fl_lightning.report.run_logger import RunLogger
from fl_lightning.sealed import read_json, write_json
from fl_lightning.terminal import say
from fl_lightning.trust import import_name

FILE = "loggers.json"
"""In the run's folder: the versions of loggers, so that a resumed run goes on in the same ones."""
Node = Mapping[str, Any]


def build_loggers(nodes: Sequence[Node], folder: Path, resumed: bool) -> Loggers:
    """The loggers, writing into the run's folder where they say nothing else. Writes nothing.

    Args:
        nodes: ``{class_path, init_args}`` of each.
        folder: the run's.
        resumed: whether the run that the folder holds goes on.
    """
    kept = _kept_versions(nodes, folder / FILE) if resumed else {}
    loggers = []
    for index, node in enumerate(nodes):
        cls = import_name(node["class_path"])
        takes = inspect.signature(cls).parameters
        given = {"save_dir": str(folder)} if "save_dir" in takes else {}
        if "version" in takes and index in kept and not issubclass(cls, RunLogger):  # which keeps its own
            given["version"] = kept[index]
        own = node.get("init_args") or {}
        said = {name: value for name, value in own.items() if value is not None}
        if isinstance(said.get("save_dir"), str):  # TensorBoard's looks for versions in a folder that is called "$HOME"
            said["save_dir"] = os.path.expanduser(os.path.expandvars(said["save_dir"]))
        loggers.append(build({**node, "init_args": {**own, **given, **said}}, f"logger.{index}"))
    return Loggers(loggers, kept)


def keep_versions(nodes: Sequence[Node], loggers: Loggers, folder: Path) -> None:
    """Write down under which versions they log; a file that an earlier process left says nothing else then.

    Args:
        nodes: those that they were built from.
        loggers: all of them.
        folder: the run's.
    """
    entries = [{**_place(nodes[index]), "version": version} for index, version in loggers.versions.items()]
    if entries or (folder / FILE).exists():
        write_json(folder / FILE, {"loggers": entries})


def _kept_versions(nodes: Sequence[Node], file: Path) -> dict[int, Any]:
    """The version that each had in an earlier process, by its place in the list; another logger has none."""
    if not file.is_file():
        return {}
    try:
        kept = read_json(file, "--resume")
    except ConfigError as error:
        say(f"{error}; loggers begin new versions")
        return {}
    if "loggers" not in kept:  # an older version's, by place alone
        return {index: kept[str(index)] for index in range(len(nodes)) if str(index) in kept}
    found: dict[int, Any] = {}
    left = list(kept["loggers"])
    for index, node in enumerate(nodes):
        entry = next((each for each in left if each == {**_place(node), "version": each["version"]}), None)
        if entry is not None:
            left.remove(entry)
            found[index] = entry["version"]
    return found


def _place(node: Node) -> dict[str, Any]:
    """What makes a version another logger's, or one of another folder."""
    own = node.get("init_args") or {}
    return {"class_path": node["class_path"], "name": own.get("name"), "save_dir": own.get("save_dir")}
