"""FedDecorr's term."""

import pytest
import torch

from fl_lightning.errors import ConfigError
from fl_lightning.losses.decorrelation import Decorrelation, decorrelation_loss


def test_value_of_perfectly_correlated_coordinates():
    """r = 1 everywhere, B = 3: the paper's form is 1; the code's ((B − 1) r)² / B = 4/3."""
    z = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]])
    assert decorrelation_loss(z, "paper").item() == pytest.approx(1.0, rel=1e-6)
    assert decorrelation_loss(z).item() == pytest.approx(4 / 3, rel=1e-6)


def test_value_by_the_correlation_matrix():
    torch.manual_seed(0)
    z = torch.randn(7, 4)
    r = torch.corrcoef(z.T)
    off = r[~torch.eye(4, dtype=torch.bool)]
    assert decorrelation_loss(z, "paper").item() == pytest.approx((r.square().sum() / 16).item(), rel=1e-5)
    assert decorrelation_loss(z).item() == pytest.approx(((6 * off).square().mean() / 7).item(), rel=1e-5)


def test_it_does_not_depend_on_scale_or_shift():
    torch.manual_seed(0)
    z = torch.randn(6, 3)
    moved = z * torch.tensor([1.0, 10.0, 0.1]) + 5
    torch.testing.assert_close(decorrelation_loss(moved), decorrelation_loss(z), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5), (4, 1)])
def test_nothing_to_correlate_is_zero_with_a_gradient(shape):
    z = torch.randn(shape, requires_grad=True)
    loss = decorrelation_loss(z)
    loss.backward()
    assert loss.item() == 0
    assert not z.grad.any()


def test_constant_coordinates_are_finite():
    z = torch.ones(4, 3, requires_grad=True)
    loss = decorrelation_loss(z)
    loss.backward()
    assert loss.item() == 0
    assert z.grad.isfinite().all()


def test_gradient_step_lowers_the_correlation():
    torch.manual_seed(0)
    base = torch.randn(16, 1)
    z = (base @ torch.ones(1, 3) + 0.3 * torch.randn(16, 3)).requires_grad_()
    before = decorrelation_loss(z)
    (gradient,) = torch.autograd.grad(before, z)
    assert decorrelation_loss(z - 0.1 * gradient) < before


def test_form_is_checked():
    with pytest.raises(ConfigError, match=r"Decorrelation\.form: must be one of code, paper, got 'x'"):
        Decorrelation(form="x")
