"""What is read off predictions: accuracy, and the measures beside it, torchmetrics' among them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.message import accumulation_dtype
from fl_lightning.core.precision import widened
from fl_lightning.errors import ConfigError
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.report.columns import BALANCED, LOSS
from fl_lightning.terminal import say

if TYPE_CHECKING:
    from torchmetrics import Metric

_COUNTS = ("tp", "fp", "tn", "fn", "confmat")
"""States of torchmetrics' that count samples."""


MetricsFactory = Callable[[int], Mapping[str, "Reading"]]


class Outcome(NamedTuple):
    """What a model makes of n samples, on the device on which it was made; a field that nothing asks for is empty.

    Args:
        right: [n] 1 where the sample is predicted right, else 0, in the widest type of the device.
        loss: [n] cross-entropy of the scores, in the same type.
        y: [n] int64 classes.
        predicted: [n] int64 classes.
        scores: [n, C] as they were predicted.
    """

    right: Tensor
    loss: Tensor
    y: Tensor
    predicted: Tensor
    scores: Tensor

    def at(self, positions: Tensor) -> Outcome:
        """Those of some of the samples."""
        return Outcome(*(field.index_select(0, positions) if field.shape[0] else field for field in self))

    def to(self, device: torch.device | str) -> Outcome:
        """The same on a device."""
        return Outcome(*(field.to(device) for field in self))

    @staticmethod
    def join(batches: Sequence[Outcome]) -> Outcome:
        """Those of batches, one after another."""
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return Outcome(*(torch.zeros(0) for _ in Outcome._fields))
        return Outcome(*map(torch.cat, zip(*batches, strict=True)))


class Measures:
    """Reads numbers off outcomes.

    Accuracy (torchmetrics' micro average), the loss and balanced accuracy (the mean over classes that the samples have)
    are sums over samples: a metric's own machinery costs more than the evaluation of a small client. All others are
    torchmetrics' objects, which see all samples of a figure at once.

    Args:
        num_classes: C.
        loss: whether the mean cross-entropy is one of them (`eval_loss`).
        balanced: whether balanced accuracy is.
        metrics: further ones, by the names of their columns.
    """

    def __init__(
        self,
        num_classes: int,
        loss: bool = True,
        balanced: bool = True,
        metrics: Mapping[str, Reading] | None = None,
    ) -> None:
        self.num_classes = num_classes
        self.loss = loss
        self.balanced = balanced
        self.metrics = dict(metrics or {})
        self._keeps_scores = any(reading.sees_scores for reading in self.metrics.values())

    @classmethod
    def made_for(cls, policy: EvaluationPolicy, num_classes: int, make: MetricsFactory | None) -> Measures:
        """Those that a configuration asks for.

        Args:
            policy: what is evaluated.
            num_classes: C.
            make: makes further metrics; None for none.
        """
        metrics = None if make is None else make(num_classes)
        return cls(num_classes, policy.loss, policy.balanced_accuracy, metrics)

    @property
    def names(self) -> list[str]:
        """Of all measures, in their order; the empty one is accuracy."""
        return ["", *([LOSS] if self.loss else ()), *([BALANCED] if self.balanced else ()), *self.metrics]

    def outcome(self, scores: Tensor, y: Tensor) -> Outcome:
        """What is kept of a batch.

        Args:
            scores: [B, C], of which the largest wins.
            y: [B] int64 classes.
        """
        wide, nothing = accumulation_dtype(y.device), scores.new_zeros(0)
        predicted, loss = scores.argmax(1), nothing
        if self.loss:  # as `cross_entropy` has it, in half the time on a CPU
            known = widened(scores)
            loss = (known.logsumexp(1) - known.gather(1, y[:, None])[:, 0]).to(wide)
        kept = (y, predicted) if self.metrics else (nothing, nothing)
        return Outcome((predicted == y).to(wide), loss, *kept, scores if self._keeps_scores else nothing)

    def balance(self, y: Tensor) -> Tensor:
        """[n] what each sample of classes y counts in balanced accuracy: all classes that occur count the same."""
        held = torch.bincount(y, minlength=self.num_classes).to(accumulation_dtype(y.device))
        return 1 / (held[y] * (held > 0).sum())

    def of(self, outcome: Outcome, balance: Tensor) -> dict[str, float]:
        """Every measure of some samples, by name; NaN where there are none, or it is not defined.

        Args:
            outcome: what came out for n samples.
            balance: [n] what `balance` says of them.
        """
        if not len(outcome.right):
            return dict.fromkeys(self.names, math.nan)
        read = [outcome.right.mean()]
        read += [outcome.loss.mean()] if self.loss else []
        read += [(outcome.right @ balance).clamp(max=1)] if self.balanced else []
        values = torch.stack(read).tolist()
        values += [reading.of(outcome) for reading in self.metrics.values()]
        named = zip(self.names, values, strict=True)
        return {name: value if math.isfinite(value) else math.nan for name, value in named}


_AREAS = {
    "MulticlassAUROC": ("average", True),
    "MulticlassLogAUC": ("average2", True),
    "MulticlassAveragePrecision": ("average", False),
}
"""Areas of which torchmetrics counts a class without samples as 0: where they keep their average, and whether the area
needs samples of other classes, too."""


class Reading:
    """One of torchmetrics' metrics, used again for every figure.

    Args:
        metric: the metric; it is on the device of the first outcome from then on.
        num_classes: C.
    """

    def __init__(self, metric: Metric, num_classes: int) -> None:
        from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

        self.metric = metric
        self.num_classes = num_classes
        for part in metric.modules():  # every process reads for itself
            if hasattr(part, "_to_sync"):
                part.sync_on_compute = part._to_sync = False
        theirs = type(metric).__module__.startswith("torchmetrics.")  # what derives from one may look at anything
        counts = theirs and isinstance(metric, (MulticlassStatScores, MulticlassConfusionMatrix))
        self.sees_scores = not counts or getattr(metric, "top_k", 1) != 1
        area = _AREAS.get(type(metric).__name__) if theirs else None
        self.over_present = area is not None and getattr(metric, area[0]) == "macro"
        self.needs_others = area is not None and area[1]
        self.is_tried = False
        """Whether it has given a number for made-up predictions: what fails then is a matter of its samples."""
        self._is_theirs, self._has_said = theirs, False
        ignored = getattr(metric, "ignore_index", None)
        self.ignored = -1 if ignored is None else ignored  # a class whose samples are left out; -1 is none
        if area is not None and self.over_present:
            setattr(metric, area[0], "none")

    def of(self, outcome: Outcome) -> float:
        """The metric of some samples; NaN where it is not defined, as of samples that are all left out.

        Raises:
            ConfigError: if a metric of somebody's own fails.
        """
        y = outcome.y[outcome.y != self.ignored]
        if not len(y) or (self.needs_others and not bool((y != y[:1]).any())):
            return math.nan  # however classes are weighed: of samples of one class there is no such area
        try:
            value = self._value(outcome)
        except Exception as error:  # a metric's, which is no client's sickness
            if not self.is_tried:
                raise
            said = f"{type(self.metric).__name__} fails ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
            if not self._is_theirs:
                raise ConfigError("metrics", said) from error
            if not self._has_said:
                say(f"fl-lightning: metrics: {said} of some client's samples, whose cells are blank")
            self._has_said = True
            return math.nan
        if self.over_present:
            held = torch.bincount(y, minlength=self.num_classes)
            value = value[held > 0].to(accumulation_dtype(y.device)).mean()
        return float(value)

    def _value(self, outcome: Outcome) -> Any:
        """What torchmetrics makes of some samples."""
        metric, y = self.metric, outcome.y
        if metric.device != y.device:
            metric.to(y.device)
        predictions = outcome.predicted
        if self.sees_scores:
            predictions = torch.softmax(outcome.scores.to(accumulation_dtype(y.device)), 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without samples, which are dealt with
            metric.reset()
            metric.update(predictions, y if self._is_theirs else y.clone())  # or the next one sees what it writes
            for name in _COUNTS:  # so that shares of counts are those of double precision
                if isinstance(counted := getattr(metric, name, None), Tensor):
                    setattr(metric, name, counted.to(accumulation_dtype(y.device)))
            value = metric.compute()
            metric.reset()
        return value
