"""The adversary's numbers of DRDFL.md, section 8 (test 6)."""

import math

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.adversarial import Adversarial, UniformAdversarial, adversarial_loss, uniform_adversarial_loss
from fl_lightning.methods.fedavg import FedAvg

FIRST = torch.tensor([0])


@pytest.mark.parametrize(
    ("logits", "adversarial", "uniform"),
    [([1.0, 0.0, 0.0], 0.5514, 1.2181), ([0.0, 0.0, 0.0], 1.0986, 1.0986), ([2.0, 0.0, -1.0], 0.1698, 1.8365)],
)
def test_losses_match_hand_computed_values(logits, adversarial, uniform):
    assert adversarial_loss(torch.tensor([logits]), FIRST).item() == pytest.approx(adversarial, abs=5e-5)
    assert uniform_adversarial_loss(torch.tensor([logits])).item() == pytest.approx(uniform, abs=5e-5)


def test_uniform_loss_is_at_least_log_k_and_reaches_it_at_a_uniform_answer():
    logits = 5 * torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    values = torch.stack([uniform_adversarial_loss(row[None]) for row in logits])
    assert (values > math.log(7)).all()
    assert uniform_adversarial_loss(torch.full((3, 7), 4.2)).item() == pytest.approx(math.log(7))


def test_losses_are_means_over_the_batch():
    logits, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    rows = range(4)
    own = sum(adversarial_loss(logits[i : i + 1], y[i : i + 1]) for i in rows) / 4
    uniform = sum(uniform_adversarial_loss(logits[i : i + 1]) for i in rows) / 4
    torch.testing.assert_close(adversarial_loss(logits, y), own)
    torch.testing.assert_close(uniform_adversarial_loss(logits), uniform)


@pytest.mark.parametrize("classes", [None, torch.tensor([True, False, True, True])])
def test_gradients_match_finite_differences(classes):
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2, 3, 3, 0])
    torch.autograd.gradcheck(lambda t: adversarial_loss(t, y, classes), (logits,))
    torch.autograd.gradcheck(lambda t: uniform_adversarial_loss(t, classes), (logits,))


def test_classes_that_are_left_out_count_nowhere():
    """As if the logits of the others stood alone; the class that is left out gets no gradient."""
    logits = torch.tensor([[2.0, 9.0, 0.0, -1.0]], requires_grad=True)
    classes = torch.tensor([True, False, True, True])
    values = adversarial_loss(logits, FIRST, classes), uniform_adversarial_loss(logits, classes)
    assert [value.item() for value in values] == pytest.approx([0.1698, 1.8365], abs=5e-5)
    sum(values).backward()
    assert logits.grad[0, 1] == 0
    assert logits.grad.isfinite().all()


def test_one_class_has_nothing_to_tell():
    logits = torch.randn(2, 3, requires_grad=True)
    only = torch.tensor([True, False, False])
    value = adversarial_loss(logits, torch.tensor([0, 0]), only) + uniform_adversarial_loss(logits, only)
    value.backward()
    assert value.item() == 0.0
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_finite_float32(dtype):
    logits = torch.tensor([[6e4, -6e4, 0.0]], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = adversarial_loss(logits, torch.tensor([1])), uniform_adversarial_loss(logits)
    sum(values).backward()
    for value in values:
        assert value.dtype == torch.float32
        assert value.isfinite()
    assert logits.grad.isfinite().all()


def test_sizes_that_do_not_fit_are_refused():
    for loss in (
        lambda c: adversarial_loss(torch.zeros(1, 3), FIRST, c),
        lambda c: uniform_adversarial_loss(torch.zeros(1, 3), c),
    ):
        with pytest.raises(ValueError, match=r"`logits` is \(1, 3\) but `classes` is \(2,\)"):
            loss(torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("kind", [Adversarial, UniformAdversarial])
def test_method_without_a_latent_is_refused(mlp, make_client, kind):
    with pytest.raises(ConfigError, match=rf"method\.extra_terms: {kind.__name__} needs .* FedAvg does not have"):
        make_client(FedAvg(mlp(), extra_terms=[kind()]))
