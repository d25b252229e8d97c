"""The residual variational autoencoder that tells what of an image a classifier does not need (FedFed)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.checks import require_image, require_size
from fl_lightning.models.vae import reparametrised

_WIDTH = 32


class ResidualBlock(nn.Module):
    """x + [LeakyReLU, Conv3x3, BN, LeakyReLU, Conv1x1](x), all of one width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LeakyReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → the same."""
        return x + self.layers(x)


class ResidualVAE(nn.Module):
    """Autoencoder of images in [0, 1]: 12,648,774 parameters on 3x32x32, 7,439,266 on 1x28x28.

    Two Conv4x4 of stride 2 (C_in→16→32), each with batch norm and ReLU; residual block, batch norm, residual block;
    flatten; one linear layer for either output. Back: linear, residual block, batch norm, residual block, batch norm,
    ConvT4x4 of stride 2 (32→16), batch norm, LeakyReLU, tanh, ConvT4x4 of stride 2 (16→C_in), batch norm, sigmoid.

    Args:
        image_shape: (channels, height, width), sides that are multiples of 4.
        latent_size: D; null takes as many as the encoder's maps have values, 32·(height/4)·(width/4).

    Raises:
        ConfigError: if a side is no multiple of 4, or the size is below 1.
    """

    def __init__(self, image_shape: tuple[int, ...], latent_size: int | None = None) -> None:
        super().__init__()
        channels, height, width = require_image("ResidualVAE", image_shape)
        fits = height % 4 == 0 and width % 4 == 0
        require(fits, "model", "ResidualVAE needs images whose sides are multiples of 4", tuple(image_shape))
        self.grid = (_WIDTH, height // 4, width // 4)
        flat = _WIDTH * (height // 4) * (width // 4)
        self.latent_size = flat if latent_size is None else latent_size
        require_size("latent_size", self.latent_size)
        half = _WIDTH // 2
        self.encoder = nn.Sequential(
            *(nn.Conv2d(channels, half, 4, 2, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()),
            *(nn.Conv2d(half, _WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU()),
            *(ResidualBlock(_WIDTH), nn.BatchNorm2d(_WIDTH), ResidualBlock(_WIDTH), nn.Flatten()),
        )
        self.mean = nn.Linear(flat, self.latent_size)
        self.log_variance = nn.Linear(flat, self.latent_size)
        self.linear = nn.Linear(self.latent_size, flat)
        self.decoder = nn.Sequential(
            *(ResidualBlock(_WIDTH), nn.BatchNorm2d(_WIDTH), ResidualBlock(_WIDTH), nn.BatchNorm2d(_WIDTH)),
            *(nn.ConvTranspose2d(_WIDTH, half, 4, 2, 1, bias=False), nn.BatchNorm2d(half), nn.LeakyReLU(), nn.Tanh()),
            *(nn.ConvTranspose2d(half, channels, 4, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruct images.

        Args:
            x: [B, C_in, H, W] in [0, 1].

        Returns:
            The reconstruction in [0, 1], of a draw from the posterior while training and of its mean in eval mode; and
            the posterior's mean and log-variance, [B, D] each.
        """
        trunk = self.encoder(x)
        mean, log_variance = self.mean(trunk), self.log_variance(trunk)
        z = reparametrised(mean, log_variance.clamp(-10, 10)) if self.training else mean
        return self.decode(z), mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        """Images [B, C_in, H, W] of latents [B, D]."""
        return self.decoder(self.linear(z).unflatten(1, torch.Size(self.grid)))
