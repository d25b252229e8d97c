"""A server that gives every client a combination of its own of what all participants have sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.message import Message, accumulation_dtype
from fl_lightning.core.server import Server

Shares = Callable[[Mapping[int, Message]], Tensor]
"""How much each participant gets of everyone's weights.

Takes a round's messages, by client in the order of clients: the weights that are combined, and all artifacts. Returns
[N, N], row i of the i-th of them.
"""


class CombiningServer(Server):
    """Averages all that comes in, and combines some of the weights anew for each participant.

    A client hears its last combination until it has taken part again; who never did hears the mean.

    Args:
        initial: as the base's.
        combined: names of the weights that are combined.
        shares: what the combinations are.
        private: names of artifacts that are for the server alone.
    """

    sees_messages = True

    def __init__(self, initial: Message, combined: Sequence[str], shares: Shares, private: Sequence[str] = ()) -> None:
        self.combined = list(combined)
        self.shares = shares
        self.private = frozenset(private)
        self.takes_noise = not private  # of blurred statistics chance would make the combinations
        self.own: dict[int, dict[str, Tensor]] = {}
        super().__init__(initial)

    def message_for(self, client: int) -> Message:
        """The means, and the client's own combination."""
        if client not in self.own:
            return self.message
        return replace(self.message, weights={**self.message.weights, **self.own[client]})

    def open_round(self) -> None:
        """Start a round: forget what came in."""
        super().open_round()
        self._held: dict[int, Message] = {}

    def see(self, client: int, message: Message) -> Message:
        """Keep what is combined, and what it is combined by."""
        weights = {name: message.weights[name] for name in self.combined}
        self._held[client] = replace(message, weights=weights)
        public = {name: value for name, value in message.artifacts.items() if name not in self.private}
        return replace(message, artifacts=public)

    def close_round(self) -> None:
        """Combine and average. If nothing came in, nothing changes."""
        held = dict(sorted(self._held.items()))
        if held:
            wide = accumulation_dtype(self.device)
            shares = self.shares(held).to(self.device, wide)
            for name in self.combined:
                stacked = torch.stack([message.weights[name] for message in held.values()])
                if stacked.is_floating_point():  # running counters are as in the mean
                    vectors = stacked.to(wide).view(len(stacked), stacked[0].numel())
                    rows = (shares @ vectors).to(stacked.dtype)
                    for client, row in zip(held, rows, strict=True):
                        self.own.setdefault(client, {})[name] = row.reshape(stacked.shape[1:]).clone()
        super().close_round()

    def state_dict(self) -> dict[str, Any]:
        """The base's state and the combinations."""
        return {**super().state_dict(), "own": {client: dict(own) for client, own in self.own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.own = {client: dict(own) for client, own in state["own"].items()}
