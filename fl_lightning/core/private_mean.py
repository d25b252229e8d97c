"""The mean of a round's clipped messages under noise: all that a server learns of its clients (DP-FedAvg)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import Partial
from fl_lightning.core.checkup import Unsound
from fl_lightning.core.coding import Coding, clipped, deviations
from fl_lightning.core.door import Door
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.message import Message, Structured, accumulation_dtype, artifact
from fl_lightning.seeding import torch_generator

CLIPPED = "clipped"
"""Name of the one artifact in a message that was clipped for this mean."""
ANYONE = -1
"""Who sends the mean: no client."""


@artifact
@dataclass(frozen=True)
class Clipped(Structured):
    """A message as one vector of bounded length.

    Args:
        vector: [P] float32.
        layout: what lies where in it (`Coding.state`), as JSON.
    """

    vector: Tensor
    layout: str

    @classmethod
    def of(cls, vector: Tensor, coding: Coding) -> Clipped:
        """Pack a vector that was clipped."""
        return cls(vector.float(), json.dumps(coding.state()))

    @property
    def coding(self) -> Coding:
        """What lies where."""
        return Coding.from_state(json.loads(self.layout))


class PrivateMean(Door):
    """r + (Σ clip(v_i) + N(0, z² C²)) / m, with m fixed beforehand and all clients alike.

    Where weights and artifacts are clipped apart, the variance is twice that (`coding.deviations`).

    m is the number of clients that are expected in a round, whoever comes: a mean over those who came, or by their
    samples, has no bound on what one client does to it. Sums are exact, so that the result does not depend on order or
    workers; the noise is drawn once, by who closes the round.

    Args:
        norms: C of the weights' updates and of the artifacts.
        multiplier: z, >= 0.
        expected: round -> m.
        seed: of the noise. Whoever knows it can take the noise away again: it is for experiments that repeat.
    """

    key = "mean"
    works_in_parts = True

    def __init__(
        self, norms: tuple[float, float], multiplier: float, expected: Callable[[int], float], seed: int
    ) -> None:
        self.norms = norms
        self.multiplier = multiplier
        self.expected = expected
        self.seed = seed
        self.coding: Coding | None = None
        self.released: Tensor | None = None
        """[P] what the last round gave away: the mean vector under noise."""
        self.open_round()

    @override
    def open_round(self) -> None:
        """Forget what was added."""
        self._sum = ExactSum()

    @override
    def add(self, client: int, message: Message) -> None:
        """Add a client's message; it is clipped here, too, whatever has happened to it on its way.

        Args:
            client: whoever sent it.
            message: with a `Clipped`, as the wire left it.
        """
        sent = message.artifacts[CLIPPED]
        assert isinstance(sent, Clipped)
        self._note(sent.coding)
        self._sum.add(clipped(sent.vector.to(accumulation_dtype(sent.vector.device)), sent.coding, self.norms), 1.0)

    @override
    def partial(self) -> Partial:
        """What was added so far, in plain containers."""
        return {"sum": self._sum.partial(), "coding": None if self.coding is None else self.coding.state()}

    @override
    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add what was added elsewhere."""
        if partial["coding"] is not None:
            self._note(Coding.from_state(partial["coding"]))
        self._sum.merge(partial["sum"])

    def _note(self, coding: Coding) -> None:
        """Remember how messages are laid out, which also a round without any must follow.

        Raises:
            Unsound: if they are laid out otherwise than before: the mean of nobody's would tell that nobody came.
        """
        if self.coding is not None and coding.state() != self.coding.state():
            before, now = ({entry.name for entry in own.entries} for own in (self.coding, coding))
            odd = ", ".join(sorted(before ^ now)) or "the same in other shapes"
            raise Unsound(f"messages are laid out otherwise than before ({odd}), for which no private mean is bounded")
        self.coding = coding

    @override
    def release(self, round: int, previous: Message) -> Iterator[tuple[int, Message]]:
        """The round's mean as one message of nobody's; under noise also where nobody came, of those who could.

        Args:
            round: 1-based.
            previous: with the weights that clients received.
        """
        reference = previous.weights
        coding = Coding.of(Message(dict(reference))) if self.coding is None else self.coding
        expected = self.expected(round)
        if not expected:  # a rule chose nobody, whoever they are: there is nothing to tell, nor to hide
            self.open_round()
            return iter(())
        noise = deviations(coding, self.norms, self.multiplier) / expected
        vector = noise * torch.randn(
            coding.size, generator=torch_generator(self.seed, "privacy", round), dtype=torch.float64
        )
        if self._sum.partial():
            vector = vector + self._sum.value(expected).cpu()
        self.released = vector
        self.open_round()
        device = next((tensor.device for tensor in reference.values()), vector.device)
        message = coding.decoded(vector.to(device, accumulation_dtype(device)), reference, noise)
        message.num_samples = max(1, int(expected + 0.5))
        return iter([(ANYONE, message)])

    @override
    def state_dict(self) -> dict[str, Any]:
        """What the next rounds depend on: how messages are laid out."""
        return {"coding": None if self.coding is None else self.coding.state()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.coding = None if state["coding"] is None else Coding.from_state(state["coding"])
