"""FedFed's autoencoder (BASELINES-B.md, section 5)."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.models.residual_vae import ResidualVAE


@pytest.mark.parametrize(
    ("shape", "parameters", "buffers"),
    [((3, 32, 32), 12_648_774, 593), ((1, 28, 28), 7_439_266, 589), ((1, 32, 32), 12_647_746, 589)],
    ids=str,
)
def test_autoencoder_has_the_published_size(shape, parameters, buffers):
    with torch.device("meta"):
        vae = ResidualVAE(shape)
    assert sum(p.numel() for p in vae.parameters()) == parameters
    assert sum(b.numel() for b in vae.buffers()) == buffers


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 20)], ids=str)
def test_autoencoder_gives_images_of_the_inputs_shape_in_0_1(shape):
    vae = ResidualVAE(shape, latent_size=7)
    image, mean, log_variance = vae(torch.rand(3, *shape))
    assert image.shape == (3, *shape)
    assert image.min() >= 0
    assert image.max() <= 1
    assert mean.shape == log_variance.shape == (3, 7)


def test_autoencoder_draws_while_training_and_takes_the_mean_in_eval_mode():
    vae, x = ResidualVAE((1, 8, 8)), torch.rand(3, 1, 8, 8)
    assert not torch.equal(vae(x)[0], vae(x)[0])
    vae.eval()
    assert torch.equal(vae(x)[0], vae(x)[0])


@pytest.mark.parametrize("shape", [(1, 30, 32), (1, 32, 30), (64,)], ids=str)
def test_autoencoder_refuses_what_it_cannot_halve_twice(shape):
    with pytest.raises(ConfigError, match=r"^model: ResidualVAE (needs images|takes images)"):
        ResidualVAE(shape)
