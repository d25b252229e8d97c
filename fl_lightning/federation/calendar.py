"""Who takes part when, and who is evaluated when: functions of the seed, the settings and clients' sizes alone."""

from __future__ import annotations

import numpy as np

from fl_lightning.federation.selection import check_rule, selected
from fl_lightning.federation.settings import Federation
from fl_lightning.seeding import numpy_generator


class Calendar:
    """The rounds of a federation, known ahead.

    Args:
        settings: of the federation.
        num_clients: N, newcomers among them.
        seed: the run's.
        num_train: [N] training samples, which a rule for who takes part may go by; None has one of each.
    """

    def __init__(self, settings: Federation, num_clients: int, seed: int, num_train: np.ndarray | None = None) -> None:
        self.settings = settings
        self.num_train = np.ones(num_clients, dtype=int) if num_train is None else num_train
        self.num_clients = num_clients
        self.num_founders = num_clients - settings.newcomers.clients
        self.seed = seed
        self._known: dict[int, frozenset[int]] = {}

    def participants(self, round: int) -> list[int]:
        """The clients that take part in a round, in order; depends on seed and round alone."""
        drawn = self._drawn(round)
        out = self.settings.failures.among(drawn, self.seed, round)
        return [client for client in drawn if client not in out]

    def missing(self, round: int) -> set[int]:
        """The clients that should take part in a round and fail."""
        return self.settings.failures.among(self._drawn(round), self.seed, round)

    def check(self) -> None:
        """Refuse a rule for who takes part that cannot be known ahead.

        Raises:
            ConfigError: naming it, and what it gave.
        """
        if self.settings.selection is not None:
            check_rule(self.settings.selection, self._drawn, self.settings.rounds)

    def _drawn(self, round: int) -> list[int]:
        there = self.num_present(round)
        if self.settings.selection is not None:
            count, rng = number_drawn(self.settings.participation, there), self._rng(round)
            return selected(self.settings.selection, round, self.num_train[:there], count, rng)
        if self.samples_independently:
            return (self._rng(round).random(there) < self.settings.participation).nonzero()[0].tolist()
        count = int(self.expected(round))
        if count == there:
            return list(range(there))
        return sorted(self._rng(round).choice(there, size=count, replace=False).tolist())

    def _rng(self, round: int) -> np.random.Generator:
        return numpy_generator(self.seed, "participants", round)

    @property
    def samples_independently(self) -> bool:
        """Whether each client takes part by a chance of its own (Poisson sampling)."""
        return self.settings.sampling == "poisson" and self.settings.participation < 1

    def expected(self, round: int) -> float:
        """How many clients a round expects, whoever fails; under Poisson sampling the mean of their number."""
        there = self.num_present(round)
        if self.settings.selection is not None:
            return len(self._drawn(round))
        if self.samples_independently:
            return self.settings.participation * there
        return number_drawn(self.settings.participation, there)

    @property
    def fewest(self) -> int:
        """The fewest clients of a round that has some, whoever fails; where they are drawn singly, on average."""
        if self.settings.selection is None:
            return max(1, int(self.expected(1)))
        sizes = (len(self._drawn(round)) for round in range(1, self.settings.rounds + 1))
        return min(filter(None, sizes), default=1)

    def num_present(self, round: int) -> int:
        """How many clients have joined by `round`; they are the first ones."""
        return self.num_clients if round > self.settings.newcomers.after else self.num_founders

    def is_evaluated(self, round: int) -> bool:
        """Whether clients are evaluated in `round`."""
        return round % self.settings.evaluate_every == 0 or round == self.settings.rounds

    def takes_part(self, client: int, round: int) -> bool:
        """Whether a client takes part in a round."""
        if round not in self._known:
            self._known[round] = frozenset(self.participants(round))
        return client in self._known[round]

    def last_fit(self, client: int, done: int) -> int | None:
        """The last of the rounds that are done in which a client took part; None for none."""
        return next((round for round in range(done, 0, -1) if self.takes_part(client, round)), None)

    def is_last_fit(self, client: int, round: int) -> bool:
        """Whether a client takes part in no later round."""
        return not any(self.takes_part(client, later) for later in range(round + 1, self.settings.rounds + 1))

    def may_be_last_fit(self, client: int, round: int) -> bool:
        """Whether a client may take part in no later round: nobody knows where the run may be stopped early."""
        while (first := next(iter(self._known), round)) < round:  # of no use any more, and one a round for ever
            del self._known[first]
        return self.settings.early_stopping is not None or self.is_last_fit(client, round)

    def is_last_before_evaluation(self, client: int, round: int) -> bool:
        """Whether the state after this fit is the one that the next evaluated round reports.

        Participants are known ahead, so a client that will sit out until then is evaluated now: its weights need not be
        kept for it.
        """
        while not self.is_evaluated(round):
            round += 1
            if self.takes_part(client, round):
                return False
        return True


def number_drawn(participation: float, there: int) -> int:
    """How many clients of those that are there take part in a round, rounded down and at least 1.

    >>> number_drawn(0.29, 100)  # which is 28.999… in floating point
    29
    """
    return max(1, int(participation * there + 1e-9))
