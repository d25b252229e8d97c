"""Clients that are drawn when they are looked at."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.core.private_steps import RecordPrivacy
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.module import FederatedData
from fl_lightning.data.population import Population
from fl_lightning.data.shifts import RotationSkew
from fl_lightning.errors import ConfigError
from fl_lightning.methods.fedavg import FedAvg

MILLION = 1_000_000


class Made(Dataset):
    """A data set that is made, not read."""

    def __init__(self, content):
        self.content = content

    def arrays(self):
        return self.content


@pytest.fixture
def drawn(make_data):
    """A population from 400 samples of four classes, of which a quarter is the official test part."""
    content = make_data(((100, 60, 40, 200),)).arrays
    order = torch.from_numpy(np.random.default_rng(0).permutation(400))
    arrays = Arrays(content.x[order], content.y[order], 300, content.classes)

    def make(clients=MILLION, seed=0, samples=20, beta=None, **options) -> FederatedData:
        data = FederatedData(Made(arrays), Population(samples, beta), clients, batch_size=4, **options)
        data.setup(seed)
        return data

    return make


def parts(client):
    return client.train, client.validation, client.test


def test_nothing_is_made_of_clients_that_nobody_looks_at(drawn, monkeypatch):
    made = []
    monkeypatch.setattr(FederatedData, "_client", lambda self, client, part: made.append(client))
    data = drawn()
    assert len(data.clients) == MILLION
    assert (data.num_train[MILLION - 1], data.num_test[3]) == (15, 5)
    data.clients[MILLION - 1]
    assert made == [MILLION - 1]
    with pytest.raises(IndexError):
        data.clients[MILLION]


def test_data_with_groups_can_be_drawn_from(drawn):
    """It ended in a traceback; whose groups a client has would be listed for a million of them."""
    arrays = drawn(clients=50).arrays
    groups = torch.arange(len(arrays.y)) % 7
    data = FederatedData(Made(replace(arrays, groups=groups)), Population(20), 50, batch_size=4)
    data.setup(0)
    assert "groups" not in data.partition_record()
    assert data.partition_record()["hash"] == data.partition_hash


@pytest.mark.parametrize("beta", [None, 0.1, 100.0])
@pytest.mark.parametrize("split", ["holdout", "matched", "global"])
def test_client_is_the_same_whenever_and_among_however_many(drawn, split, beta):
    options = {"split": split, "beta": beta, "validation_fraction": 0.2}
    first, again, fewer = drawn(**options), drawn(**options), drawn(clients=50, **options)
    for data in (again, fewer):
        for client in (41, 7, 49):
            for own, other in zip(parts(data.clients[client]), parts(first.clients[client]), strict=True):
                assert torch.equal(own, other)
    assert again.partition_hash == first.partition_hash != fewer.partition_hash
    assert drawn(seed=1, **options).partition_hash != first.partition_hash
    assert not torch.equal(drawn(seed=1, **options).clients[7].train, first.clients[7].train)


@pytest.mark.parametrize(("beta", "moves"), [(None, False), (0.1, True)])
def test_hash_is_over_labels_where_samples_are_drawn_by_them(drawn, beta, moves):
    data = drawn(clients=50, beta=beta)
    content = replace(data.arrays, y=data.arrays.y.flip(0), digest="")
    other = FederatedData(Made(content), Population(20, beta), 50)
    other.setup(0)
    assert (other.partition_hash != data.partition_hash) == moves
    assert torch.equal(other.clients[7].train, data.clients[7].train) != moves
    assert other.former_hash == data.former_hash
    assert (data.former_hash != data.partition_hash) == moves


@pytest.mark.parametrize("beta", [None, 0.1])
@pytest.mark.parametrize("split", ["holdout", "matched", "global"])
def test_nobody_is_tested_on_what_anybody_trains_on(drawn, split, beta):
    data = drawn(clients=200, split=split, beta=beta, validation_fraction=0.2)
    train, validation, test = (torch.cat(own).unique() for own in zip(*map(parts, data.clients), strict=True))
    union = data.server_test
    for one, other in ((train, validation), (train, union), (validation, union)):
        assert not np.intersect1d(one, other).size
    assert np.isin(test, union).all()
    assert np.isin(validation, data.validation_union).all()
    assert (union.diff() > 0).all()
    sizes = {"holdout": (12, 3, 5), "matched": (16, 4, 7), "global": (16, 4, 0)}[split]
    for client in data.clients:
        assert tuple(map(len, parts(client))) == sizes
        assert all((own.diff() > 0).all() for own in parts(client))  # in order, and none twice
    if split != "holdout":
        assert int(train.max()) < 300 <= int(union.min())


def test_clients_have_the_mix_of_the_data_or_their_own(drawn):
    def classes_of(data):
        return data.class_counts() / data.num_train[0]

    alike, own = classes_of(drawn(clients=400, samples=40)), classes_of(drawn(clients=400, samples=40, beta=0.1))
    assert np.abs(alike.mean(0) - [0.25, 0.15, 0.1, 0.5]).max() < 0.03
    assert np.abs(own.mean(0) - 0.25).max() < 0.06  # each class is as likely to be a client's main one
    assert own.max(1).mean() > 0.75 > 0.6 > alike.max(1).mean()


def test_class_without_enough_samples_gives_its_share_to_the_others(drawn):
    data = drawn(clients=50, samples=200, beta=0.01)
    assert all(len(client.train.unique()) == 150 for client in data.clients)


def test_tuning_looks_at_validation_parts_alone(drawn):
    data = drawn(clients=9, validation_fraction=0.2, evaluate_on="validation")
    plain = drawn(clients=9, validation_fraction=0.2)
    assert torch.equal(data.clients[3].test, plain.clients[3].validation)
    assert np.isin(data.clients[3].test, data.server_test).all()
    assert data.num_test.tolist() == [3] * 9
    assert not len(data.clients[3].validation)


def test_record_says_whom_it_shows(drawn):
    record = drawn(clients=2000).partition_record()
    assert (record["num_clients"], len(record["class_counts"]), record["clients"]) == (2000, 1000, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, r"data\.partition\.samples: must be at least 1, got 0"),
        ({"samples": 401}, r"data\.partition\.samples: a client has 301 of them for the training part, .* only 300"),
        ({"beta": 0.0}, r"data\.partition\.beta: must be above 0"),
        ({"split": "file"}, r"data\.split: 'file' needs a partition that lists each part"),
        ({"shift": RotationSkew([0.0, 90.0])}, r"data\.shift: must be null where data\.partition is Population"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(drawn, options, message):
    with pytest.raises(ConfigError, match=message):
        drawn(clients=5, **options)


def test_a_samples_privacy_is_not_accounted_for_where_clients_share_it(drawn, run_federation, mlp):
    """`record_epsilon` was of one client alone, where eight held a sample."""
    with pytest.raises(ConfigError, match=r"^federation\.record_privacy: must be null where clients share samples"):
        run_federation(lambda: FedAvg(mlp()), 1, data=drawn(5), record_privacy=RecordPrivacy())
