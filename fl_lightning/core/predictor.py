"""Ways to predict: what a client is tested by, and which headline figures each way gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from fl_lightning.core.message import version_of

if TYPE_CHECKING:
    from fl_lightning.models.split import SplitModel

Figure = Literal["Local-T", "Global-T", "Server-T"]


class Seen:
    """A batch that is to be predicted; what several predictors need of it is computed once.

    Args:
        x: [B, …] inputs.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._known: dict[Any, Any] = {}
        self._fresh: dict[int, int] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, computed at the first call with this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def z(self, model: SplitModel) -> Tensor:
        """The embedding [B, D]."""
        if (id(model), "z") not in self._known:
            self.knows(model, model.embed(self.x))
        return self._known[id(model), "z"]

    def knows(self, model: SplitModel, z: Tensor) -> None:
        """Take an embedding [B, D] that was computed before."""
        self._known[id(model), "z"] = z
        self._fresh[id(model)] = version_of(z)

    def known(self, model: SplitModel) -> Tensor | None:
        """The embedding [B, D], if somebody has asked for it and nobody has changed it in place."""
        z = self._known.get((id(model), "z"))
        return z if z is not None and version_of(z) == self._fresh[id(model)] else None

    def logits(self, model: SplitModel) -> Tensor:
        """The logits [B, C]."""
        return self.once((id(model), "logits"), lambda: model.head(self.z(model)))


@dataclass(frozen=True)
class Predictor:
    """One way to predict.

    Args:
        scores: from a batch to class scores [B, C]; the largest wins. Losses and calibration take them for logits, so
            that probabilities go in by their logarithm.
        figures: the headline figures that it gives. Each figure has one predictor. A ``Server-T`` it has only where its
            scores rest on what travels alone, which is measured, not believed.
        adapts: whether `Method.adapt` personalises the client before it predicts for Local-T and Global-T. What it
            needs must be there before: `setup` makes it, for every way is tried on a sample before anything is trained.
        fine_tunes: whether the configuration's fine-tuning does (`core/finetuning.py`); no method says so.
        merged: makes the network whose logits the scores are, where they are those of weights that several models make
            together: what a file of the model holds.
    """

    scores: Callable[[Seen], Tensor]
    figures: tuple[Figure, ...] = ("Local-T", "Global-T", "Server-T")
    adapts: bool = False
    fine_tunes: bool = False
    merged: Callable[[], nn.Module] | None = None


def headline(ways: Mapping[str, Predictor], figure: Figure) -> str | None:
    """The name of the predictor that gives a headline figure; None where there is none.

    Raises:
        ValueError: if several claim it.
    """
    names = [name for name, way in ways.items() if figure in way.figures]
    if len(names) > 1:
        raise ValueError(f"{figure} must have one predictor, but {' and '.join(map(repr, names))} claim it")
    return names[0] if names else None
