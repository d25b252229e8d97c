"""The places where clients of one architecture are fitted: one, or several that a GPU computes side by side.

A small step, or a large network's later layers, leave most of a GPU idle. Where each client's steps are recorded by
themselves, several clients are under way at once, each on a stream with recordings and memory of its own: the same
kernels, so the same numbers. Replayed on four streams, steps of a ResNet-18 at batch 64 take 0.6 of the time that they
take on one, and a round 0.7 as long as the CPU keeps up.
"""

from __future__ import annotations

from collections.abc import Callable

from fl_lightning.core import recording
from fl_lightning.core.written import Contents, overwritten
from fl_lightning.federation.stack import Stack

MOST = 4
"""Lone clients under way at once: twice as many take 0.7 to 0.95 of the time, and twice the memory."""


class Lanes:
    """Stacks of one architecture that take turns.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], Stack]) -> None:
        self._make = make
        self.stacks = [make()]
        """In the order in which they were used, the one whose last clients came first in front."""
        self._contents, self._several = Contents(), False

    def __len__(self) -> int:
        return len(self.stacks)

    @property
    def unrecorded(self) -> str:
        """Why steps are not recorded (any more); empty where they are, or nobody asks for it."""
        graphs = [stack.graphs for stack in self.stacks if stack.graphs is not None]
        return next((own.reason for own in graphs if own.reason), "")

    def open(self, count: int, alone: bool) -> Stack | None:
        """Where a cohort of so many clients is fitted; None for one client whose steps are not recorded.

        Args:
            count: clients.
            alone: whether clients are fitted by themselves rather than stacked.
        """
        records = all(own.records for own in self.stacks)
        if count == 1 and not records:
            return None
        if alone and records and self._has_more():
            self.stacks.insert(0, self._make())
        stack = self.stacks.pop(0)
        self.stacks.append(stack)
        stack.open(count)
        if not stack.goes_ahead:  # those before have sent, and need nothing of what they had
            self.forget()
        self._several = count > 1 or stack.goes_ahead
        return stack

    def overwritten(self, stack: Stack) -> str:
        """What the client that came in last has changed of what those who wait hold, too; empty where it is nothing."""
        if not self._several:
            return ""
        before, self._contents = self._contents, stack.attributes.contents()
        return overwritten(before, self._contents)

    def forget(self) -> None:
        """Nobody waits who holds what the module does: others were fitted in it since."""
        self._contents = Contents()

    def _has_more(self) -> bool:
        """Whether one more is worth its memory: what was recorded worked, and there is room for all of it again."""
        return (
            len(self) < MOST
            and self.stacks[0].goes_ahead
            and all(own.graphs is not None and own.graphs.has_recorded for own in self.stacks)
            and recording.has_room(self.stacks[0].layout.device)
        )

    def close(self) -> None:
        """Let what comes wait until all fits are done."""
        for stack in self.stacks:
            stack.close()
