"""What somebody's own server, or what follows or guards its mean, remembers, and no checkpoint does."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import deque
from collections.abc import Hashable, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.aggregator import Aggregator
from fl_lightning.core.checkup import Unsound
from fl_lightning.core.leaves import inside
from fl_lightning.core.message import Message
from fl_lightning.core.server import Server
from fl_lightning.core.server_optimizer import ServerOptimizer
from fl_lightning.errors import is_own, shortened
from fl_lightning.running_on import mark_of, mark_of_generator
from fl_lightning.sealed import require_readable
from fl_lightning.terminal import say
from fl_lightning.trust import is_known

_KNOWN: Mapping[type, frozenset[str]] = {
    Server: frozenset(vars(Server(Message()))),
    ServerOptimizer: frozenset({"lr", "trained", "share", "state"}),
    Aggregator: frozenset({"trained"}),
}
"""What the bases have, and save where it matters."""
_MOST, _LARGE = 2000, 2**20
"""Entries of a container, and numbers of a larger tensor or array, by which it is known."""
_HOLDING = (list, tuple, deque, set, frozenset, functools.partial, FunctionType, MethodType, SimpleNamespace)


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
        if self._said or _saves_by_itself(owner):
            return
        known = next((names for kind, names in _KNOWN.items() if isinstance(owner, kind)), ours)
        now = {name: _mark(value, (id(owner),)) for name, value in vars(owner).items() if name not in known}
        before, self._before = self._before, now
        lost = [name for name, mark in now.items() if before is not None and before.get(name) != mark]
        lost = [name for name in lost if name not in owner.state_dict()]
        sent = _sent(owner) if lost else set()
        lost = [name for name in lost if now[name] not in sent]
        if lost:
            who = type(owner).__name__
            say(
                f"fl-lightning: {who}.{lost[0]} changes from round to round and is not in {who}.state_dict(), so that "
                "a resumed run differs: override state_dict and load_state_dict"
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


def _saves_by_itself(owner: Kept) -> bool:
    """Whether it is one of ours, or says by itself what it saves."""
    kind = type(owner)
    saves = next(own for own in kind.__mro__ if "state_dict" in vars(own))
    return is_known(kind.__module__) or not is_known(saves.__module__)


def _sent(owner: Kept) -> set[Hashable]:
    """What stands for a server's message and what is in it, which are saved: they may have other names, too."""
    if not isinstance(owner, Server):
        return set()
    weights, artifacts = owner.message.weights, owner.message.artifacts
    values = [owner.message, weights, artifacts, *weights.values(), *artifacts.values()]
    return {_mark(value, (id(owner),)) for value in values}


def _mark(value: Any, above: tuple[int, ...] = ()) -> Hashable:
    """What tells a value from another: of numbers, texts, tensors, arrays, random generators and what holds them.

    By value, for what is made anew for every round may be as it was. None for anything else.

    Args:
        value: what an attribute holds.
        above: ids of what holds it.
    """
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return value.shape, mark_of(_some(torch.view_as_real(value.detach()) if value.is_complex() else value.detach()))
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.shape, zlib.crc32(_some(value).tobytes())
    if isinstance(value, itertools.count):
        return repr(value)
    held = None if id(value) in above else _held(value)
    if held is None:
        return mark_of_generator(value)
    few = itertools.islice(held.items(), _MOST)
    return len(held), *((str(key), _mark(own, (*above, id(value)))) for key, own in few)


def _some(values: Any) -> Any:
    """A tensor or an array; of a large one, a server's own data set, numbers that are spread over it."""
    size = math.prod(values.shape)
    whole = size <= _LARGE or (isinstance(values, Tensor) and values.layout != torch.strided)
    return values if whole else values.reshape(-1)[:: size // _MOST]


def _held(value: Any) -> Mapping[Any, Any] | None:
    """What a container, a module, a function or an object of one's own holds; None of anything else."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return dict(enumerate(value.ravel().tolist()))
    if isinstance(value, Mapping):
        return value
    return inside(value) if isinstance(value, _HOLDING) or is_own(type(value)) else None
