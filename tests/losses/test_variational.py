"""The numbers of DRDFL.md, section 8 (tests 5 and 8)."""

import math

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.variational import (
    KLToStandardNormal,
    Reconstruction,
    kl_to_standard_normal,
    reconstruction_loss,
)
from fl_lightning.methods.fedavg import FedAvg

X = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
X_REC = torch.tensor([[0.5, 0.5], [0.0, 0.5]])


def test_divergence_matches_hand_computed_value():
    value = kl_to_standard_normal(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(4)]]))
    assert value.item() == pytest.approx(1.3069, abs=5e-5)


def test_divergence_is_zero_at_the_prior_and_nowhere_else():
    assert kl_to_standard_normal(torch.zeros(3, 2), torch.zeros(3, 2)).item() == 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert kl_to_standard_normal(*torch.randn(2, 1, 2, generator=generator)).item() > 0


def test_divergence_is_a_sum_over_features_and_a_mean_over_the_batch():
    mean, log_variance = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, math.log(4)], [0.0, 0.0]])
    assert kl_to_standard_normal(mean, log_variance).item() == pytest.approx(1.3069 / 2, abs=5e-5)


@pytest.mark.parametrize(("reduction", "value"), [("sum", 0.375), ("mean", 0.1875)])
def test_reconstruction_matches_hand_computed_value(reduction, value):
    assert reconstruction_loss(X, X_REC, reduction).item() == value
    images = (t.reshape(2, 1, 1, 2) for t in (X, X_REC))
    assert reconstruction_loss(*images, reduction).item() == value


def test_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    torch.autograd.gradcheck(kl_to_standard_normal, (one, other))
    for reduction in ("sum", "mean"):
        torch.autograd.gradcheck(lambda a, b, r=reduction: reconstruction_loss(a, b, r), (one, other))


@pytest.mark.parametrize("log_variance", [1e4, -1e4, math.inf, -math.inf])
def test_extreme_log_variances_are_clamped(log_variance):
    mean, extreme = torch.ones(1, 2, requires_grad=True), torch.full((1, 2), log_variance, requires_grad=True)
    value = kl_to_standard_normal(mean, extreme)
    value.backward()
    bound = math.copysign(10, log_variance)
    assert value.item() == pytest.approx(math.exp(bound) - bound, rel=1e-6)
    assert mean.grad.isfinite().all()
    assert extreme.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_finite_float32(dtype):
    """300² is more than a float16 holds, and so is exp(11)."""
    large = torch.full((2, 3), 300.0, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = [
            kl_to_standard_normal(large, torch.full((2, 3), 11.0, dtype=dtype)),
            reconstruction_loss(torch.zeros(2, 3), large),
            reconstruction_loss(torch.zeros(2, 3), large, "mean"),
        ]
    sum(values).backward()
    assert {value.dtype for value in values} == {torch.float32}
    assert values[1].item() == 3 * 300.0**2
    assert large.grad.isfinite().all()


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"kl_to_standard_normal: `mean` is \(2, 2\) but `log_variance` is \(1, 2\)"):
        kl_to_standard_normal(X, X[:1])
    with pytest.raises(ValueError, match=r"reconstruction_loss: `x` is \(2, 2\) but `x_rec` is \(1, 2\)"):
        reconstruction_loss(X, X[:1])


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'sum' or 'mean', got 'max'"):
        reconstruction_loss(X, X_REC, "max")
    with pytest.raises(ConfigError, match=r"Reconstruction\.reduction.*'max'"):
        Reconstruction(reduction="max")


@pytest.mark.parametrize("kind", [KLToStandardNormal, Reconstruction])
def test_method_without_a_latent_is_refused(mlp, make_client, kind):
    with pytest.raises(ConfigError, match=rf"method\.extra_terms: {kind.__name__} needs .* FedAvg does not have") as e:
        make_client(FedAvg(mlp(), extra_terms=[kind()]))
    assert "\n" not in str(e.value)


def test_terms_are_logged_under_short_names():
    assert (KLToStandardNormal().name, Reconstruction().name) == ("kl", "reconstruction")
