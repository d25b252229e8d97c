"""The numbers that BASELINES-B.md, section 9a, promises of FedTGP's server: the margin, its gap and the distances."""

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.losses.prototype_margin import prototype_gap, prototype_margin_loss

U = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
T = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_loss_is_the_cross_entropy_of_negative_distances_less_the_margin(margin):
    distances = (U[:, None] - T[None]).square().sum(2).sqrt()
    expected = F.cross_entropy(-(distances + margin * F.one_hot(Y, 4)), Y)
    torch.testing.assert_close(prototype_margin_loss(U, Y, T, margin), expected)


def test_a_wider_margin_costs_more():
    losses = [prototype_margin_loss(U, Y, T, margin).item() for margin in (0.0, 1.0, 5.0, 100.0)]
    assert losses == sorted(losses)
    assert losses[-1] > 90


def test_gradient_is_finite_where_an_upload_lies_on_its_prototype():
    prototypes = T.clone().requires_grad_()
    prototype_margin_loss(T[:2].clone(), torch.tensor([0, 1]), prototypes, 1.0).backward()
    assert prototypes.grad.isfinite().all()


def test_distances_far_from_the_origin_are_not_cancelled():
    """The square expanded, 1e8 − 2e8 + 1e8 in float32, loses a distance of 1 (and may be negative)."""
    u, prototypes = torch.tensor([[1e4]]), torch.tensor([[1e4], [1e4 + 1]])
    loss = prototype_margin_loss(u, torch.tensor([0]), prototypes, 0.0)
    assert loss.item() == pytest.approx(0.3133, abs=1e-4)  # log(1 + e^−1)


def test_loss_rejects_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="same last size"):
        prototype_margin_loss(U, Y, T[:, :2], 1.0)


def test_gap_is_the_largest_distance_to_a_nearest_neighbour_or_of_all():
    means = torch.tensor([[0.0], [3.0], [10.0]])
    assert prototype_gap(means) == 7.0
    assert prototype_gap(means, "pairwise") == 10.0


@pytest.mark.parametrize("classes", [0, 1])
@pytest.mark.parametrize("kind", ["nearest", "pairwise"])
def test_gap_of_fewer_than_two_classes_is_zero(classes, kind):
    assert prototype_gap(torch.ones(classes, 3), kind) == 0.0
