"""What the user did wrong, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args


class ConfigError(ValueError):
    """A bad value in a configuration, a data set or a run's folder.

    The command line prints the message as one line and exits with code 2, before anything is written.

    Args:
        key: the dotted configuration key (or file) that is at fault, e.g. ``data.partition.beta``.
        value: the offending value, shown as given; leave it out where there is none.
        allowed: what is allowed, or what to do instead.
    """

    def __init__(self, key: str, allowed: str, value: object = ...) -> None:
        got = "" if value is ... else f", got {value!r}"
        super().__init__(" ".join(f"{key}: {allowed}{got}".split()))
        self.key = key
        self.value = value


def suggest(name: str, choices: Iterable[str]) -> str:
    """Say which of `choices` is nearest to `name`, and list them all: ``did you mean FedRep? (choose from …)``."""
    choices = sorted(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[near[0]]}? " if near else ""
    return f"{hint}(choose from {', '.join(choices)})"


def require(condition: bool, key: str, allowed: str, value: object = ...) -> None:
    """Raise `ConfigError` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, allowed, value)


def require_choices(owner: str, **options: tuple[object, Any]) -> None:
    """Raise `ConfigError` for the first option whose value its type does not allow.

    Args:
        owner: key that the options belong to: ``method``, or a term's class.
        options: each option's value and the `Literal` of what is allowed.
    """
    for name, (value, literal) in options.items():
        allowed = get_args(literal)
        require(value in allowed, f"{owner}.{name}", f"must be one of {', '.join(allowed)}", value)
