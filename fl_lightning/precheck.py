"""Names in a configuration, checked before anything heavy is imported: a misspelt key or class is refused at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning import catalog
from fl_lightning.errors import ConfigError, suggest

SECTIONS = ("seed", "name", "output", "method", "model", "optimizer", "data", "federation", "trainer", "logger")
OPTIONS = ("config", "resume", "overwrite", "quiet", "figure", "print_config", "help")
CLASS_KEYS = {
    "method": "methods",
    "model": "models",
    "data.dataset": "datasets",
    "data.partition": "partitions",
    "federation.exchange": "exchanges",
}
"""Keys that name a class -> the kind that the package offers for it."""
GROUPS = {
    "data": "fl_lightning.data.module.FederatedData",
    "federation": "fl_lightning.federation.loop.FederatedLoop",
    "federation.evaluate": "fl_lightning.federation.loop.EvaluationPolicy",
    "federation.checkpoint": "fl_lightning.federation.checkpoint.CheckpointPolicy",
}
"""Keys whose members are the parameters of one class."""
FILLED_IN = ("model", "input_shape", "num_classes", "vocabulary_size", "params")
"""Constructor parameters that come from the data or the experiment, never from a configuration."""


def precheck(argv: Sequence[str]) -> None:
    """Refuse what can be refused by its name.

    Args:
        argv: the command line after the subcommand.

    Raises:
        ConfigError: with the key, the nearest name and all that are allowed.
    """
    classes: dict[str, str] = {}
    members: list[tuple[str, str]] = []
    for key, value in _settings(argv):
        top = key.partition(".")[0]
        if top not in (*SECTIONS, *OPTIONS):
            raise ConfigError(key, f"there is no such section; {suggest(top, SECTIONS)}")
        group, _, member = key.rpartition(".")
        if key in CLASS_KEYS and isinstance(value, str):
            classes[key] = _class_path(key, value)
        elif key.endswith(".class_path") and isinstance(value, str) and group in CLASS_KEYS:
            classes[group] = _class_path(group, value)
        elif group in GROUPS and key not in CLASS_KEYS:
            _check_member(key, member, catalog.parameters(GROUPS[group]))
        else:
            members.append((key, member))
    for key, member in members:
        owner = key.removesuffix(f".{member}").removesuffix(".init_args")
        if owner in classes and classes[owner] and member not in ("class_path", "init_args", "dict_kwargs", "help"):
            allowed = [name for name in catalog.parameters(classes[owner]) if name not in FILLED_IN]
            _check_member(key, member, allowed, f"{classes[owner].rpartition('.')[2]} takes ")


def _check_member(key: str, member: str, allowed: Sequence[str], who: str = "") -> None:
    if member not in allowed:
        hint = suggest(member, allowed) if allowed else "no arguments"
        raise ConfigError(key, f"there is no such key; {who}{hint}")


def _class_path(key: str, name: str) -> str:
    """The full path of one of the package's classes; empty for a class of the user's own, which is imported later."""
    kind = CLASS_KEYS[key]
    known = {entry.name: entry.class_path for entry in catalog.entries(kind)}
    if name in known:
        return known[name]
    if name in known.values():
        return name
    if "." in name or Path(name).suffix or Path(name).exists():
        return ""
    raise ConfigError(key, f"there is no {kind[:-1]} of that name; {suggest(name, known)}", name)


def _settings(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of the configuration files and options, in the order in which they are given."""
    waiting = list(argv)
    while waiting:
        option = waiting.pop(0)
        if not option.startswith("--"):
            continue
        key, equals, value = option[2:].partition("=")
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        if key == "config":
            yield from _flatten(_read(Path(value)))
        else:
            yield key.rstrip("+"), value


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError("--config", "there is no such file", str(path))
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path} is not YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError("--config", f"{path} must hold sections ({', '.join(SECTIONS)})")
    return content


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value
