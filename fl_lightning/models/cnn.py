"""The small convolutional networks of FedCPD, FedDW and FedProto."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_dropout, require_image, require_size, require_sizes
from fl_lightning.models.layers import conv_block, linear_head, mapping_layers, size_after_blocks
from fl_lightning.models.split import Body, SplitModel


class CNN(SplitModel):
    """Two convolutions and two linear layers: FedCPD's backbone and PFLlib's default.

    Conv5x5 C_in→32, pool2, ReLU; Conv5x5 32→64, pool2, ReLU; flatten; Linear→512, ReLU = z; head Linear 512→C.
    Two feature maps: [B, 32, 14, 14] and [B, 64, 5, 5] on 32x32 images.

    Args:
        input_shape: (channels, height, width) of an image, 16x16 or more with the default kernels.
        num_classes: number of classes C.
        channels: output channels of the two convolutions.
        hidden: size of the first linear layer, or of several, each with its ReLU (NIID-Bench's network: channels [6,
            16], hidden [120, 84]); the last is D where there is no mapping.
        kernel_size: of both convolutions; 3 with `padding: 1` suits images as small as 4x4.
        padding: of both convolutions, on every side; below `kernel_size`.
        mapping: sizes of FedDW's mapping layers between this extractor and the head, e.g. [256, 128]; none by default.
        head_bias: whether the head has a bias (FedDW's has none).

    Raises:
        ConfigError: if the images are too small, or a size is below 1.
    """

    paper = "Jin et al., FedCPD (IJCAI 2025); sizes as in PFLlib (Zhang et al., JMLR 2025)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        channels: Sequence[int] = (32, 64),
        hidden: int | Sequence[int] = 512,
        kernel_size: int = 5,
        padding: int = 0,
        mapping: Sequence[int] | None = None,
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("CNN", input_shape)
        require_sizes("channels", channels, count=2)
        if isinstance(hidden, int):
            require_size("hidden", hidden)
        sizes = [hidden] if isinstance(hidden, int) else list(hidden)
        require_sizes("hidden", sizes)
        require(bool(sizes), "model.hidden", "must hold a size", sizes)
        require_size("kernel_size", kernel_size)
        require(0 <= padding < kernel_size, "model.padding", f"must be from 0 to {kernel_size - 1}", padding)
        positions = size_after_blocks("CNN", input_shape, (kernel_size, kernel_size), padding)
        first, second = channels
        linear: list[nn.Module] = []
        for inputs, outputs in pairwise([second * positions, *sizes]):
            linear += [nn.Linear(inputs, outputs), nn.ReLU()]
        mapping_part, embedding_size = mapping_layers(sizes[-1], mapping)
        body = Body(
            stages=[
                conv_block(in_channels, first, kernel_size, padding=padding),
                conv_block(first, second, kernel_size, padding=padding),
            ],
            neck=nn.Sequential(nn.Flatten(), *linear, *mapping_part),
        )
        super().__init__(
            body, linear_head(embedding_size, num_classes, head_bias), embedding_size, num_classes, input_shape
        )


class FedDWCNN(SplitModel):
    """FedDW's two-convolution networks for MNIST and CIFAR-10, with its two mapping layers.

    Conv5x5, pool2, ReLU; Conv5x5, dropout, pool2, ReLU; flatten; Linear→256, ReLU; Linear→128 = z (no ReLU); head
    128→C. The paper's own runs have no bias in the head: set `head_bias: false` for them. The sizes are those of the
    authors' public code, as are pooling and dropout on MNIST: the paper has pooling for CIFAR-10 alone, and no dropout.

    Args:
        input_shape: (channels, height, width) of an image, 16x16 or more.
        num_classes: number of classes C.
        channels: output channels of the two convolutions; by default [10, 20] for one input channel (MNIST) and
            [6, 16] for three (CIFAR-10).
        dropout: probability of the dropout after the second convolution, in [0, 1); by default 0.5 for one input
            channel (MNIST) and 0 for three (CIFAR-10).
        mapping: sizes of the mapping layers; an empty list leaves them out.
        head_bias: whether the head has a bias.

    Raises:
        ConfigError: if the images are too small, a value is out of range, or a default does not exist for this number
            of input channels.
    """

    paper = "Liu et al., FedDW (arXiv:2412.04521, 2024)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        channels: Sequence[int] | None = None,
        dropout: float | None = None,
        mapping: Sequence[int] | None = (256, 128),
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("FedDWCNN", input_shape)
        if channels is None:
            self._require_default("channels", in_channels)
            channels = (10, 20) if in_channels == 1 else (6, 16)
        if dropout is None:
            self._require_default("dropout", in_channels)
            dropout = 0.5 if in_channels == 1 else 0.0
        require_sizes("channels", channels, count=2)
        require_dropout("dropout", dropout)
        positions = size_after_blocks("FedDWCNN", input_shape, (5, 5))
        first, second = channels
        mapping_part, embedding_size = mapping_layers(second * positions, mapping)
        drop = nn.Dropout(dropout) if dropout else None
        body = Body(
            stages=[conv_block(in_channels, first, 5), conv_block(first, second, 5, drop)],
            neck=nn.Sequential(nn.Flatten(), *mapping_part),
        )
        super().__init__(
            body, linear_head(embedding_size, num_classes, head_bias), embedding_size, num_classes, input_shape
        )

    @staticmethod
    def _require_default(parameter: str, in_channels: int) -> None:
        rule = f"has a default for 1 or 3 input channels only, not for {in_channels}; set it"
        require(in_channels in (1, 3), f"model.{parameter}", rule)


class FedProtoCNN(SplitModel):
    """FedProto's two-convolution network for MNIST and FEMNIST, with a 50-dimensional embedding.

    Conv5x5 C_in→10, pool2, ReLU; Conv5x5 10→20, Dropout2d, pool2, ReLU; flatten; Linear→50, ReLU = z; the head is
    dropout and Linear 50→C. The sizes are those of the authors' public code; its FEMNIST network has `kernel_size: 3`.

    Args:
        input_shape: (channels, height, width) of an image, 16x16 or more (14x14 with `kernel_size: 3`).
        num_classes: number of classes C.
        channels: output channels of the second convolution; 18, 20 or 22 in FedProto's heterogeneous federations.
        embedding: D, which all clients of a federation must share.
        dropout: probability of both dropouts (of channels in the body, of values in the head), in [0, 1).
        kernel_size: kernel size of the first convolution: 5 (MNIST) or 3 (FEMNIST).
        head_bias: whether the head has a bias.

    Raises:
        ConfigError: if the images are too small or a value is out of range.
    """

    paper = "Tan et al., FedProto (AAAI 2022)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        channels: int = 20,
        embedding: int = 50,
        dropout: float = 0.5,
        kernel_size: int = 5,
        head_bias: bool = True,
    ) -> None:
        in_channels, *_ = require_image("FedProtoCNN", input_shape)
        require_size("channels", channels)
        require_size("embedding", embedding)
        require_dropout("dropout", dropout)
        require_size("kernel_size", kernel_size)
        positions = size_after_blocks("FedProtoCNN", input_shape, (kernel_size, 5))
        body = Body(
            stages=[conv_block(in_channels, 10, kernel_size), conv_block(10, channels, 5, nn.Dropout2d(dropout))],
            neck=nn.Sequential(nn.Flatten(), nn.Linear(channels * positions, embedding), nn.ReLU()),
        )
        # The dropout sits in the head, so that prototypes are means of the undisturbed z.
        head = nn.Sequential(nn.Dropout(dropout), linear_head(embedding, num_classes, head_bias))
        super().__init__(body, head, embedding, num_classes, input_shape)
