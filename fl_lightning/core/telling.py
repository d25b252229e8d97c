"""What the code of a class speaks of: the names in its functions, and in what these define."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

_IN_STEPS = frozenset({"forward", "local_step", "observe"})
"""Where an attribute is made before it is read."""


def codes_of(kind: type, functions: Collection[str]) -> Iterator[CodeType]:
    """The code of some of a class's functions, as all of its bases define them, and of what is defined in them.

    Args:
        kind: the class.
        functions: their names; properties count, too.
    """
    owns = (vars(base).get(name) for base in kind.__mro__ for name in functions)
    found = [inspect.unwrap(own) for own in map(_function_of, owns) if callable(own)]
    for function in (own for own in found if isinstance(own, FunctionType)):
        yield from _codes(function.__code__, function.__globals__, set())


def _function_of(own: Any) -> Any:
    """What a property, a cached one, or a method of a class calls; anything else itself."""
    for name in ("fget", "func", "__func__"):
        own = getattr(own, name, None) or own
    return own


def _codes(code: CodeType, around: Mapping[str, Any], known: set[CodeType]) -> Iterator[CodeType]:
    """A code, what is defined in it, and the functions of its own file that it names."""
    if code in known:
        return
    known.add(code)
    yield code
    beside = (around.get(name) for name in code.co_names)
    own = (each.__code__ for each in beside if isinstance(each, FunctionType) and each.__globals__ is around)
    for inner in (*(each for each in code.co_consts if isinstance(each, CodeType)), *own):
        yield from _codes(inner, around, known)


def told_in(kinds: Iterable[type], functions: Collection[str]) -> frozenset[str]:
    """The names that functions of some classes speak of, and whatever of these classes they call outside of steps.

    Args:
        kinds: the classes; torch's own tell nothing.
        functions: names of functions to begin with.
    """
    own = [kind for kind in set(kinds) if not kind.__module__.startswith("torch.nn")]
    found, asked = set(functions), set(_IN_STEPS)
    for code in (code for kind in own for code in codes_of(kind, ("forward",))):
        if "training" in code.co_names:  # what one of them makes in a step, another may read in an evaluation
            found.update(code.co_names)
    while new := found - asked:
        asked |= new
        for code in (code for kind in own for code in codes_of(kind, new)):
            texts = (each for each in code.co_consts if isinstance(each, str))  # getattr(self, "…")
            found.update(code.co_names, texts)
    return frozenset(found)
