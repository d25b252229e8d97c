"""What a method says by name is looked up before anything is trained: a name that nothing has would do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fl_lightning.core.predictor import Predictor
from fl_lightning.errors import ConfigError, own_code, require, suggest

if TYPE_CHECKING:
    from fl_lightning.core.method import Method


def check_names(method: Method) -> None:
    """Refuse names that a method has not, in what it shares, trains and lets its terms reach, and no way to predict.

    Python takes ``("model.head")`` for a text and each of its letters for a name, so that is refused, too.

    Raises:
        ConfigError: naming the method and what it says.
    """
    who = type(method).__name__
    with own_code("method", method, "phases()"):
        said = list(_said(method))
    modules = [name for name, _ in method.named_modules(remove_duplicate=False)]
    known = dict.fromkeys([*modules, *method.state_dict(), *(name for name, _ in method.named_parameters())])
    for what, names in said:
        rule = f"{who}'s {what} must be names of submodules, as in ('model.head',) with its comma"
        require(not isinstance(names, str), "method", rule, names)
        unknown = next((str(name) for name in names if name not in known), None)
        if unknown is not None:
            near = suggest(unknown, [name for name in known if name])
            raise ConfigError("method", f"{who}'s {what} names {unknown!r}, which it does not have; {near}")
    with own_code("method", method, "predictors()"):
        ways = method.predictors()
    there = isinstance(ways, Mapping) and bool(ways) and all(isinstance(way, Predictor) for way in ways.values())
    require(there, "method", f"{who}.predictors() must give at least one Predictor by its name")


def _said(method: Method) -> Iterator[tuple[str, Iterable[Any]]]:
    """All that a method names of itself, and where."""
    yield "shared", method.shared
    for place, term in enumerate(method.terms):
        if term.exchanges:
            inside = f"terms.{place}."
            own = term.shared
            yield f"{type(term).__name__}.shared", own if isinstance(own, str) else [inside + name for name in own]
        if term.weight:
            yield f"{type(term).__name__}.reaches", term.reaches
    for phase in method.phases():
        where = f"phase {phase.name!r}"
        yield f"{where} (trains)", phase.trains
        yield f"{where} (resting)", phase.resting
        yield f"{where} (through)", (phase.through,)
        for part, names in (phase.parts or {}).items():
            yield f"{where} (part {part!r})", names
