"""FedNTD's distillation, beside numbers computed by hand."""

import math

import pytest
import torch

from fl_lightning.losses.not_true import not_true_distillation_loss


def test_only_other_classes_count():
    """Teacher ¾, ¼ beside an even student: KL = ¾ log(3/2) + ¼ log(1/2); the true class's logits are of no account."""
    teacher = torch.tensor([[math.log(3), -7.0, 0.0]])
    for true in (0.0, 50.0):
        loss = not_true_distillation_loss(torch.tensor([[2.0, true, 2.0]]), teacher, torch.tensor([1]))
        assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_temperature_softens_both_and_scales():
    """At τ = 2 a teacher of logits 2 log 3, 0 is the one above, times 4; two samples are averaged."""
    teacher = torch.tensor([[2 * math.log(3), 0.0, 9.0], [1.0, 1.0, 1.0]])
    loss = not_true_distillation_loss(torch.zeros(2, 3), teacher, torch.tensor([2, 0]), temperature=2.0)
    assert loss.item() == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2)


def test_two_classes_have_no_other():
    assert not_true_distillation_loss(torch.randn(3, 2), torch.randn(3, 2), torch.tensor([0, 1, 1])).item() == 0
