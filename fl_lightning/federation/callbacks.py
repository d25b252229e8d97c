"""Hooks into a running federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fl_lightning.federation.reports import ClientReport
from fl_lightning.terminal import say

Loop = Any
"""The running `FederatedLoop` (`federation/loop.py`); its settings hold the callbacks, so it is not named here."""


class FederationCallback:
    """Called by the loop; override what you need. A callback must not change what is trained."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of it, as plain containers of numbers, texts and tensors; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; called before `on_run_start`, and only where it gave something."""

    def on_run_start(self, loop: Loop) -> None:
        """The federation is set up; `loop.round` rounds are done already."""

    def on_round_start(self, loop: Loop, round: int, participants: Sequence[int]) -> None:
        """A round begins."""

    def on_client_fit_end(self, loop: Loop, report: ClientReport) -> None:
        """One participant has received, fitted and sent."""

    def on_round_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """A round is done, before it is saved; `row` copies its row of `metrics.csv`, None where nothing applies."""

    def on_run_end(self, loop: Loop, summary: dict[str, Any]) -> None:
        """All rounds are done."""


def tell(callbacks: Iterable[FederationCallback], hook: str, loop: Loop, *arguments: Any) -> None:
    """Call a hook of all; figures come as copies, of which a change is said."""
    for callback in callbacks:
        given = [dict(own) if isinstance(own, dict) else own for own in arguments]
        getattr(callback, hook)(loop, *given)
        if any(isinstance(own, dict) and own != was for own, was in zip(given, arguments, strict=True)):
            say(f"fl-lightning: {type(callback).__name__}.{hook} changes figures, which are written as they were")
