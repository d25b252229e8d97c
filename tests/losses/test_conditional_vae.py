"""The divergence from a class's prior, and the moments that make it (BASELINES-B.md, section 6)."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from fl_lightning.losses.conditional_vae import class_moments, kl_to_normal
from fl_lightning.losses.variational import kl_to_standard_normal


def draws(count=4, size=3, dtype=torch.float32):
    """Means, log-variances, prior means and prior variances."""
    generator = torch.Generator().manual_seed(0)
    mean, log_variance, prior_mean, other = torch.randn(4, count, size, generator=generator, dtype=dtype)
    return mean, log_variance, prior_mean, other.exp()


def test_divergence_matches_hand_computed_values():
    """½ (log 4 + (1 + 4)/4 − 1) and, for the second coordinate, ½ (log(1/4) + 4 − 1)."""
    one, four = 0.5 * (math.log(4) + 5 / 4 - 1), 0.5 * (math.log(1 / 4) + 4 - 1)
    mean, log_variance = torch.tensor([[3.0, 2.0]]), torch.tensor([[0.0, math.log(4)]])
    value = kl_to_normal(mean, log_variance, torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 1.0]]))
    assert value.item() == pytest.approx(one + four)
    unit = torch.ones(1, 1)
    assert kl_to_normal(unit, 0 * unit, 0 * unit, unit).item() == 0.5


def test_divergence_is_zero_at_the_prior_and_nowhere_else():
    mean, _, _, variance = draws()
    assert kl_to_normal(mean, variance.log(), mean, variance).item() == 0.0
    for changed in ((mean + 0.1, variance.log()), (mean, variance.log() + 0.1), (mean, variance.log() - 0.1)):
        assert kl_to_normal(*changed, mean, variance).item() > 0


def test_divergence_is_torch_s_summed_over_features_and_averaged_over_the_batch():
    mean, log_variance, prior_mean, prior_variance = draws()
    posterior, prior = Normal(mean, (log_variance / 2).exp()), Normal(prior_mean, prior_variance.sqrt())
    value = kl_to_normal(mean, log_variance, prior_mean, prior_variance)
    torch.testing.assert_close(value, kl_divergence(posterior, prior).sum(1).mean())


def test_divergence_from_a_standard_normal_prior_is_the_plain_one():
    mean, log_variance, *_ = draws()
    value = kl_to_normal(mean, log_variance, torch.zeros_like(mean), torch.ones_like(mean))
    torch.testing.assert_close(value, kl_to_standard_normal(mean, log_variance))


def test_gradients_match_finite_differences():
    mean, log_variance, *prior = draws(dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda a, b: kl_to_normal(a, b, *prior), (mean.requires_grad_(), log_variance.requires_grad_())
    )


@pytest.mark.parametrize("log_variance", [1e4, -1e4, math.inf, -math.inf])
def test_extreme_log_variances_are_clamped(log_variance):
    zero, extreme = torch.zeros(1, 2), torch.full((1, 2), log_variance, requires_grad=True)
    value = kl_to_normal(zero, extreme, zero, zero + 0.01)
    value.backward()
    bound = math.copysign(10, log_variance) - math.log(0.01)
    assert value.item() == pytest.approx(math.exp(bound) - bound - 1, rel=1e-5)
    assert extreme.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_finite_float32(dtype):
    large = torch.full((2, 3), 300.0, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = kl_to_normal(large, torch.full((2, 3), 11.0, dtype=dtype), torch.zeros(2, 3), torch.full((2, 3), 0.01))
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(1.5 * (300**2 / 0.01 + math.exp(10) * 100), rel=1e-3)
    assert large.grad.isfinite().all()


def test_shapes_that_differ_are_refused():
    mean, log_variance, prior_mean, prior_variance = draws()
    with pytest.raises(ValueError, match=r"kl_to_normal: `mean` is \(4, 3\), .*`prior_variance` \(3, 3\)"):
        kl_to_normal(mean, log_variance, prior_mean, prior_variance[:3])


def test_moments_are_the_classes_own():
    features = torch.tensor([[0.0, 1.0], [4.0, 1.0], [7.0, 2.0], [2.0, 4.0]])
    mean, variance = class_moments(features, torch.tensor([2, 2, 0, 2]), 4, variance_floor=0.01)
    assert mean.tolist() == [[7, 2], [0, 0], [2, 2], [0, 0]]
    # Class 0 has one sample: the floor. Classes 1 and 3 have none: N(0, 1).
    expected = torch.tensor([[0.01, 0.01], [1, 1], [8 / 3, 2], [1, 1]])
    torch.testing.assert_close(variance, expected)


def test_floor_lifts_small_variances_alone():
    features = torch.tensor([[0.0, 0.0], [0.02, 2.0]])
    _, variance = class_moments(features, torch.tensor([0, 0]), 1, variance_floor=0.25)
    assert variance.tolist() == [[0.25, 1.0]]


def test_moments_keep_their_digits_far_from_the_origin():
    """E[a²] − E[a]² in float32 would give 0 here."""
    features = 4096 + torch.tensor([[-0.5], [0.5]])
    mean, variance = class_moments(features, torch.tensor([0, 0]), 1, variance_floor=0.01)
    assert (mean.item(), variance.item()) == (4096.0, 0.25)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_moments_are_float32_or_wider(dtype, wide):
    mean, variance = class_moments(torch.ones(2, 3, dtype=dtype), torch.tensor([0, 1]), 3, variance_floor=0.01)
    assert mean.dtype == variance.dtype == wide
