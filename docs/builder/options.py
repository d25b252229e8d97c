"""Constructors' arguments as tables: name, type, default, meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from fl_lightning.explained import kind_of
from fl_lightning.precheck import FILLED_IN
from fl_lightning.schema import Parameter, dataclass_of, parameters

_EMPTY = inspect.Parameter.empty
SKIPPED = {*FILLED_IN, "terms", "body", "embedding_size"}
"""What comes from the data or the experiment, never from a configuration."""


class Option(NamedTuple):
    """One line of a table."""

    name: str
    kind: str
    default: str
    meaning: str


def options(cls: Callable[..., Any], prefix: str = "", skip: Collection[str] = SKIPPED) -> Iterator[Option]:
    """The options of a constructor, those of its sections behind them with a dot."""
    return shown({name: each for name, each in parameters(cls).items() if name not in skip}, prefix)


def shown(known: Mapping[str, Parameter], prefix: str = "") -> Iterator[Option]:
    """Parameters as options, those of sections behind them with a dot."""
    for name, parameter in known.items():
        inside = dataclass_of(parameter.hint)
        yield _option(f"{prefix}{name}", parameter)
        if inside is not None:
            default = parameter.default
            values = vars(default) if is_dataclass(default) and not isinstance(default, type) else {}
            yield from _fields(inside, f"{prefix}{name}.", values)


def _fields(cls: type, prefix: str, values: Mapping[str, Any]) -> Iterator[Option]:
    """A section's fields; defaults are those that the owner gives."""
    for name, parameter in parameters(cls).items():
        own = parameter._replace(default=values[name]) if name in values else parameter
        yield _option(f"{prefix}{name}", own)


def _option(name: str, parameter: Parameter) -> Option:
    is_section = is_dataclass(parameter.default) and not isinstance(parameter.default, type)
    default = "" if is_section else _default(parameter.default)
    return Option(name, kind_of(parameter.hint, "`"), default, _meaning(parameter.doc))


def _default(value: Any) -> str:
    if value is _EMPTY:
        return "must be given"
    plain = {None: "null", True: "true", False: "false"}
    if isinstance(value, bool) or value is None:
        return f"`{plain[value]}`"
    if isinstance(value, (tuple, set, frozenset)):
        return f"`{list(value)}`"
    return f"`{value}`"


def _meaning(doc: str) -> str:
    text = " ".join(doc.split()).replace("``", "`")
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def table(rows: Iterator[Option]) -> str:
    """Options as a Markdown table; a line of text where there are none."""
    lines = [
        f"| `{row.name}` | {row.kind.replace('|', chr(92) + '|')} | {row.default} | {row.meaning} |" for row in rows
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *lines]) if lines else "No options."
