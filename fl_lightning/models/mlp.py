"""A multi-layer perceptron, for Digits, vectors and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_sizes
from fl_lightning.models.layers import linear_head
from fl_lightning.models.split import Body, SplitModel


class MLP(SplitModel):
    """Multi-layer perceptron: flatten, Linear and ReLU per hidden layer, linear head.

    Args:
        input_shape: shape of one sample of floats, of any rank; it is flattened.
        num_classes: number of classes C.
        hidden: sizes of the hidden layers. The last one is z [B, D], the ones before are the feature maps (vectors).
            With an empty list z is the flattened input: softmax regression, whose body has no parameters.
        head_bias: whether the head has a bias.

    Raises:
        ConfigError: if a size is below 1.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        hidden: Sequence[int] = (128, 64),
        head_bias: bool = True,
    ) -> None:
        fits = len(input_shape) >= 1 and all(size >= 1 for size in input_shape)
        require(fits, "model", "MLP takes samples with at least one axis and no empty one", tuple(input_shape))
        require_sizes("hidden", hidden)
        layers: list[nn.Module] = []
        in_features = math.prod(input_shape)
        for size in hidden:
            # Only the first layer sees more than one axis.
            flatten: list[nn.Module] = [] if layers else [nn.Flatten()]
            layers.append(nn.Sequential(*flatten, nn.Linear(in_features, size), nn.ReLU()))
            in_features = size
        *stages, neck = layers or [nn.Flatten()]
        super().__init__(
            Body(stages, neck), linear_head(in_features, num_classes, head_bias), in_features, num_classes, input_shape
        )
