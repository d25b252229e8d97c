"""The two distances of FedHKD (BASELINES-B.md, section 9d)."""

import math

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.hyper_knowledge import (
    HyperFeatures,
    HyperPredictions,
    class_feature_distance,
    soft_prediction_distance,
)
from fl_lightning.methods.fedavg import FedAvg

ALL = torch.ones(2, dtype=torch.bool)


def test_soft_prediction_distance_matches_hand_computed_value():
    """softmax((log 3, 0) / 1) = (3/4, 1/4) against (1/2, 1/2): √(1/16 + 1/16); the other row agrees; mean of both."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    value = soft_prediction_distance(logits, torch.full((2, 2), 0.5), 1.0, ALL)
    assert float(value) == pytest.approx(math.sqrt(1 / 8) / 2, abs=1e-6)


def test_temperature_divides_the_logits():
    """softmax((log 3, 0) / 0.5) = (9/10, 1/10), and (0, 0) is even at any temperature."""
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    value = soft_prediction_distance(logits, torch.tensor([[0.9, 0.1], [0.5, 0.5]]), 0.5, ALL)
    assert float(value) == pytest.approx(0.0, abs=1e-6)


def test_class_feature_distance_is_a_mean_of_norms_and_not_of_squares():
    """‖(3, 4)‖ = 5 and ‖(0, 1)‖ = 1: mean 3, where the mean of squares would be 13."""
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert float(class_feature_distance(z, torch.tensor([0, 1]), torch.zeros(2, 2), ALL)) == 3.0


def test_samples_and_rows_without_knowledge_do_not_count():
    valid = torch.tensor([True, False])
    z = torch.tensor([[3.0, 4.0], [100.0, 1.0]])
    assert float(class_feature_distance(z, torch.tensor([0, 1]), torch.zeros(2, 2), valid)) == 5.0
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    assert float(soft_prediction_distance(logits, torch.tensor([[0.5, 0.5], [0.0, 1.0]]), 0.5, valid)) == 0.0


def test_nothing_valid_is_zero_without_a_gradient():
    z = torch.randn(3, 2, requires_grad=True)
    none = torch.zeros(2, dtype=torch.bool)
    value = class_feature_distance(z, torch.tensor([0, 1, 1]), torch.ones(2, 2), none)
    value = value + soft_prediction_distance(z[:2], torch.ones(2, 2), 0.5, none)
    value.backward()
    assert value.item() == 0
    assert z.grad.abs().max() == 0


def test_gradient_is_finite_where_a_distance_is_zero():
    z = torch.zeros(2, 2, requires_grad=True)
    class_feature_distance(z, torch.tensor([0, 1]), torch.zeros(2, 2), ALL).backward()
    assert z.grad.abs().max() == 0


def test_sizes_must_fit():
    with pytest.raises(ValueError, match="same last size"):
        class_feature_distance(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(2, 2), ALL)


def test_values_are_float32_under_autocast():
    z, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        assert class_feature_distance(z.bfloat16(), y, torch.zeros(2, 2), ALL).dtype == torch.float32
        assert soft_prediction_distance(z[:2].bfloat16(), torch.ones(2, 2), 0.5, ALL).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"weight": -1}, "HyperFeatures.weight"),
        ({"temperature": 0}, "HyperFeatures.temperature"),
        ({"noise_std": -0.1}, "HyperFeatures.noise_std"),
        ({"min_share": -1}, "HyperFeatures.min_share"),
    ],
)
def test_bad_values_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"^{key}: must be"):
        HyperFeatures(**options)


def test_terms_that_share_their_knowledge_must_agree(mlp, make_client):
    with pytest.raises(ConfigError, match="share their hyper-knowledge"):
        make_client(FedAvg(mlp(), extra_terms=[HyperFeatures(), HyperPredictions(temperature=1.0)]))
    make_client(FedAvg(mlp(), extra_terms=[HyperFeatures(), HyperPredictions(0.0, temperature=1.0)]))
