import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.digits import Digits
from fl_lightning.data.listed import FromFile
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import IID, ClassesPerClient, Dirichlet, Partition
from fl_lightning.data.sample import Sample
from fl_lightning.data.shifts import ConceptShift
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import build_data


class Made(Dataset):
    """A data set of the tests' own, as a user would write one."""

    def __init__(self, arrays):
        self._arrays = arrays

    def arrays(self):
        return self._arrays


class Drawn(Made):
    """Samples from the global streams, at every call others."""

    def arrays(self):
        return replace(self._arrays, x=torch.randint_like(self._arrays.x, 9 + random.randrange(99)))


class DrawnOnce(Dataset):
    """Samples that are drawn when it is made."""

    def __init__(self, size: int):
        self.x, self.y = torch.randn(size, 3), torch.arange(size) % 3

    def arrays(self):
        return Arrays(self.x, self.y, len(self.y), ("a", "b", "c"))


class Shuffled(Partition):
    """Equal parts of an order from the global streams, as much public code has it."""

    def assign(self, labels, num_clients, num_classes, rng):
        order = np.random.permutation(len(labels))
        random.shuffle(order)
        return np.array_split(order, num_clients)


@pytest.fixture
def made(make_arrays):
    return Made(make_arrays([60, 60, 60], [20, 20, 20]))


def federation(made, partition=None, seed=0, **kwargs):
    data = FederatedData(made, partition or Dirichlet(0.5, min_samples=5), num_clients=4, **kwargs)
    data.setup(seed)
    return data


def test_who_holds_what_in_a_second_setup_is_what_it_is_in_a_first(made):
    twice, once = (federation(made, shift=ConceptShift(2), seed=seed) for seed in (0, 1))
    twice.setup(1)
    assert twice.partition_hash == once.partition_hash
    assert (twice.class_counts() == once.class_counts()).all()


def test_what_draws_from_the_global_streams_depends_on_the_seed_alone(made):
    first, before = federation(Drawn(made.arrays()), Shuffled()), torch.get_rng_state()
    again, other = federation(Drawn(made.arrays()), Shuffled()), federation(Drawn(made.arrays()), Shuffled(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert (again.content_hash, again.partition_hash) == (first.content_hash, first.partition_hash)
    assert (other.content_hash, other.partition_hash != first.partition_hash) == (first.content_hash, True)


def test_what_is_drawn_as_a_configuration_is_built_is_the_same_again():
    dataset = {"class_path": f"{__name__}.DrawnOnce", "init_args": {"size": 30}}
    partition = {"class_path": "fl_lightning.data.partitions.IID"}
    one, other = (build_data({"dataset": dataset, "partition": partition, "num_clients": 2}) for _ in range(2))
    assert torch.equal(one.dataset.x, other.dataset.x)


def test_holdout_gives_clients_their_parts_and_the_server_their_union(made):
    data = federation(made)
    assert [client.client for client in data.clients] == [0, 1, 2, 3]
    assert data.server_test.tolist() == sorted(i for client in data.clients for i in client.test.tolist())
    assert data.local_test
    assert data.spec.input_shape == (1, 4, 4)
    assert data.store.x.data_ptr() == data.arrays.x.data_ptr()


def test_matched_gives_the_server_the_official_test_part_if_all_classes_are_held(made):
    assert federation(made, ClassesPerClient(2), split="matched").server_test.tolist() == list(range(180, 240))


def test_global_leaves_the_official_test_part_to_the_server(made):
    data = federation(made, split="global")
    assert data.server_test.tolist() == list(range(180, 240))
    assert not data.local_test
    assert all(client.num_test == 0 for client in data.clients)


def test_partition_depends_on_the_seed_and_not_on_how_it_is_trained(made, tmp_path):
    first = federation(made)
    assert federation(made, batch_size=3, drop_last=True, cache=str(tmp_path)).partition_hash == first.partition_hash
    assert federation(made, seed=1).partition_hash != first.partition_hash
    assert federation(made, split="global").partition_hash != first.partition_hash
    assert federation(made, test_fraction=0.5).partition_hash != first.partition_hash


def test_partition_of_a_seed_never_changes(made):
    """Pinned: results under a seed can be compared between versions."""
    assert federation(made, ClassesPerClient(2)).partition_hash[:16] == "a32bd6f4c84023e2"


def test_setup_twice_does_nothing_and_with_another_seed_shares_out_anew(made):
    data = federation(made)
    clients = data.clients
    data.setup(0)
    assert data.clients is clients
    data.setup(1)
    assert data.partition_hash == federation(made, seed=1).partition_hash


def test_class_counts_are_of_the_training_parts(made):
    data = federation(made, validation_fraction=0.2)
    expected = [np.bincount(data.arrays.y[client.train].numpy(), minlength=3) for client in data.clients]
    assert np.array_equal(data.class_counts(), np.stack(expected))


@pytest.mark.parametrize("split", ["holdout", "global"])
def test_evaluating_on_the_validation_part_lays_the_test_part_aside(made, split):
    plain = federation(made, validation_fraction=0.2, split=split)
    tuning = federation(made, validation_fraction=0.2, split=split, evaluate_on="validation")
    tested = set(plain.server_test.tolist())
    assert not tested & set(tuning.server_test.tolist())
    for before, now in zip(plain.clients, tuning.clients, strict=True):
        assert torch.equal(now.train, before.train)
        assert torch.equal(now.test, before.validation)
        assert not len(now.validation)  # by which FedFomo weighs models
        assert set(now.test.tolist()) <= set(tuning.server_test.tolist())


def test_partition_record_says_who_holds_what_and_goes_through_json(made):
    data = federation(made, validation_fraction=0.2)
    record = json.loads(json.dumps(data.partition_record()))
    assert record["hash"] == data.partition_hash
    assert record["dataset"] == "Made"
    assert record["classes"] == ["0", "1", "2"]
    assert record["class_counts"] == data.class_counts().tolist()
    assert record["clients"][2]["validation"] == data.clients[2].validation.tolist()
    held = [i for client in record["clients"] for part in client.values() for i in part]
    assert sorted(held) == list(range(240))


@pytest.mark.parametrize("split", ["holdout", "matched"])
def test_evaluating_on_validation_parts_that_nobody_has_is_refused(made, split):
    """The run went through without a single figure."""
    with pytest.raises(ConfigError, match=r"^data\.evaluate_on: no client has a validation sample: take a larger"):
        federation(made, validation_fraction=1e-6, split=split, evaluate_on="validation")


@pytest.mark.parametrize("split", ["holdout", "matched", "global"])
def test_record_of_a_run_on_validation_parts_can_be_used_for_both(made, tmp_path, split):
    options = {"validation_fraction": 0.2, "split": split}
    tuning = federation(made, evaluate_on="validation", **options)
    record = tuning.partition_record()
    assert record["clients"] == federation(made, **options).partition_record()["clients"]
    assert (record["left_out"], record["hash"]) == (0, tuning.partition_hash)
    (tmp_path / "partition.json").write_text(json.dumps(record))
    listed = FromFile(str(tmp_path / "partition.json"))
    for evaluate_on in ("test", "validation"):
        data = federation(made, listed, split="file", evaluate_on=evaluate_on)
        for own, part in zip(data.clients, record["clients"], strict=True):
            assert (own.train.tolist(), own.test.tolist()) == (part["train"], part[evaluate_on])
    assert split == "global" or data.partition_hash == tuning.partition_hash


def test_record_without_test_parts_as_it_was_once_written_is_refused(made, tmp_path):
    own = {"train": [0, 1], "validation": [2], "test": [2]}
    (tmp_path / "p.json").write_text(json.dumps([own] * 4))
    with pytest.raises(ConfigError, match=r"client 0: its test part is its validation part; .* run it again"):
        federation(made, FromFile(str(tmp_path / "p.json")), split="file")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_clients": 0}, r"data.num_clients: must be at least 1, got 0"),
        ({"batch_size": 0}, r"data.batch_size: must be at least 1, got 0"),
        ({"test_fraction": 1.0}, r"data.test_fraction: must be from 0 to below 1, got 1.0"),
        ({"test_fraction": -0.1}, r"data.test_fraction"),
        ({"validation_fraction": 1.0}, r"data.validation_fraction"),
        ({"evaluate_on": "train"}, r"data.evaluate_on: must be test or validation"),
        ({"evaluate_on": "validation"}, r"data.evaluate_on: validation needs data.validation_fraction"),
        ({"split": "half"}, r"data.split: must be holdout, matched, global or file, got 'half'"),
    ],
)
def test_constructor_refuses_bad_values(made, wrong, message):
    with pytest.raises(ValueError, match=message):
        FederatedData(made, IID(), **wrong)


def test_a_client_without_a_training_sample_is_refused(made):
    class Unfair(Partition):
        def assign(self, labels, num_clients, num_classes, rng):
            return [np.arange(len(labels)), *[np.empty(0, dtype=np.int64)] * (num_clients - 1)]

    with pytest.raises(
        ValueError, match=r"data.partition: Unfair leaves client 1 without a training sample; use fewer"
    ):
        federation(made, Unfair())


def test_invalid_arrays_are_refused_when_they_are_loaded(made):
    made._arrays.y = made._arrays.y + 1
    with pytest.raises(ValueError, match=r"data.dataset: Made: label 3 of sample \d+ is out of range"):
        federation(made)


def test_one_client_with_one_sample_is_a_federation(make_arrays):
    data = FederatedData(Made(make_arrays([1])), IID(), num_clients=1)
    data.setup(0)
    assert (data.clients[0].num_train, data.clients[0].num_test, len(data.server_test)) == (1, 0, 0)
    (bundle,) = data.clients[0].bundles(0, 10, 16, drop_last=True)
    assert torch.isfinite(bundle.x).all()


def test_title_names_data_partition_and_seed():
    data = FederatedData(Digits(), Dirichlet(beta=0.5, min_samples=5), num_clients=4)
    assert data.title(3) == "Digits, Dirichlet(beta=0.5, min_samples=5), 4 clients, seed 3"
    data = FederatedData(Sample(Digits(), 300), IID(), num_clients=4)
    assert data.title(3) == "Sample(Digits), IID, 4 clients, seed 3"
