"""What a search's file says: methods, what may vary, and the budget."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import ConfigError, require
from fl_lightning.reading import read_yaml
from fl_lightning.report.columns import is_validated
from fl_lightning.resuming import check_name
from fl_lightning.shipped import path_of
from fl_lightning.table.definition import text_of
from fl_lightning.table.overlays import Overlay, given_in, known_keys, name_in, plain, read_overlay, said_twice
from fl_lightning.table.quantity import Figure, read_figure

_KEYS = (
    "title", "name", "seeds", "monitor", "goal", "trials", "search", "pruning", "validation", "base", "rows", "space",
)  # fmt: skip
_SAMPLES = re.compile(r"data(\.(dataset|partition|num_clients|split|shift|test_fraction|validation_fraction)\b|$)")
"""Keys that say which samples clients are tested on."""
_RANGE = ("values", "low", "high", "log", "whole")
MOST_TRIALS = 10**6
_LARGE = 10**6
"""Points of a grid up to which all are put into an order; of a larger one as many as are wanted are drawn."""
SEARCHES = ("grid", "optuna")
Point = dict[str, Any]
"""Key -> value: one choice of everything that may vary."""


@dataclass(frozen=True)
class Range:
    """What one key may be.

    Args:
        values: one of these; or, if there are none,
        low: from here
        high: to here, both inclusive,
        log: evenly by magnitude,
        whole: in whole numbers;
        guessed: whether the last is concluded from ends that are written as whole numbers.
    """

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    guessed: bool = field(default=False, repr=False)

    @property
    def most(self) -> float:
        """How many different values there are."""
        if self.values:
            return len(self.values)
        return int(self.high) - int(self.low) + 1 if self.whole else math.inf

    def points(self, count: int = 3) -> list[Any]:
        """The values of a grid: all of them, or `count` >= 2 evenly spaced ones, both ends among them.

        Those between the ends have six digits, or as many more as they need to differ.

        >>> Range(low=0.001, high=0.1, log=True).points()
        [0.001, 0.01, 0.1]
        """
        if self.values:
            return list(self.values)
        between = (np.geomspace if self.log else np.linspace)(self.low, self.high, count)[1:-1]
        if self.whole:
            return list(dict.fromkeys([int(self.low), *(round(round(float(p), 6)) for p in between), int(self.high)]))
        points: list[float] = []
        for digits in range(6, 18):
            points = [float(self.low), *(float(f"{point:.{digits}g}") for point in between), float(self.high)]
            if all(one < other for one, other in itertools.pairwise(points)):
                break
        return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Contender:
    """A method with what may vary in it."""

    name: str
    overlay: Overlay
    space: Mapping[str, Range]

    @property
    def file(self) -> str:
        """Name of the file of what was chosen for it."""
        return f"{self.name.lower().replace(' ', '_')}.yaml"


@dataclass(frozen=True)
class Search:
    """A search's file.

    Args:
        path: the file.
        name: of the folder of its results.
        title: for people.
        seeds: every point is run with each of them, and judged by the mean.
        monitor: the figure, on the validation parts.
        maximise: whether more is better.
        trials: points a method, the same for all.
        kind: ``grid`` or ``optuna``.
        pruning: whether runs below the median of the others at the same round are ended.
        validation: share of each client's training part that is laid aside where the base lays none aside.
        base: under all methods.
        contenders: the methods.
    """

    path: Path
    name: str
    title: str
    seeds: tuple[int, ...]
    monitor: Figure
    maximise: bool
    trials: int
    kind: str
    pruning: bool
    validation: float
    base: Overlay
    contenders: tuple[Contender, ...]


def read_search(path: Path) -> Search:
    """Read a search's file.

    Raises:
        ConfigError: naming the key that is wrong, and what is allowed.
    """
    path = path_of(path)
    content = read_yaml(path, "tune")
    known_keys(content, _KEYS, "", "tune")
    seeds = content.get("seeds", [0])
    whole = isinstance(seeds, list) and bool(seeds) and all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    rule = "must be different whole numbers >= 0 and below 2^63"
    require(whole and len(set(seeds)) == len(seeds), "seeds", rule, seeds)
    asked = content.get("monitor", "Local-T_received.last")
    if isinstance(asked, Mapping) and "scale" in asked:
        raise ConfigError("monitor.scale", "a search has its figure as it is, shares in percent: leave the scale out")
    monitor = replace(read_figure(asked, "monitor"), scale=None)
    if is_validated(monitor.column) or is_validated(monitor.by):
        there = str(monitor).replace("-V", "-T")
        rule = f"test parts are laid aside in a search, and figures of validation parts have their names: take {there}"
        raise ConfigError("monitor", rule, str(monitor))
    usual = "min" if monitor.less_is_better else "max"
    goal, kind = content.get("goal", usual), content.get("search", "grid")
    require(goal in ("max", "min"), "goal", "must be max or min", goal)
    require(kind in SEARCHES, "search", "must be grid or optuna", kind)
    trials, validation = content.get("trials", 10), content.get("validation", 0.2)
    few = type(trials) is int and 1 <= trials <= MOST_TRIALS
    require(few, "trials", f"must be a whole number from 1 to {MOST_TRIALS}", trials)
    share = type(validation) is float and 0 < validation < 1
    require(share, "validation", "must be a share above 0 and below 1", validation)
    pruning = content.get("pruning", kind == "optuna")
    require(type(pruning) is bool, "pruning", "must be true or false", pruning)
    common = _space(given_in(content, "space", {}), "space")
    name = text_of(content, "name", f"{path.resolve().parent.name}-{path.stem}")
    check_name(name)
    return Search(
        path,
        name,
        text_of(content, "title", path.stem),
        tuple(seeds),
        monitor,
        goal == "max",
        trials,
        kind,
        pruning,
        validation,
        read_overlay(content.get("base"), "base", path),
        _contenders(content.get("rows"), common, path),
    )


def _contenders(node: Any, common: Mapping[str, Range], path: Path) -> tuple[Contender, ...]:
    require(isinstance(node, Mapping) and bool(node), "rows", "must name the methods of the search", node)
    found = []
    for name, own in [(name_in("rows", name), {} if own is None else own) for name, own in node.items()]:
        overlay = read_overlay(own, f"rows.{name}", path, ("space",))
        space = _over(common, _space(given_in(own, "space", {}), f"rows.{name}.space"))
        require(bool(space), f"rows.{name}.space", "is empty, so that there is nothing to choose")
        try:
            check_name(name)
        except ConfigError as error:
            raise error.at(f"rows.{name}") from error
        found.append(Contender(name, overlay, space))
    files = [contender.file for contender in found]
    twice = next((contender.name for contender in found if files.count(contender.file) > 1), None)
    require(twice is None, f"rows.{twice}", "another row's overlay has the same file name; give it another name")
    return tuple(found)


def _over(common: Mapping[str, Range], own: Mapping[str, Range]) -> dict[str, Range]:
    """What may vary in a method: its own keys, and those of all that are none of these, however they are written."""
    said = {plain(key) for key in own}
    return {**{key: value for key, value in common.items() if plain(key) not in said}, **own}


def _space(node: Any, key: str) -> dict[str, Range]:
    require(isinstance(node, Mapping), key, "must hold keys of a configuration and what they may be", node)
    for name in ("seed", "name", "output", "data.evaluate_on"):
        require(name not in node, f"{key}.{name}", "no trial may vary it: take it out")
    other = next((name for name in map(str, node) if _SAMPLES.match(name)), None)
    rule = "trials would be scored on other samples, and their scores say nothing of each other: take it out"
    require(other is None, f"{key}.{other}", rule)
    twice = said_twice(map(str, node))
    require(twice is None, f"{key}.{twice}", "stands there twice, with and without init_args")
    return {str(name): _range(given, f"{key}.{name}") for name, given in node.items()}


def _range(given: Any, key: str) -> Range:
    if isinstance(given, list):
        given = {"values": given}
    known_keys(given, _RANGE, key)
    if "values" in given:
        values = given["values"]
        require(isinstance(values, list) and bool(values), f"{key}.values", "must be a list of values", values)
        require(len(given) == 1, key, "takes values, or low and high", ", ".join(given))
        kinds = [(isinstance(own, bool), own) for own in values]
        twice = next((own for place, (_, own) in enumerate(kinds) if kinds[place] in kinds[:place]), ...)
        require(twice is ..., f"{key}.values", f"must differ from each other; {twice!r} stands there twice")
        return Range(tuple(values))
    low, high = given.get("low"), given.get("high")
    numbers = all(type(end) is float and math.isfinite(end) for end in (low, high) if type(end) is not int)
    require(numbers and low < high, key, "needs low and high, with low below high; or values", given)
    for name, end in (("low", low), ("high", high)):
        require(type(end) is float or abs(end) < 2**63, f"{key}.{name}", "must be a number of at most 63 bits", end)
    log, whole = given.get("log", False), given.get("whole", type(low) is int and type(high) is int)
    for name, value in (("log", log), ("whole", whole)):
        require(type(value) is bool, f"{key}.{name}", "must be true or false", value)
    for name, end in (("low", low), ("high", high)):
        require(not whole or end == int(end), f"{key}.{name}", "must be a whole number where whole is true", end)
    require(not log or low > 0, f"{key}.low", "must be above 0 where log is true", low)
    return Range((), low, high, log, whole, guessed=whole and "whole" not in given)


def grid(contender: Contender, trials: int, seed: int = 0) -> list[Point]:
    """`trials` points of a method's grid, in an order that is drawn once; all of them where there are no more."""
    axes = _axes(contender, trials)
    size = math.prod(map(len, axes))
    if size <= _LARGE:
        numbers = np.random.default_rng(seed).permutation(size)[:trials].tolist()
    else:
        draw, numbers = random.Random(seed), []
        known: set[int] = set()
        while len(numbers) < trials:
            number = draw.randrange(size)
            if number not in known:
                known.add(number)
                numbers.append(number)
    return [dict(zip(contender.space, _point(axes, number), strict=True)) for number in numbers]


def grid_size(contender: Contender, trials: int) -> int:
    """How many points a method's grid has, up to the budget."""
    return min(trials, math.prod(map(len, _axes(contender, trials))))


def _axes(contender: Contender, trials: int) -> list[Sequence[Any]]:
    return [own.points(_density(contender, trials)) for own in contender.space.values()]


def _point(axes: Sequence[Sequence[Any]], number: int) -> list[Any]:
    """A point by its place, the last axis first, as `itertools.product` counts."""
    values = []
    for axis in reversed(axes):
        number, place = divmod(number, len(axis))
        values.append(axis[place])
    return values[::-1]


def _density(contender: Contender, trials: int) -> int:
    """Points of each open range, so that the grid has `trials` of them or a few more, if its values are so many."""
    ranges = contender.space.values()
    fixed = math.prod(len(own.values) for own in ranges if own.values)
    open_ranges = sum(not own.values for own in ranges)
    wanted = min(trials, math.prod(own.most for own in ranges))
    count = max(2, math.ceil(round((trials / fixed) ** (1 / max(open_ranges, 1)), 9)))
    while math.prod(len(own.points(count)) for own in ranges) < wanted and count < 8 * trials:
        count += 1 + count // 16  # whole numbers are too few for so many
    return count
