"""Sums against exact rational arithmetic, over the sizes, kinds and orders that take another way."""

import random
from fractions import Fraction

import pytest
import torch

from fl_lightning.core import exact_sum
from fl_lightning.core.exact_sum import ExactSum


def summed(addends, parts=1):
    sums = [ExactSum() for _ in range(parts)]
    for place, (values, scale) in enumerate(addends):
        sums[place % parts].add(values, scale)
    for other in sums[1:]:
        sums[0].merge(other.partial())
    return sums[0].value(1.0)


def exact(addends):
    columns = zip(*[[Fraction(v) * Fraction(scale) for v in values.tolist()] for values, scale in addends], strict=True)
    return torch.tensor([float(sum(column)) for column in columns], dtype=torch.float64)


def drawn(seed, size=257, clients=40, low=-20, high=3, dtype=torch.float32):
    """Values over some powers of two, of both signs, each times a sample count."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(low, high, (clients, size), generator=generator)
    values = (torch.randn(clients, size, generator=generator) * scale).to(dtype)
    return list(zip(values, torch.randint(1, 2**20, (clients,), generator=generator).tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_is_the_exact_one_rounded_once_in_any_order_and_parts(dtype, monkeypatch):
    monkeypatch.setattr(exact_sum, "_BLOCK", 100)  # three blocks, the last one shorter
    addends = drawn(1, dtype=dtype)
    expected = exact(addends)
    for seed in range(4):
        random.Random(seed).shuffle(addends)
        assert torch.equal(summed(addends, parts=1 + seed), expected)


def test_addend_that_outgrows_the_first_ones_offset_is_added_exactly():
    addends = [*drawn(2, size=9), *drawn(3, size=9, clients=3, low=30, high=40), *drawn(4, size=9)]
    assert torch.equal(summed(addends), exact(addends))
    assert torch.equal(summed(addends[::-1]), exact(addends))


@pytest.mark.parametrize("scale", [0.0, -3.0, 0.37, 2.0**40])
def test_any_scale_is_taken(scale):
    addends = [(torch.tensor([1.5, -0.1, 0.0, 3e-42]), scale), (torch.tensor([1.0, 2.0, 0.0, 1e-20]), 7)]
    assert torch.allclose(summed(addends), exact(addends), rtol=1e-15, atol=0)


def test_zeros_then_values_and_values_then_zeros_agree():
    addends = [(torch.zeros(3), 5), (torch.tensor([1e-30, 1.0, 3e38]), 3)]
    assert torch.equal(summed(addends), exact(addends))
    assert torch.equal(summed(addends[::-1]), exact(addends))


def test_value_can_be_read_between_additions():
    total, addends = ExactSum(), drawn(5, clients=6)
    for place, (values, scale) in enumerate(addends):
        total.add(values, scale)
        assert torch.equal(total.value(1.0), exact(addends[: place + 1]))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_values_stay_where_they_are(broken):
    total = summed([(torch.tensor([1.0, broken]), 2), (torch.tensor([1.0, 1.0]), 2)])
    assert total[0] == 4
    assert not total[1].isfinite()
