"""Pulling the classes' relation, as the classification layer sees it, towards the federation's mean soft labels.

Liu, Wang, Wang, Yang, Tao, "FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated
Learning", arXiv:2412.04521, 2024: soft labels (equations 4 to 7) and the regulariser L_reg (equation 11). Where the
equations and the authors' public code differ, each form is a switch; the defaults are the equations, and ours
where these are silent (labels before the first round; classes that nobody holds). Equation 7 is over participants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.aggregation import ArtifactRule, Partial
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import training
from fl_lightning.core.message import Artifact, ClassMeans, Message, accumulation_dtype
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term, require_whole_model
from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    import numpy as np

    from fl_lightning.core.aggregation import RuleFactory
    from fl_lightning.core.facts import Facts
    from fl_lightning.core.host import Host, OwnData
    from fl_lightning.models.split import SplitModel

InitialSoftLabels = Literal["none", "identity", "uniform"]
History = Literal["round", "all"]
MissingSoftLabels = Literal["keep", "drop", "one_hot"]
Source = Literal["post", "running"]
LastBias = Literal["remove", "keep", "always"]


@dataclass(frozen=True)
class SoftLabels:
    """How soft labels are made and averaged.

    Args:
        soft_labels_init: the global soft labels of the first round: ``none`` (no regulariser yet), ``identity`` (the
            public code) or ``uniform`` (1/C everywhere).
        momentum: share m of a row's last value in its next one, in [0, 1); the public code has 0.5.
        history: ``round`` averages the participants' soft labels of the round, ``all`` pools everything that was ever
            sent (the public code).
        missing: what becomes of a class that the average lacks: its row stays as it was (``keep``), becomes invalid
            (``drop``), or is one-hot until somebody holds the class and stays afterwards (``one_hot``, the public
            code).
        source: ``post`` averages predictions over the whole training part in eval mode after the fit (Algorithm 1, line
            9); ``running`` over the last epoch's own forward passes, which costs no pass.
    """

    soft_labels_init: InitialSoftLabels = "none"
    momentum: float = 0.0
    history: History = "round"
    missing: MissingSoftLabels = "keep"
    source: Source = "post"

    def __post_init__(self) -> None:
        require_choices(
            "SoftLabels",
            soft_labels_init=(self.soft_labels_init, InitialSoftLabels),
            history=(self.history, History),
            missing=(self.missing, MissingSoftLabels),
            source=(self.source, Source),
        )
        require(0 <= self.momentum < 1, "SoftLabels.momentum", "must be in [0, 1)", self.momentum)


@dataclass(frozen=True)
class Relation:
    """What of the last layer is compared with the soft labels.

    Args:
        temperature: divides W Wᵀ, > 0; the paper has none (1). For study.
        exclude_diagonal: compare the relations to the other classes only. For study.
        bias: ``remove`` takes the bias off the last layer (the paper), ``keep`` leaves the model as it is (the public
            code), ``always`` takes the bias off at weight 0, too: the control without the term but with the same model.
    """

    temperature: float = 1.0
    exclude_diagonal: bool = False
    bias: LastBias = "remove"

    def __post_init__(self) -> None:
        require(self.temperature > 0, "Relation.temperature", "must be > 0", self.temperature)
        require_choices("Relation", bias=(self.bias, LastBias))


@checked
def class_relation_loss(
    weight: Float[Tensor, "C D"],
    soft_labels: Float[Tensor, "C C"],
    valid: Bool[Tensor, " C"] | None = None,
    temperature: float = 1.0,
    exclude_diagonal: bool = False,
) -> Float[Tensor, ""]:
    """Squared distance of soft labels and class relation, FedDW's L_reg (equation 11).

    L = ‖SL − σ(W Wᵀ)‖²_F / C², where σ is the softmax of each row. It lies in [0, 2/C], reaches the classification
    layer alone and does not depend on the batch. Invalid rows add nothing; the divisor stays C².

    Args:
        weight: [C, D] weights W of the classification layer, one row a class.
        soft_labels: [C, C], row i the mean prediction for samples of class i; constants.
        valid: [C] bool, rows that count; None takes all.
        temperature: divides W Wᵀ, > 0; the paper has none (1).
        exclude_diagonal: compare the two as distributions over the other classes: σ leaves out ‖w_i‖², and rows of soft
            labels are renormalised without their diagonal (a row with nothing beside it does not count).

    Returns:
        Scalar in float32, or float64 where the weights are; never narrower, whatever the autocast.

    Raises:
        ValueError: if sizes do not fit.

    >>> soft_labels = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> round(float(class_relation_loss(torch.eye(2), soft_labels)), 4)
    0.0166
    """
    num_classes = len(weight)
    if soft_labels.shape != (num_classes, num_classes):
        shapes = f"`weight` is {tuple(weight.shape)} but `soft_labels` is {tuple(soft_labels.shape)}"
        raise ValueError(f"class_relation_loss: {shapes}; for C rows of weights it takes [C, C]")
    w = widened(weight)  # [C, D]
    with torch.autocast(weight.device.type, enabled=False):
        relation = w @ w.t()  # [C, C]
        if temperature != 1:
            relation = relation / temperature
        target = soft_labels.detach().to(w.dtype)
        if exclude_diagonal:
            same = torch.eye(num_classes, dtype=torch.bool, device=w.device)
            relation = relation.masked_fill(same, torch.finfo(w.dtype).min)
            target = target.masked_fill(same, 0.0)
            others = target.sum(1)
            target = target / others.clamp(min=torch.finfo(w.dtype).tiny)[:, None]
            valid = others > 0 if valid is None else valid & (others > 0)
        relation = relation.softmax(1)
        if valid is not None:  # `where`, not a product: a row that means nothing may hold anything
            target = torch.where(valid[:, None], target, 0.0)
            relation = torch.where(valid[:, None], relation, 0.0)
        return F.mse_loss(relation, target)  # the mean over C² entries


def initial_soft_labels(initial: InitialSoftLabels, num_classes: int) -> ClassMeans:
    """Soft labels [C, C] before the first exchange; all rows are invalid for ``none``.

    >>> initial_soft_labels("uniform", 2).mean.tolist(), initial_soft_labels("none", 2).valid.tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [False, False])
    """
    shape, wide = (num_classes, num_classes), torch.float32  # in half precision new tensors would be narrow
    rows = {
        "none": torch.zeros(shape, dtype=wide),
        "identity": torch.eye(num_classes, dtype=wide),
        "uniform": torch.full(shape, 1 / num_classes, dtype=wide),
    }
    count = torch.full((num_classes,), int(initial != "none"))
    return ClassMeans(rows[initial], count, sends_count=False, relates_classes=True)


class SoftLabelRule(ArtifactRule):
    """Merge soft labels class by class, weighted by the samples of the class (equation 7).

    A row becomes m · old + (1 − m) · mean; without an old row, the mean. The mean is over this round's participants, or
    over everything that was ever sent.

    Args:
        options: how they are averaged; the initial ones are the old rows of the first round.
    """

    in_parts = True
    hears_mean = True
    fills_alone = True

    def __init__(self, options: SoftLabels = SoftLabels()) -> None:
        self.initial = options.soft_labels_init
        self.momentum = options.momentum
        self.history = options.history
        self.missing = options.missing
        self._sum = ExactSum()
        self._count: Tensor | None = None  # [C] int64, samples in the average
        self._before: Tensor | int = 0  # [C] int64, samples of rounds that are not in the average
        self._is_wide = False  # whether a client sends float64

    @property
    @override
    def remembers(self) -> bool:
        return self.history == "all" or self.missing == "one_hot"

    def add(self, value: ClassMeans, num_samples: int) -> None:
        """Fold in one client's soft labels.

        Raises:
            ValueError: if the number of classes differs from that of the clients before.
        """
        count = value.count[:, None]
        self._is_wide |= value.mean.dtype == torch.float64
        rows = value.mean.to(accumulation_dtype(value.mean.device)) * count
        self._fold(torch.where(count > 0, rows, 0.0), value.count)

    def _fold(self, sums: Tensor, count: Tensor) -> None:
        self._fold_count(count)
        self._sum.add(sums.reshape(-1), 1.0)

    def _fold_count(self, count: Tensor) -> None:
        if self._count is None:
            self._count = torch.zeros_like(count)
        if count.shape != self._count.shape:
            shapes = f"{len(self._count)} and {len(count)}"
            raise ValueError(f"soft labels must have the same number of classes, got {shapes}")
        self._count += count

    @override
    def partial(self) -> Partial:
        return (
            {} if self._count is None else {"sum": self._sum.partial(), "count": self._count, "is_wide": self._is_wide}
        )

    @override
    def merge(self, partial: Mapping[str, Any]) -> None:
        if partial:
            self._fold_count(partial["count"])
            self._sum.merge(partial["sum"])
            self._is_wide |= partial["is_wide"]

    @override
    def result(self, previous: ClassMeans | None) -> ClassMeans | None:
        if self._count is None:
            return previous
        num_classes = len(self._count)
        old = initial_soft_labels(self.initial, num_classes) if previous is None else previous
        old = old.to(self._count.device)
        rows = self._sums() / self._count.clamp(min=1)[:, None]
        present = self._count > 0
        if self.missing == "one_hot":
            unseen = self._count + self._before == 0
            rows = torch.where(unseen[:, None], torch.eye(num_classes).to(rows), rows)
            present = present | unseen
        last = old.mean.to(rows.dtype)
        if self.momentum:
            rows = torch.where(old.valid[:, None], self.momentum * last + (1 - self.momentum) * rows, rows)
        valid = present if self.missing == "drop" else present | old.valid
        rows = torch.where(present[:, None], rows, torch.where(valid[:, None], last, 0.0))
        rows = rows if self._is_wide else rows.float()
        return ClassMeans(rows, valid.long(), sends_count=False, relates_classes=True)

    def _sums(self) -> Tensor:
        assert self._count is not None
        return self._sum.value(1.0).reshape(len(self._count), -1)

    def memory(self) -> Mapping[str, Tensor] | None:
        """Sums and samples of all rounds, or the samples alone, or nothing: what history and `missing` ask for."""
        if self._count is None:
            return None
        if self.history == "all":
            return {"sum": self._sums(), "count": self._count}
        return {"count": self._count + self._before} if self.missing == "one_hot" else None

    @override
    def remember(self, memory: Mapping[str, Tensor]) -> None:
        if self.history == "all":
            self._fold(memory["sum"], memory["count"])
        else:
            self._before = memory["count"]


class ClassRelation(Term):
    """Pull σ(W Wᵀ) of the classification layer towards the global soft labels (FedDW's L_reg).

    Sends the client's soft labels (for each class that it holds the mean of softmax(logits) over its own training
    samples of the class, equations 4 to 6), receives the global ones (equation 7). Until a row was received it does
    not count. W Wᵀ says everything about the classes only where the last layer has no bias, so the bias is taken away.

    Args:
        weight: μ, >= 0.
        decay_rounds: rounds (1-based) at whose start the weight is divided by 10; none by default.
        soft_labels: how soft labels are made and averaged.
        relation: what of the last layer is compared with them.
    """

    paper = "Liu et al., FedDW (arXiv:2412.04521, 2024)"
    reaches = ("model.head",)
    accumulates = ("sums", "seen")

    def __init__(
        self,
        weight: float = 0.1,
        decay_rounds: list[int] | None = None,
        soft_labels: SoftLabels = SoftLabels(),
        relation: Relation = Relation(),
    ) -> None:
        super().__init__(weight)
        decay_rounds = list(decay_rounds or ())
        counted = all(round >= 1 for round in decay_rounds)
        require(counted, "ClassRelation.decay_rounds", "must be rounds, counted from 1", decay_rounds)
        self.decay_rounds = decay_rounds
        self.options = soft_labels
        self.relation = relation
        self._num_valid = 0

    soft_labels: Tensor  # [C, C], as received; invalid rows are zero
    valid: Tensor  # [C] bool
    sums: Tensor  # [C, C], of the last epoch's predictions
    seen: Tensor  # [C] int64

    @override
    def weight_at(self, facts: Facts) -> float:
        return self.weight / 10 ** sum(start <= facts.round for start in self.decay_rounds)

    def alter(self, model: SplitModel) -> None:
        """Take the last layer's bias away."""
        if self.relation.bias == "always" or (self.relation.bias == "remove" and self.weight):
            _last_layer(model).register_parameter("bias", None)

    @override
    def setup(self, host: Host) -> None:
        if self.weight:
            require_whole_model(self, host)
            _last_layer(host.model)
        classes = host.model.num_classes
        self.register_buffer("soft_labels", torch.zeros(classes, classes), persistent=False)
        self.register_buffer("valid", torch.zeros(classes, dtype=torch.bool), persistent=False)
        self.register_buffer("sums", torch.zeros(classes, classes), persistent=False)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.long), persistent=False)

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self._num_valid:
            return torch.zeros((), dtype=torch.float32, device=out.z.device)
        valid = None if self._num_valid == len(self.valid) else self.valid
        weight, how = host.model.classification_layer.weight, self.relation
        return class_relation_loss(weight, self.soft_labels, valid, how.temperature, how.exclude_diagonal)

    @property
    @override
    def needs_whole_epochs(self) -> bool:
        return self.exchanges and self.options.source == "running"

    @torch.no_grad()
    @override
    def observe(self, host: Host, out: Forward) -> None:
        if self.options.source == "running" and host.fit.in_last_epoch:
            predictions = torch.softmax(widened(out.logits), 1)
            self.sums = self.sums.to(accumulation_dtype(self.sums.device))
            self.sums.index_add_(0, out.y, predictions.to(self.sums.dtype))
            self.seen.index_add_(0, out.y, torch.ones_like(out.y))  # bincount waits for the device

    @override
    def receive(self, host: Host, message: Message) -> None:
        received = message.artifacts.get("soft_labels")
        if not isinstance(received, ClassMeans):
            received = initial_soft_labels(self.options.soft_labels_init, len(self.valid))
        self.soft_labels.copy_(torch.where(received.valid[:, None], received.mean, 0.0))
        self.valid.copy_(received.valid)
        self._num_valid = int(self.valid.sum())  # once a round: reading it in every step would wait for the device
        self.sums.zero_()
        self.seen.zero_()

    @override
    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        if self.options.source == "running":
            mean = (self.sums / self.seen.clamp(min=1)[:, None]).to(widened(self.soft_labels).dtype)
            return {"soft_labels": ClassMeans(mean, self.seen.clone(), relates_classes=True)}
        collected = data.collected()
        predictions = torch.softmax(widened(collected.logits), 1)
        means = ClassMeans.from_samples(predictions, collected.y, len(self.valid), relates_classes=True)
        return {"soft_labels": means}

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        return {"soft_labels": tuple(self.soft_labels.shape)}

    @override
    def rules(self) -> Mapping[str, RuleFactory]:
        return {"soft_labels": lambda: SoftLabelRule(self.options)}

    def drawn(self, host: Host, message: Message) -> Mapping[str, np.ndarray]:
        """σ(W Wᵀ) of the global classification layer, beside the soft labels, if that is shared."""
        layer = host.model.classification_layer
        name = next((f"{name}.weight" for name, part in host.named_modules() if part is layer), "")
        weight = message.weights.get(name)
        if weight is None or "soft_labels" not in message.artifacts:
            return {}
        w = weight.detach().float().cpu()  # [C, D]
        return {"class_relation": torch.softmax(w @ w.t(), 1).numpy()}


def _last_layer(model: SplitModel) -> nn.Linear:
    """The classification layer.

    Raises:
        ConfigError: if something comes after it, or beside it, so that its rows are not all that a class is told by.
    """
    layer = model.classification_layer
    inside = set(layer.modules())
    modules = list(model.head.modules())
    after = [m for m in modules[modules.index(layer) :] if m not in inside and not isinstance(m, nn.Identity)]
    rule = "ClassRelation needs the linear layer of one output a class to be the head's last; after it comes"
    require(not after, "model.head", rule + "".join(f" {type(module).__name__}" for module in after[:1]))
    around = [m for m in modules if m not in inside and inside <= set(m.modules())]
    learns = any(p.requires_grad for name, p in layer.named_parameters() if "bias" not in name)
    rests = not learns and any(p.requires_grad for p in model.head.parameters())
    alone = not rests and not any(m._parameters for m in around) and _gives_the_scores(layer, model)
    rule = "ClassRelation needs the linear layer of one output a class to be all that gives the scores; beside it are"
    require(alone, "model.head", f"{rule} other parameters (an adapter's)")
    return layer


@torch.no_grad()
def _gives_the_scores(layer: nn.Linear, model: SplitModel) -> bool:
    """Whether a head's scores are what one of its layers gives; of an embedding that is not a vector nobody can say."""
    given: list[Tensor] = []
    z = torch.linspace(-1, 1, 2 * model.embedding_size).view(2, -1).to(layer.weight)
    handle = layer.register_forward_hook(lambda layer, inputs, out: given.append(out))
    try:
        with training(model.head, False):
            scores = model.head(z)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return True
    finally:
        handle.remove()
    return len(given) == 1 and torch.equal(given[0], scores)
