import numpy as np
import pytest
import torch

from fl_lightning.data.partitions import IID, ClassesPerClient, Dirichlet, Partition
from fl_lightning.data.skews import ByGroup
from fl_lightning.data.splits import holdout, matched, server_only
from fl_lightning.errors import ConfigError


def together(clients, *names):
    return np.sort(np.concatenate([getattr(client, name) for client in clients for name in names]))


def test_holdout_merges_the_official_parts_and_uses_every_sample_once(make_arrays):
    arrays = make_arrays([60, 50], [20, 30])
    clients = holdout(Dirichlet(0.5), arrays, 4, seed=0, validation_fraction=0.1)
    assert np.array_equal(together(clients, "train", "validation", "test"), np.arange(160))


def test_holdout_cuts_a_quarter_of_each_client(make_arrays):
    clients = holdout(Dirichlet(0.5), make_arrays([100, 100]), 4, seed=0)
    for client in clients:
        assert len(client.test) == round((len(client.train) + len(client.test)) * 0.25)
        assert len(client.validation) == 0


@pytest.mark.parametrize(
    ("samples", "fraction", "train", "test"),
    [
        (1, 0.25, 1, 0),
        (2, 0.25, 1, 1),
        (3, 0.1, 2, 1),
        (2, 0.99, 1, 1),
        (4, 0.25, 3, 1),
        (4, 0.0, 4, 0),
        (8, 0.25, 6, 2),
    ],
)
def test_holdout_keeps_a_training_sample_and_a_test_sample_where_it_can(make_arrays, samples, fraction, train, test):
    (client,) = holdout(IID(), make_arrays([samples]), 1, seed=0, test_fraction=fraction)
    assert (len(client.train), len(client.test)) == (train, test)


def test_holdout_cuts_at_random_but_the_same_under_one_seed(make_arrays):
    arrays = make_arrays([50, 50])
    first, again, other = (holdout(IID(), arrays, 2, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first[0].test, again[0].test)
    assert not np.array_equal(first[0].test, other[0].test)


def test_matched_takes_training_and_test_samples_from_their_official_parts(make_arrays):
    arrays = make_arrays([40, 40, 40, 40], [10, 10, 10, 10])
    clients = matched(ClassesPerClient(2), arrays, 4, seed=0)
    assert np.array_equal(together(clients, "train"), np.arange(160))
    assert np.array_equal(together(clients, "test"), np.arange(160, 200))


def test_matched_gives_test_samples_in_the_clients_own_class_mix(make_arrays):
    arrays = make_arrays([400, 400, 400], [40, 40, 40])
    labels = arrays.y.numpy()
    for client in matched(Dirichlet(0.5), arrays, 5, seed=0, validation_fraction=0.2):
        held = np.concatenate([client.train, client.validation])
        train, test = (np.bincount(labels[part], minlength=3) for part in (held, client.test))
        assert np.abs(train / 10 - test).max() < 1


def test_a_test_part_of_nobody_that_trains_is_refused(make_arrays):
    """LEAF splits by user, too: a run of such a folder trained to its end, and had not one accuracy."""
    arrays = make_arrays([40, 40], [10, 10])
    arrays.groups = torch.cat([torch.arange(80) % 4, 4 + torch.arange(20) % 2])
    for partition, data in ((ByGroup(), arrays), (IID(), make_arrays([40, 0], [0, 10]))):
        with pytest.raises(ConfigError, match=r"^data\.split: leaves every client without a .*; use global, or hold"):
            matched(partition, data, 4, seed=0)


def test_server_only_leaves_clients_without_test_samples(make_arrays):
    clients = server_only(IID(), make_arrays([40, 40], [10, 10]), 4, seed=0)
    assert np.array_equal(together(clients, "train"), np.arange(80))
    assert all(len(client.test) == 0 for client in clients)


@pytest.mark.parametrize(("split", "name"), [(matched, "matched"), (server_only, "global")])
def test_splits_that_need_an_official_test_part_say_so(make_arrays, split, name):
    with pytest.raises(ConfigError, match=rf"data.split: '{name}' needs an official test part .* use 'holdout'"):
        split(IID(), make_arrays([40, 40]), 4, 0)


def test_validation_never_takes_the_last_training_sample(make_arrays):
    (client,) = server_only(IID(), make_arrays([1], [1]), 1, 0, validation_fraction=0.9)
    assert (len(client.train), len(client.validation)) == (1, 0)
    (client,) = server_only(IID(), make_arrays([10], [1]), 1, 0, validation_fraction=0.2)
    assert (len(client.train), len(client.validation)) == (8, 2)


def test_validation_does_not_move_the_test_samples(make_arrays):
    arrays = make_arrays([50, 50])
    plain = holdout(Dirichlet(0.5), arrays, 3, 0)
    other = holdout(Dirichlet(0.5), arrays, 3, 0, validation_fraction=0.3)
    for a, b in zip(plain, other, strict=True):
        assert np.array_equal(a.test, b.test)
        assert np.array_equal(a.train, np.sort(np.concatenate([b.train, b.validation])))


class Own(Partition):
    """Somebody's own, which does something to the labels before it shares out equally."""

    def __init__(self, first):
        self.first = first

    def assign(self, labels, num_clients, num_classes, rng):
        self.first(labels)
        return np.array_split(np.arange(len(labels)), num_clients)

    def match(self, test_labels, train_counts, rng):
        return self.assign(test_labels, len(train_counts), train_counts.shape[1], rng)


def write(labels):
    labels[:] = 0


@pytest.mark.parametrize("split", [holdout, server_only, matched])
def test_an_own_partition_cannot_write_to_the_labels_of_the_run(make_arrays, split):
    arrays = make_arrays([20, 20], [10, 10])
    before = arrays.y.clone()
    with pytest.raises(ConfigError, match=r"^data\.partition: Own raises ValueError: .*read-only"):
        split(Own(write), arrays, 2, seed=0)
    assert (arrays.y == before).all()
    assert len(split(Own(lambda labels: labels.copy().sort()), arrays, 2, seed=0)) == 2
    arrays.y[0] = 1 - arrays.y[0]  # the run itself still may, as a shift does


def test_whatever_an_own_partition_raises_is_one_line(make_arrays):
    def fail(labels):
        raise KeyError("sites")

    with pytest.raises(ConfigError, match=r"^data\.partition: Own raises KeyError: 'sites' \(test_splits\.py:\d+\)$"):
        holdout(Own(fail), make_arrays([20, 20]), 2, seed=0)
