"""What the processes of a run agree on at the end of every round."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fl_lightning.federation.workers import MAIN, Workers

if TYPE_CHECKING:
    from fl_lightning.federation.cohort import Cohort


class Agreement:
    """Whether to stop, how long ago something was saved, and what stands against stacking clients.

    The same on all processes once they have settled it.

    Args:
        cohort: this process's.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.asked_by = 0
        """The signal by which somebody asked to stop; 0 where nobody did."""
        self.asked_why = ""
        """Why somebody asked to end the run as a whole one; empty where nobody did."""
        self.reason = ""
        """The same, once all processes know it."""
        self.stops = False
        """Whether all processes know it."""
        self.waited = 0.0
        """Seconds since something was saved, by the main process's clock."""
        self.settled: int | None = None
        """The round after which they last settled it; who asks now stops after the next one."""
        self.note_save()

    def ask(self, number: int, reason: str) -> None:
        """Note that somebody asked to stop: by a signal, or, where its number is 0, for a reason."""
        if number:
            self.asked_by = number
        else:
            self.asked_why = reason

    def note_save(self) -> None:
        """Something was saved now, or there is nothing yet to be saved."""
        self._saved = time.monotonic()

    def settle(self, workers: Workers, round: int) -> None:
        """Tell each other, after a round. Who is asked to stop later stops after the next one, with the others."""
        waited = time.monotonic() - self._saved
        said = workers.everyone_says((self.asked_by, waited, self.asked_why, self.cohort.state_dict()))
        asked = max(number for number, *_ in said)
        self.reason = self.reason or next((why for _, _, why, _ in said if why), "")
        for *_, found in said:
            self.cohort.load_state_dict(found)
        self.stops = asked != 0
        self.asked_by = self.asked_by or asked
        self.waited = said[MAIN][1]
        self.settled = round
