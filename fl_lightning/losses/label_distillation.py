"""Learning from the soft labels that other clients give a class on average.

Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", arXiv:1811.11479, 2018: per-class averages of predictions, and a teacher that
leaves a client's own average out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.aggregation import ClassMeanRule, MissingClass
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Artifact, ClassMeans, Message, Structured, artifact
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term
from fl_lightning.errors import require, require_choices
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.aggregation import RuleFactory
    from fl_lightning.core.host import Host, OwnData

Averages = Literal["post", "running"]
Stale = MissingClass


@checked
def label_distillation_loss(
    logits: Float[Tensor, "B C"],
    y: Int[Tensor, " B"],
    teacher: Float[Tensor, "C C"],
    valid: Bool[Tensor, " C"] | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Divergence of predictions from the teacher's soft label of the class, KL(q_y ‖ p).

    L = mean over samples with a teacher of Σ_k q_{y,k} (log q_{y,k} − log p_k), p = softmax(logits / T). Its gradient
    is that of the cross-entropy −Σ_k q_{y,k} log p_k; it is 0 where student and teacher agree.

    Args:
        logits: [B, C].
        y: [B] int64 classes.
        teacher: [C, C], row c the soft label of class c (non-negative, sums to 1); constants.
        valid: [C] bool, classes that have a teacher; None means all.
        temperature: T > 0, of the student's softmax.

    Returns:
        Scalar, float32; 0 (attached to the graph) if no sample's class has a teacher.

    Raises:
        ValueError: if sizes do not fit, or for a temperature that is not positive.

    >>> teacher = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    >>> round(float(label_distillation_loss(torch.zeros(2, 2), torch.tensor([0, 1]), teacher)), 4)
    0.0964
    """
    if not temperature > 0:
        raise ValueError(f"label_distillation_loss: `temperature` must be > 0, got {temperature}")
    classes = logits.shape[-1]
    if teacher.shape != (classes, classes):
        shapes = f"`logits` is {tuple(logits.shape)} but `teacher` is {tuple(teacher.shape)}"
        raise ValueError(f"label_distillation_loss: {shapes}; for C logits it takes [C, C].")
    with torch.autocast(logits.device.type, enabled=False):
        log_p = torch.log_softmax(widened(logits) / temperature, 1)
        q = teacher.detach().to(log_p.dtype)
        if valid is not None:  # a row of zeros adds nothing; a row that means nothing may hold anything
            q = torch.where(valid[:, None], q, 0.0)
        divergence = (torch.xlogy(q, q)[y] - q[y] * log_p).sum()
        return divergence / (max(len(y), 1) if valid is None else valid[y].sum().clamp(min=1))


@checked
def leave_one_out(
    sums: Float[Tensor, "C C"], own: Float[Tensor, "C C"], included: Bool[Tensor, " C"]
) -> tuple[Float[Tensor, "C C"], Bool[Tensor, " C"]]:
    """Mean soft labels of the others, out of everybody's sums.

    Args:
        sums: [C, C], row c the sum of the clients' soft labels of class c. As each of them sums to 1, the row's sum is
            the number of clients behind it.
        own: [C, C], the client's own soft labels.
        included: [C] bool, where `own` is part of `sums`.

    Returns:
        The means [C, C], whose rows sum to 1 (0 where there is nobody else), and [C] bool, where there is somebody.

    >>> sums, own = torch.tensor([[1.4, 0.6], [0.1, 0.9]]), torch.tensor([[0.8, 0.2], [0.1, 0.9]])
    >>> teacher, valid = leave_one_out(sums, own, torch.tensor([True, True]))
    >>> [round(p, 4) for p in teacher[0].tolist()], valid.tolist()
    ([0.6, 0.4], [True, False])
    """
    valid = (sums.sum(1).round() - included.to(sums.dtype)) > 0
    others = torch.where(included[:, None], sums - own, sums).clamp(min=0)
    others = torch.where(valid[:, None], others, 0.0)
    return others / torch.where(valid, others.sum(1), 1.0)[:, None], valid


@artifact
@dataclass(frozen=True)
class SoftLabelSums(Structured):
    """Sums of clients' soft labels, class by class; how many clients stand behind a row is the row's sum.

    Args:
        sums: [C, C] float.
        rounds: [C] int32 (int64 beside float64), in which each row was summed; 0 where there is none, or no server
            counts rounds.
    """

    sums: Tensor
    rounds: Tensor
    lossy = ("sums",)


class LabelSums(ClassMeanRule):
    """Sum clients' soft labels class by class, all clients alike, and say in which round each row was summed.

    Args:
        stale: a class that no participant held this round keeps its last sums (``keep``) or has none (``drop``).
        include_self: whether without a server a client's own soft labels are in its sums. A server sums everybody's.
    """

    passes_one = False
    hears_mean = hears_alike = False  # clients take their own out of the sums
    takes_noise = False  # and know by a row's sum how many stand behind it

    def __init__(self, stale: Stale = "keep", include_self: bool = False) -> None:
        super().__init__("uniform", stale)
        self.takes_own = include_self

    @override
    def result(self, previous: SoftLabelSums | None) -> SoftLabelSums | None:  # type: ignore[override]
        totals = self.totals()
        if totals is None:
            return previous if self.missing == "keep" else None
        sums, held = self.as_sent(totals[0]), totals[2] > 0
        rounds = torch.where(held, self.round, 0).to(torch.int64 if sums.dtype == torch.float64 else torch.int32)
        if self.missing == "drop" or previous is None:
            return SoftLabelSums(sums, rounds)
        sums = torch.where(held[:, None], sums, previous.sums.to(sums))
        return SoftLabelSums(sums, torch.where(held, rounds, previous.rounds.to(rounds)))


class LabelDistillation(Term):
    """Learn from the mean soft labels that the other clients give a sample's class (FedDistill's regulariser).

    Sends, for each class that the client holds, its mean prediction softmax(logits) over its own training samples of
    the class, and their number; receives the sums over clients, and takes what it sent itself out of them. A class for
    which no other client sent a soft label does not count. The number in the log is KL(teacher ‖ student).

    Args:
        weight: λ, >= 0.
        temperature: T of the student's softmax in the loss, > 0; averages are made at 1.
        averages: ``post`` averages over the training part in eval mode after the fit; ``running`` averages the
            predictions of the fit's own forward passes (the paper), which costs no pass.
        include_self: leave the client's own soft labels in its teacher.
        stale: a class that no participant held in the last round keeps its older sums (``keep``) or has no teacher
            (``drop``).
    """

    paper = "Jeong et al., arXiv:1811.11479, 2018"
    accumulates = ("sums", "seen")

    def __init__(
        self,
        weight: float = 1.0,
        temperature: float = 1.0,
        averages: Averages = "post",
        include_self: bool = False,
        stale: Stale = "keep",
    ) -> None:
        super().__init__(weight)
        require(temperature > 0, "LabelDistillation.temperature", "must be > 0", temperature)
        require_choices("LabelDistillation", averages=(averages, Averages), stale=(stale, Stale))
        self.temperature = temperature
        self.averages = averages
        self.include_self = include_self
        self.stale = stale

    own: Tensor  # [C, C], what the client sent last of each class
    sent_round: Tensor  # [C] int64, the round in which it did; 0 for a class that it never sent
    teacher: Tensor  # [C, C], as received
    valid: Tensor  # [C] bool
    sums: Tensor  # [C, C], of this fit's predictions
    seen: Tensor  # [C] int64

    @override
    def setup(self, host: Host) -> None:
        classes = host.model.num_classes
        remembers = self.exchanges and not self.include_self
        self.register_buffer("own", torch.zeros(classes, classes), persistent=remembers)
        self.register_buffer("sent_round", torch.zeros(classes, dtype=torch.long), persistent=remembers)
        self.register_buffer("teacher", torch.zeros(classes, classes), persistent=False)
        self.register_buffer("valid", torch.zeros(classes, dtype=torch.bool), persistent=False)
        self.register_buffer("sums", torch.zeros(classes, classes), persistent=False)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.long), persistent=False)

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        return label_distillation_loss(out.logits, out.y, self.teacher, self.valid, self.temperature)

    @torch.no_grad()
    @override
    def observe(self, host: Host, out: Forward) -> None:
        if self.averages == "running":
            predictions = torch.softmax(widened(out.logits), 1)
            self.sums.index_add_(0, out.y, predictions.to(self.sums.dtype))
            self.seen.index_add_(0, out.y, torch.ones_like(out.y))  # bincount waits for the device

    @override
    def receive(self, host: Host, message: Message) -> None:
        self.sums.zero_()
        self.seen.zero_()
        received = message.artifacts.get("label_distillation")
        if not isinstance(received, SoftLabelSums):
            self.teacher.zero_()
            self.valid.zero_()
            return
        sums = received.sums
        included = (self.sent_round > 0) & (received.rounds == self.sent_round) & (not self.include_self)
        teacher, valid = leave_one_out(sums, self.own.to(sums), included)
        self.teacher.copy_(teacher)
        self.valid.copy_(valid)

    @override
    def send(self, host: Host, data: OwnData) -> Mapping[str, Artifact]:
        if self.averages == "running":
            means = ClassMeans(self.sums / self.seen.clamp(min=1)[:, None], self.seen.clone())
        else:
            collected = data.collected()
            predictions = torch.softmax(widened(collected.logits), 1)
            means = ClassMeans.from_samples(predictions, collected.y, len(self.valid))
        sent, own = means.valid, means.mean.to(self.own)
        if not self.include_self:  # who leaves it in its teacher keeps none of it, and the next client must find none
            self.own.copy_(torch.where(sent[:, None], own, self.own))
            self.sent_round.masked_fill_(sent, host.facts.round)
        return {"label_distillation": ClassMeans(widened(torch.where(sent[:, None], own, 0.0)), means.count)}

    @override
    def interface(self, host: Host) -> Mapping[str, tuple[int, ...]]:
        return {"label_distillation": tuple(self.teacher.shape)}

    @override
    def rules(self) -> Mapping[str, RuleFactory]:
        return {"label_distillation": lambda: LabelSums(self.stale, self.include_self)}
