"""Hooks into a running federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederatedLoop
    from fl_lightning.federation.runner import ClientReport


class FederationCallback:
    """Called by the loop; override what you need. A callback must not change what is trained."""

    def on_run_start(self, loop: FederatedLoop) -> None:
        """The federation is set up; `loop.round` rounds are done already."""

    def on_round_start(self, loop: FederatedLoop, round: int, participants: Sequence[int]) -> None:
        """A round begins."""

    def on_client_fit_end(self, loop: FederatedLoop, report: ClientReport) -> None:
        """One participant has received, fitted and sent."""

    def on_round_end(self, loop: FederatedLoop, row: dict[str, Any]) -> None:
        """A round is done, before it is saved; `row` is its row of `metrics.csv`, None where nothing applies."""

    def on_run_end(self, loop: FederatedLoop, summary: dict[str, Any]) -> None:
        """All rounds are done."""
