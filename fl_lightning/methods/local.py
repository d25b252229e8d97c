"""Local: every client trains alone. The floor of every table."""

from __future__ import annotations

from fl_lightning.core.client import ClientModule
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel


class Local(ClientModule):
    """Every client trains alone; nothing is exchanged.

    Participants are the same as the other methods' under one seed, so that training budgets match.

    Args:
        extra_terms: terms added to the loss; without an exchange their artifacts stay with the client.
    """

    shared = ()

    def __init__(self, model: SplitModel, extra_terms: list[Term] | None = None) -> None:
        super().__init__(model, extra_terms=extra_terms)
