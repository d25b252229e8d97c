"""FedUV's two terms: the specification's numbers (BASELINES-A.md, section 12) and edges."""

import math

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.uniformity import PredictionVariance, Uniformity, prediction_variance_loss, uniformity_loss
from fl_lightning.methods.fedavg import FedAvg

LINE = torch.tensor([[0.0], [1.0], [3.0]])


def one_hot_logits(classes, y):
    return 100.0 * torch.eye(classes)[y]


def noise(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize(("classes", "gamma"), [(2, 0.7071), (10, 0.3162), (100, 0.1)])
def test_variance_of_a_collapsed_batch_is_gamma_and_of_a_balanced_one_0(classes, gamma):
    assert prediction_variance_loss(one_hot_logits(classes, [1] * 5)).item() == pytest.approx(gamma, abs=1e-4)
    balanced = one_hot_logits(classes, list(range(classes)))
    assert prediction_variance_loss(balanced).item() == pytest.approx(0.0, abs=1e-6)


def test_variance_matches_hand_computed_value():
    """C = 4, one-hot on classes 1, 2, 1, 2: two classes at γ, two above it."""
    assert prediction_variance_loss(one_hot_logits(4, [1, 2, 1, 2])).item() == pytest.approx(0.25)


def test_uniformity_matches_hand_computed_value_at_any_scale():
    """Points 0, 1, 3: d² = 1, 9, 4, their median 4."""
    expected = (math.exp(-1 / 4) + math.exp(-9 / 4) + math.exp(-1)) / 3
    assert expected == pytest.approx(0.417360, abs=1e-6)
    for scale in (1.0, 7.0):
        assert uniformity_loss(scale * LINE).item() == pytest.approx(expected, abs=1e-6)


def test_uniformity_takes_the_lower_median_of_pairs_that_differ():
    """Points 0, 0, 1, 3: d² without the 0 are 1, 9, 1, 9, 4; with it the median would be 1 of six."""
    points = torch.cat([torch.zeros(1, 1), LINE])
    expected = (1 + 2 * math.exp(-1 / 4) + 2 * math.exp(-9 / 4) + math.exp(-1)) / 6
    assert uniformity_loss(points).item() == pytest.approx(expected, abs=1e-6)


def test_uniformity_of_two_samples_has_a_gradient_only_with_a_constant_width():
    for detach in (False, True):
        z = noise(2, 3).requires_grad_()
        loss = uniformity_loss(z, detach_bandwidth=detach)
        loss.backward()
        assert loss.item() == pytest.approx(math.exp(-1))
        assert bool(z.grad.any()) == detach


def test_uniformity_gradient_is_orthogonal_to_the_embeddings():
    z = noise(6, 3).requires_grad_()
    uniformity_loss(z).backward()
    assert z.grad.abs().max() > 1e-3
    assert (z * z.grad).sum().item() == pytest.approx(0.0, abs=1e-14)


def test_gradients_match_finite_differences():
    assert torch.autograd.gradcheck(uniformity_loss, noise(5, 3).requires_grad_())
    assert torch.autograd.gradcheck(prediction_variance_loss, noise(5, 3).requires_grad_())


@pytest.mark.parametrize("loss", [uniformity_loss, prediction_variance_loss, lambda z: uniformity_loss(z, True)])
@pytest.mark.parametrize(
    "batch", [noise(1, 4), torch.zeros(5, 4), torch.full((5, 4), 3.0)], ids=["one", "zeros", "equal"]
)
def test_batches_without_a_spread_give_finite_losses_and_gradients(loss, batch):
    """One sample, dead embeddings: the public code gives NaN."""
    values = batch.clone().requires_grad_()
    result = loss(values)
    result.backward()
    assert result.isfinite()
    assert values.grad.isfinite().all()


def test_terms_of_one_sample_are_0_and_of_equal_embeddings_there_is_no_uniformity():
    assert prediction_variance_loss(torch.randn(1, 4)).item() == 0
    assert uniformity_loss(torch.randn(1, 4)).item() == 0
    assert uniformity_loss(torch.ones(5, 4)).item() == 0


@pytest.mark.parametrize("loss", [uniformity_loss, prediction_variance_loss])
def test_narrow_values_are_widened_outside_autocast(loss):
    values = noise(6, 4, dtype=torch.float32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(values)
    assert inside.dtype == torch.float32
    assert inside == loss(values.float())


def test_terms_name_themselves_and_say_what_they_reach(mlp, make_client):
    client = make_client(FedAvg(mlp(), extra_terms=[PredictionVariance(2.0), Uniformity(0.5)]))
    assert client.loss_names == ("loss", "cross_entropy", "prediction_variance", "uniformity")
    assert Uniformity().reaches == ("model.body",)
    with pytest.raises(ConfigError, match=r"Uniformity\.weight: must be >= 0"):
        Uniformity(-0.1)
