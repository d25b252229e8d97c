"""Means of messages, one message at a time, whose result does not depend on the order of the messages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.message import Artifact, ClassMeans, Flat, accumulation_dtype, packed, registered, unpacked
from fl_lightning.errors import require

Partial = dict[str, Any]
"""What a worker has folded in, in plain containers of tensors and numbers."""


class WeightedMean:
    """Mean of state dictionaries, weighted by samples: Σ n_i θ_i / Σ n_i.

    Floating tensors (BatchNorm's running statistics among them) are averaged, integer ones (`num_batches_tracked`)
    take the maximum and keep their dtype. If all messages are equal the mean equals them, bit for bit, for float32 and
    narrower types (a float64 times a sample count is rounded).
    """

    def __init__(self) -> None:
        self._sum = ExactSum()
        self._weights: list[float] = []  # to be added up exactly, in whatever order they come
        self._template: dict[str, Tensor] = {}
        self._floats: list[str] = []
        self._integers: dict[str, Tensor] = {}

    def add(self, weights: Mapping[str, Tensor], weight: float, flat: Flat | None = None) -> None:
        """Fold in one client's tensors.

        Args:
            weights: the tensors.
            weight: the client's.
            flat: the tensors as one vector, where somebody has made it; it is made here where it is not of these.

        Raises:
            ValueError: if names or shapes differ from those of the clients before, or the weight is no number >= 0.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"a client's weight in a mean must be a number >= 0, not {weight}")
        if not self._template:
            self._template = {name: tensor.detach().to("meta") for name, tensor in weights.items()}
            self._floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
            self._integers = {n: t.detach().clone() for n, t in weights.items() if not t.is_floating_point()}
        self._check(weights)
        if self._floats:
            if flat is None or not flat.holds(weights, self._floats):
                flat = Flat({name: weights[name] for name in self._floats})  # a message's own order may differ
            self._sum.add(flat.values, weight, flat.square)
        if self._integers:
            torch._foreach_maximum_(list(self._integers.values()), [weights[name] for name in self._integers])
        self._weights.append(weight)

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        if weights.keys() != self._template.keys():
            odd = sorted(weights.keys() ^ self._template.keys())[0]
            raise ValueError(f"tensors to be averaged must have the same names, but {odd!r} is not in all of them")
        for name, tensor in weights.items():
            if tensor.shape != self._template[name].shape:
                shapes = f"{tuple(self._template[name].shape)} and {tuple(tensor.shape)}"
                raise ValueError(f"tensors to be averaged must have the same shapes, but {name!r} is {shapes}")

    @property
    def empty(self) -> bool:
        """True while no weight was added."""
        return self.total == 0

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return math.fsum(self._weights)

    @property
    def count(self) -> int:
        """How many were folded in."""
        return len(self._weights)

    def partial(self) -> Partial:
        """What was folded in so far, in plain containers, to be merged elsewhere."""
        return {
            "sum": self._sum.partial(),
            "weights": self._weights,
            "template": self._template,
            "integers": self._integers,
        }

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Fold in what was folded in elsewhere.

        Raises:
            ValueError: if names or shapes differ.
        """
        if not partial["weights"]:
            return
        if self._template:
            self._check(partial["template"])
            for name, tensor in self._integers.items():
                torch.maximum(tensor, partial["integers"][name], out=tensor)
        else:
            self._template = dict(partial["template"])
            self._floats = [name for name, tensor in self._template.items() if tensor.is_floating_point()]
            self._integers = {name: tensor.clone() for name, tensor in partial["integers"].items()}
        self._sum.merge(partial["sum"])
        self._weights += partial["weights"]

    def result(self) -> dict[str, Tensor]:
        """The mean, in the names' first order, shapes and dtypes."""
        means = self._over(self.total)
        return {
            name: means[name].to(t.dtype) if t.is_floating_point() else self._integers[name]
            for name, t in self._template.items()
        }

    def sum(self) -> dict[str, Tensor]:
        """Σ n_i θ_i of the floating tensors, in the accumulation's dtype."""
        return self._over(1.0)

    def _over(self, divisor: float) -> dict[str, Tensor]:
        floats = [self._template[name] for name in self._floats]
        if not floats:
            return {}
        parts = self._sum.value(divisor).split([tensor.numel() for tensor in floats])
        return {name: part.reshape(t.shape) for name, part, t in zip(self._floats, parts, floats, strict=True)}


class ArtifactRule(ABC):
    """How the values of one artifact, one a client, become one value. Made anew for every round.

    A rule that can be worked out in parts says so with `in_parts`, and has `partial` and `merge`: then every worker
    folds in its own clients, and only the parts travel. Its result must not depend on how clients are spread.
    """

    in_parts: ClassVar[bool] = False
    """Whether `partial` and `merge` tell all that `add` has taken. Not inherited by a class with an `add` of its own,
    nor is `hears_mean`."""
    round: int = 0
    """The present round, 1-based; set by the server."""
    client: int = -1
    """Who sent the value that is added next; set by the server."""
    takes_own: bool = True
    """Without a server: whether a client's own value is among those that are merged for it."""
    passes_one: bool = True
    """Without a server: whether a value that is heard alone comes as it was sent."""
    fills_alone: bool = False
    """Without a server: whether who hears itself alone keeps what it knew beside it, as it would among others."""
    hears_mean: ClassVar[bool] = False
    """Whether one value, the mean of all clients', may stand for theirs."""
    takes_noise: ClassVar[bool] = True
    """Whether values that were clipped and blurred one by one still mean what the rule takes them for."""
    hears_alike: ClassVar[bool] = True
    """Whether every client's value may be replaced by the same one, which a robust rule makes of them."""
    adds: ClassVar[bool] = False
    """Whether values are what is added to the previous one, and not the next one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "add" in cls.__dict__:  # which may keep what its base's parts know nothing of
            cls.in_parts = cls.__dict__.get("in_parts", False)
            cls.hears_mean = cls.__dict__.get("hears_mean", False)

    @property
    def remembers(self) -> bool:
        """Whether something beyond `previous` is carried from round to round, which takes a server."""
        return False

    @abstractmethod
    def add(self, value: Any, num_samples: int) -> None:
        """Fold in one client's value, with the number of training samples behind it."""

    @abstractmethod
    def result(self, previous: Any) -> Artifact | None:
        """The merged value; `previous` is last round's, None if there was none."""

    def partial(self) -> Partial:
        """What was added so far, in plain containers."""
        raise NotImplementedError(f"{type(self).__name__} cannot be worked out in parts")

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Fold in the `partial` of another worker's rule."""
        raise NotImplementedError(f"{type(self).__name__} cannot be worked out in parts")

    def memory(self) -> Mapping[str, Tensor] | None:
        """What the next round's rule must know beyond `previous`; saved in checkpoints. Default: nothing."""
        return None

    def remember(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027 - a rule without memory has nothing to do
        """Take up what last round's rule left in `memory`; called before the first `add`."""


RuleFactory = Callable[[], ArtifactRule]


class TensorMean(ArtifactRule):
    """Mean of tensors, weighted by samples; of whole numbers and truths (class counts, masks) a float32.

    Whole numbers of more than 2²⁴ are refused.

    Args:
        uniform: all clients alike instead.
    """

    in_parts = True
    hears_mean = True

    def __init__(self, uniform: bool = False) -> None:
        self._mean = WeightedMean()
        self._uniform = uniform

    @override
    def add(self, value: Tensor, num_samples: int) -> None:
        odd = value.is_complex() or value.is_quantized or value.layout is not torch.strided
        if odd or (value.is_floating_point() and value.element_size() < 2):
            kind = "sparse" if value.layout is not torch.strided else str(value.dtype).removeprefix("torch.")
            raise ValueError(f"tensors to be averaged must be dense and of real numbers that can be added, not {kind}")
        if not value.is_floating_point():  # a state's integers take the maximum
            widest = max(abs(int(end)) for end in value.aminmax()) if value.numel() else 0
            if widest > 2**24:
                raise ValueError(
                    f"whole numbers above 2**24, as {widest}, are rounded in float32; send them as float64"
                )
            value = value.float()
        self._mean.add({"value": value}, 1 if self._uniform else num_samples)

    @override
    def result(self, previous: Tensor | None) -> Tensor | None:
        return previous if self._mean.empty else self._mean.result()["value"]

    @override
    def partial(self) -> Partial:
        return self._mean.partial()

    @override
    def merge(self, partial: Mapping[str, Any]) -> None:
        self._mean.merge(partial)


class RunningSum(TensorMean):
    """Adds what participants send to what there was: previous + Σ values / divisor.

    Args:
        divisor: > 0; the number of all clients makes it the mean over them of what those who are out last sent, too.
            Of one that grows, round -> divisor, what there was is a mean over fewer, and brought to it first.
        uniform: all clients alike; False weighs them by samples: previous + |S| / divisor · Σ n_i v_i / Σ n_i.
    """

    hears_mean = takes_noise = False  # who sends one counts on its being added as it is
    adds = True

    def __init__(self, divisor: float | Callable[[int], float], uniform: bool = True) -> None:
        super().__init__(uniform)
        self._divisor = divisor
        self._known: Mapping[str, Tensor] | None = None  # the divisor of what there was, where it may be another one

    @property
    @override
    def remembers(self) -> bool:
        return True

    @override
    def result(self, previous: Tensor | None) -> Tensor | None:
        if self._mean.empty:
            return previous
        mean, divisor, before = self._mean, self._divisor, self._known
        if callable(divisor):
            divisor = divisor(self.round)
            self._known = {"divisor": torch.tensor(float(divisor))}
        added = mean.sum()["value"] / (divisor if self._uniform else mean.total / mean.count * divisor)
        total = added if previous is None else added + _scaled(previous.to(added.dtype), before, divisor)
        return total.to(self._mean.result()["value"].dtype)

    @override
    def memory(self) -> Mapping[str, Tensor] | None:
        return self._known

    @override
    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._known = memory


def _scaled(total: Tensor, known: Mapping[str, Tensor] | None, divisor: float) -> Tensor:
    """A sum over one divisor as one over another."""
    before = divisor if known is None else float(known["divisor"])
    return total if before == divisor else total * (before / divisor)


ClassWeighting = Literal["count", "uniform", "count_over_holders"]
MissingClass = Literal["keep", "drop"]


class ClassMeanRule(ArtifactRule):
    """Merge `ClassMeans` class by class over the clients that hold the class.

    Args:
        weighting: ``count`` weighs by the class's samples (weights sum to 1), ``uniform`` takes the plain mean over
            holders, ``count_over_holders`` is the former divided once more by the number of holders (the formula as
            the prototype paper prints it; for the record only).
        missing: a class that nobody held this round keeps its previous mean (``keep``) or becomes invalid (``drop``).
    """

    in_parts = True
    hears_mean = True

    def __init__(self, weighting: ClassWeighting = "count", missing: MissingClass = "keep") -> None:
        require(weighting in get_args(ClassWeighting), "weighting", f"must be in {get_args(ClassWeighting)}", weighting)
        require(missing in get_args(MissingClass), "missing", f"must be in {get_args(MissingClass)}", missing)
        self.weighting = weighting
        self.missing = missing
        self.fills_alone = missing == "keep"
        self._sum = ExactSum()
        self._shape: torch.Size | None = None
        self._weight: Tensor | None = None
        self._holders: Tensor | None = None
        self._relates_classes = False
        self._is_wide = False

    def add(self, value: ClassMeans, num_samples: int) -> None:
        """Fold in one client's means.

        Raises:
            ValueError: if the shape differs from that of the clients before.
        """
        holds = value.valid.long()
        weight = holds if self.weighting == "uniform" else value.count
        if self._shape is None or self._weight is None or self._holders is None:
            self._shape, self._weight, self._holders = (
                value.mean.shape,
                torch.zeros_like(weight),
                torch.zeros_like(holds),
            )
        _same_shape(self._shape, value.mean.shape)
        self._relates_classes = value.relates_classes
        self._is_wide |= value.mean.dtype == torch.float64
        rows = weight.view(-1, *(1,) * (value.mean.ndim - 1))
        scaled = torch.where(rows > 0, value.mean.to(accumulation_dtype(value.mean.device)) * rows, 0.0)
        self._sum.add(scaled.reshape(-1), 1.0)
        self._weight += weight
        self._holders += holds

    @override
    def partial(self) -> Partial:
        if self._shape is None:
            return {}
        return {
            "sum": self._sum.partial(),
            "shape": list(self._shape),
            "weight": self._weight,
            "holders": self._holders,
            "relates_classes": self._relates_classes,
            "is_wide": self._is_wide,
        }

    @override
    def merge(self, partial: Mapping[str, Any]) -> None:
        if not partial:
            return
        shape = torch.Size(partial["shape"])
        if self._shape is None or self._weight is None or self._holders is None:
            self._shape = shape
            self._weight, self._holders = torch.zeros_like(partial["weight"]), torch.zeros_like(partial["holders"])
        _same_shape(self._shape, shape)
        self._sum.merge(partial["sum"])
        self._weight += partial["weight"]
        self._holders += partial["holders"]
        self._relates_classes = partial["relates_classes"]
        self._is_wide |= partial["is_wide"]

    def totals(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Σ weight · mean [C, …] in the accumulation's dtype, Σ weight [C], and how many hold a class [C].

        None where nothing came in.
        """
        if self._shape is None or self._weight is None or self._holders is None:
            return None
        return self._sum.value(1.0).reshape(self._shape), self._weight, self._holders

    def as_sent(self, rows: Tensor) -> Tensor:
        """What was summed, in the type in which it came: float64 if any of it did, float32 else."""
        return rows if self._is_wide else rows.float()

    @override
    def result(self, previous: ClassMeans | None) -> ClassMeans | None:
        totals = self.totals()
        if totals is None:
            return previous if self.missing == "keep" else None
        total, weight, holders = totals
        divisor = weight.clamp(min=1)
        if self.weighting == "count_over_holders":
            divisor = divisor * holders.clamp(min=1)
        rows = self.as_sent(total / divisor.view(-1, *(1,) * (total.ndim - 1)))
        merged = ClassMeans(rows, weight, relates_classes=self._relates_classes).without_counts()
        return merged.filled_from(previous) if self.missing == "keep" else merged


class KindRule(ArtifactRule):
    """Merge the values of a registered kind, in the order of clients, as the kind itself says (`Structured.merge`).

    Args:
        kind: its name, as `registered` takes it.

    Raises:
        ValueError: if no kind, or more than one, has it.
    """

    in_parts = True  # a part is the values themselves: which artifacts come without a rule is not known ahead

    def __init__(self, kind: str) -> None:
        self._kind = registered(kind)
        self._values: list[tuple[int, Any, int]] = []

    @override
    def add(self, value: Any, num_samples: int) -> None:
        self._values.append((self.client, value, num_samples))

    @override
    def result(self, previous: Any) -> Artifact | None:
        in_order = sorted(self._values, key=lambda own: own[0])
        values = [(value, num_samples) for _, value, num_samples in in_order]
        return self._kind.merge(values, previous) if values else previous

    @override
    def partial(self) -> Partial:
        return {"values": [[client, packed(value), num_samples] for client, value, num_samples in self._values]}

    @override
    def merge(self, partial: Mapping[str, Any]) -> None:
        name = self._kind.__name__
        self._values += [(client, unpacked(name, value), samples) for client, value, samples in partial["values"]]


def default_rule(kind: str) -> RuleFactory:
    """The rule of an artifact for which none is named, by the name of its type."""
    known: dict[str, RuleFactory] = {"Tensor": TensorMean, ClassMeans.__name__: ClassMeanRule}
    return known.get(kind, lambda: KindRule(kind))


def _same_shape(own: torch.Size, other: torch.Size) -> None:
    if own != other:
        raise ValueError(f"class means must have the same shape, got {tuple(own)} and {tuple(other)}")
