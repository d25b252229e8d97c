"""ShuffleNet v1, for small images: grouped 1x1 convolutions, and a shuffle of the channels between groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_image
from fl_lightning.models.layers import linear_head, mapping_layers
from fl_lightning.models.split import Body, SplitModel

STEM = 24
"""Channels of the first convolution."""


class ShuffleNetV1(SplitModel):
    """ShuffleNet v1 with a 1x1 stem that keeps the size, as FedDW's public code has it for 32x32 images.

    Four feature maps: the stem and three stages, each of which halves the map in its first unit; z is the global
    average of the last. The printed network for ImageNet has a 3x3 stem with stride 2 and a max-pool, and for two
    groups the same widths.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of classes C.
        groups: groups of the 1x1 convolutions, 1, 2, 3 or 6: halving units leave room for their input's channels, the
            stem's 24 at first; the first convolution, which sees these, has one.
        widths: channels of the three stages, each a multiple of four times the groups and more than the one before
            (the first more than 24).
        blocks: units of the three stages, each >= 1.
        depthwise_relu: whether a ReLU follows the depthwise convolution, as in FedDW's public code; the paper has none.
        mapping: sizes of FedDW's mapping layers between this extractor and the head, e.g. [256, 128]; none by default.
        head_bias: whether the head has a bias (FedDW's has none).

    Raises:
        ConfigError: if a sample is no image or a value is out of range.
    """

    paper = "Zhang et al., ShuffleNet (CVPR 2018)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        groups: int = 2,
        widths: Sequence[int] = (200, 400, 800),
        blocks: Sequence[int] = (4, 8, 4),
        depthwise_relu: bool = True,
        mapping: Sequence[int] | None = None,
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("ShuffleNetV1", input_shape)
        require(groups in (1, 2, 3, 6), "model.groups", "must be 1, 2, 3 or 6", groups)
        fits = all(width % (4 * groups) == 0 for width in widths) and all(
            narrow < wide for narrow, wide in zip((STEM, *widths), widths, strict=False)
        )
        rule = f"must be three, each more than the one before (the first more than {STEM}), multiples of 4 x groups"
        require(len(widths) == 3 and fits, "model.widths", rule, widths)
        require(len(blocks) == 3 and min(blocks) >= 1, "model.blocks", "must be three, each >= 1", blocks)
        mapping_part, embedding_size = mapping_layers(widths[-1], mapping)
        stem = nn.Sequential(nn.Conv2d(in_channels, STEM, kernel_size=1, bias=False), nn.BatchNorm2d(STEM), nn.ReLU())
        stages: list[nn.Module] = [stem]
        for before, width, units in zip((STEM, *widths), widths, blocks, strict=False):
            first = ShuffleUnit(before, width, groups, True, depthwise_relu)
            stages.append(
                nn.Sequential(
                    first, *(ShuffleUnit(width, width, groups, False, depthwise_relu) for _ in range(units - 1))
                )
            )
        body = Body(stages=stages, neck=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *mapping_part))
        super().__init__(
            body, linear_head(embedding_size, num_classes, head_bias), embedding_size, num_classes, input_shape
        )


class ShuffleUnit(nn.Module):
    """A bottleneck of grouped 1x1 convolutions around a depthwise 3x3 one, with a residual path.

    One that halves the map has its input's 3x3 average beside its own channels; the others add their input.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, the input's share included.
        groups: of the 1x1 convolutions; the first has one where the input is the stem's.
        halve: whether the map is halved.
        depthwise_relu: whether a ReLU follows the depthwise convolution, as in FedDW's public code; the paper has none.
    """

    def __init__(
        self, in_channels: int, out_channels: int, groups: int, halve: bool = False, depthwise_relu: bool = True
    ) -> None:
        super().__init__()
        own = out_channels - in_channels if halve else out_channels  # a halving unit's other channels are its input's
        middle, first_groups = own // 4, 1 if in_channels == STEM else groups
        self.groups = first_groups
        self.squeeze = nn.Sequential(
            nn.Conv2d(in_channels, middle, kernel_size=1, groups=first_groups, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
        )
        self.expand = nn.Sequential(
            nn.Conv2d(middle, middle, 3, stride=2 if halve else 1, padding=1, groups=middle, bias=False),
            nn.BatchNorm2d(middle),
            *([nn.ReLU()] if depthwise_relu else []),
            nn.Conv2d(middle, own, kernel_size=1, groups=groups, bias=False),
            nn.BatchNorm2d(own),
        )
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, H, W], or half as high and wide."""
        out = self.expand(shuffled(self.squeeze(x), self.groups))
        if self.halve:
            return F.relu(torch.cat([out, F.avg_pool2d(x, 3, stride=2, padding=1)], dim=1))
        return F.relu(out + x)


def shuffled(x: Tensor, groups: int) -> Tensor:
    """Deal the channels of each group out over all groups: [B, g·c, H, W] read as [g, c] is written as [c, g].

    >>> shuffled(torch.arange(6).reshape(1, 6, 1, 1), 2).flatten().tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
