"""The command line and its files, read once: what they set, in their order, and what is left of it for the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigError, suggest

SECTIONS = ("seed", "name", "output", "method", "model", "optimizer", "data", "federation", "trainer", "logger")
ENTRY_KEYS = ("class_path", "init_args", "clients")
"""What an entry of a list of models may hold."""

Setting = tuple[str, Any]
"""A dotted key and its value."""


@dataclass(frozen=True)
class Part:
    """One option, or one section of a file.

    Args:
        source: tells parts of one file from those of another.
        section: the section that it changes; empty for a part that no later one can replace.
        settings: dotted keys and values.
        words: an option as it stands on the command line; none for a file's section.
        content: a file's section under its name.
    """

    source: int
    section: str = ""
    settings: list[Setting] = field(default_factory=list)
    words: Sequence[str] = ()
    content: Mapping[str, Any] = field(default_factory=dict)


class CommandLine:
    """What the words after the subcommand say, files included and short forms written out.

    A method or model that is named anew replaces what was said of the one before: the parser would hand an argument on
    to the new class wherever that has one of the same name, a weight of 10 that suits one method to a method that
    means something else by it. So does a list of models, and a model named after it.

    Args:
        argv: the command line after the subcommand.

    Raises:
        ConfigError: if a file is no configuration, a short form is none of those allowed, an entry of a list of models
            is none, or an option would change one argument of all entries.
    """

    settings: list[Setting]
    """All keys and values; entries of a list have their own (``model.1.init_args.depth``)."""
    models: list[Any] | None
    """The list of models; None where it is one model, or none."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.models = None
        self._parts: list[Part] = []
        self._named: dict[str, str] = {}  # section -> its class
        for part in _parts(argv):
            self._add(part)
        self.settings = [each for part in self._parts for setting in part.settings for each in _with_entries(*setting)]

    def _add(self, part: Part) -> None:
        if part.section in ("method", "model"):
            given = dict(part.settings)
            named = given.get(part.section, given.get(f"{part.section}.class_path"))
            if isinstance(named, (str, list)):
                name = named.rpartition(".")[2] if isinstance(named, str) else ""
                if self._named.get(part.section) != name or not name:
                    self._parts = [earlier for earlier in self._parts if earlier.section != part.section]
                self._named[part.section] = name
                if part.section == "model":
                    self.models = named if isinstance(named, list) else None
            elif part.section == "model" and self.models is not None:
                rule = "`model` is a list here; change its entries, or say --model NAME for one model"
                raise ConfigError(part.settings[0][0], rule)
        self._parts.append(part)

    @property
    def keys(self) -> list[str]:
        """The dotted keys, without ``init_args``."""
        return [key.replace(".init_args.", ".") for key, _ in self.settings]

    def words(self, models: Sequence[Any] | None = None) -> list[str]:
        """The command line for the parser: what later parts replace is left out, a file is its content.

        Args:
            models: the entries of the list of models, checked; the parser takes no list of them as it is written.
        """
        words: list[str] = []
        left = [part for part in self._parts if models is None or part.section != "model"]
        for _, group in groupby(left, key=lambda part: part.source):
            parts = list(group)
            content = {name: value for part in parts for name, value in part.content.items()}
            words += parts[0].words or ["--config", yaml.safe_dump(content, sort_keys=False)]
        return words if models is None else [*words, f"--model={json.dumps(models)}"]


def _parts(argv: Sequence[str]) -> Iterator[Part]:
    waiting = list(argv)
    while waiting:
        source, option = len(waiting), waiting.pop(0)
        if not option.startswith("--"):
            yield Part(source, words=[option])
            continue
        words = [option]
        key, equals, value = option[2:].partition("=")
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
            words.append(value)
        key = key.rstrip("+")
        section, _, rest = key.partition(".")
        if key == "config":
            yield from _sections(source, _read(Path(value)))
        elif key in SHORT_FORMS:
            yield from _sections(source, {section: {rest: _long_form(key, _value(value), value)}})
        else:
            yield Part(source, "" if key.endswith(".help") else section, [(key, value)], words)


def _sections(source: int, content: Mapping[str, Any]) -> Iterator[Part]:
    """A file's sections, short forms written out."""
    for section, value in content.items():
        whole = value
        if isinstance(value, Mapping):
            short = {name: f"{section}.{name}" for name in value if f"{section}.{name}" in SHORT_FORMS}
            whole = {**value, **{name: _long_form(key, value[name], value[name]) for name, key in short.items()}}
        yield Part(source, str(section), list(flatten({section: whole})), content={section: whole})


def flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """The dotted keys and values of nested mappings."""
    # A class first: it drops what was said of the arguments of an earlier one.
    for name, value in sorted(node.items(), key=lambda item: item[0] != "class_path"):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def _with_entries(key: str, value: Any) -> Iterator[Setting]:
    """A setting, and what the entries say where it is a list of classes."""
    if key == "model" and isinstance(value, list):
        yield from _models(value)
        return
    if key in ("method.init_args.extra_terms", "method.extra_terms", "federation.wire"):
        value = _value(value) if isinstance(value, str) else value
        for index, entry in enumerate(value if isinstance(value, list) else ()):
            if key == "federation.wire":
                _check_entry(f"{key}.{index}", "filter", entry, ENTRY_KEYS[:2])
            yield from flatten({f"{key}.{index}": entry})
    yield key, value


def _models(models: list[Any]) -> Iterator[Setting]:
    if not models:
        raise ConfigError("model", "the list must hold at least one model")
    for index, entry in enumerate(models):
        _check_entry(f"model.{index}", "model", entry, ENTRY_KEYS)
        yield from flatten({f"model.{index}": entry})


def _check_entry(key: str, kind: str, entry: Any, keys: Sequence[str]) -> None:
    """Refuse an entry of a list that is neither a class's name nor holds one, with its arguments, under `keys`."""
    if isinstance(entry, str):
        return
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_path"), str):
        raise ConfigError(key, f"must be a {kind}'s name, or hold one under class_path", entry)
    for name in entry:
        if name not in keys:
            raise ConfigError(f"{key}.{name}", f"there is no such key; {suggest(str(name), keys)}")
    if not isinstance(entry.get("init_args") or {}, Mapping):
        raise ConfigError(f"{key}.init_args", f"must hold the {kind}'s arguments by name", entry["init_args"])


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError("--config", "there is no such file", str(path))
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("--config", f"{path} is not YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError("--config", f"{path} must hold sections ({', '.join(SECTIONS)})")
    return content


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the latter for a date that is none
        return text


# --- short forms ----------------------------------------------------------------------------------------------------


def _long_form(key: str, value: Any, given: Any) -> dict[str, Any]:
    written_out, allowed = SHORT_FORMS[key]
    found = written_out(value)
    if found is None:
        raise ConfigError(key, f"must be {allowed}", given)
    return found


def _failures(given: Any) -> dict[str, Any] | None:
    """Failures by the names of their parameters; None if they are given in none of the forms."""
    if _are_clients(given):
        return {"clients": given}
    if isinstance(given, Mapping):
        if given and all(re.fullmatch(r"\d+(-\d+)?", str(name)) for name in given):
            fits = all(map(_are_clients, given.values()))
            return {"schedule": {str(name): clients for name, clients in given.items()}} if fits else None
        named = all(isinstance(name, str) and not name[:1].isdigit() for name in given)
        return dict(given) if named else None
    try:  # as a number, also where YAML 1.1 takes it for text: 1e-3
        return None if isinstance(given, bool) else {"probability": float(given)}
    except (TypeError, ValueError, OverflowError):
        return None


def _newcomers(given: Any) -> dict[str, Any] | None:
    """Newcomers by the names of their parameters; None if they are given in none of the forms."""
    if isinstance(given, Mapping):
        return dict(given)
    return {"clients": given} if type(given) is int else None


def _are_clients(given: Any) -> bool:
    return isinstance(given, list) and all(type(client) is int for client in given)


SHORT_FORMS: dict[str, tuple[Callable[[Any], dict[str, Any] | None], str]] = {
    "federation.failures": (
        _failures,
        "a probability (0.3), a list of clients ([7]), rounds with the clients that are out of them "
        "({3: [0, 4], 5-8: [2]}), or probability, schedule and clients by name",
    ),
    "federation.newcomers": (_newcomers, "how many join later (5), or clients and after by name"),
}
"""Keys whose commonest members need no name -> what writes the value out, and what it may be."""
