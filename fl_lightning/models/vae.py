"""The parts of an autoencoder around a classifier: two encoders, a decoder, and a reader of latents.

Sizes are chosen so that DRDFL's communication column holds (Guo et al., 2025, Table I; the paper gives no architecture
but the classifier's). None has buffers, so that what travels is weights alone.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_image, require_size
from fl_lightning.shapes import checked

_SMALLEST = 8  # pixels: three halvings leave one
_GROUPS = 8


def _grid(part: str, image_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels of an image, and rows and columns after three halvings (rounded up)."""
    channels, height, width = require_image(part, image_shape)
    fits = min(height, width) >= _SMALLEST
    require(fits, "model", f"{part} needs images of {_SMALLEST}x{_SMALLEST} or more", tuple(image_shape))
    return channels, math.ceil(height / 8), math.ceil(width / 8)


def _halving(in_channels: int, out_channels: int) -> nn.Conv2d:
    """[B, C_in, H, W] → [B, C_out, ⌈H/2⌉, ⌈W/2⌉]."""
    return nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)


def _doubling(in_channels: int, out_channels: int) -> nn.ConvTranspose2d:
    """[B, C_in, H, W] → [B, C_out, 2H, 2W]."""
    return nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1)


class VariationalEncoder(nn.Module):
    """Small encoder to the mean and log-variance of a Gaussian posterior: 29,240 parameters on 3x32x32 images.

    Three Conv3x3 of stride 2 (C_in→24→24→32), a ReLU after each; flatten; one linear layer for either output.

    Args:
        image_shape: (channels, height, width), 8x8 or more.
        latent_size: D.

    Raises:
        ConfigError: if the images are too small, or the size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], latent_size: int = 16) -> None:
        super().__init__()
        channels, rows, columns = _grid("VariationalEncoder", image_shape)
        require_size("latent_size", latent_size)
        sizes = (channels, 24, 24, 32)
        layers = [layer for i in range(3) for layer in (_halving(sizes[i], sizes[i + 1]), nn.ReLU())]
        self.trunk = nn.Sequential(*layers, nn.Flatten())
        self.mean = nn.Linear(sizes[-1] * rows * columns, latent_size)
        self.log_variance = nn.Linear(sizes[-1] * rows * columns, latent_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance [B, D] of the posterior of images [B, C_in, H, W]."""
        trunk = self.trunk(x)
        return self.mean(trunk), self.log_variance(trunk)


class ConvEncoder(nn.Module):
    """Encoder to an embedding: 224,832 parameters on 3x32x32 images.

    Three Conv3x3 of stride 2 (C_in→32→64→128), GroupNorm(8) and ReLU after each; flatten; linear.

    Args:
        image_shape: (channels, height, width), 8x8 or more.
        embedding_size: D.

    Raises:
        ConfigError: if the images are too small, or the size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], embedding_size: int = 64) -> None:
        super().__init__()
        channels, rows, columns = _grid("ConvEncoder", image_shape)
        require_size("embedding_size", embedding_size)
        sizes = (channels, 32, 64, 128)
        layers: list[nn.Module] = []
        for i in range(3):
            layers += [_halving(sizes[i], sizes[i + 1]), nn.GroupNorm(_GROUPS, sizes[i + 1]), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(sizes[-1] * rows * columns, embedding_size))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding [B, D] of images [B, C_in, H, W]."""
        return self.layers(x)


class ConvDecoder(nn.Module):
    """Decoder from an embedding to an image: 331,811 parameters from 80 values to 3x32x32.

    Linear; view as 128 maps of an eighth of the image's sides (rounded up); GroupNorm(8) and ReLU, then a transposed
    Conv4x4 of stride 2, three times (128→64→32→C_out). The output is linear, and cut to the image's sides around the
    centre where these are no multiples of 8.

    Args:
        embedding_size: D.
        image_shape: (channels, height, width), 8x8 or more.

    Raises:
        ConfigError: if the images are too small, or the size is below 1.
    """

    def __init__(self, embedding_size: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, self.rows, self.columns = _grid("ConvDecoder", image_shape)
        require_size("embedding_size", embedding_size)
        self.sides = tuple(image_shape[1:])
        sizes = (128, 64, 32, channels)
        self.linear = nn.Linear(embedding_size, sizes[0] * self.rows * self.columns)
        layers: list[nn.Module] = []
        for i in range(3):
            layers += [nn.GroupNorm(_GROUPS, sizes[i]), nn.ReLU(), _doubling(sizes[i], sizes[i + 1])]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        """Images [B, C_out, H, W] of embeddings [B, D]."""
        image = self.layers(self.linear(z).unflatten(1, (-1, self.rows, self.columns)))
        top, left = ((8 * size - side) // 2 for size, side in zip((self.rows, self.columns), self.sides, strict=True))
        return image[:, :, top : top + self.sides[0], left : left + self.sides[1]]


class LatentClassifier(nn.Module):
    """Reads the class off a latent: Linear→64, ReLU, Linear→K; 1,738 parameters from 16 values to 10 classes.

    Args:
        latent_size: D.
        num_classes: K.
        hidden: size of the hidden layer.

    Raises:
        ConfigError: if a size is below 1.
    """

    def __init__(self, latent_size: int, num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        for name, size in (("latent_size", latent_size), ("num_classes", num_classes), ("hidden", hidden)):
            require_size(name, size)
        self.layers = nn.Sequential(nn.Linear(latent_size, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, z: Tensor) -> Tensor:
        """Logits [B, K] of latents [B, D]."""
        return self.layers(z)


@checked
def reparametrised(mean: Float[Tensor, "B D"], log_variance: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """Draw z = μ + exp(s/2)·ε, ε ~ N(0, I), differentiable in both; drawn in float32 and given in the inputs' dtype.

    Args:
        mean: [B, D] μ.
        log_variance: [B, D] s.
    """
    wide = torch.promote_types(mean.dtype, torch.float32)
    epsilon = torch.randn(mean.shape, device=mean.device, dtype=torch.float32)
    return (mean + (0.5 * log_variance.to(wide)).exp() * epsilon).to(mean.dtype)
