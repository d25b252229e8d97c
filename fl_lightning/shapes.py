"""Shapes as types: public tensor functions say what they take, and tests check it.

`Float[Tensor, "B D"]` in a signature names axes; axes of one name must agree. In ordinary runs `checked` does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

CHECKS = bool(os.environ.get("FL_LIGHTNING_CHECK_SHAPES"))
"""Whether signatures are checked at every call; read once, at import."""
Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """Check a function's arguments and result against its signature, where the environment asks for it.

    What the function itself refuses, it refuses in its own words.
    """
    if not CHECKS:
        return function
    from beartype import BeartypeConf, beartype
    from jaxtyping import TypeCheckError, jaxtyped

    whole_numbers_are_floats = beartype(conf=BeartypeConf(is_pep484_tower=True))
    typed = jaxtyped(typechecker=whole_numbers_are_floats)(function)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return typed(*arguments, **options)
        except TypeCheckError:
            function(*arguments, **options)
            raise

    return call  # type: ignore[return-value]
