"""The mean discrepancy, beside numbers computed by hand."""

import math

import pytest
import torch

from fl_lightning.losses.discrepancy import mean_discrepancy

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


def test_two_pairs_on_a_line():
    """0 and 1 beside 2 and 3: over 16 pairs squared distances 1 (6), 4 (4) and 9 (2), of mean 40/12."""
    m = 40 / 12
    k = {square: sum(math.exp(-square / (m * s)) for s in SCALES) for square in (1, 4, 9)}
    within, across = 2 * (5 + k[1]) / 4, (2 * k[4] + k[9] + k[1]) / 4
    found = mean_discrepancy(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]]))
    assert found.item() == pytest.approx(2 * within - 2 * across, rel=1e-5)


def test_equal_batches_are_of_one_distribution():
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert mean_discrepancy(z, z[[3, 1, 4, 0, 2]]).item() == pytest.approx(0, abs=1e-5)
    assert mean_discrepancy(z[:1], z[:1]).item() == 0
