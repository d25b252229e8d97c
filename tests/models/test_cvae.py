"""FedCVAE's networks (BASELINES-B.md, section 6)."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import ConfigError
from fl_lightning.models.cvae import ConditionalDecoder, ConditionalEncoder, PriorNetwork

PARTS = (PriorNetwork, ConditionalEncoder, ConditionalDecoder)
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 9, 16), (1, 31, 13)]


def size_of(*parts):
    """Parameters and buffers."""
    parameters = sum(p.numel() for part in parts for p in part.parameters())
    return parameters, sum(b.numel() for part in parts for b in part.buffers())


@pytest.mark.parametrize(
    ("shape", "classes", "prior", "autoencoder"),
    [
        ((1, 28, 28), 10, 2_633_354, 515_121),
        ((3, 32, 32), 10, 2_634_506, 759_043),
        ((3, 32, 32), 100, 2_640_356, 1_035_523),
    ],
    ids=str,
)
def test_parts_have_the_specified_sizes(shape, classes, prior, autoencoder):
    with torch.device("meta"):
        g, encoder, decoder = (part(shape, classes) for part in PARTS)
    assert size_of(g) == (prior, 1_924)
    assert size_of(encoder, decoder) == (autoencoder, 645)


@pytest.mark.parametrize(("side", "halvings"), [(8, 2), (9, 3), (16, 3), (17, 4), (28, 4), (32, 4), (64, 4)])
def test_prior_network_halves_as_often_as_leaves_2x2(side, halvings):
    network = PriorNetwork((1, side, side), 3, width=2)
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [2, 4, 8, 16][:halvings]
    maps = network.trunk[: 3 * halvings](torch.rand(2, 1, side, side))
    assert maps.shape[2:] == (2, 2) or halvings == 4
    assert min(maps.shape[2:]) >= 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_fit_together_on_any_image(shape):
    x, y = torch.rand(3, *shape), torch.tensor([0, 4, 4])
    feature, logits = PriorNetwork(shape, 5, feature_size=6, width=2)(x)
    mean, log_variance = ConditionalEncoder(shape, 5, latent_size=6)(x, y)
    assert feature.shape == mean.shape == log_variance.shape == (3, 6)
    assert logits.shape == (3, 5)
    assert ConditionalDecoder(shape, 5, latent_size=6)(mean, y).shape == x.shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoder_paints_between_0_and_1(shape):
    image = ConditionalDecoder(shape, 2, latent_size=4)(100 * torch.randn(20, 4), torch.arange(20) % 2)
    assert 0 <= image.min() < 0.5 < image.max() <= 1


def test_autoencoder_knows_the_class():
    x, one, other = torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), torch.tensor([2, 1])
    encoder, decoder = ConditionalEncoder((1, 8, 8), 3, 4).eval(), ConditionalDecoder((1, 8, 8), 3, 4).eval()
    z = torch.zeros(2, 4)
    for a, b in ((encoder(x, one)[0], encoder(x, other)[0]), (decoder(z, one), decoder(z, other))):
        assert not torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_prior_network_s_feature_is_what_its_logits_are_made_of():
    network = PriorNetwork((1, 8, 8), 3, feature_size=4, width=2)
    feature, logits = network(torch.rand(5, 1, 8, 8))
    torch.testing.assert_close(logits, feature @ network.head.weight.T + network.head.bias)
    assert feature.min() < 0  # linear: a Gaussian shall fit


@pytest.mark.parametrize("part", PARTS)
def test_small_images_and_other_inputs_are_refused(part):
    for shape in ((1, 7, 8), (3, 8, 4)):
        with pytest.raises(ConfigError, match=rf"^model: {part.__name__} needs images of 8x8 or more, got"):
            part(shape, 4)
    with pytest.raises(ConfigError, match=rf"^model: {part.__name__} takes images of shape"):
        part((64,), 4)


@pytest.mark.parametrize("part", PARTS)
def test_sizes_below_one_are_refused(part):
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ConfigError, match="must be >= 1, got 0"):
            part((1, 8, 8), *sizes)
    with pytest.raises(ConfigError, match=r"^model\.width: must be >= 1, got 0"):
        PriorNetwork((1, 8, 8), 4, width=0)
