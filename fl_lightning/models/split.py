"""A model split into body f: x → z and head g: z → logits, the split that every method speaks of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn


class Body(nn.Module):
    """Feature extractor f: x → z, with the feature maps on the way.

    Args:
        stages: run one after another; the output of each is one feature map. May be empty.
        neck: from the last map (or from the input, if there are no stages) to the embedding z [B, D].
    """

    def __init__(self, stages: Iterable[nn.Module], neck: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.neck = neck

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding z [B, D]."""
        for stage in self.stages:
            x = stage(x)
        return self.neck(x)

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the feature maps, in the order of the stages, and the embedding z [B, D], in one pass."""
        maps: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps, self.neck(x)


class SplitModel(nn.Module):
    """A body and a head; subclasses differ only in what they put there.

    Args:
        body: the extractor f: x → z [B, D].
        head: the classifier g: z [B, D] → logits [B, C].
        embedding_size: D.
        num_classes: C.
    """

    paper: ClassVar[str] = ""
    body: Body
    head: nn.Module

    def __init__(self, body: Body, head: nn.Module, embedding_size: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.embedding_size = embedding_size
        self.num_classes = num_classes

    def features(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps, in the order of the stages."""
        return self.forward_features(x)[0]

    def embed(self, x: Tensor) -> Tensor:
        """Return the embedding z [B, D]."""
        return self.body(x)

    def forward_features(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the feature maps and the embedding z [B, D] in one pass."""
        return self.body.forward_features(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [B, C]."""
        return self.head(self.embed(x))
