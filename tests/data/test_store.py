from itertools import chain

import numpy as np
import pytest
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.store import ClientData, TensorStore

NOTHING = np.empty(0, dtype=np.int64)


def make_client(num_train, test=NOTHING):
    """Samples 0, 1, 2, … whose input is their number, so that a batch shows which they are."""
    total = num_train + len(test)
    x = torch.arange(total, dtype=torch.float32).unsqueeze(1)
    arrays = Arrays(x, torch.arange(total) % 3, total, ("a", "b", "c", "d"))
    return ClientData(0, TensorStore(arrays), 4, np.arange(num_train), NOTHING, test)


def plain_steps(client, seed, batch_size, steps_per_bundle, **rules):
    bundles = client.bundles(seed, batch_size, steps_per_bundle, **rules)
    return [x.flatten().int().tolist() for bundle in bundles for x, _ in bundle.steps()]


def test_mini_batches_may_be_larger_than_any_data():
    client = make_client(5)
    steps = plain_steps(client, 1, 2**62, 16)
    assert [sorted(step) for step in steps] == [[0, 1, 2, 3, 4]]
    assert steps == plain_steps(client, 1, 5, 1)


def test_gather_normalises_images_per_channel():
    x = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(2, 2, 1, 1)
    store = TensorStore(Arrays(x, torch.tensor([1, 0]), 2, ("a", "b"), (0.5, 0.2), (0.5, 0.1)))
    out, y = store.gather(torch.tensor([1, 0]))
    torch.testing.assert_close(out.flatten(1), torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
    assert out.dtype == torch.float32
    assert y.tolist() == [0, 1]


def test_gather_scales_images_without_constants_to_one():
    store = TensorStore(Arrays(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), torch.tensor([0]), 1, ("a",)))
    assert store.gather(torch.tensor([0]))[0].item() == pytest.approx(1.0)


def test_pixel_mean_and_std_take_normalised_images_back_to_0_1():
    x = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(2, 2, 1, 1)
    store = TensorStore(Arrays(x, torch.tensor([1, 0]), 2, ("a", "b"), (0.5, 0.2), (0.5, 0.1)))
    mean, std = store.pixel_mean_and_std()
    assert mean.shape == std.shape == (1, 2, 1, 1)
    torch.testing.assert_close(store.gather(torch.arange(2))[0] * std + mean, x.float() / 255)


def test_inputs_that_are_floats_are_given_as_they_are():
    mean, std = make_client(3).store.pixel_mean_and_std()
    assert (mean.item(), std.item()) == (0.0, 1.0)


def test_gather_leaves_tokens_and_floats_as_they_are():
    for x in (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5], [1.5]])):
        out, _ = TensorStore(Arrays(x, torch.tensor([0, 0]), 2, ("a",))).gather(torch.tensor([1]))
        assert torch.equal(out, x[1:])
        assert out.dtype == x.dtype


def test_gather_lays_images_out_channels_last_with_the_same_values(make_arrays):
    x = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    arrays = Arrays(x, torch.zeros(5, dtype=torch.int64), 5, ("a",), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    plain, last = TensorStore(arrays), TensorStore(arrays, channels_last=True)
    indices = torch.tensor([4, 0, 2])
    assert torch.equal(plain.gather(indices)[0], last.gather(indices)[0])
    assert last.gather(indices)[0].is_contiguous(memory_format=torch.channels_last)
    assert last.gather(indices)[0][1:].is_contiguous(memory_format=torch.channels_last)
    assert plain.gather(indices)[0].is_contiguous()


def test_store_moves_to_a_device_in_place(make_arrays):
    store = TensorStore(make_arrays([3]))
    assert store.to("cpu") is store
    assert store.device.type == "cpu"
    assert store.fits("cpu")
    assert store.num_bytes == 3 * 16 + 3 * 8


def test_an_epoch_uses_every_sample_once_in_a_seeded_order():
    client = make_client(23)
    order = list(chain(*plain_steps(client, 5, 4, 1)))
    assert sorted(order) == list(range(23))
    assert order == torch.randperm(23, generator=torch.Generator().manual_seed(5)).tolist()
    assert order != list(chain(*plain_steps(client, 6, 4, 1)))


@pytest.mark.parametrize("steps_per_bundle", [2, 3, 6, 100])
def test_bundles_hold_the_same_batches_whatever_their_size(steps_per_bundle):
    client = make_client(23)
    assert plain_steps(client, 5, 4, steps_per_bundle) == plain_steps(client, 5, 4, 1)
    assert len(client.bundles(5, 4, steps_per_bundle)) == -(-6 // steps_per_bundle)


def test_bundle_steps_are_views_with_their_labels():
    bundle = make_client(10).bundles(0, 4, 16)[0]
    steps = list(bundle.steps())
    assert [len(y) for _, y in steps] == [4, 4, 2]
    assert steps[1][0].data_ptr() == bundle.x[4:].data_ptr()
    for x, y in steps:
        assert torch.equal(x.flatten().long() % 3, y)


@pytest.mark.parametrize(
    ("samples", "rules", "sizes"),
    [
        (10, {}, [4, 4, 2]),
        (9, {}, [4, 4, 1]),
        (10, {"drop_last": True}, [4, 4]),
        (8, {"drop_last": True}, [4, 4]),
        (3, {"drop_last": True}, [3]),
        (9, {"drop_single": True}, [4, 4]),
        (10, {"drop_single": True}, [4, 4, 2]),
        (1, {"drop_single": True}, [1]),
        (1, {"drop_last": True, "drop_single": True}, [1]),
        (0, {}, []),
    ],
)
def test_last_batch_rules(samples, rules, sizes):
    client = make_client(samples)
    steps = plain_steps(client, 0, 4, 2, **rules)
    assert [len(step) for step in steps] == sizes
    assert client.num_steps(4, **rules) == len(sizes)


def test_batch_size_one_keeps_every_batch():
    assert make_client(3).num_steps(1, drop_last=True, drop_single=True) == 3


def test_client_counts_its_classes():
    client = make_client(4, test=np.array([4, 5]))
    assert client.class_counts.tolist() == [2, 1, 1, 0]
    assert client.held_classes.tolist() == [True, True, True, False]
    assert (client.num_train, client.num_test) == (4, 2)


def test_batches_come_in_fixed_order():
    client = make_client(5, test=np.array([7, 6, 5]))
    assert [x.flatten().tolist() for x, _ in client.batches("test", 2)] == [[7, 6], [5]]
    assert [len(y) for _, y in client.batches("train")] == [5]
    assert list(client.batches("validation")) == []


@pytest.mark.parametrize(("share", "samples"), [(1.0, 10), (0.5, 5), (0.01, 1)])
def test_bundles_of_a_share_hold_so_many_samples_each_once(share, samples):
    client = make_client(10)
    drawn, other, again = (
        [i for step in plain_steps(client, seed, batch_size=4, steps_per_bundle=1, share=share) for i in step]
        for seed in (3, 4, 3)
    )
    assert len(drawn) == len(set(drawn)) == samples
    assert drawn == again != other


def test_clients_know_the_batch_size_of_their_federation(make_data):
    assert {client.batch_size for client in make_data(batch_size=7).clients} == {7}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8, 8), 512), ((1, 28, 28), 256), ((3, 32, 32), 64), ((3, 224, 224), 16), ((40,), 512), ((0,), 512)],
)
def test_large_inputs_pass_in_smaller_batches_on_a_cpu(shape, expected):
    store = TensorStore(Arrays(torch.zeros(3, *shape), torch.zeros(3, dtype=torch.int64), 3, ("a",)))
    assert store.fitting_batch == expected
    store.target = torch.device("cuda")
    assert store.fitting_batch == 512


def test_no_samples_at_all_have_a_batch_size_too():
    store = TensorStore(Arrays(torch.zeros(0, 1, 28, 28), torch.zeros(0, dtype=torch.int64), 0, ("a",)))
    assert store.fitting_batch == 512
