"""What a round asks of a participant, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.federation.clients import State
from fl_lightning.federation.evaluation import Scores

if TYPE_CHECKING:
    from fl_lightning.data.store import ClientData

KnownScores = Callable[[ClientModule], "Scores | None"]


@dataclass
class Job:
    """What a round asks of one participant.

    Args:
        facts: of the round.
        client: 0-based.
        message: what the client receives.
        received: whether to evaluate right after the receive.
        trained: whether to evaluate after the fit.
        known_scores: gives the received model's scores where they are known already (a global model's), else None.
        keep_model: where to save the trained model, None for not at all.
    """

    facts: Facts
    client: int
    message: Message
    received: bool = True
    trained: bool = True
    known_scores: KnownScores | None = None
    keep_model: Path | None = None

    @property
    def round(self) -> int:
        """1-based."""
        return self.facts.round


@dataclass
class Visit:
    """A participant's round up to its fit.

    Args:
        job: what the round asks of it.
        module: the resident module of its architecture, which other clients may enter before the fit.
        data: its samples.
        scores: right after the receive.
        own: what it kept until now.
        memory: of wire filters.
        seconds: how long it took so far.
        fit: brings the fitted client into the module; None where it is fitted by itself.
        trained: its scores after the fit, where they are known.
        waits: whether it is still to be tested after the receive.
        moved: the weights that its receive left otherwise than they came, where somebody heeds that.
        began: the shared weights that it started from, once it has sent, where the runner keeps them.
    """

    job: Job
    module: ClientModule
    data: ClientData
    scores: Scores
    own: State
    memory: dict[str, Tensor]
    seconds: float
    fit: Callable[[], None] | None = None
    trained: Scores | None = None
    waits: bool = False
    moved: Mapping[str, Tensor] = field(default_factory=dict)
    began: Mapping[str, Tensor] = field(default_factory=dict)
