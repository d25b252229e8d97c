"""What the loop and its callbacks hear of one participant's round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fl_lightning.core.message import NOTHING, Message, Size
from fl_lightning.federation.evaluation import Scores


@dataclass
class ClientReport:
    """What one participant did in a round.

    Args:
        client: 0-based.
        message: what it sends; empty where another worker fitted it, and only its size is known. It is dropped once it
            is posted: who needs it after `on_client_fit_end` keeps it.
        scores: its accuracies, by column.
        losses: mean over its samples, by name.
        num_steps: local mini-batches.
        logged: what a model of the user's own and Lightning's callbacks logged in its fit, by name.
        seconds: how long it took.
        downlink: size of all that was sent to it for what it received; the exchange knows.
        uplink: size of all that it sends.
    """

    client: int
    message: Message
    scores: Scores
    losses: dict[str, float]
    num_steps: int
    seconds: float
    downlink: Size = NOTHING
    uplink: Size = NOTHING
    logged: dict[str, float] = field(default_factory=dict)

    def without_message(self) -> ClientReport:
        """The same, with no more of the message than its size."""
        return replace(self, message=Message(num_samples=self.message.num_samples, sent=self.message.size))
