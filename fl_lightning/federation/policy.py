"""What a configuration's section `federation.evaluate` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.core.finetuning import FineTune
from fl_lightning.errors import require, require_choices

MOST_DRAWN = 10_000


@dataclass(frozen=True)
class EvaluationPolicy:
    """What is evaluated, in the rounds that are.

    Args:
        trained: clients' models after the local fit (`Local-T`, `Global-T`). Without it, a client that sits out counts
            in `Local-T_received` with what it last received, and one that never took part does not count.
        received: clients' models right after the receive (`Local-T_received`, `Global-T_received`).
        globally: on the union of all clients' test splits, too (`Global-T`); costs N times that union.
        clients: whose figures count in a round's row and stand in `clients.csv`: those of ``all`` clients, where who
            sits out keeps its last ones and who never took part is tested with its initial model; or those of the
            round's ``participants`` alone, so that nothing is computed or kept of the others: for populations of which
            a small part is ever seen.
        server: the global model on that union, where the method has one (`Server-T`).
        validation: all of that on clients' validation parts, too, where they have some (`Local-V`, `Server-V`).
        loss: the mean cross-entropy of what is predicted, beside accuracy (`eval_loss/Local-T` and so on).
        balanced_accuracy: the mean accuracy over the classes that are there, too (`balanced_accuracy/Local-T`).
        reference: folder of a run of the same data and seed in which clients trained alone (`Local`): `Local-T_hurt` is
            the share of clients below their own figure there; null compares with their first fit, where it was in round
            1, before they had heard of each other, and round 1 is evaluated.
        fine_tune: tests clients after local epochs on a throw-away copy, too (`Local-T/fine_tuned`); null does not.
        batch_size: test samples a batch, >= 1; null takes 512, on a CPU fewer of large inputs.
    """

    trained: bool = True
    received: bool = True
    globally: bool = True
    clients: Literal["all", "participants"] = "all"
    server: bool = True
    validation: bool = True
    loss: bool = True
    balanced_accuracy: bool = True
    reference: str | None = None
    fine_tune: FineTune | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        require_choices("federation.evaluate", clients=(self.clients, Literal["all", "participants"]))
        if self.batch_size is not None:
            require(self.batch_size >= 1, "federation.evaluate.batch_size", "must be >= 1", self.batch_size)

    def check(self, num_clients: int, are_drawn: bool) -> None:
        """Refuse to look at all clients where these are drawn only when they are looked at, and too many.

        Args:
            num_clients: N.
            are_drawn: whether they are a `Population`.

        Raises:
            ConfigError: if they are.
        """
        few = self.clients == "participants" or not are_drawn or num_clients <= MOST_DRAWN
        rule = f"must be participants where data.partition draws more than {MOST_DRAWN} clients ({num_clients})"
        require(few, "federation.evaluate.clients", rule, self.clients)

    @property
    def moments(self) -> list[str]:
        """The moments at which clients are evaluated."""
        return [moment for moment in ("trained", "received") if getattr(self, moment)]
