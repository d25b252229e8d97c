"""Protected copies, mixup and mosaic (BASELINES-B.md, section 5)."""

import math

import pytest
import torch

from fl_lightning.losses.feature_split import mixup_cross_entropy, mosaic, protected_copies


def test_copies_without_noise_of_nothing_robust_are_the_images_bit_for_bit():
    x = torch.randn(4, 2, 8, 8)
    for copy in protected_copies(x, torch.zeros_like(x), (0.0, 0.0), torch.tensor([0.3, 0.7]).view(1, 2, 1, 1)):
        assert torch.equal(copy, x)


def test_noise_has_the_standard_deviation_asked_for():
    x = torch.zeros(1000, 1, 32, 32)
    for std, copy in zip((0.15, 0.25), protected_copies(x, x, (0.15, 0.25)), strict=True):
        assert float(copy.std()) == pytest.approx(std, rel=0.02)
        assert float(copy.mean()) == pytest.approx(0.0, abs=1e-3)


def test_every_sample_has_noise_of_its_own():
    """One noise image for a batch, which a public code draws, would cancel in the difference of two copies."""
    x = torch.zeros(2, 1, 32, 32)
    copy = protected_copies(x, x, (0.15,))[0]
    assert float((copy[0] - copy[1]).std()) == pytest.approx(0.15 * math.sqrt(2), rel=0.1)


def test_both_copies_have_noise_of_their_own():
    x = torch.zeros(1, 1, 8, 8)
    one, other = protected_copies(x, x, (0.2, 0.2))
    assert not torch.equal(one, other)


def test_copies_of_normalised_images_are_normalised_alike():
    """(0.8 − 0.3 − 0.5) / 0.25 = 0 with mean 0.5 and std 0.25: what the classifier would see of x − x_r."""
    x = torch.full((1, 1, 1, 1), (0.8 - 0.5) / 0.25)
    copy = protected_copies(x, torch.full_like(x, 0.3), (0.0,), 0.25)[0]
    assert float(copy) == pytest.approx((0.8 - 0.3 - 0.5) / 0.25, abs=1e-6)


def test_gradient_reaches_what_is_taken_away():
    robust = torch.rand(2, 1, 4, 4, requires_grad=True)
    sum(copy.sum() for copy in protected_copies(torch.rand(2, 1, 4, 4), robust, (0.1, 0.2), 0.5)).backward()
    torch.testing.assert_close(robust.grad, torch.full_like(robust, -2 / 0.5))


def test_mixup_matches_hand_computed_value():
    """p = (3/4, 1/4): 0.3 log 4/3 + 0.7 log 4."""
    logits = torch.tensor([[math.log(3), 0.0]])
    value = mixup_cross_entropy(logits, torch.tensor([0]), torch.tensor([1]), 0.3)
    assert float(value) == pytest.approx(0.3 * math.log(4 / 3) + 0.7 * math.log(4), abs=1e-6)
    assert float(mixup_cross_entropy(logits, torch.tensor([0]), torch.tensor([1]), 1.0)) == pytest.approx(
        math.log(4 / 3), abs=1e-6
    )


@pytest.mark.parametrize(("count", "least"), [(6, 4), (3, 1), (1, 1)])
def test_mosaic_has_four_quarters_of_four_images(count, least):
    x = torch.arange(float(count)).view(-1, 1, 1, 1).expand(count, 2, 8, 6)
    out = mosaic(x)
    assert out.shape == x.shape
    for image in out:
        quarters = [image[:, top : top + 4, left : left + 3] for top in (0, 4) for left in (0, 3)]
        assert all(len(quarter.unique()) == 1 for quarter in quarters)  # each of one image
        assert len({float(quarter[0, 0, 0]) for quarter in quarters}) >= least


def test_mosaic_cuts_pixels_that_lie_together():
    x = torch.arange(64.0).view(1, 1, 8, 8)
    out = mosaic(x)
    for top in (0, 4):
        for left in (0, 4):
            quarter = out[0, 0, top : top + 4, left : left + 4]
            corner = int(quarter[0, 0])
            row, column = divmod(corner, 8)
            assert torch.equal(quarter, x[0, 0, row : row + 4, column : column + 4])
