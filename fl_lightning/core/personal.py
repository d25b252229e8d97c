"""A client's personal model, alone or beside the one that all share: how it is made, and how it predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fl_lightning.core.predictor import Predictor, Seen
from fl_lightning.models.copying import copied

if TYPE_CHECKING:
    from fl_lightning.models.split import SplitModel

Merged = Callable[[], nn.Module] | None
"""What makes the network that stands for a prediction, as `Predictor.merged`; None where none does."""


def personal_copy(method: Any) -> None:
    """Keep a copy of the model, `personal`, beside it: what a method can say as ``setup = personal_copy``."""
    method.personal = copied(method.model)


def personal_only(personal: SplitModel | Callable[[Seen], Tensor], merged: Merged = None) -> dict[str, Predictor]:
    """The one way to predict of a method that has no global model.

    Args:
        personal: a model, for its logits, or what gives class scores [B, C].
        merged: as `Predictor.merged`.
    """
    return {"": Predictor(_scores(personal), ("Local-T", "Global-T"), merged=merged)}


def personal_and_global(
    personal: SplitModel | Callable[[Seen], Tensor], shared: SplitModel, merged: Merged = None
) -> dict[str, Predictor]:
    """Each client's own way to predict, and that of the model that all share, which gives Server-T.

    Args:
        personal: a model, for its logits, or what gives class scores [B, C].
        shared: the global model.
        merged: as `Predictor.merged`, of the personal way.
    """
    return {
        "personal": Predictor(_scores(personal), ("Local-T", "Global-T"), merged=merged),
        "global": Predictor(_scores(shared), ("Server-T",)),
    }


def _scores(way: SplitModel | Callable[[Seen], Tensor]) -> Callable[[Seen], Tensor]:
    return (lambda seen: seen.logits(way)) if isinstance(way, nn.Module) else way  # type: ignore[arg-type]
