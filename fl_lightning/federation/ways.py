"""How clients come to their fits: stacked, recorded each apart, or one by one; and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.terminal import say

if TYPE_CHECKING:
    from fl_lightning.core.stacked_timing import Timing

Size = int | Literal["auto"] | None
LARGEST = 32
"""Clients that ``auto`` stacks at most: beyond, memory grows and time does not fall."""


class Way(Enum):
    """How clients come to their fits, the plainest last."""

    STACKED = "the steps of several are made as one"
    APART = "the steps of each are made by themselves, and recorded"
    ONE_BY_ONE = "each is fitted by the trainer"


class Ways:
    """The present way, which only becomes a plainer one, the reasons for that, and what is said of them.

    Args:
        size: `federation.cohort`.
        records: whether steps are recorded where they can be: then one client is a cohort, too.
        method: the name of the method.
        is_main: whether this process says what is chosen.
    """

    def __init__(self, size: Size, records: bool, method: str, is_main: bool) -> None:
        one: Size = 1 if records else None
        self.size = one if size in (None, 1) else size
        """Clients that are wanted in a cohort: None for no cohorts, 1 where they are not to be stacked."""
        self.records, self.method, self.is_main = records, method, is_main
        self.reason = ""
        """Why clients are fitted one by one; empty where they are not, or nobody wants anything else."""
        self.unstacked = ""
        """Why they are apart; empty where they are not, or nobody wants them to be stacked."""
        self._chosen = size != "auto"
        self._unstacked_is_said = False
        self._unrecorded_said: set[str] = set()

    @property
    def now(self) -> Way:
        """The present one."""
        if self.size is None or self.reason:
            return Way.ONE_BY_ONE
        return Way.APART if self.most == 1 else Way.STACKED

    @property
    def most(self) -> int:
        """Clients in a cohort at most."""
        if self.unstacked:
            return 1
        return LARGEST if self.size == "auto" else self.size or 1

    @property
    def is_undecided(self) -> bool:
        """Whether it is still to be measured if stacking pays."""
        return not self._chosen and self.now is Way.STACKED

    def fall_back(self, way: Way, reason: str) -> None:
        """From now on go this plainer way; without a reason nothing changes, and the first one of each way stays.

        That clients are fitted one by one is said at once; that they are apart, when it has worked.
        """
        if not reason:
            return
        if way is Way.APART:
            self.unstacked = self.unstacked or reason
        elif not self.reason:
            self.reason = reason
            if self.size == 1:
                self.tell_unrecorded(reason)
            else:
                self._say(f"{self.method} runs one by one: {reason}")

    def choose(self, count: int, timing: Timing) -> None:
        """Decide from what a step takes, alone and with `count` clients stacked."""
        self._chosen = True
        stacked, alone = (f"{1e3 * seconds:.2f} ms" for seconds in (timing.stacked, timing.alone))
        if timing.pays:
            self._say(f"up to {LARGEST} clients' steps run as one: {stacked} a client, one by one {alone}")
        elif self.records:
            self.fall_back(Way.APART, f"a step takes {alone} alone, and {stacked} of {count} stacked")
        else:
            self.fall_back(Way.ONE_BY_ONE, f"a step takes {alone} so, and {stacked} of {count} stacked")

    # --- what is said -------------------------------------------------------------------------------------------------

    def tell_unrecorded(self, reason: str) -> None:
        """Say why steps are not recorded (any more): each reason once."""
        if reason not in self._unrecorded_said:
            self._unrecorded_said.add(reason)
            self._say(f"{self.method} runs as it is: {reason}", option="graph")

    def tell_unstacked(self, recorded: bool) -> None:
        """Say once why clients are apart, now that it has worked.

        Args:
            recorded: whether their steps are (still) recorded.
        """
        if self.unstacked and not self._unstacked_is_said:
            self._unstacked_is_said = True
            how = ", each one's steps are recorded" if recorded else ""
            self._say(f"{self.method}'s clients are not stacked{how}: {self.unstacked}")

    def _say(self, line: str, option: str = "cohort") -> None:
        if self.is_main:
            say(f"fl-lightning: federation.{option}: {line}")

    # --- over a resume ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The reasons that a round has shown; none for ``auto``, for a run may go on on another machine."""
        if not isinstance(self.size, int):
            return {}
        found = {"reason": self.reason, "unstacked": self.unstacked}
        return {name: reason for name, reason in found.items() if reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the reasons of a run that goes on, or of another process."""
        if self.size is not None:
            self.fall_back(Way.ONE_BY_ONE, state.get("reason", ""))
            self.fall_back(Way.APART, state.get("unstacked", ""))
