import pytest
import torch

from fl_lightning.models.sparsity import erdos_renyi_kernel, random_mask, regrown_mask


def test_erdos_renyi_kernel_matches_hand_computed_values():
    """Scores 16/64 and 8/16: ε (16 + 8) = 40 active, so densities are 5/12 and 5/6."""
    assert erdos_renyi_kernel([(8, 8), (4, 4)], 0.5) == [26, 13]


def test_erdos_renyi_kernel_makes_small_tensors_dense_and_shares_the_rest_out_anew():
    """Of 0.5 · 436 = 218 the biases take 20 + 16; 182 are left for 400 entries, at one density each."""
    assert erdos_renyi_kernel([(20, 20), (20,), (16,)], 0.5) == [182, 20, 16]
    assert erdos_renyi_kernel([(6, 6), (4,), ()], 0.5) == [15, 4, 1]  # a single number is dense, too


@pytest.mark.parametrize("shapes", [[(3, 7), (7,), (5, 3, 3, 3)], [(10, 10)], [(4,), (9,)], [()]], ids=str)
def test_erdos_renyi_kernel_at_density_1_is_dense(shapes):
    assert erdos_renyi_kernel(shapes, 1.0) == [torch.Size(shape).numel() for shape in shapes]


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 0.5, 0.9, 0.99])
def test_erdos_renyi_kernel_meets_the_density_up_to_rounding_down(density):
    shapes = [(64, 3, 3, 3), (64,), (128, 64, 3, 3), (128,), (10, 128), (10,)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    active = erdos_renyi_kernel(shapes, density)
    assert density * sum(sizes) - len(shapes) < sum(active) <= density * sum(sizes) + 1e-6
    assert all(0 <= own <= size for own, size in zip(active, sizes, strict=True))


def test_erdos_renyi_kernel_counts_decimals_as_they_are_written():
    """In floating point, 0.29 · 100 is 28.999999999999996."""
    assert erdos_renyi_kernel([(10, 10)], 0.29) == [29]


def test_tensors_of_one_entry_and_of_none_have_masks():
    assert erdos_renyi_kernel([(6, 6), (4,), (), (0,)], 0.5) == [15, 4, 1, 0]
    assert random_mask((), 1, torch.Generator()).equal(torch.tensor(True))
    assert random_mask((0, 3), 0, torch.Generator()).shape == (0, 3)


def test_random_mask_has_exactly_so_many_entries():
    drawn = [random_mask((5, 4), 7, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert [int(mask.sum()) for mask in drawn] == [7, 7, 7]
    assert drawn[0].shape == (5, 4)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_regrown_mask_matches_hand_computed_value():
    """1 and −2 are dropped; 8 and 7 promise most among the inactive, one of which was just dropped."""
    mask = torch.tensor([[True, True, True], [False, False, True]])
    weights = torch.tensor([[1.0, -5.0, -2.0], [0.0, 0.0, 3.0]])
    promise = torch.tensor([[8.0, 99.0, 1.0], [7.0, 2.0, 99.0]])
    assert regrown_mask(mask, weights, promise, 2).tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("active", [0, 1, 7, 20])
def test_regrown_mask_keeps_the_number_of_active_entries(active):
    generator = torch.Generator().manual_seed(0)
    mask = random_mask((4, 5), active, generator)
    for count in range(active + 1):
        weights, promise = torch.randn(2, 4, 5, generator=generator)
        new = regrown_mask(mask, weights, promise.abs(), count)
        assert int(new.sum()) == active
        assert int((new & ~mask).sum()) <= count


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_regrown_mask_keeps_the_number_where_values_are_alike_or_broken(value):
    mask = random_mask((6, 6), 11, torch.Generator().manual_seed(0))
    values = torch.full((6, 6), value)
    assert int(regrown_mask(mask, values, values, 5).sum()) == 11


def test_regrown_mask_of_a_dense_tensor_stays_dense():
    dense = torch.ones(3, 3, dtype=torch.bool)
    assert regrown_mask(dense, torch.randn(3, 3), torch.rand(3, 3), 4).all()


def test_regrown_mask_does_not_depend_on_the_memory_format():
    generator = torch.Generator().manual_seed(0)
    mask = random_mask((4, 3, 2, 2), 20, generator)
    weights, promise = torch.randn(2, 4, 3, 2, 2, generator=generator)
    expected = regrown_mask(mask, weights, promise, 9)
    layout = {"memory_format": torch.channels_last}
    assert torch.equal(regrown_mask(mask.to(**layout), weights.to(**layout), promise, 9), expected)
