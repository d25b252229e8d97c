"""What files of tables and searches lay over a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.command_line import SECTIONS, Setting, as_text, bare, flatten, sections
from fl_lightning.errors import ConfigError, require, suggest
from fl_lightning.merging import ONE_CLASS, merged
from fl_lightning.reading import read_yaml
from fl_lightning.shipped import path_of

OVERLAY = ("files", "set")


@dataclass(frozen=True)
class Overlay:
    """What is laid over a configuration.

    Args:
        files: YAML files, later ones win.
        settings: sections and values, over the files.
    """

    files: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> Iterator[str]:
        """The same as options of a command line."""
        for file in self.files:
            yield from ("--config", os.path.relpath(file))
        for key, value in classes_first(flatten(self.settings)):
            yield option(*in_its_section(key, value))

    def layers(self) -> Iterator[tuple[str, Any]]:
        """The same as dotted keys and values, later ones over earlier ones."""
        for file in self.files:
            content = read_yaml(file, "--config")
            for part in sections(content if isinstance(content, Mapping) else {}):
                yield from part.settings
        yield from classes_first(flatten(self.settings))


def in_its_section(key: str, value: Any) -> Setting:
    """A setting as an option of which an empty mapping says nothing, as in a file; by its own key it takes all back.

    >>> in_its_section("federation.evaluate", {}), in_its_section("federation.rounds", 3)
    (('federation', {'evaluate': {}}), ('federation.rounds', 3))
    """
    if value != {}:
        return key, value
    section, *path = key.split(".")
    for name in reversed(path):
        value = {name: value}
    return section, value


def classes_first(settings: Iterable[Setting]) -> list[Setting]:
    """Settings, a class before its arguments, in whatever order they are: it drops what was said of an earlier one's.

    >>> classes_first([("method.mu", 1), ("data.batch_size", 8), ("method", "FedProx")])
    [('method', 'FedProx'), ('method.mu', 1), ('data.batch_size', 8)]
    """
    found: list[Setting] = []
    for key, value in settings:
        own = f"{key.removesuffix('.class_path')}."
        inside = (place for place, (other, _) in enumerate(found) if other.startswith(own))
        found.insert(next(inside, len(found)), (key, value))
    return found


def plain(key: str) -> str:
    """A key as its shortest spelling.

    >>> plain("method.class_path"), plain("method.init_args.mu")
    ('method', 'method.mu')
    """
    return bare(key).removesuffix(".class_path")


def said_twice(keys: Iterable[str]) -> str | None:
    """The first of two keys that are one in two spellings; None where there are none."""
    known: dict[str, str] = {}
    return next((first for key in keys if (first := known.setdefault(plain(key), key)) is not key), None)


def laid_over(layers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What a file would hold that says all that dotted keys and values say, one after another.

    >>> laid_over([("optimizer", "SGD"), ("optimizer.init_args.lr", 0.1)])
    {'optimizer': {'class_path': 'SGD', 'init_args': {'lr': 0.1}}}
    """
    node: dict[str, Any] = {}
    for key, value in layers:
        section, *path = key.split(".")
        for name in reversed(path):
            value = {name: value}
        node[section] = merged(node.get(section), value, section)
    return node


def spelled_out(key: str, config: Mapping[str, Any]) -> str:
    """A key as a file has it, with the ``init_args`` that the command line lets one leave out.

    Args:
        key: dotted.
        config: resolved.

    >>> spelled_out("optimizer.lr", {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}})
    'optimizer.init_args.lr'
    """
    node: Any = config
    names: list[str] = []
    for name in key.split("."):
        if isinstance(node, Mapping) and "class_path" in node and name not in ("class_path", "init_args"):
            names.append("init_args")
            node = node.get("init_args")
        names.append(name)
        node = node.get(name) if isinstance(node, Mapping) else None
    return ".".join(names)


def whole_list(key: str, value: Any, config: Mapping[str, Any]) -> tuple[str, Any]:
    """A setting as a file has it: one inside a list is the whole list, for a file's list replaces that under it.

    Args:
        key: dotted, spelled out.
        value: of the key.
        config: resolved.

    >>> whole_list("federation.wire.0.init_args.bits", 8, {"federation": {"wire": [{"class_path": "Quantize"}]}})
    ('federation.wire', [{'class_path': 'Quantize'}])
    """
    node: Any = config
    names: list[str] = []
    for name in key.split("."):
        if isinstance(node, list):
            return ".".join(names), node
        names.append(name)
        node = node.get(name) if isinstance(node, Mapping) else None
    return key, value


def option(key: str, value: Any) -> str:
    """One setting as an option of a command line; a text that would be read as a list stands in quotes.

    >>> option("data.dataset.label", "cat"), option("data.dataset.label", "[cat]"), option("model.hidden", [64])
    ('--data.dataset.label=cat', '--data.dataset.label="[cat]"', '--model.hidden=[64]')
    """
    own = key.removesuffix(".class_path")  # elsewhere a name alone would take the place of all that was said
    return f"--{own if own in ONE_CLASS else key}={as_text(value)}"


def read_overlay(node: Any, key: str, beside: Path, others: Sequence[str] = ()) -> Overlay:
    """Read ``{files: […], set: {…}}``.

    Args:
        node: part of a file; None is nothing.
        key: its key, for errors.
        beside: the file, whose folder the files' paths start in; one that is not there may be the name of one of ours.
        others: what else the node may hold, which is left to the caller.

    Raises:
        ConfigError: naming the key that is wrong.
    """
    if node is None:
        return Overlay()
    known_keys(node, (*OVERLAY, *others), key)
    files, settings = given_in(node, "files", []), given_in(node, "set", {})
    named = isinstance(files, list) and all(isinstance(file, str) for file in files)
    require(named, f"{key}.files", "must be a list of YAML files", files)
    require(isinstance(settings, Mapping), f"{key}.set", "must hold sections of a configuration", settings)
    for name in ("seed", "name", "output"):
        require(name not in settings, f"{key}.set.{name}", "each run has its own: take it out")
    own = [Path(os.path.abspath(beside.parent / file)) for file in files]
    paths = tuple(path if path.is_file() else path_of(Path(file)) for file, path in zip(files, own, strict=True))
    for file, found in zip(files, paths, strict=True):
        require(found.is_file(), f"{key}.files", f"there is no such file beside {beside}", file)
    try:
        own_settings = {part.section: part.content for part in sections(settings)}
    except ConfigError as error:
        raise error.at(f"{key}.set.{error.key}") from error
    twice = said_twice(name for name, _ in flatten(own_settings))
    require(twice is None, f"{key}.set.{twice}", "stands there twice, in two spellings")
    return Overlay(paths, own_settings)


def split_options(argv: Sequence[str], seeds: str) -> tuple[list[str], list[str]]:
    """A command's own words, and the options of a configuration among them, each in one word.

    Args:
        argv: a command line.
        seeds: how seeds are said, for who gives one.

    Raises:
        ConfigError: for a seed or a name, which every run has of its own.
    """
    own: list[str] = []
    overrides: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        section = word[2:].partition("=")[0].rstrip("+").partition(".")[0] if word.startswith("--") else ""
        if section not in (*SECTIONS, "config") or section in ("output", "seed", "name"):
            require(section not in ("seed", "name"), f"--{section}", f"each run has its own; {seeds}")
            own.append(word)
        elif "=" in word or not waiting:
            overrides.append(word)
        else:
            overrides.append(f"{word}={waiting.pop(0)}")
    return own, overrides


def given_in(node: Mapping[str, Any], key: str, default: Any) -> Any:
    """What a file says under a key; the default only where it says nothing, so that ``0`` or ``""`` is a mistake."""
    return default if node.get(key) is None else node[key]


def name_in(key: str, name: Any) -> str:
    """A name that a file gives under a key; a number may be one.

    Raises:
        ConfigError: for a word that YAML takes for something else than a text.
    """
    plain = name is not None and not isinstance(name, bool)
    rule = f"a name in it is read by YAML as {str(name).lower().replace('none', 'null')}, as on, off, yes and no are"
    require(plain, key, f"{rule}: put it in quotes")
    return str(name)


def known_keys(node: Any, allowed: Sequence[str], key: str, whole: str = "table") -> None:
    """Refuse any other key.

    Args:
        node: a mapping.
        allowed: its keys.
        key: the node's own; empty for a whole file.
        whole: what a whole file is called.
    """
    require(isinstance(node, Mapping), key or whole, f"must hold {', '.join(allowed)}", node)
    for name in node:
        inner = f"{key}.{name}" if key else str(name)
        of_a_run = not key and name in SECTIONS
        other = "belongs to a run's file: fl-lightning fit --config FILE runs it"
        rule = other if of_a_run else f"there is no such key; {suggest(str(name), allowed)}"
        require(name in allowed, inner, rule)
