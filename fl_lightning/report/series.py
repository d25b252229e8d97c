"""Runs that differ only in their seed, as one line of a picture; and the settings in which lines are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fl_lightning.report.colours import DASHES, PALETTE, colours_of
from fl_lightning.report.record import Row
from fl_lightning.report.recorded_run import RecordedRun, class_name
from fl_lightning.source import UnreadableError
from fl_lightning.static import EMPTY, load, parameters

_USUAL = {"split": "holdout", "test_fraction": 0.25, "validation_fraction": 0.0, "evaluate_on": "test", "shift": None}
"""Keys of ``data`` beside data set, partition and clients that make two runs' figures comparable: their defaults."""
_SECTIONS = ("data.dataset", "data.partition", "data.shift")
_OF_SETTING = (*_SECTIONS, "data.num_clients", *(f"data.{key}" for key in _USUAL))
_NAMED_KEYS = 3  # at most so many keys say how two lines of one method differ


@dataclass(frozen=True)
class Member:
    """A run that is to be shown.

    Args:
        run: its folder.
        label: what the line is called; empty leaves it to the method and its settings.
        setting: of data and partition; empty leaves it to the configuration.
    """

    run: RecordedRun
    label: str = ""
    setting: str = ""


@dataclass(frozen=True)
class Series:
    """One line: a run, or its repeats with other seeds.

    Args:
        label: for people; no two series of a setting have the same.
        method: its name, which chooses the colour where there are several.
        setting: in which its figures can be compared.
        runs: in the order of seeds.
        colour: place in `PALETTE`.
        dash: place in `DASHES`; more than 0 where the method, or the colour, comes again.
    """

    label: str
    method: str
    setting: str
    runs: tuple[RecordedRun, ...]
    colour: int
    dash: int

    @property
    def light(self) -> str:
        """Its colour on a white page."""
        return PALETTE[self.colour][0]

    @property
    def dark(self) -> str:
        """Its colour on a dark page."""
        return PALETTE[self.colour][1]

    @property
    def over(self) -> tuple[RecordedRun, ...]:
        """The runs that are finished; all where none is. One that goes on has no last round yet beside theirs."""
        return tuple(run for run in self.runs if not run.unfinished) or self.runs

    def curve(self, column: str) -> Curve:
        """A column of ``metrics.csv`` over the rounds that any of the runs has it in."""
        return curve_of([run.rows for run in self.runs], column)


@dataclass(frozen=True)
class Curve:
    """A figure over rounds.

    Args:
        rounds: [R] those in which a run has it.
        mean: [R] over the runs that have it.
        std: [R] the sample standard deviation over runs; NaN of fewer than two.
    """

    rounds: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def curve_of(repeats: Sequence[Sequence[Row]], column: str) -> Curve:
    """The mean and spread of a column over repeats of a run, round by round; what is no finite number is left out."""
    found: dict[int, list[float]] = {}
    for rows in repeats:
        for row in rows:
            value = row.get(column)
            if isinstance(value, (int, float)) and np.isfinite(value):
                found.setdefault(int(row["round"]), []).append(float(value))
    rounds = sorted(found)
    mean = [float(np.mean(found[round])) for round in rounds]
    std = [float(np.std(found[round], ddof=1)) if len(found[round]) > 1 else np.nan for round in rounds]
    return Curve(np.array(rounds, dtype=int), np.array(mean), np.array(std))


def series_of(members: Iterable[Member], apart: bool = True) -> list[Series]:
    """Put runs that differ only in their seed together, and give every line its name, colour and style.

    A colour is a method's; where all lines are of one method, each has its own.

    Args:
        members: the runs, in the order in which they are to be shown.
        apart: whether settings are shown apart; else lines say in their names how theirs differ.
    """
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        groups.setdefault(_key(member, groups), []).append(member)
    lines = list(groups.values())
    labels = _labels(lines, apart)
    methods = [line[0].run.method for line in lines]
    coloured = labels if len(set(methods)) == 1 < len(set(labels)) else methods
    colours = colours_of(coloured)
    settings = [_setting(line[0]) for line in lines]
    used: Counter[tuple[str, int, int]] = Counter()
    found = []
    for line, label, setting, own in zip(lines, labels, settings, coloured, strict=True):
        others = sorted(set(range(len(PALETTE))) - {colours[own]}, key=lambda place: place in colours.values())
        styles = [(setting, colour, dash) for colour in (colours[own], *others) for dash in range(len(DASHES))]
        style = min(styles, key=used.__getitem__)  # the method's colour, until its dashes are used up
        used[style] += 1
        runs = sorted((member.run for member in line), key=lambda run: (run.seed is None, run.seed or 0))
        found.append(Series(label, line[0].run.method, setting, tuple(runs), *style[1:]))
    return found


def in_one_picture(runs: Iterable[RecordedRun], title: str) -> tuple[list[Series], str]:
    """The lines of a picture that has no place for settings apart; in several settings, lines say theirs, too.

    Args:
        runs: in the order in which they are to be shown.
        title: the picture's, where there are several settings.

    Returns:
        The lines, and the picture's title: the setting, where there is one.
    """
    members = [Member(run) for run in runs]
    settings = sorted({_setting(member) for member in members})
    if len(settings) == 1:
        return series_of(members), settings[0]
    return series_of((replace(member, setting=title) for member in members), apart=False), title


def _key(member: Member, groups: Mapping[tuple[Any, ...], Sequence[Member]]) -> tuple[Any, ...]:
    """Of the line that a run belongs to; a seed that the line has already makes a line of its own.

    A table's cells say by their row and column which line it is: their seeds may be rounded otherwise.
    """
    run = member.run
    what = tuple(sorted((key, repr(value)) for key, value in run.identity.items())) or (str(run.path),)
    key: tuple[Any, ...] = (member.setting, member.label, run.method, what)
    key = key[:2] if member.setting and member.label else key
    while any(other.run.seed == run.seed for other in groups.get(key, ())):
        key = (*key, run.name)
    return key


def _setting(member: Member) -> str:
    if member.setting:
        return member.setting
    data = member.run.config.get("data")
    if not isinstance(data, Mapping):
        said = member.run.partition
        return ", ".join(str(said[key]) for key in ("dataset", "partition") if key in said) or "unknown data"
    number = data.get("num_clients")
    clients = "1 client" if number == 1 else f"{number} clients"
    parts = [_shown(data.get("dataset")), _shown(data.get("partition")), clients]
    for key, usual in _USUAL.items():
        value = data.get(key)
        if value is not None and value != usual:
            parts.append(f"{key} {_shown(value) if isinstance(value, Mapping) else value}")
    return ", ".join(part for part in parts if part)


def _shown(node: Any) -> str:
    """``Dirichlet(beta=0.1, min_samples=20)``: a section of a configuration in one line, without what is usual."""
    arguments = node.get("init_args") if isinstance(node, Mapping) else None
    given = arguments if isinstance(arguments, Mapping) else {}
    usual = _defaults(str(node.get("class_path"))) if isinstance(node, Mapping) else {}
    given = {name: value for name, value in given.items() if name not in usual or usual[name] != value}
    hidden = ("root", "download")
    nested = {k: _shown(v) if isinstance(v, Mapping) else v for k, v in given.items()}  # what a sample is drawn from
    told = [f"{k}={v}" for k, v in nested.items() if k not in hidden and isinstance(v, (bool, int, float, str))]
    return class_name(node) + (f"({', '.join(told)})" if told else "")


@lru_cache
def _defaults(class_path: str) -> Mapping[str, Any]:
    """What a class of the package takes where nothing is said, read from its source; nothing of others."""
    try:
        return {name: default for name, (_, default, _) in parameters(load(class_path)).items() if default is not EMPTY}
    except UnreadableError:
        return {}


def _labels(lines: Sequence[Sequence[Member]], apart: bool) -> list[str]:
    """Each line's name: what its member says, or the method, with what differs between lines of one method.

    Where settings are not shown `apart`, with what differs between all lines' settings, too.
    """
    first = [line[0] for line in lines]
    labels = []
    for member in first:
        others = [
            other.run
            for other in first
            if other is not member and _same_name(other, member) and _setting(other) == _setting(member)
        ]
        label = member.label or member.run.method
        beside = [] if apart else [other.run for other in first]
        labels.append(f"{label} ({_difference(member.run, others, beside)})" if others or beside else label)
    seen: dict[tuple[str, str], int] = {}
    for place, (member, label) in enumerate(zip(first, labels, strict=True)):
        count = seen[_setting(member), label] = seen.get((_setting(member), label), 0) + 1
        labels[place] = label if count == 1 else f"{label} [{count}]"
    return labels


def _same_name(a: Member, b: Member) -> bool:
    return (a.label or a.run.method) == (b.label or b.run.method)


def _difference(run: RecordedRun, others: Sequence[RecordedRun], beside: Sequence[RecordedRun]) -> str:
    """The keys in which a run differs from others of its method, and its setting from those of all runs beside it.

    The run's name where none does; in place of too many keys, its name and those of the setting.
    """
    if not run.identity:
        return run.name
    everyone, data = (run, *others, *beside), run.config.get("data")
    keys = [
        key
        for key in dict.fromkeys(key for one in everyone for key in one.identity)
        if not key.endswith(".length")
        and (_differ(key, run, others) or (_is_of_setting(key) and _differ(key, run, beside)))
    ]
    named = {key: f"{short} {run.identity.get(key, 'none')}" for key, short in short_keys(keys).items()}
    for section in _SECTIONS:
        own = [key for key in keys if f"{key}.".startswith(f"{section}.")]
        if len(own) > 1 or f"{section}.class_path" in own:  # shown as it is called where more than one number differs
            what = section.rpartition(".")[2]
            said = _shown(data.get(what) if isinstance(data, Mapping) else None) or f"no {what}"
            named = {key: text for key, text in named.items() if key not in own} | {section: said}
    if 1 <= len(named) <= _NAMED_KEYS:
        return ", ".join(named.values())
    return ", ".join([run.name, *(text for key, text in named.items() if beside and _is_of_setting(key))])


def _differ(key: str, run: RecordedRun, others: Sequence[RecordedRun]) -> bool:
    return any(other.identity.get(key) != run.identity.get(key) for other in others)


def _is_of_setting(key: str) -> bool:
    return any(f"{key}.".startswith(f"{own}.") for own in _OF_SETTING)


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Keys of a configuration by their last words, as many of them as they need to differ.

    >>> list(short_keys(["optimizer.init_args.lr", "model.init_args.hidden.0"]).values())
    ['lr', 'hidden.0']
    >>> list(short_keys(["optimizer.lr", "federation.server_optimizer.init_args.lr", "method.mu"]).values())
    ['optimizer.lr', 'server_optimizer.lr', 'mu']
    """
    words = {key: [word for word in key.split(".") if word != "init_args"] for key in keys}
    counts = {key: 2 if own[-1].isdigit() else 1 for key, own in words.items()}
    while True:
        short = {key: ".".join(own[-counts[key] :]) for key, own in words.items()}
        alike = [key for key, text in short.items() if list(short.values()).count(text) > 1]
        longer = [key for key in alike if counts[key] < len(words[key])]
        if not longer:
            return short
        for key in longer:
            counts[key] += 1
