"""What a term may ask of the method that it is part of, and what both may ask of the client's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from fl_lightning.core.message import ClassMeans

if TYPE_CHECKING:
    from fl_lightning.core.facts import Facts, Fit, Phase
    from fl_lightning.core.step import Step
    from fl_lightning.models.split import SplitModel


class Network(Protocol):
    """What makes embeddings of inputs, and logits of embeddings: a split model, or `Parts`."""

    @property
    def embed(self) -> Callable[[Tensor], Tensor]:
        """From inputs [B, …] to embeddings [B, D]."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """From embeddings [B, D] to logits [B, C]."""


class Parts(NamedTuple):
    """A network whose head, or body, is more than a model's.

    Args:
        embed: from inputs [B, …] to embeddings [B, D].
        head: from embeddings [B, D] to logits [B, C].
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


class Host(Protocol):
    """A method, as its terms see it."""

    model: SplitModel
    terms: Any
    facts: Facts
    fit: Fit

    def is_shared(self, name: str, module: nn.Module) -> bool:
        """Whether an entry of the state dict is exchanged."""

    def phases(self) -> list[Phase]:
        """The phases of a local fit."""

    def network(self) -> Network:
        """What the losses of a fit see samples through."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """As every module's."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As every module's."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """As every module's."""


class Collected(NamedTuple):
    """The client's training part as its losses see it, but in eval mode: z [N, D], logits [N, C], y [N]."""

    z: Tensor
    logits: Tensor
    y: Tensor

    def class_means(self) -> ClassMeans:
        """The embeddings' mean of each class, [C, D]."""
        return ClassMeans.from_samples(self.z, self.y, self.logits.shape[1])


class OwnData(Protocol):
    """A client's own data, as its method and terms see them in one receive, send or adaptation."""

    client: int
    num_train: int
    class_counts: Tensor
    """Training samples of each class, int64 [C]."""
    held_classes: Tensor
    """Which classes occur in the training part, bool [C]."""

    def batches(self, split: Literal["train", "validation"] = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of one part, in fixed order and as they are."""

    def steps(self, share: float = 1.0) -> Sequence[Step]:
        """Mini-batches of one shuffled pass over the training part, as steps outside the fit."""

    def collected(self) -> Collected:
        """The whole training part through the method's `network`, in eval mode; once for all that ask."""

    def risk(self) -> Tensor:
        """The model's mean cross-entropy on the validation part, or where there is none on the training part."""

    def pixel_mean_and_std(self) -> tuple[Tensor, Tensor]:
        """What takes a batch of images back to [0, 1], as ``x * std + mean``: [1, C, 1, 1] each.

        Inputs that come as floats are taken as they are: mean 0, std 1.
        """

    @property
    def are_floats(self) -> bool:
        """Whether inputs come as floats, of any range, and not as bytes."""
