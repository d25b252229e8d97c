"""The balanced softmax and calibrated logits, beside numbers computed by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.losses.logit_adjustment import balanced_softmax_loss, calibrated_loss

LOGITS = torch.tensor([[0.0, math.log(2)], [math.log(3), 0.0]])
Y = torch.tensor([0, 1])


@pytest.mark.parametrize(("gamma", "odds"), [(1.0, (4 / 2, 7 / 1)), (2.0, (6 / 4, 13 / 1))])
def test_exponentials_count_by_class_frequencies(gamma, odds):
    """n = (2, 1): row 0, of class 0, has 2^γ · 1 beside 1 · 2; row 1, of class 1, has 1 · 1 beside 2^γ · 3."""
    loss = balanced_softmax_loss(LOGITS, Y, torch.tensor([2, 1]), gamma)
    assert loss.item() == pytest.approx(sum(map(math.log, odds)) / 2)


@pytest.mark.parametrize("form", ["code", "paper"])
def test_frequencies_are_as_precise_as_logits(form):
    """They were of float32 under 64-true."""
    logits, y, n = LOGITS.double() / 3, Y, [7, 5]
    rows = [[math.exp(own) * n[c] for c, own in enumerate(row)] for row in logits.tolist()]
    expected = sum(math.log(sum(row) / row[own]) for row, own in zip(rows, y.tolist(), strict=True)) / 2
    assert balanced_softmax_loss(logits, y, torch.tensor(n)).item() == pytest.approx(expected, rel=1e-14)
    rows = [[math.exp(own - n[c] ** -0.25) for c, own in enumerate(row)] for row in logits.tolist()]
    rivals = [sum(row) - (form == "paper") * row[own] for row, own in zip(rows, y.tolist(), strict=True)]
    expected = sum(math.log(rival / row[own]) for rival, row, own in zip(rivals, rows, y.tolist(), strict=True)) / 2
    assert calibrated_loss(logits, y, torch.tensor(n), 1.0, form).item() == pytest.approx(expected, rel=1e-13)


def test_without_an_exponent_or_among_equals_it_is_the_cross_entropy():
    plain = F.cross_entropy(LOGITS, Y)
    torch.testing.assert_close(balanced_softmax_loss(LOGITS, Y, torch.tensor([7, 1]), gamma=0.0), plain)
    torch.testing.assert_close(balanced_softmax_loss(LOGITS, Y, torch.tensor([5, 5])), plain)


def test_large_exponents_and_counts_stay_finite():
    value = balanced_softmax_loss(LOGITS, Y, torch.tensor([5000, 4000]), gamma=11.0)
    expected = F.cross_entropy(LOGITS + 11 * torch.tensor([math.log(5000), math.log(4000)]), Y)
    torch.testing.assert_close(value, expected)


def test_class_without_samples_is_no_rival():
    logits = torch.tensor([[1.0, 0.0, 9.0]], requires_grad=True)
    balanced_softmax_loss(logits, torch.tensor([0]), torch.tensor([3, 3, 0])).backward()
    assert logits.grad[0, 2] == 0
    torch.testing.assert_close(logits.grad[0, :2], torch.tensor([-1.0, 1.0]) / (1 + math.e))


def test_rare_classes_get_a_margin():
    """n = (16, 1): margins ½ and 1 at τ = 1, so that row 1, of class 1, has e^{−1} beside 3 e^{−½}."""
    counts = torch.tensor([16, 1])
    odds = (2 * math.exp(-0.5), 3 * math.exp(0.5))
    code = calibrated_loss(LOGITS, Y, counts)
    assert code.item() == pytest.approx(sum(math.log1p(o) for o in odds) / 2)
    assert calibrated_loss(LOGITS, Y, counts, form="paper").item() == pytest.approx(sum(map(math.log, odds)) / 2)
    torch.testing.assert_close(calibrated_loss(LOGITS, Y, counts, tau=0.0), F.cross_entropy(LOGITS, Y))


def test_client_of_one_class_has_nothing_to_calibrate():
    logits = LOGITS.clone().requires_grad_()
    for form in ("code", "paper"):
        loss = calibrated_loss(logits, torch.tensor([1, 1]), torch.tensor([0, 5]), form=form)
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, logits)[0].any()
