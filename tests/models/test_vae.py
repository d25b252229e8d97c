"""Sizes and shapes of DRDFL's parts (DRDFL.md, section 2)."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.models.split import SplitModel
from fl_lightning.models.vae import ConvDecoder, ConvEncoder, LatentClassifier, VariationalEncoder, reparametrised

SHAPES = [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 9, 17)]


@pytest.mark.parametrize(
    ("part", "size"),
    [
        (VariationalEncoder((3, 32, 32)), 29_240),
        (VariationalEncoder((1, 28, 28)), 28_808),
        (ConvEncoder((3, 32, 32)), 224_832),
        (ConvDecoder(80, (3, 32, 32)), 331_811),
        (LatentClassifier(16, 10), 1_738),
    ],
    ids=["learngene", "learngene of one channel", "personanet", "decoder", "adversary"],
)
def test_parts_have_the_specified_sizes_and_no_buffers(part, size):
    assert sum(p.numel() for p in part.parameters()) == size
    assert not list(part.buffers())
    assert not isinstance(part, SplitModel)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_parts_fit_together_on_any_image(shape, batch):
    x = torch.randn(batch, *shape)
    mean, log_variance = VariationalEncoder(shape, 5)(x)
    assert mean.shape == log_variance.shape == (batch, 5)
    z = torch.cat([ConvEncoder(shape, 6)(x), mean], 1)
    assert ConvDecoder(11, shape)(z).shape == x.shape
    assert LatentClassifier(5, 4)(mean).shape == (batch, 4)


def test_decoder_cuts_around_the_centre():
    full, cut = ConvDecoder(4, (1, 32, 32)), ConvDecoder(4, (1, 28, 28))
    cut.load_state_dict(full.state_dict())
    z = torch.randn(2, 4)
    assert torch.equal(cut(z), full(z)[:, :, 2:30, 2:30])


def test_decoder_paints_beyond_the_unit_interval():
    """Its output is linear: inputs are normalised."""
    image = ConvDecoder(4, (1, 8, 8))(10 * torch.randn(50, 4))
    assert image.min() < 0 < image.max()


@pytest.mark.parametrize("part", [VariationalEncoder, ConvEncoder, lambda shape: ConvDecoder(4, shape)])
@pytest.mark.parametrize("shape", [(1, 7, 8), (3, 8, 4), (10,), (8, 8)])
def test_small_images_and_other_inputs_are_refused(part, shape):
    with pytest.raises(ConfigError, match=r"model: .*images of"):
        part(shape)


def test_sizes_below_one_are_refused():
    for make in (
        lambda: VariationalEncoder((1, 8, 8), 0),
        lambda: ConvEncoder((1, 8, 8), 0),
        lambda: ConvDecoder(0, (1, 8, 8)),
        lambda: LatentClassifier(4, 0),
    ):
        with pytest.raises(ConfigError, match="must be >= 1, got 0"):
            make()


def test_draw_has_the_posterior_s_moments_and_gradients():
    torch.manual_seed(0)
    mean = torch.tensor([[2.0, -1.0]]).expand(20_000, 2).clone().requires_grad_()
    log_variance = torch.tensor([[0.0, 2.0]]).expand(20_000, 2).clone().requires_grad_()
    sample = reparametrised(mean, log_variance)
    assert sample.mean(0).tolist() == pytest.approx([2.0, -1.0], abs=0.06)
    assert sample.var(0).tolist() == pytest.approx([1.0, 7.389], rel=0.05)
    sample.sum().backward()
    assert (mean.grad == 1).all()
    torch.testing.assert_close(log_variance.grad, ((sample - mean) / 2).detach())


def test_draw_keeps_the_dtype():
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert reparametrised(half, half.float()).dtype == torch.bfloat16
