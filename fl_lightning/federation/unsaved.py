"""What somebody's own server, or what follows or guards its mean, remembers, and no checkpoint does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from types import FunctionType
from typing import Any, Protocol

import numpy as np

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.checkup import Unsound
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.core.telling import codes_of
from fl_lightning.errors import shortened
from fl_lightning.marks import Look
from fl_lightning.sealed import require_readable
from fl_lightning.terminal import say
from fl_lightning.trust import is_known

_KNOWN: Mapping[type, frozenset[str]] = {
    Server: frozenset(vars(Server(Message()))),
    ServerOptimizer: frozenset({"lr", "trained", "share", "joined", "state"}),
    Aggregator: frozenset({"trained"}),
}
"""What the bases have, and save where it matters."""
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)
"""What has a value that something else may have, too, such as the number of the round."""
_LOOK = Look()


class Kept(Protocol):
    """What is saved with a run and may be somebody's own."""

    def state_dict(self) -> dict[str, Any]:
        """What the next rounds depend on."""


class Unsaved:
    """Looks, once a round has been opened, for attributes that have changed since the round before.

    What is made anew for every round is as it was by then. What is not, and not in `state_dict`, is lost to a run that
    is resumed, which says nothing of it otherwise.
    """

    def __init__(self) -> None:
        self._before: dict[str, Hashable] | None = None
        self._said = False
        self._rounds = 0

    def look(self, owner: Kept, ours: frozenset[str] = frozenset()) -> None:
        """Say which attribute a resumed run would lack, once.

        Args:
            owner: exchange, server, optimizer or the rule that guards it, of the round that was just opened.
            ours: names of attributes that are passed over, beside those that the bases have.
        """
        self._rounds += 1
        if self._rounds == 2:  # what is kept of a round is there: a long run must not end without a checkpoint
            checked_state(owner)
        if self._said or is_known(type(owner).__module__):
            return
        known = next((names for kind, names in _KNOWN.items() if isinstance(owner, kind)), ours)
        now = {name: _LOOK.mark(value, (id(owner),)) for name, value in vars(owner).items() if name not in known}
        before, self._before = self._before, now
        lost = {name: mark for name, mark in now.items() if before is not None and before.get(name) != mark}
        lost = _without_saved(owner, lost) if lost else lost
        if lost:
            who = type(owner).__name__
            say(
                f"fl-lightning: {who}.{next(iter(lost))} changes from round to round and is not in {who}.state_dict(), "
                f"so that a resumed run differs: {_remedy(type(owner))} state_dict and load_state_dict"
            )
            self._said = True


def names_of_ours(kind: type) -> frozenset[str]:
    """The attributes that the code of this package's own classes among a class's bases speaks of."""
    bases = (base for base in kind.__mro__ if is_known(base.__module__))
    functions = (function for base in bases for function in vars(base).values() if isinstance(function, FunctionType))
    return frozenset(name for function in functions for name in function.__code__.co_names)


def checked_state(owner: Kept) -> dict[str, Any]:
    """What a server, or what follows, guards or carries its messages, wants to keep, if it can be read again; ours can.

    Raises:
        Unsound: if it cannot.
    """
    state = owner.state_dict()
    if is_known(type(owner).__module__):
        return state
    rule = f"{type(owner).__name__}.state_dict() must give plain containers of numbers, texts and tensors"
    try:
        known = state.keys() - ({"message", "memories", "server_optimizer"} if isinstance(owner, Server) else set())
        require_readable({key: state[key] for key in sorted(known)})
    except Exception as error:
        raise Unsound(f"{rule} ({shortened(str(error), 100)})") from error
    return state


def _remedy(kind: type) -> str:
    saves = next(own for own in kind.__mro__ if "state_dict" in vars(own))
    return "override" if is_known(saves.__module__) else "add it to"


def _without_saved(owner: Kept, lost: Mapping[str, Hashable]) -> dict[str, Hashable]:
    """Attributes that are not saved: neither by their name, nor by what they hold, which may have another name.

    Args:
        owner: whose they are.
        lost: their names, with what stands for their values.
    """
    told = {name.strip("_") for name in _told_of(type(owner))}
    left = {name: mark for name, mark in lost.items() if name.strip("_") not in told}
    if not left:
        return left
    saved = list(_entries(owner.state_dict(), isinstance(owner, Server)))
    names = {str(name).strip("_") for name, _ in saved}
    marks = {_LOOK.mark(value) for _, value in saved if not isinstance(value, _NUMBERS)} | _sent(owner)
    return {
        name: mark
        for name, mark in left.items()
        if name.strip("_") not in names and (isinstance(getattr(owner, name), _NUMBERS) or mark not in marks)
    }


def _told_of(kind: type) -> Iterator[str]:
    """The names that the code speaks of by which a class saves and loads."""
    for code in codes_of(kind, ("state_dict", "load_state_dict")):
        yield from code.co_names


def _entries(state: Mapping[Any, Any], of_server: bool = False) -> Iterator[tuple[Any, Any]]:
    """What a state holds, and what is in what it holds, by name; of a server's message and the like only as a whole."""
    for name, value in state.items():
        yield name, value
        if isinstance(value, Mapping) and not (of_server and name in {"message", "memories", "server_optimizer"}):
            yield from _entries(value)


def _sent(owner: Kept) -> set[Hashable]:
    """What stands for a server's message and what is in it, which are saved: they may have other names, too."""
    if not isinstance(owner, Server):
        return set()
    weights, artifacts = owner.message.weights, owner.message.artifacts
    values = [owner.message, weights, artifacts, *weights.values(), *artifacts.values()]
    return {_LOOK.mark(value, (id(owner),)) for value in values}
