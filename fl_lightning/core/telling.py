"""What the code of a class speaks of: the names in its functions, and in what these define."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType

_IN_STEPS = frozenset({"forward", "local_step", "observe"})
"""Where an attribute is made before it is read."""


def codes_of(kind: type, functions: Collection[str]) -> Iterator[CodeType]:
    """The code of some of a class's functions, as all of its bases define them, and of what is defined in them.

    Args:
        kind: the class.
        functions: their names; properties count, too.
    """
    owns = (vars(base).get(name) for base in kind.__mro__ for name in functions)
    found = (inspect.unwrap(own) for own in (getattr(own, "fget", own) for own in owns) if callable(own))
    codes = [function.__code__ for function in found if isinstance(function, FunctionType)]
    for code in codes:  # which grows as it is gone through
        yield code
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]


def told_in(kinds: Iterable[type], functions: Collection[str]) -> frozenset[str]:
    """The names that functions of some classes speak of, and whatever of these classes they call outside of steps.

    Args:
        kinds: the classes; torch's own tell nothing.
        functions: names of functions to begin with.
    """
    own = [kind for kind in set(kinds) if not kind.__module__.startswith("torch.nn")]
    found, asked = set(functions), set(_IN_STEPS)
    while new := found - asked:
        asked |= new
        for code in (code for kind in own for code in codes_of(kind, new)):
            texts = (each for each in code.co_consts if isinstance(each, str))  # getattr(self, "…")
            found.update(code.co_names, texts)
    return frozenset(found)
