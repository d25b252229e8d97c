"""Whose a method, or a class, is: that of a base, Lightning's, or somebody's own."""

from __future__ import annotations


def overrides(kind: type, base: type, name: str) -> bool:
    """Whether a class has something else of a name than a class that it derives from; either may have nothing."""
    return getattr(kind, name, None) is not getattr(base, name, None)


def has_own(one: object, base: type, name: str) -> bool:
    """Whether an object does something else in a method than a class that it is of: by its class, or by itself."""
    method = getattr(one, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def is_lightnings(kind: type) -> bool:
    """Whether a class is one of Lightning's, not one of somebody's own that derives from it."""
    return kind.__module__.startswith("lightning.")
