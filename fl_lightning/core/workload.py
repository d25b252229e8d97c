"""How much a client trains in one local fit: passes over its training part, whole or in part, or mini-batches."""

from __future__ import annotations

import math
from typing import NamedTuple


class Workload(NamedTuple):
    """What a phase trains that names no epochs of its own.

    Args:
        epochs: passes over the client's training part, > 0; of a fraction the last pass is cut short.
        steps: local mini-batches instead, >= 1; None counts epochs.
        batches: local mini-batches of the client's whole epoch, >= 1.
        tries: whether every phase is tried out for one epoch alone, those that name their own, too.
    """

    epochs: float = 1
    steps: int | None = None
    batches: int = 1
    tries: bool = False

    def of(self, epochs: int | None) -> tuple[int, int | None]:
        """How many epochs a phase begins, and how many mini-batches its last one has; None is a whole one.

        Args:
            epochs: the phase's own; None takes the workload's.

        >>> Workload(0.5, batches=5).of(None), Workload(steps=12, batches=5).of(None), Workload(2.0, batches=5).of(None)
        ((1, 3), (3, 2), (2, None))
        """
        if self.tries:
            return 1 if epochs is None else min(epochs, 1), None
        if epochs is not None:
            return epochs, None
        steps = self.steps
        if steps is None:
            if self.epochs == int(self.epochs):
                return int(self.epochs), None
            steps = max(1, math.ceil(self.epochs * self.batches - 1e-9))  # 0.1 · 30 is 3, and not a little more
        whole, rest = divmod(steps, self.batches)
        return whole + (rest > 0), rest or None
