"""The numbers that BASELINES-B.md, section 1, promises of the loss, the server's rule and the leave-one-out teacher."""

import math

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.message import ClassMeans
from fl_lightning.errors import ConfigError
from fl_lightning.losses.label_distillation import (
    LabelDistillation,
    LabelSums,
    label_distillation_loss,
    leave_one_out,
)

TEACHER = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])


@pytest.fixture
def logits():
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


Y = torch.tensor([0, 1, 2, 0, 1, 2])


def sums_of(rule, *uploads, round=1, previous=None):
    """What the rule makes of (mean, count) of some clients."""
    rule.round = round
    for mean, count in uploads:
        rule.add(ClassMeans(torch.tensor(mean), torch.tensor(count)), sum(count))
    return rule.result(previous)


# --- the loss ----------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_is_the_divergence_from_the_teacher(logits, temperature):
    log_p = F.log_softmax(logits / temperature, 1)
    expected = F.kl_div(log_p, TEACHER[Y], reduction="batchmean")
    torch.testing.assert_close(label_distillation_loss(logits, Y, TEACHER, temperature=temperature), expected)


def test_gradient_is_that_of_the_cross_entropy_with_the_teacher(logits):
    """(p − q_y) / B."""
    logits.requires_grad_()
    label_distillation_loss(logits, Y, TEACHER).backward()
    torch.testing.assert_close(logits.grad, (logits.detach().softmax(1) - TEACHER[Y]) / 6)


def test_loss_is_zero_where_student_and_teacher_agree():
    teacher = TEACHER.clamp(min=1e-3)
    teacher = teacher / teacher.sum(1, keepdim=True)
    assert label_distillation_loss(teacher.log()[Y], Y, teacher).item() == pytest.approx(0, abs=1e-7)


def test_mean_is_over_the_samples_whose_class_has_a_teacher(logits):
    valid = torch.tensor([True, False, True])
    kept = [0, 2, 3, 5]
    expected = label_distillation_loss(logits[kept], Y[kept], TEACHER)
    torch.testing.assert_close(label_distillation_loss(logits, Y, TEACHER, valid), expected)


@pytest.mark.parametrize("garbage", [0.0, math.nan, -7.0])
def test_what_a_class_without_a_teacher_holds_does_not_matter(logits, garbage):
    valid, teacher = torch.tensor([True, False, True]), TEACHER.clone()
    teacher[1] = garbage
    gradients = []
    for rows in (TEACHER, teacher):
        z = logits.clone().requires_grad_()
        label_distillation_loss(z, Y, rows, valid).backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients)


def test_without_any_teacher_the_loss_is_zero_without_a_gradient(logits):
    logits.requires_grad_()
    loss = label_distillation_loss(logits, Y, torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_narrow_logits_give_a_float32_loss(logits):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = label_distillation_loss(logits.bfloat16(), Y, TEACHER)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, label_distillation_loss(logits.bfloat16().float(), Y, TEACHER))


def test_loss_rejects_what_does_not_fit(logits):
    with pytest.raises(ValueError, match=r"takes \[C, C\]"):
        label_distillation_loss(logits, Y, TEACHER[:2])
    with pytest.raises(ValueError, match="temperature"):
        label_distillation_loss(logits, Y, TEACHER, temperature=0.0)


# --- sums and teachers ----------------------------------------------


def test_teacher_leaves_the_own_soft_labels_out():
    """Class 0: (0.8, 0.2) and (0.6, 0.4), client 2 lacks it. Samples do not count."""
    own = [[[0.8, 0.2], [0.1, 0.9]], [[0.6, 0.4], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    counts = [[50, 3], [1, 0], [0, 0]]
    received = sums_of(LabelSums(), *zip(own, counts, strict=True), round=4)
    assert (received.sums.shape, received.rounds.tolist()) == ((2, 2), [4, 4])
    torch.testing.assert_close(received.sums, torch.tensor([[1.4, 0.6], [0.1, 0.9]]))
    for client, expected in enumerate([[0.6, 0.4], [0.8, 0.2], [0.7, 0.3]]):
        included = torch.tensor(counts[client]) > 0
        teacher, valid = leave_one_out(received.sums, torch.tensor(own[client]), included)
        torch.testing.assert_close(teacher[0], torch.tensor(expected))
        assert valid.tolist() == [True, client != 0]  # nobody but client 0 has class 1


def test_teacher_rows_sum_to_one():
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(40, 7, 7, generator=generator).mul(4).softmax(2)
    sums = own.double().sum(0).float()
    for mine in own:
        teacher, valid = leave_one_out(sums, mine, torch.ones(7, dtype=torch.bool))
        assert valid.all()
        torch.testing.assert_close(teacher.sum(1), torch.ones(7), rtol=1e-6, atol=0)
        assert (teacher >= 0).all()


@pytest.mark.parametrize(("stale", "row"), [("keep", [0.5, 0.5, 1]), ("drop", [0.0, 0.0, 0])])
def test_class_that_nobody_held_keeps_its_sums_and_their_round_or_has_none(stale, row):
    first = sums_of(LabelSums(stale), ([[0.9, 0.1], [0.5, 0.5]], [2, 2]), round=1)
    second = sums_of(LabelSums(stale), ([[0.7, 0.3], [0.0, 0.0]], [2, 0]), round=2, previous=first)
    torch.testing.assert_close(second.sums, torch.tensor([[0.7, 0.3], row[:2]]))
    assert second.rounds.tolist() == [2, row[2]]


def test_rule_without_uploads_keeps_what_there_was():
    first = sums_of(LabelSums(), ([[0.9, 0.1], [0.5, 0.5]], [2, 2]))
    assert LabelSums().result(first) is first
    assert LabelSums("drop").result(first) is None


def test_sums_do_not_depend_on_the_order_of_clients():
    generator = torch.Generator().manual_seed(1)
    uploads = [(torch.randn(5, 5, generator=generator).mul(9).softmax(1).tolist(), [1] * 5) for _ in range(9)]
    one, other = sums_of(LabelSums(), *uploads), sums_of(LabelSums(), *uploads[::-1])
    assert torch.equal(one.sums, other.sums)
    assert torch.equal(one.rounds, other.rounds)


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"averages": "some"}, {"stale": "some"}, {"weight": -1.0}])
def test_term_rejects_bad_options(option):
    with pytest.raises(ConfigError, match=rf"LabelDistillation\.{next(iter(option))}"):
        LabelDistillation(**option)
