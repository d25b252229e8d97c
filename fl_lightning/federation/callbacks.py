"""Hooks into a running federation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from fl_lightning.errors import require
from fl_lightning.federation.directory import directory_kept
from fl_lightning.federation.reports import ClientReport
from fl_lightning.own_methods import is_lightnings
from fl_lightning.terminal import say

Loop = Any
"""The running `FederatedLoop` (`federation/loop.py`); its settings hold the callbacks, so it is not named here."""


class FederationCallback:
    """Called by the loop; override what you need. A callback must not change what is trained."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of it, as plain containers of numbers, texts and tensors; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; called before `on_run_start`, and only where it gave something."""

    def on_run_start(self, loop: Loop) -> None:
        """The federation is set up; `loop.round` rounds are done already."""

    def on_round_start(self, loop: Loop, round: int, participants: Sequence[int]) -> None:
        """A round begins."""

    def on_client_fit_end(self, loop: Loop, report: ClientReport) -> None:
        """One participant has received, fitted and sent."""

    def on_round_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """A round is done, before it is saved; `row` copies its row of `metrics.csv`, without its empty cells."""

    def on_run_end(self, loop: Loop, summary: dict[str, Any]) -> None:
        """All rounds are done, or the run has ended early; `summary` is what the last receive scored, by column."""


HOOKS = tuple(name for name in vars(FederationCallback) if not name.startswith("_"))


def check_hooks(callbacks: Iterable[FederationCallback], key: str) -> None:
    """Refuse a hook that cannot be called as it will be.

    Args:
        callbacks: they are asked for their hooks' signatures.
        key: where they are listed.

    Raises:
        ConfigError: naming the callback, the hook and its arguments.
    """
    for index, callback in enumerate(callbacks):
        for name in HOOKS:
            wanted = list(inspect.signature(getattr(FederationCallback, name)).parameters)[1:]
            rule = f"{type(callback).__name__}.{name}() must take {', '.join(wanted) or 'nothing'}"
            require(_takes(getattr(callback, name), len(wanted)), f"{key}.{index}", rule)


def _takes(hook: Any, number: int) -> bool:
    try:
        inspect.signature(hook).bind(*[None] * number)
    except (TypeError, ValueError):  # it is called otherwise, or it is nothing to be called
        return False
    return True


def never_called(callbacks: Iterable[FederationCallback]) -> Iterator[str]:
    """What looks as if a hook had been meant, in a line each."""
    for callback in callbacks:
        kind = type(callback)
        theirs = {name for base in kind.__mro__ if is_lightnings(base) for name in vars(base)}
        for name in sorted(name for name in dir(kind) if name.startswith("on_") and name not in theirs):
            near = difflib.get_close_matches(name, HOOKS, 1, 0.7)
            if near and name not in HOOKS:
                yield f"{kind.__name__}.{name}() is no hook, and nobody calls it; did you mean {near[0]}()?"


def tell(callbacks: Iterable[FederationCallback], hook: str, loop: Loop, *arguments: Any) -> None:
    """Call a hook of all; figures come as copies, of which a change is said. So is another working directory.

    What the run writes may be named from there.
    """
    for callback in callbacks:
        given, name = list(map(_copy, arguments)), f"{type(callback).__name__}.{hook}"
        with directory_kept(partial(say, f"fl-lightning: {name} changes the working directory, which is set back")):
            getattr(callback, hook)(loop, *given)
        if any(_figures(own) != _figures(was) for own, was in zip(given, arguments, strict=True)):
            say(f"fl-lightning: {name} changes what it is given, which stays as it was")


def _copy(argument: Any) -> Any:
    """What somebody else's code may change without changing the run: all but the tensors of a message."""
    if isinstance(argument, ClientReport):
        own, message = copy(argument), argument.message
        own.message = replace(message, weights=dict(message.weights), artifacts=dict(message.artifacts))
        own.scores, own.losses, own.logged = dict(own.scores), dict(own.losses), dict(own.logged)
        return own
    return copy(argument) if isinstance(argument, dict | list) else argument


def _figures(argument: Any) -> Any:
    """What of an argument is compared: tensors are not."""
    if isinstance(argument, ClientReport):
        return argument.client, argument.scores, argument.losses, argument.logged, argument.num_steps
    return argument if isinstance(argument, dict | list) else None
