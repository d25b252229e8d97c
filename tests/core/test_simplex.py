"""The least quadratic form over the simplex: what its optimum must fulfil, and cases that are known."""

import pytest
import torch

from fl_lightning.core.simplex import least_on_simplex


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_no_weight_can_be_moved_to_where_the_form_is_less(size, rank):
    """(Pα)_j is the same for all weights that are not 0, and not less for the others."""
    points = torch.randn(size, rank, generator=torch.Generator().manual_seed(size + rank), dtype=torch.double) + 0.3
    matrix = points @ points.T
    weights = least_on_simplex(matrix)
    slopes, least = matrix @ weights, (weights @ matrix @ weights).item()
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1)
    assert (slopes >= least - 1e-7).all()
    assert slopes[weights > 1e-6].tolist() == pytest.approx([least] * int((weights > 1e-6).sum()), abs=1e-6)


def test_independent_terms_weigh_by_one_over_their_variance():
    weights = least_on_simplex(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    assert weights.tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_who_lies_on_the_way_is_left_out():
    """Points 1 and 3 on a line: nothing of the second brings the first nearer to 0."""
    line = torch.tensor([[1.0], [3.0]])
    assert least_on_simplex(line @ line.T).tolist() == pytest.approx([1, 0])


def test_degenerate_matrices():
    assert least_on_simplex(torch.zeros(4, 4)).tolist() == pytest.approx([0.25] * 4)
    assert least_on_simplex(torch.diag(torch.tensor([0.0, 1.0]))).tolist() == pytest.approx([1, 0], abs=1e-6)
    assert least_on_simplex(torch.tensor([[7.0]])).tolist() == [1.0]
