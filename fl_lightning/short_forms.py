"""Settings whose commonest members need no name: what may be given in their place, and what it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fl_lightning.errors import ConfigError


def long_form(key: str, value: Any, given: Any) -> dict[str, Any]:
    """The setting of a key with a short form by the names of its parameters.

    Args:
        key: one of `SHORT_FORMS`.
        value: what it is set to.
        given: the same as it was written, for the error.

    Raises:
        ConfigError: if it is none of the forms.
    """
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
    return {"probability": given} if type(given) in (int, float) else None


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
