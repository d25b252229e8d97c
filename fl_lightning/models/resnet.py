"""ResNet-18, for 32x32 images and for ImageNet's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from fl_lightning.errors import ConfigError, require
from fl_lightning.models.checks import require_choice, require_image, require_sizes
from fl_lightning.models.layers import linear_head, mapping_layers
from fl_lightning.models.split import Body, SplitModel


class ResNet18(SplitModel):
    """ResNet-18 with a stem for small images or ImageNet's, as in FedDW (CIFAR-100) and FedProto (CIFAR-10).

    Five feature maps: the stem's and those of the four layers; z is the global average of the last, 512 values, so D
    does not depend on the image size.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of classes C.
        stem: "cifar" (3x3 convolution with stride 1, no max-pool) or "imagenet" (7x7 with stride 2, 3x3 max-pool with
            stride 2).
        stem_strides: strides of the "imagenet" stem's convolution and max-pool; [2, 2] by default. [1, 4] is the
            other architecture of FedProto's public code for clients that differ.
        mapping: sizes of FedDW's mapping layers between this extractor and the head, e.g. [256, 128]; none by default.
        head_bias: whether the head has a bias (FedDW's has none).
        pretrained: start layers 1 to 4 from torchvision's ImageNet weights, as FedProto's public code does; stem and
            head stay random. Needs the weights in torch's cache, or a network to fetch them.

    Raises:
        ConfigError: if a sample is no image, a value is out of range, or the pretrained weights cannot be had.
    """

    paper = "He et al., Deep Residual Learning for Image Recognition (CVPR 2016)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        stem: Literal["cifar", "imagenet"] = "cifar",
        stem_strides: Sequence[int] | None = None,
        mapping: Sequence[int] | None = None,
        head_bias: bool = True,
        pretrained: bool = False,
    ) -> None:
        in_channels, *_ = require_image("ResNet18", input_shape)
        require_choice("stem", stem, ("cifar", "imagenet"))
        require(stem_strides is None or stem == "imagenet", "model.stem_strides", 'is for `stem: "imagenet"` only')
        strides = (2, 2) if stem_strides is None else tuple(stem_strides)
        require_sizes("stem_strides", strides, count=2)
        mapping_part, embedding_size = mapping_layers(512, mapping)
        head = linear_head(embedding_size, num_classes, head_bias)

        from torchvision.models import resnet18  # late: importing torchvision takes seconds

        network = resnet18()
        if pretrained:
            _load_imagenet_layers(network)
        body = Body(
            stages=[
                _stem(in_channels, stem, *strides),
                network.layer1,
                network.layer2,
                network.layer3,
                network.layer4,
            ],
            neck=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *mapping_part),
        )
        super().__init__(body, head, embedding_size, num_classes, input_shape)


def _stem(in_channels: int, kind: str, conv_stride: int, pool_stride: int) -> nn.Sequential:
    """Convolution, batch norm, ReLU and, in ImageNet's stem, a max-pool."""
    if kind == "cifar":
        conv = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        pool = []
    else:
        conv = nn.Conv2d(in_channels, 64, kernel_size=7, stride=conv_stride, padding=3, bias=False)
        pool = [nn.MaxPool2d(kernel_size=3, stride=pool_stride, padding=1)]
    # As torchvision initialises the other convolutions.
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(inplace=True), *pool)


def _load_imagenet_layers(network: nn.Module) -> None:
    """Load torchvision's ImageNet weights into layers 1 to 4 of a torchvision ResNet-18."""
    from torchvision.models import ResNet18_Weights

    try:
        state = ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network, no room in the cache, a file cut short
        reason = (
            f"torchvision's ImageNet weights cannot be had ({error}); use false, or put them in torch's cache first"
        )
        raise ConfigError("model.pretrained", reason) from error
    network.load_state_dict({name: value for name, value in state.items() if name.startswith("layer")}, strict=False)
