"""A configuration in plain containers: reading it, and what makes two of them alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.errors import require
from fl_lightning.identity import contents as contents
from fl_lightning.identity import identity as identity
from fl_lightning.reading import read_yaml

Config = dict[str, Any]


def short_name(node: Any) -> str:
    """The class's own name."""
    return (node if isinstance(node, str) else node["class_path"]).rpartition(".")[2]


def read_config(path: Path) -> Config:
    """Read a run's `config.yaml`.

    Raises:
        ConfigError: if it is no configuration.
    """
    config = read_yaml(path, str(path))
    require(isinstance(config, dict) and "method" in config, str(path), "is no run's configuration")
    return config
