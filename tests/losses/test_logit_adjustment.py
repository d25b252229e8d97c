"""The balanced softmax, beside numbers computed by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.losses.logit_adjustment import balanced_softmax_loss

LOGITS = torch.tensor([[0.0, math.log(2)], [math.log(3), 0.0]])
Y = torch.tensor([0, 1])


@pytest.mark.parametrize(("gamma", "odds"), [(1.0, (4 / 2, 7 / 1)), (2.0, (6 / 4, 13 / 1))])
def test_exponentials_count_by_class_frequencies(gamma, odds):
    """n = (2, 1): row 0, of class 0, has 2^γ · 1 beside 1 · 2; row 1, of class 1, has 1 · 1 beside 2^γ · 3."""
    loss = balanced_softmax_loss(LOGITS, Y, torch.tensor([2, 1]), gamma)
    assert loss.item() == pytest.approx(sum(map(math.log, odds)) / 2)


def test_without_an_exponent_or_among_equals_it_is_the_cross_entropy():
    plain = F.cross_entropy(LOGITS, Y)
    torch.testing.assert_close(balanced_softmax_loss(LOGITS, Y, torch.tensor([7, 1]), gamma=0.0), plain)
    torch.testing.assert_close(balanced_softmax_loss(LOGITS, Y, torch.tensor([5, 5])), plain)


def test_class_without_samples_is_no_rival():
    logits = torch.tensor([[1.0, 0.0, 9.0]], requires_grad=True)
    balanced_softmax_loss(logits, torch.tensor([0]), torch.tensor([3, 3, 0])).backward()
    assert logits.grad[0, 2] == 0
    torch.testing.assert_close(logits.grad[0, :2], torch.tensor([-1.0, 1.0]) / (1 + math.e))
