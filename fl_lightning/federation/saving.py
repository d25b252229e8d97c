"""What of a running federation goes into a checkpoint, and how it is taken up again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fl_lightning.core.facts import PlansRounds
from fl_lightning.core.telling import codes_of
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.callbacks import FederationCallback, Loop
from fl_lightning.federation.examiner import union
from fl_lightning.federation.model_files import is_state_of
from fl_lightning.federation.sickness import at_server
from fl_lightning.federation.transport import Waiting
from fl_lightning.federation.unsaved import checked_state
from fl_lightning.identity import CODE, CONTENTS, says_where
from fl_lightning.report.journal import rows_up_to
from fl_lightning.sealed import require_readable
from fl_lightning.terminal import say
from fl_lightning.trust import is_known

CHANGED = "the data are not those that the run began with: samples or labels were added, removed or changed"


def state_of(loop: Loop) -> dict[str, Any]:
    """All that the next rounds depend on, but for the clients' private states (they are the pool's)."""
    return {
        "identity": loop.identity,
        "data": loop.data.content_hash,
        "partition": loop.data.partition_hash,
        "rounds": loop.settings.rounds,
        "on_client_error": loop.settings.on_client_error,
        "ended": loop.agreement.reason,
        "callbacks": {name: own for name, callback in _named(loop) if (own := _checked(name, callback))},
        "exchange": _of_exchange(loop),
        "board": loop.board.state_dict(),
        "cohort": loop.cohort.state_dict(),
        "holders": loop.holders.state_dict(),
        "patience": loop.patience.state_dict(),
        **loop.ledger.state_dict(),
    }


def _of_exchange(loop: Loop) -> dict[str, Any]:
    with at_server(loop.round):
        return checked_state(loop.exchange)


def _checked(name: str, callback: FederationCallback) -> dict[str, Any]:
    """What a callback wants to keep, if it can be written down and read again; ours can."""
    state = callback.state_dict()
    try:
        if state and not _is_ours(callback):
            require_readable(state)
    except Exception as error:
        rule = f"{name}.state_dict() must give plain containers of numbers, texts and tensors"
        raise ConfigError("federation.callbacks", f"{rule} ({error})") from error
    return state


def save(loop: Loop) -> None:
    """Write a checkpoint of a round that is done, where this run keeps any; all processes together."""
    if loop.checkpoints is None or not loop.workers.writes:
        return
    with Waiting.context(), loop.stopwatch.part("save"):  # a slow disk takes its time
        loop.checkpoints.require_ours()
        states = union(loop.workers.gather(loop.runner.pool.flush(loop.round)))
        if loop.workers.is_main:
            loop.checkpoints.save(loop.round, loop.state_dict(), states, loop.settings.checkpoint.keep)
        loop.runner.pool.settle(states)
    loop.agreement.note_save()


def restore(loop: Loop, state: Mapping[str, Any]) -> None:
    """Take up what `state_of` gave.

    Args:
        loop: set up, before its first round.
        state: a checkpoint as `Checkpoints.load` returns it.

    Raises:
        ConfigError: if the checkpoint belongs to another configuration, data set or partition, or lacks something.
    """
    whose = f"the checkpoint of round {state.get('round')}"
    try:
        check_identity(state["identity"], loop.identity, whose)
        if loop.workers.is_main:
            _say_what_was_edited(state["identity"], loop.identity, int(state["round"]))
        require(state["data"] == loop.data.content_hash, "--resume", CHANGED)
        same = state["partition"] in (loop.data.partition_hash, loop.data.former_hash)
        require(same, "--resume", f"{whose} has another partition")
        _check_rounds(loop, state.get("rounds", loop.settings.rounds))
        _check_tested(loop, state)
        _restore(loop, state)
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:120]
        missing = f"it has no {said}" if isinstance(error, KeyError) else f"a part of it does not fit ({said})"
        raise ConfigError("--resume", f"{whose} is not whole: {missing}") from error


def _check_rounds(loop: Loop, planned: int) -> None:
    method = loop.runner.modules[0].method
    rule = f"{type(method).__name__} plans its rounds ahead, and this run began with {planned}; leave it at that"
    plans = isinstance(method, PlansRounds) and method.plans_rounds
    kept = planned == loop.settings.rounds or not plans
    require(kept, "federation.rounds", rule, loop.settings.rounds)
    own = None if planned == loop.settings.rounds or not loop.workers.is_main else _asks_for_rounds(loop)
    if own is not None:
        say(
            f"fl-lightning: {own} asks for facts.rounds, which were {planned} until now: this run is not the one that "
            f"{loop.settings.rounds} rounds from the beginning give (a method that is a PlansRounds, too, refuses this)"
        )


def _asks_for_rounds(loop: Loop) -> str | None:
    """The first of somebody's own classes in method, terms and server whose code asks how many rounds there are."""
    for kind in dict.fromkeys(map(type, (*loop.runner.modules[0].method.modules(), loop.carriers.server))):
        names = {name for base in kind.__mro__ if not is_known(base.__module__) for name in vars(base)}
        for code in codes_of(kind, names):
            if "rounds" in code.co_names and "facts" in (*code.co_names, *code.co_varnames):
                return kind.__name__
    return None


def _check_tested(loop: Loop, state: Mapping[str, Any]) -> None:
    """Refuse an end at which clients would count with figures of an earlier fit than their last one.

    A client is not tested where it takes part again before the next evaluated round, as it was planned. (Where clients
    that fall sick are skipped, all are.)
    """
    settings, calendar, done = loop.settings, loop.calendar, int(state["round"])
    planned, policy = int(state.get("rounds", settings.rounds)), settings.evaluate
    skipped = state.get("on_client_error", settings.on_client_error) == "skip"
    tests = policy.trained or policy.received
    if settings.rounds >= planned or loop.board.follows or skipped or not tests:
        return
    before = _as_planned(loop, planned)
    ahead = range(done + 1, next((r for r in range(done + 1, planned) if calendar.is_evaluated(r)), planned) + 1)
    for client in range(loop.num_clients):
        last = calendar.last_fit(client, done)
        again = any(calendar.takes_part(client, round) for round in ahead)
        rule = (
            f"round {settings.rounds} cannot be the last one: client {client} was not tested in round {last}, its last "
            f"one, for it was to take part again before the next evaluated round; leave it at {planned}, or end it at "
            f"a multiple of {settings.evaluate_every}"
        )
        require(last is None or again or before.is_last_before_evaluation(client, last), "federation.rounds", rule)


def _as_planned(loop: Loop, rounds: int) -> Calendar:
    """The calendar of a run of so many rounds."""
    own = loop.calendar
    return Calendar(replace(own.settings, rounds=rounds), own.num_clients, own.seed, own.num_train)


def _forget_untested(loop: Loop, state: Mapping[str, Any]) -> None:
    """Drop figures of earlier fits than clients' last ones, where those that fall sick are skipped from now on.

    Rounds that ended with the first sick client tested nobody who was to take part again before the next evaluated
    round; one that falls sick there would count with what it was before, and has no figure instead.
    """
    settings, done = loop.settings, int(state["round"])
    before = state.get("on_client_error", settings.on_client_error)
    if settings.on_client_error != "skip" or before == "skip" or loop.board.follows:
        return
    calendar = _as_planned(loop, int(state.get("rounds", settings.rounds)))
    for client in range(loop.num_clients):
        last = calendar.last_fit(client, done)
        if last is not None and not calendar.is_last_before_evaluation(client, last):
            loop.board.record(client, dict.fromkeys(loop.board.scores, math.nan))


def _restore(loop: Loop, state: Mapping[str, Any]) -> None:
    loop.round = state["round"]
    loop.exchange.load_state_dict(_to(state["exchange"], loop.runner.device))
    loop.holders.load_state_dict(state.get("holders", {}))
    rank, holders = loop.workers.rank, loop.holders.of(state["clients"])
    states = {c: record for c, record in state["clients"].items() if holders[c] == rank}
    loop.runner.pool.restore(states, lambda client, own: is_state_of(loop.runner.module(client), own))
    same = state["board"]["scores"].keys() == loop.scores.keys()
    require(same, "--resume", f"the checkpoint of round {state['round']} evaluates other columns")
    loop.board.load_state_dict(state["board"])
    _forget_untested(loop, state)
    loop.cohort.load_state_dict(state.get("cohort", {}))
    loop.ledger.load_state_dict(state)
    rows = tuple if loop.checkpoints is None else partial(rows_up_to, loop.checkpoints.journal, loop.round)
    loop.patience.load_state_dict(state["patience"], rows)
    loop.examiner.forget(loop.round)
    for name, callback in _named(loop):
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])


def _named(loop: Loop) -> Iterator[tuple[str, FederationCallback]]:
    """Callbacks by class, with a number where there are several of one; one that has a name of ours by its module."""
    seen: Counter[str] = Counter()
    callbacks = [callback for callback in loop.callbacks if isinstance(callback, FederationCallback)]
    ours = {type(callback).__qualname__ for callback in callbacks if _is_ours(callback)}
    for callback in callbacks:
        name = type(callback).__qualname__
        if name in ours and not _is_ours(callback):
            name = f"{type(callback).__module__}.{name}"
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), callback


def _is_ours(callback: FederationCallback) -> bool:
    return type(callback).__module__.startswith("fl_lightning.")


def take_up(loop: Loop, saved: Mapping[str, Any], callbacks: Sequence[FederationCallback]) -> None:
    """Give callbacks that have come to a loop after it was restored what they have kept.

    Args:
        loop: has them.
        saved: what a checkpoint holds of callbacks, by their names.
        callbacks: those.

    Raises:
        ConfigError: if one cannot take it.
    """
    for name, callback in _named(loop):
        if name in saved and any(callback is own for own in callbacks):
            try:
                callback.load_state_dict(saved[name])
            except Exception as error:  # whatever it raises
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                raise ConfigError("callbacks", f"{name}.load_state_dict() cannot take what it kept ({said})") from error


def check_identity(there: Mapping[str, Any], here: Mapping[str, Any], whose: str = "the checkpoint") -> None:
    """Refuse a checkpoint of another configuration, naming the first key that differs.

    Files of data may have been moved, as folders may; what they hold is compared when they are read.

    Args:
        there: what makes the run that it belongs to this run.
        here: what makes the present one.
        whose: the checkpoint, in words.

    Raises:
        ConfigError: with that key.
    """
    for key in sorted(there.keys() | here.keys()):
        unknown = key.endswith(CODE) or (key.endswith(CONTENTS) and not (key in there and key in here))
        if there.get(key) != here.get(key) and not unknown and not says_where(key):
            was = f"{there[key]!r} there" if key in there else "absent there"
            now = f"{here[key]!r} here" if key in here else "absent here"
            raise ConfigError("--resume", f"{whose} belongs to another configuration: {key} is {was}, {now}")


def _say_what_was_edited(there: Mapping[str, Any], here: Mapping[str, Any], done: int) -> None:
    """Say which of the user's own modules and files have changed; runs of earlier versions did not write them down."""
    was, now = ({key: own for key, own in known.items() if key.endswith(CODE)} for known in (there, here))
    edited = [key.removesuffix(CODE) for key in sorted(was | now) if was and was.get(key) != now.get(key)]
    if edited:
        rounds = "round 1 is" if done == 1 else f"rounds 1 to {done} are"
        say(f"fl-lightning: your own code or files have changed ({', '.join(edited)}): {rounds} of what it was before")


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, torch.Tensor):
        return state.to(device)
    return {key: _to(value, device) for key, value in state.items()} if isinstance(state, dict) else state
