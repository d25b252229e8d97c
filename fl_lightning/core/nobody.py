"""What is made for all clients at once, or once for all of them: it may not ask which one it is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fl_lightning.core.facts import Facts, Fit

if TYPE_CHECKING:
    from fl_lightning.core.method import Method


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
def as_nobody(method: Method, told: type[NobodysFacts] = NobodysFacts) -> Iterator[None]:
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
