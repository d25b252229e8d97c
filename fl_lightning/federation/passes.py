"""How much work a client's fit is."""

from __future__ import annotations

from dataclasses import replace

from fl_lightning.core.client import ClientModule
from fl_lightning.core.workload import Workload


class Passes:
    """How often fits of a round pass over their clients' training parts; counted once for those that are alike."""

    def __init__(self) -> None:
        self._round = 0
        self._known: dict[tuple[int, Workload], float] = {}

    def of(self, module: ClientModule, architecture: int, workload: Workload, round: int) -> float:
        """Those of one client's fit.

        Args:
            module: the resident one of its architecture, whoever's it is.
            architecture: its number.
            workload: how much the client trains in phases that do not say.
            round: on which phases may rest.
        """
        if self._round != round:
            self._known, self._round = {}, round
        key = architecture, workload
        if key not in self._known:
            facts, module.workload = module.method.facts, workload
            module.method.facts = replace(facts, round=round)
            self._known[key] = module.plan().passes(workload.batches)
            module.method.facts = facts
        return self._known[key]
