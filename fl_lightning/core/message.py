"""What crosses the wire: named weights, named artifacts, and the number of samples behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.moving import as_one
from fl_lightning.errors import suggest

_WIDTHS = {
    1: (torch.uint8, torch.int32),
    2: (torch.int16, torch.int16),
    4: (torch.int32, torch.int32),
    8: (torch.int64, torch.int64),
}
"""By bytes of an entry the whole numbers that its bits are, and those that they add up to: wider ones take longer."""


class Structured:
    """A shared quantity of several tensors and settings: a frozen dataclass that is registered with `artifact`.

    Its fields are tensors, numbers, strings or booleans; everything below follows from them, and a kind overrides what
    it counts otherwise. Where no rule is named for an artifact (`Term.rules`), several clients' values become one by
    `merge`.
    """

    lossy: ClassVar[tuple[str, ...]] = ()
    """Fields whose floating-point values a lossy wire may narrow; the others must arrive as they are."""

    @classmethod
    def merge(cls, values: Sequence[tuple[Any, int]], previous: Any) -> Any:
        """One value out of those of several clients, in the order of clients.

        Args:
            values: each client's, with the number of training samples behind it; not empty.
            previous: last round's; None if there was none.

        Raises:
            NotImplementedError: unless the kind says how.
        """
        raise NotImplementedError(f"{cls.__name__}: say how it is merged: override `merge`, or name a rule for it")

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor], *fields: str) -> Any:
        """The same kind with changed tensors: of the named fields, or of all."""
        own = {name: value for name, value in self.tensors().items() if not fields or name in fields}
        return replace(self, **{name: change(value) for name, value in own.items()})  # type: ignore[type-var]

    def crossing(self, name: str) -> Tensor | None:
        """[…] bool, which rows or entries of a lossy field really cross; None, as by default, for all."""
        return None

    def to(self, device: torch.device) -> Any:
        """Move to `device`."""
        return self.map(lambda tensor: tensor.to(device))

    def clone(self) -> Any:
        """Copy, sharing no memory."""
        return self.map(torch.clone)

    @property
    def num_params(self) -> int:
        """Values really sent. Default: those of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def num_bytes(self) -> int:
        """Bytes of these values, by dtype."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


Artifact = Structured | Tensor
KINDS: dict[str, type[Structured]] = {}
"""The registered kinds of artifacts, by the name under which checkpoints and workers know them."""
Kind = TypeVar("Kind", bound="type[Structured]")


def artifact(kind: Kind) -> Kind:
    """Register a kind of artifact, so that it can be saved, resumed and moved between workers.

    Kinds of two modules of one's own may share a name; one that is defined anew takes the place of the one before.

    Raises:
        TypeError: if one of the package's own has the name.
    """
    there = KINDS.get(kind.__name__, kind)
    if there.__module__ != kind.__module__:
        raise TypeError(f"artifact {kind.__name__}: {there.__module__} has a kind of that name; rename yours")
    KINDS[_name_of(kind)] = kind
    return kind


def _name_of(kind: type) -> str:
    """The package's own kinds are known by their name, those of others with their module."""
    if kind.__module__.startswith("fl_lightning."):
        return kind.__name__
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # so a script is called in its workers
    return f"{module}.{kind.__name__}"


@artifact
@dataclass(frozen=True)
class ClassMeans(Structured):
    """One mean per class and the number of samples behind each.

    Serves prototypes [C, D], soft labels [C, C], class logits [C, C] and both halves of class Gaussians.

    Args:
        mean: [C, …] float; rows of absent classes are zero and mean nothing.
        count: [C] int64, samples behind each row; 0 marks an absent class.
        sends_count: whether the counts travel with the rows. If not, the receiver only learns which rows are valid.
        relates_classes: whether a row says how its class relates to all classes (soft labels), so that it is drawn as a
            matrix of classes; otherwise rows are points (prototypes).
    """

    mean: Tensor
    count: Tensor
    sends_count: bool = True
    relates_classes: bool = False
    lossy = ("mean",)

    def __post_init__(self) -> None:
        if self.count.ndim != 1 or self.mean.shape[:1] != self.count.shape:
            raise ValueError(
                f"ClassMeans: `mean` is {tuple(self.mean.shape)} but `count` is {tuple(self.count.shape)}; "
                "both need the same first size, the number of classes."
            )

    @classmethod
    def from_samples(cls, values: Tensor, y: Tensor, num_classes: int, relates_classes: bool = False) -> ClassMeans:
        """Average samples by class; sums in float64, divided once; float64 of such values, float32 of all others.

        Args:
            values: [N, …] one value a sample.
            y: [N] int64 classes in [0, C).
            num_classes: C.
            relates_classes: as the class's.

        >>> means = ClassMeans.from_samples(torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([1, 1]), num_classes=2)
        >>> means.mean.tolist(), means.count.tolist()
        ([[0.0, 0.0], [2.0, 3.0]], [0, 2])
        """
        sums = values.new_zeros((num_classes, *values.shape[1:]), dtype=accumulation_dtype(values.device))
        sums.index_add_(0, y, values.to(sums.dtype))
        count = y.new_zeros(num_classes, dtype=torch.int64)
        count.index_add_(0, y, torch.ones_like(y, dtype=torch.int64))  # bincount waits for the device
        mean = (sums / _rows(count.clamp(min=1), sums)).to(torch.promote_types(values.dtype, torch.float32))
        return cls(mean, count, relates_classes=relates_classes)

    @property
    def valid(self) -> Tensor:
        """[C] bool, True where at least one sample stands behind the row."""
        return self.count > 0

    @property
    def counts(self) -> list[float]:
        """The counts as numbers; the device is waited for once, unless somebody writes to them."""
        version, found = vars(self).get("_counts", (-1, []))
        if version != version_of(self.count):
            version, found = version_of(self.count), self.count.tolist()
            vars(self)["_counts"] = version, found
        return found

    @property
    def num_held(self) -> int:
        """How many classes have a sample."""
        return sum(count > 0 for count in self.counts)

    @override
    def crossing(self, name: str) -> Tensor:
        return self.valid

    def without_counts(self) -> ClassMeans:
        """The same rows, sent without their counts: the receiver sees 1 for a valid row and 0 for an absent one."""
        return replace(self, count=self.valid.long(), sends_count=False)

    def filled_from(self, previous: ClassMeans | None) -> ClassMeans:
        """Take absent rows from `previous`, so that a class that nobody held this round is not forgotten."""
        if previous is None:
            return self
        absent = ~self.valid
        mean = torch.where(_rows(absent, self.mean), previous.mean.to(self.mean), self.mean)
        return replace(self, mean=mean, count=torch.where(absent, previous.count.to(self.count), self.count))

    @property
    def num_params(self) -> int:
        """Values really sent: the rows of classes held, and their counts where these travel."""
        held = self.num_held
        return held * self.mean[0].numel() + (held if self.sends_count else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values counted by `num_params`, by dtype."""
        held = self.num_held
        counts = held * self.count.element_size() if self.sends_count else 0
        return held * self.mean[0].numel() * self.mean.element_size() + counts


class Size(NamedTuple):
    """What a message costs."""

    num_params: int
    num_bytes: int


NOTHING = Size(0, 0)


class Flat:
    """The floating weights of a message as one vector, made once for those who look at all values and who sum them.

    Args:
        weights: the message's, or some of them.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        self._tensors = [weights[name] for name in self.names]
        self._versions = list(map(version_of, self._tensors))
        self.values = as_one(self._tensors)
        """[P], in the order of the names."""

    def holds(self, weights: Mapping[str, Tensor], names: Sequence[str]) -> bool:
        """Whether it is these of the weights, in this order, and nobody has changed one since."""
        return (
            self.names == names
            and all(weights[name] is own for name, own in zip(names, self._tensors, strict=True))
            and self._versions == list(map(version_of, self._tensors))
        )

    @cached_property
    def square(self) -> float:
        """The sum of all squares, rounded as the values' type is."""
        return self.values.dot(self.values).item() if self._tensors else 0.0


@dataclass
class Message:
    """One message between two participants. Nothing else is ever shared.

    Args:
        weights: entries of the sender's `state_dict()` that are shared, all of them; values, not updates: filters of
            the wire take from them what the receiver has already.
        artifacts: shared quantities that are no weights, by name.
        num_samples: training samples behind the message; rides along and is not counted.
        sent: what a lossy wire made of its size; None where it travels as it is.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    num_samples: int = 0
    sent: Size | None = None
    flat: Flat | None = field(default=None, init=False, repr=False, compare=False)
    """The weights once more, where somebody has made them one vector; a copy with other weights has none."""

    @property
    def num_params(self) -> int:
        """Values in the message, weights and artifacts: the papers' "# Comm. Params"."""
        if self.sent is not None:
            return self.sent.num_params
        artifacts = (a.numel() if isinstance(a, Tensor) else a.num_params for a in self.artifacts.values())
        return sum(tensor.numel() for tensor in self.weights.values()) + sum(artifacts)

    @property
    def num_bytes(self) -> int:
        """Bytes of those values, by dtype."""
        if self.sent is not None:
            return self.sent.num_bytes
        artifacts = (a.nbytes if isinstance(a, Tensor) else a.num_bytes for a in self.artifacts.values())
        return sum(tensor.nbytes for tensor in self.weights.values()) + sum(artifacts)

    @property
    def size(self) -> Size:
        """Values and bytes really sent."""
        return Size(self.num_params, self.num_bytes)

    def without_weights(self) -> Message:
        """The same message for who keeps its own weights."""
        return replace(self, weights={})

    def copy_to(self, buffer: Tensor, name: str) -> bool:
        """Put an artifact that is a plain tensor into a buffer, zeros where there is none.

        Returns:
            Whether there is one.
        """
        value = self.artifacts.get(name)
        there = isinstance(value, Tensor)
        buffer.copy_(value) if there else buffer.zero_()  # type: ignore[arg-type]
        return there

    def clone(self) -> Message:
        """Copy, sharing no memory: for who keeps a message beyond the call that brought it."""
        weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        return replace(self, weights=weights, artifacts={name: a.clone() for name, a in self.artifacts.items()})

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, for a checkpoint that loads with ``weights_only=True``."""
        artifacts = {name: packed(value) for name, value in self.artifacts.items()}
        sent = {} if self.sent is None else {"sent": tuple(self.sent)}
        return {"weights": dict(self.weights), "artifacts": artifacts, "num_samples": self.num_samples, **sent}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Message:
        """The inverse of `state_dict`.

        Raises:
            ValueError: for an artifact of a kind that nobody has registered.
        """
        artifacts = {name: unpacked(name, value) for name, value in state["artifacts"].items()}
        sent = Size(*state["sent"]) if "sent" in state else None
        return cls(dict(state["weights"]), artifacts, state["num_samples"], sent)


def tensors_in(value: Artifact) -> dict[str, Tensor]:
    """An artifact's tensors by field; a plain tensor's field is ``""``."""
    return {"": value} if isinstance(value, Tensor) else value.tensors()


def packed(value: Artifact) -> Any:
    """An artifact in plain containers.

    Raises:
        TypeError: for one of a kind that nobody has registered.
    """
    if isinstance(value, Tensor):
        return value
    return {"kind": kind_of(value), **{own.name: getattr(value, own.name) for own in fields(value)}}  # type: ignore[arg-type]


def kind_of(value: Artifact) -> str:
    """The name of an artifact's type, under which its kind is registered.

    Raises:
        TypeError: if nobody has registered it.
    """
    if isinstance(value, Tensor):
        return "Tensor"
    kind = _name_of(type(value))
    if KINDS.get(kind) is not type(value):
        raise TypeError(f"{type(value).__name__} is no registered kind of artifact: decorate the class with `artifact`")
    return kind


def unpacked(name: str, value: Any) -> Artifact:
    """The inverse of `packed`.

    Args:
        name: the artifact's.
        value: what `packed` made of it.

    Raises:
        ValueError: if it is of a kind that nobody has registered.
    """
    if isinstance(value, Tensor):
        return value
    fields = dict(value)
    try:
        kind = registered(fields.pop("kind", ""))
    except ValueError as error:
        raise ValueError(f"artifact {name!r} is of {error}") from error
    return kind(**fields)


def registered(kind: str) -> type[Structured]:
    """A kind of artifact by its name; one of one's own by its module and name, or by its name where no other has it.

    Raises:
        ValueError: if there is none, or more than one.
    """
    if kind in KINDS:
        return KINDS[kind]
    names = {own: own.rpartition(".")[2] for own in KINDS}
    bare = kind.rpartition(".")[2]  # an older checkpoint names no module, one of a script perhaps another
    alike = [own for own in KINDS if names[own] == bare]
    if len(alike) > 1:
        raise ValueError(f"a kind that several modules have: {kind!r}, which may be {' or '.join(sorted(alike))}")
    if not alike:
        rule = "a kind that is not registered; import the file that defines it"
        raise ValueError(f"{rule}: {kind!r}, {suggest(bare, list(names.values()))}")
    return KINDS[alike[0]]


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; 0 for one that nobody counts of."""
    return 0 if tensor.is_inference() else tensor._version


def bits_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """What the bits of each tensor add up to, as whole numbers of its width: a write by `.data` has no version.

    Tensors without memory of their own (sparse ones) are left out.
    """
    there = {name: own.detach() for name, own in tensors.items() if own.layout is torch.strided}
    sums: list[Tensor] = []
    for own in there.values():
        real = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
        width, total = _WIDTHS[real.element_size()]
        sums.append(real.view(width).sum(dtype=total).long())
    return dict(zip(there, torch.stack([own.to(sums[0].device) for own in sums]).tolist(), strict=True)) if sums else {}


def writes_to(tensors: Mapping[str, Tensor], by_bits: bool = True) -> dict[str, tuple[int, int]]:
    """Of each tensor how often it was written to and, where it is looked for, what its bits add up to (else 0)."""
    bits = bits_of(tensors) if by_bits else {}
    return {name: (version_of(tensor), bits.get(name, 0)) for name, tensor in tensors.items()}


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def _rows(per_class: Tensor, like: Tensor) -> Tensor:
    """View a [C] tensor so that it broadcasts over the rows of `like` [C, …]."""
    return per_class.view(-1, *(1,) * (like.ndim - 1))
