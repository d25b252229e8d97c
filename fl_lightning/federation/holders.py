"""Which worker has which client's private state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fl_lightning.federation.clients import ClientPool
from fl_lightning.federation.workers import MAIN, Workers


class Holders:
    """Knows the worker of every client that has been anywhere; of the others there is no state, and nothing is kept.

    Args:
        workers: the processes.
        num_train: [N] clients' training samples, by which they are shared out where no round does it.
    """

    def __init__(self, workers: Workers, num_train: np.ndarray) -> None:
        self.workers = workers
        self.num_train = num_train
        self._known: dict[int, int] = {}

    def share_out(self, costs: Mapping[int, float], pool: ClientPool) -> dict[int, int]:
        """Decide which worker takes which client, and bring their states there; all processes together.

        The main process decides: what a fit costs is read off a method of anybody's, of which each process has another
        client's, and processes that disagree would wait for one another for ever.

        Args:
            costs: client -> how long it takes, in any unit; the main process's count.
            pool: this process's.
        """
        return self.assign(self.workers.main_says(self.workers.share_out(costs, self._known)), pool)

    def assign(self, owners: dict[int, int], pool: ClientPool) -> dict[int, int]:
        """Bring clients' states to these workers; returns them."""
        if self.workers.size > 1:
            self.workers.move(self._known, owners, pool)
            self._known |= owners
        return owners

    def all_to_main(self, clients: Iterable[int], pool: ClientPool) -> dict[int, int]:
        """Likewise, with the main worker for all of them."""
        return self.assign(dict.fromkeys(clients, MAIN), pool)

    def of(self, clients: Iterable[int]) -> dict[int, int]:
        """The worker of each client; those that have been nowhere yet are shared out, the same on every process."""
        asked = list(clients)
        if self.workers.size == 1:
            return dict.fromkeys(asked, MAIN)
        new = {client: float(self.num_train[client]) for client in asked if client not in self._known}
        self._known |= self.workers.share_out(new, {})
        return {client: self._known[client] for client in asked}

    def state_dict(self) -> dict[str, Any]:
        """Where clients are, for as many workers: who is fitted beside whom in a cohort is a bit. Empty for one."""
        if self.workers.size == 1:
            return {}
        return {"workers": self.workers.size, "known": torch.tensor(list(self._known.items()), dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; what is of another number of workers is shared out anew."""
        if state.get("workers") == self.workers.size:
            self._known = {client: worker for client, worker in state["known"].tolist()}
