"""A conditional variational autoencoder of images, and the classifier whose features give it a prior for every class.

Sizes are a reconstruction: the paper that has these parts (Guo et al., 2025, appendix VII-B3) describes none of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_image, require_size

_SMALLEST = 8  # pixels: three halvings leave one
_MAPS = (32, 64, 128)  # of the autoencoder, from the image inwards


def _sides(part: str, image_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of an image that is large enough."""
    channels, height, width = require_image(part, image_shape)
    fits = min(height, width) >= _SMALLEST
    require(fits, "model", f"{part} needs images of {_SMALLEST}x{_SMALLEST} or more", tuple(image_shape))
    return channels, height, width


class PriorNetwork(nn.Module):
    """Classifier g with a small feature before its last layer: 2,633,354 parameters on 1x28x28, 2,634,506 on 3x32x32.

    Four Conv3x3 of stride 2 (C_in→w→2w→4w→8w), with batch norm and ReLU each; flatten; linear to 8w, ReLU; linear to
    the feature; linear to the logits. Images that four halvings would shrink below 2x2 get as many as leave that: two
    for 8x8, three for 16x16.

    Args:
        image_shape: (channels, height, width), 8x8 or more.
        num_classes: K.
        feature_size: D.
        width: w.

    Raises:
        ConfigError: if the images are too small, or a size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], num_classes: int, feature_size: int = 64, width: int = 64) -> None:
        super().__init__()
        channels, height, wide = _sides("PriorNetwork", image_shape)
        for name, size in (("num_classes", num_classes), ("feature_size", feature_size), ("width", width)):
            require_size(name, size)
        layers: list[nn.Module] = []
        maps = channels
        for out in (width, 2 * width, 4 * width, 8 * width):
            if min(height, wide) <= 2:
                break
            layers += [nn.Conv2d(maps, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            maps, height, wide = out, (height + 1) // 2, (wide + 1) // 2
        layers += [nn.Flatten(), nn.Linear(maps * height * wide, 8 * width), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.feature = nn.Linear(8 * width, feature_size)
        self.head = nn.Linear(feature_size, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, D] and logits [B, K] of images [B, C_in, H, W]."""
        feature = self.feature(self.trunk(x))
        return feature, self.head(feature)


class ConditionalEncoder(nn.Module):
    """Encoder of an image and its class to a Gaussian posterior.

    The class becomes one more channel by a linear layer. Then three Conv4x4 of stride 2 (C_in+1→32→64→128), with batch
    norm and LeakyReLU each; flatten; linear.

    Args:
        image_shape: (channels, height, width), 8x8 or more.
        num_classes: K.
        latent_size: D.

    Raises:
        ConfigError: if the images are too small, or a size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], num_classes: int, latent_size: int = 64) -> None:
        super().__init__()
        channels, height, width = _sides("ConditionalEncoder", image_shape)
        require_size("num_classes", num_classes)
        require_size("latent_size", latent_size)
        self.num_classes = num_classes
        self.label_map = nn.Linear(num_classes, height * width)
        layers: list[nn.Module] = []
        maps = channels + 1
        for out in _MAPS:
            layers += [nn.Conv2d(maps, out, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU(0.2)]
            maps = out
        flat = maps * (height // 8) * (width // 8)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 2 * latent_size))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance [B, D] of the posterior of images [B, C_in, H, W] of classes [B]."""
        label_map = self.label_map(_one_hot(y, self.num_classes, x)).view(-1, 1, *x.shape[2:])
        mean, log_variance = self.layers(torch.cat([x, label_map], 1)).chunk(2, 1)
        return mean, log_variance


class ConditionalDecoder(nn.Module):
    """Decoder of a latent and a class to an image in [0, 1].

    Linear; view as 128 maps of an eighth of the image's sides (rounded down); three transposed convolutions of stride 2
    (128→64→32→C_out) with batch norm and ReLU in between; sigmoid. Their kernels are 4x4, and 3 long where the side
    that they lead to is odd, so that the sides come out as they should.

    Args:
        image_shape: (channels, height, width), 8x8 or more.
        num_classes: K.
        latent_size: D.

    Raises:
        ConfigError: if the images are too small, or a size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], num_classes: int, latent_size: int = 64) -> None:
        super().__init__()
        channels, height, width = _sides("ConditionalDecoder", image_shape)
        require_size("num_classes", num_classes)
        require_size("latent_size", latent_size)
        self.num_classes = num_classes
        self.grid = (_MAPS[-1], height // 8, width // 8)
        self.linear = nn.Linear(latent_size + num_classes, _MAPS[-1] * (height // 8) * (width // 8))
        layers: list[nn.Module] = []
        maps = _MAPS[-1]
        for out, halvings in ((_MAPS[1], 2), (_MAPS[0], 1)):
            to = (height >> halvings, width >> halvings)
            layers += [_doubling(maps, out, to, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            maps = out
        self.layers = nn.Sequential(*layers, _doubling(maps, channels, (height, width)), nn.Sigmoid())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images [B, C_out, H, W] of latents [B, D] and classes [B]."""
        inputs = torch.cat([z, _one_hot(y, self.num_classes, z)], 1)
        return self.layers(self.linear(inputs).unflatten(1, torch.Size(self.grid)))


def _doubling(in_channels: int, out_channels: int, to: tuple[int, int], bias: bool = True) -> nn.ConvTranspose2d:
    """[B, C_in, ⌊H/2⌋, ⌊W/2⌋] → [B, C_out, H, W]."""
    kernel = (3 if to[0] % 2 else 4, 3 if to[1] % 2 else 4)
    padding = (0 if to[0] % 2 else 1, 0 if to[1] % 2 else 1)
    return nn.ConvTranspose2d(in_channels, out_channels, kernel, stride=2, padding=padding, bias=bias)


def _one_hot(y: Tensor, num_classes: int, like: Tensor) -> Tensor:
    """[B, K] of classes [B], in the dtype of `like`."""
    return F.one_hot(y, num_classes).to(like.dtype)
