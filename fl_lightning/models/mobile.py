"""ShuffleNetV2 and MobileNetV2, for 32x32 images and for ImageNet's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_choice, require_image, require_size
from fl_lightning.models.layers import linear_head, mapping_layers
from fl_lightning.models.split import Body, SplitModel

SHUFFLENET_WIDTHS = (0.5, 1.0, 1.5, 2.0)


class ShuffleNetV2(SplitModel):
    """ShuffleNetV2 with a stem for small images or ImageNet's.

    Five feature maps: stem, stages 2 to 4 and the last 1x1 convolution; z is the global average of the last, 1,024
    values (2,048 at double width). FedDW's public code has ShuffleNet v1 in its place: ShuffleNetV1.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of classes C.
        width: width of the stages: 0.5, 1.0, 1.5 or 2.0.
        stem: "cifar" (first convolution with stride 1, no max-pool) or "imagenet" (stride 2 and a max-pool).
        mapping: sizes of FedDW's mapping layers between this extractor and the head, e.g. [256, 128]; none by default.
        head_bias: whether the head has a bias (FedDW's has none).

    Raises:
        ConfigError: if a sample is no image or a value is out of range.
    """

    paper = "Ma et al., ShuffleNet V2 (ECCV 2018)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: float = 1.0,
        stem: Literal["cifar", "imagenet"] = "cifar",
        mapping: Sequence[int] | None = None,
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("ShuffleNetV2", input_shape)
        require_choice("width", width, SHUFFLENET_WIDTHS)
        require_choice("stem", stem, ("cifar", "imagenet"))
        in_features = 2048 if width == 2.0 else 1024
        mapping_part, embedding_size = mapping_layers(in_features, mapping)
        head = linear_head(embedding_size, num_classes, head_bias)

        from torchvision.models import shufflenetv2  # late: importing torchvision takes seconds

        build = {
            0.5: shufflenetv2.shufflenet_v2_x0_5,
            1.0: shufflenetv2.shufflenet_v2_x1_0,
            1.5: shufflenetv2.shufflenet_v2_x1_5,
            2.0: shufflenetv2.shufflenet_v2_x2_0,
        }
        network = build[width]()
        _, *norm_and_relu = network.conv1
        stride, pool = (1, []) if stem == "cifar" else (2, [network.maxpool])
        conv = nn.Conv2d(in_channels, 24, kernel_size=3, stride=stride, padding=1, bias=False)
        body = Body(
            stages=[
                nn.Sequential(conv, *norm_and_relu, *pool),
                network.stage2,
                network.stage3,
                network.stage4,
                network.conv5,
            ],
            neck=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *mapping_part),
        )
        super().__init__(body, head, embedding_size, num_classes, input_shape)


class MobileNetV2(SplitModel):
    """MobileNetV2 with a stem for small images or ImageNet's.

    Five feature maps, one per resolution: a stage begins wherever a block halves the map, and the last one ends with
    the 1x1 convolution. z is the global average of the last map. The dropout before torchvision's classifier is left
    out: the head is one linear layer, as methods that read the head's weights (FedDW) expect.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of classes C.
        width: width multiplier, above 0 and at most 4; 0.5 in FedDW's public code.
        last_channels: channels of the last 1x1 convolution, D where there is no mapping; by default 1,280 times the
            width, but not below 1,280. That code has 640.
        stem: "cifar" (first convolution with stride 1) or "imagenet" (stride 2).
        mapping: sizes of FedDW's mapping layers between this extractor and the head, e.g. [256, 128]; none by default.
        head_bias: whether the head has a bias (FedDW's has none).

    Raises:
        ConfigError: if a sample is no image or a value is out of range.
    """

    paper = "Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks (CVPR 2018)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: float = 1.0,
        last_channels: int | None = None,
        stem: Literal["cifar", "imagenet"] = "cifar",
        mapping: Sequence[int] | None = None,
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("MobileNetV2", input_shape)
        require(0.0 < width <= 4.0, "model.width", "must be > 0 and <= 4", width)
        if last_channels is not None:
            require_size("last_channels", last_channels)
        require_choice("stem", stem, ("cifar", "imagenet"))

        from torchvision.models import mobilenetv2  # late: importing torchvision takes seconds

        blocks = list(mobilenetv2.MobileNetV2(width_mult=width).features)
        first, last = blocks[0][0], blocks[-1][0]
        conv_stride = 1 if stem == "cifar" else 2
        blocks[0][0] = _kaiming(nn.Conv2d(in_channels, first.out_channels, 3, conv_stride, padding=1, bias=False))
        in_features = last.out_channels
        if last_channels is not None:
            in_features = last_channels
            conv = _kaiming(nn.Conv2d(last.in_channels, last_channels, kernel_size=1, bias=False))
            blocks[-1] = nn.Sequential(conv, nn.BatchNorm2d(last_channels), nn.ReLU6(inplace=True))

        mapping_part, embedding_size = mapping_layers(in_features, mapping)
        body = Body(
            stages=_by_resolution(blocks),
            neck=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *mapping_part),
        )
        super().__init__(
            body, linear_head(embedding_size, num_classes, head_bias), embedding_size, num_classes, input_shape
        )


def _by_resolution(blocks: list[nn.Module]) -> list[nn.Module]:
    """Group MobileNetV2's blocks into stages: the stem opens the first, every block that halves the map a new one."""
    groups = [[blocks[0]]]
    for block in blocks[1:]:
        halves = getattr(block, "stride", 1) == 2
        if halves:
            groups.append([])
        groups[-1].append(block)
    return [nn.Sequential(*group) for group in groups]


def _kaiming(conv: nn.Conv2d) -> nn.Conv2d:
    """Initialise a convolution as torchvision initialises MobileNetV2's."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    return conv
