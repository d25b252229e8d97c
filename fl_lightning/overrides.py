"""What is said in Python, in the words of a command line: files, mappings, and overrides by keyword."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.command_line import CommandLine, as_text
from fl_lightning.errors import ConfigError, require
from fl_lightning.homes import no_section
from fl_lightning.own_sources import is_same
from fl_lightning.precheck import check_names

Source = str | Path | Mapping[str, Any]
"""A YAML file, the name of one of ours (``quickstart``), or what such a file would hold."""

_TEXTS = ("name", "output")
"""Keys whose text stays as it is: on a command line `null` and `~` are YAML's null."""


def said(sources: Sequence[Source], overrides: Mapping[str, Any]) -> CommandLine:
    """Read what sources and overrides say, later ones over earlier ones.

    Args:
        sources: files, their names, or mappings: of sections (``{"federation": {"rounds": 3}}``), of dotted keys
            (``{"federation.rounds": 3}``) or of both.
        overrides: by keyword, two underscores for a dot (``federation__rounds=3``).

    Raises:
        ConfigError: if a file is no configuration, there is no such key, or a value is nothing that YAML can say.
    """
    words: list[str | Mapping[str, Any]] = []
    for source in sources:
        if isinstance(source, Mapping):
            keys = {str(name): value for name, value in source.items()}
            words.append({name: plain(value, name) for name, value in keys.items() if "." not in name})
            words += _options({name: value for name, value in keys.items() if "." in name})
        else:
            words.append(f"--config={os.fspath(source)}")
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    texts = {name for name in _TEXTS if isinstance(given.get(name), (str, os.PathLike))}
    whole = {name: value for name, value in given.items() if name in texts or (value is None and "." not in name)}
    words += [{name: plain(value, name)} for name, value in whole.items()]
    words += _options({name: value for name, value in given.items() if name not in whole})
    said = CommandLine(words)
    for word in said.words:
        raise no_section(word.partition("=")[0].removeprefix("--"))
    check_names(said)
    return said


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    """Options of a command line; a class comes before its arguments, whatever the order of keywords."""
    for key in sorted(settings, key=_rank):
        yield f"--{key}={as_text(plain(settings[key], key))}"


def _rank(key: str) -> tuple[int, bool]:
    """``method.class_path`` names a class as ``method`` does, before ``method.mu``."""
    return key.removesuffix(".class_path").count("."), not key.endswith(".class_path")


def plain(value: Any, key: str) -> Any:
    """A value in YAML's types: a class becomes its path, a path a text, an array's number a number.

    Raises:
        ConfigError: for an object of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {name: plain(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain(each, f"{key}.{index}") for index, each in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        return _path_of(value, key)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of NumPy or torch
        return value.item()
    raise ConfigError(key, "must be plain data, or a class with its arguments ({class_path, init_args})", value)


def _path_of(kind: type, key: str) -> str:
    """Where a configuration finds a class.

    Raises:
        ConfigError: if it would find none there, or one that does something else; nothing is imported for that.
    """
    path = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        rule = "must be a class of a module, so that the run's folder can name it; write it into a file of its own"
        raise ConfigError(key, rule, kind.__qualname__)
    found: Any = sys.modules.get(kind.__module__, kind)
    if found is not kind:
        for name in kind.__qualname__.split("."):
            found = getattr(found, name, None)
    same = found is kind or (isinstance(found, type) and is_same(found, kind))
    where = f"take {path}" if isinstance(found, type) else "write it into a file of its own"
    why = "the module was imported anew, or the class was made elsewhere"
    require(same, key, f"is not what {path} names now: {why}; {where}")
    return path
