"""What is made for all clients at once, or once for all of them: it may not ask which one it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

from typing_extensions import override

from fl_lightning.core.facts import Facts, Fit
from fl_lightning.errors import ConfigError


class AsksWho(Exception):
    """Something asks for what is one client's own, or one round's."""


class NobodysFacts(Facts):
    """What all clients know of the federation."""

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in ("client", "is_newcomer"):
            raise AsksWho(f"facts.{name}")
        return super().__getattribute__(name)


class TimelessFacts(NobodysFacts):
    """What is so in every round."""

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in ("round", "participants"):
            raise AsksWho(f"facts.{name}")
        return super().__getattribute__(name)


class NobodysFit(Fit):
    """A fit of which nothing is said: each client had one of its own."""

    @override
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            raise AsksWho(f"fit.{name}")
        return super().__getattribute__(name)


@contextmanager
def as_nobody(method: Any, told: type[NobodysFacts] = NobodysFacts) -> Iterator[None]:
    """Keep from a method which client it is, and how its fit went.

    What asks for it meanwhile raises `AsksWho`.

    Args:
        method: the resident one.
        told: what it still knows of the federation.
    """
    facts, fit = method.facts, method.fit
    known = {own.name: getattr(facts, own.name) for own in fields(Facts) if own.name != "client"}
    method.facts, method.fit = told(**known), object.__new__(NobodysFit)
    try:
        yield
    finally:
        method.facts, method.fit = facts, fit


@contextmanager
def asked_once(method: Any, what: str) -> Iterator[None]:
    """A stretch in which a method answers for all rounds and clients.

    Args:
        method: it; a module without facts is told nothing anyway.
        what: it is asked, e.g. ``is_shared()``.

    Raises:
        ConfigError: if it asks for the round, or for what is one client's own.
    """
    try:
        with as_nobody(method, TimelessFacts) if hasattr(method, "facts") else nullcontext():
            yield
    except AsksWho as error:
        rule = f"{type(method).__name__}.{what} asks for {error}, and is asked once, for all rounds and clients"
        raise ConfigError("method", f"{rule}: what only some of them send is an artifact") from error


@contextmanager
def in_a_round(method: Any) -> Iterator[None]:
    """A stretch in which a method that is in no round is told of the first one: its schedules may begin there.

    Args:
        method: it.
    """
    facts = method.facts
    if facts.round == 0:
        method.facts = replace(facts, round=1)
    try:
        yield
    finally:
        method.facts = facts
