"""Local: every client trains alone. The floor of every table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fl_lightning.core.message import Message
from fl_lightning.core.method import Method
from fl_lightning.core.private_steps import record_safe
from fl_lightning.core.term import Term
from fl_lightning.models.split import SplitModel

if TYPE_CHECKING:
    from fl_lightning.core.host import OwnData


class Local(Method):
    """Every client trains alone; nothing is exchanged.

        θ_i ← min_θ L_ce on client i's own samples

    Participants are the same as the other methods' under one seed, so that training budgets match.

    Args:
        extra_terms: terms added to the loss; without an exchange their artifacts stay with the client.
    """

    shared = ()

    def __init__(self, model: SplitModel, extra_terms: list[Term] | None = None) -> None:
        super().__init__(model, extra_terms=extra_terms)

    @override
    @record_safe()
    def send(self, data: OwnData) -> Message:
        return Message(num_samples=data.num_train)
