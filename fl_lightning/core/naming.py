"""What a method says by name is looked up before anything is trained: a name that nothing has would do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

from fl_lightning.core.division import matches
from fl_lightning.core.facts import Phase
from fl_lightning.core.predictor import Figure, Predictor, headline
from fl_lightning.errors import ConfigError, own_code, require, suggest

if TYPE_CHECKING:
    from fl_lightning.core.method import Method


class Said(NamedTuple):
    """Names that a method has said, which were looked up."""

    phases: set[tuple[str, Any]]
    ways: set[str]


_SAID: WeakKeyDictionary[Any, Said] = WeakKeyDictionary()


def check_names(method: Method) -> None:
    """Refuse names that a method has not, in what it shares, trains and lets its terms reach, and no way to predict.

    Python takes ``("model.head")`` for a text and each of its letters for a name, so that is refused, too.

    Raises:
        ConfigError: naming the method and what it says.
    """
    with own_code("method", method, "phases()"):
        phases = method.phases()
    fits = isinstance(phases, (list, tuple)) and all(isinstance(phase, Phase) for phase in phases)
    rule = f"{type(method).__name__}.phases() must give a list of Phase"
    require(fits, "method", rule, type(phases).__name__)
    _require_known(method, _said(method))
    check_phases(method, phases)
    with own_code("method", method, "predictors()"):
        ways = method.predictors()
    _check_ways(type(method).__name__, ways)
    _SAID[method].ways.update(ways)


def check_phases(method: Method, phases: Sequence[Phase]) -> None:
    """Look up the names in phases that a method has not said before; in later rounds it may say others.

    Raises:
        ConfigError: naming the method, the phase and the name.
    """
    said = [(where, names if isinstance(names, str) else tuple(names)) for where, names in _said_of(phases)]
    known = _SAID.setdefault(method, Said(set(), set())).phases
    new = [each for each in said if each not in known]
    if new:
        _require_known(method, new)
        _require_parts(method, phases)
        known.update(new)
    for phase in phases:
        odd = next((part for part in phase.settings or () if part not in phase.by_part), None)
        if odd is not None:
            rule = f"{type(method).__name__}'s phase {phase.name!r} has settings of {odd!r}, which is no part of it"
            raise ConfigError("method", f"{rule}; {suggest(odd, list(phase.by_part))}")


def known_ways(method: Method) -> dict[str, Predictor]:
    """A method's predictors, of which there must be the same in every round: columns are named after them.

    Raises:
        ConfigError: naming the one that came or went.
    """
    ways = method.predictors()
    known = _SAID[method].ways if method in _SAID else None
    if known and known != ways.keys():
        odd = sorted(known ^ ways.keys())[0]
        rule = f"{type(method).__name__}.predictors() must give the same names in every round, and {odd!r} came or went"
        raise ConfigError("method", rule)
    return ways


def _require_known(method: Method, said: Iterable[tuple[str, Iterable[Any]]]) -> None:
    who = type(method).__name__
    modules = [name for name, _ in method.named_modules(remove_duplicate=False)]
    known = dict.fromkeys([*modules, *method.state_dict(), *(name for name, _ in method.named_parameters())])
    for what, names in said:
        rule = f"{who}'s {what} must be names of submodules, as in ('model.head',) with its comma"
        require(not isinstance(names, str), "method", rule, names)
        unknown = next((str(name) for name in names if name not in known), None)
        if unknown is not None:
            near = suggest(unknown, [name for name in known if name])
            raise ConfigError("method", f"{who}'s {what} names {unknown!r}, which it does not have; {near}")


def _require_parts(method: Method, phases: Iterable[Phase]) -> None:
    """Refuse a phase that trains what is in none of its parts, which no optimizer would have."""
    for phase in phases:
        if not phase.parts or "" in phase.trains:  # else its parts alone say what is trained
            continue
        names = [name for own in phase.parts.values() for name in own]
        free = (name for name, p in method.named_parameters() if p.requires_grad and matches(name, phase.trains))
        left = next((name for name in free if not matches(name, names)), None)
        rule = f"{type(method).__name__}'s phase {phase.name!r} trains {left!r}, which is in none of its parts"
        require(left is None, "method", f"{rule}: name it in one, or not in trains")


def _check_ways(who: str, ways: Any) -> None:
    there = isinstance(ways, Mapping) and bool(ways) and all(isinstance(way, Predictor) for way in ways.values())
    require(there, "method", f"{who}.predictors() must give at least one Predictor by its name")
    known = get_args(Figure)
    for name, way in ways.items():
        odd = next((figure for figure in way.figures if figure not in known), None)
        rule = f"{who}'s predictor {name!r} gives {odd!r}, which is no headline figure; choose from {', '.join(known)}"
        require(odd is None, "method", rule)
    for figure in known:
        try:
            headline(ways, figure)
        except ValueError as error:
            raise ConfigError("method", f"{who}.predictors(): {error}; say figures=()") from error


def _said(method: Method) -> Iterator[tuple[str, Iterable[Any]]]:
    """What a method and its terms name of it beside phases, and where."""
    yield "shared", method.shared
    for place, term in enumerate(method.terms):
        if term.exchanges:
            inside = f"terms.{place}."
            own = term.shared
            yield f"{type(term).__name__}.shared", own if isinstance(own, str) else [inside + name for name in own]
        if term.weight:
            yield f"{type(term).__name__}.reaches", term.reaches


def _said_of(phases: Iterable[Phase]) -> Iterator[tuple[str, Iterable[Any]]]:
    for phase in phases:
        where = f"phase {phase.name!r}"
        yield f"{where} (trains)", phase.trains
        yield f"{where} (resting)", phase.resting
        yield f"{where} (through)", (phase.through,)
        for part, names in (phase.parts or {}).items():
            yield f"{where} (part {part!r})", names
