"""Who takes part in a round by a rule, in place of a draw in which all have the same chance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np
from typing_extensions import override

from fl_lightning.errors import own_code, require

KEY = "federation.selection"


class ClientSelection(ABC):
    """A rule for who takes part in a round.

    A run asks for rounds ahead and for those behind it, in every worker and again after a break: an answer rests on the
    arguments alone, and draws from `rng`. What training has found (losses, say) is not known ahead, so that nobody can
    be chosen by it.
    """

    paper: ClassVar[str] = ""

    @abstractmethod
    def select(self, round: int, num_train: np.ndarray, count: int, rng: np.random.Generator) -> Iterable[int]:
        """The clients that should take part; `federation.failures` may keep some of them out.

        Args:
            round: 1-based.
            num_train: [N_t] training samples of each client that has joined by then, not to be written to.
            count: how many `federation.participation` asks for, ``max(1, int(participation * N_t))``; a rule may choose
                others, or nobody.
            rng: the round's own, from the run's seed: the same one whenever it is asked.

        Returns:
            0-based clients below N_t, in any order, none of them twice.
        """


class BySamples(ClientSelection):
    """Each client's chance goes by its training samples; drawn one after another, without replacement.

    As in FedProx's public code for experiments with a plain mean (Li et al., "Federated Optimization in Heterogeneous
    Networks", MLSys 2020), whose paper draws with replacement.
    """

    @override
    def select(self, round: int, num_train: np.ndarray, count: int, rng: np.random.Generator) -> Iterable[int]:
        """`count` clients; those without training samples only where the others are fewer."""
        some = np.flatnonzero(num_train)
        if count > len(some):
            return {*some.tolist(), *rng.permutation(np.flatnonzero(num_train == 0))[: count - len(some)].tolist()}
        return rng.choice(len(num_train), size=count, replace=False, p=num_train / num_train.sum()).tolist()


class Cyclic(ClientSelection):
    """Groups of clients are there in turns, as devices are that are idle at night; of one, all have the same chance.

    Client c is in group ``c % groups``, and round t is the turn of group ``(t - 1) % groups``.

    Args:
        groups: how many, >= 1.
    """

    paper = "Cho et al., On the Convergence of Federated Averaging with Cyclic Client Participation, ICML 2023"

    def __init__(self, groups: int = 2) -> None:
        require(groups >= 1, f"{KEY}.groups", "must be >= 1", groups)
        self.groups = groups

    @override
    def select(self, round: int, num_train: np.ndarray, count: int, rng: np.random.Generator) -> Iterable[int]:
        """`count` clients of the group whose turn it is; all of them, where they are fewer."""
        there = np.arange((round - 1) % self.groups, len(num_train), self.groups)
        return rng.choice(there, size=min(count, len(there)), replace=False).tolist()


def selected(
    rule: ClientSelection, round: int, num_train: np.ndarray, count: int, rng: np.random.Generator
) -> list[int]:
    """What a rule chooses, in order.

    Args:
        rule: it.
        round: 1-based.
        num_train: [N_t] training samples of those who are there.
        count: how many are asked for.
        rng: the round's.

    Raises:
        ConfigError: if it names somebody who is not there, or somebody twice, or raises an error.
    """
    seen = num_train.view()
    seen.flags.writeable = False
    with own_code(KEY, rule, f"select() in round {round}"):
        said = rule.select(round, seen, count, rng)
        said = list(said) if isinstance(said, Iterable) else said
    who = f"{type(rule).__name__}.select() must give, in round {round},"
    there = len(num_train)
    require(isinstance(said, list), KEY, f"{who} clients from 0 to {there - 1}, each at most once", said)
    chosen: set[int] = set()
    for client in said:
        whole = isinstance(client, (int, np.integer)) and not isinstance(client, bool) and 0 <= client < there
        require(whole, KEY, f"{who} clients from 0 to {there - 1}", client)
        require(int(client) not in chosen, KEY, f"{who} each client at most once", client)
        chosen.add(int(client))
    return sorted(chosen)


def check_rule(rule: ClientSelection, ask: Callable[[int], list[int]], rounds: int) -> None:
    """Refuse a rule that answers otherwise when it is asked again.

    Args:
        rule: it.
        ask: gives what it chooses for a round.
        rounds: of the run.

    Raises:
        ConfigError: naming it, or what is wrong with its answer for the first or the last round.
    """
    first, _ = ask(1), ask(rounds)
    again = ask(1)
    whole = f"{type(rule).__name__}.select() must give the same clients whenever it is asked: for round 1 it gave "
    require(again == first, KEY, f"{whole}{first}, and then others; draw from `rng` alone, and keep nothing", again)
