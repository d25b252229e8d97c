import math

import pytest
import torch

from fl_lightning.core.term import CrossEntropy, Forward, Term, term_sum
from fl_lightning.errors import ConfigError


def forward(logits, y):
    logits = torch.as_tensor(logits)
    return Forward(torch.zeros(len(y), 1), torch.tensor(y), [], torch.zeros(len(y), 1), logits)


class HTMLPage2Term(Term):
    pass


def test_cross_entropy_matches_hand_computed_value():
    """log(1 + e^-1) for logits (1, 0) and class 0, and log 2 for equal logits; the mean of both."""
    term = CrossEntropy()
    assert term(None, forward([[1.0, 0.0]], [0])).item() == pytest.approx(0.3133, abs=5e-5)
    both = term(None, forward([[1.0, 0.0], [3.0, 3.0]], [0, 1])).item()
    assert both == pytest.approx((math.log1p(math.exp(-1)) + math.log(2)) / 2)


def test_cross_entropy_of_half_precision_logits_is_float32():
    assert CrossEntropy()(None, forward(torch.zeros(2, 3, dtype=torch.bfloat16), [0, 1])).dtype == torch.float32


def test_a_terms_name_is_its_class_in_snake_case():
    assert CrossEntropy().name == "cross_entropy"
    assert HTMLPage2Term().name == "htmlpage2_term"


@pytest.mark.parametrize("weight", [-1.0, -1e-9, float("nan")])
def test_a_terms_weight_must_not_be_negative(weight):
    with pytest.raises(ConfigError, match=r"CrossEntropy.weight.*>= 0"):
        CrossEntropy(weight)


def test_term_sum_weighs_each_value():
    values = {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
    assert term_sum(values, {"a": 1.0, "b": 0.5}).item() == 3.5


def test_term_sum_leaves_the_value_of_a_lone_term_of_weight_one_alone():
    value = torch.tensor(2.0)
    assert term_sum({"a": value}, {"a": 1.0}) is value


def test_term_sum_of_no_terms_is_zero():
    assert term_sum({}, {}).item() == 0.0
