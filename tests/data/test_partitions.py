import numpy as np
import pytest

from fl_lightning.data.partitions import IID, ClassesPerClient, Dirichlet, NWayKShot, Shards
from fl_lightning.data.skews import Pathological, PowerLaw
from fl_lightning.errors import ConfigError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), [40, 60, 50, 70, 45, 55, 65, 35, 80, 50]))
ALL = [
    IID(),
    Dirichlet(0.1, min_samples=5),
    Dirichlet(0.5, min_samples=0, balance=False),
    ClassesPerClient(2),
    ClassesPerClient(3, balanced=False),
    ClassesPerClient(3, even=False),
    Shards(2),
    Shards(2, distinct=False),
    NWayKShot(3, 4, 1, 2, stride=6),
]


def name(partition):
    return "-".join([type(partition).__name__, *(f"{k}={v}" for k, v in vars(partition).items())])


def assign(partition, labels=LABELS, clients=5, classes=10, seed=0):
    return partition.assign(labels, clients, classes, np.random.default_rng(seed))


def counts(parts, labels=LABELS, classes=10):
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


@pytest.mark.parametrize("partition", ALL, ids=name)
def test_no_sample_is_held_twice_and_indices_are_sorted(partition):
    parts = assign(partition)
    assert len(parts) == 5
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize(
    "partition",
    [IID(), Dirichlet(0.1, 5), Dirichlet(0.1, 0, balance=False), ClassesPerClient(2), Shards(3, distinct=False)],
    ids=name,
)
def test_every_sample_is_held_once(partition):
    assert np.array_equal(np.sort(np.concatenate(assign(partition))), np.arange(len(LABELS)))


@pytest.mark.parametrize("partition", ALL, ids=name)
def test_a_seed_gives_the_same_partition_and_another_seed_another(partition):
    first, again, other = assign(partition), assign(partition), assign(partition, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("partition", ALL[:-1], ids=name)
def test_one_client_works(partition):
    parts = assign(partition, clients=1)
    assert len(parts) == 1
    assert len(parts[0]) > 0


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, assign(IID(), np.zeros(11, dtype=np.int64), 3, 1))) == [3, 4, 4]


def test_iid_refuses_more_clients_than_samples():
    with pytest.raises(ConfigError, match=r"data.num_clients: must be at most 3, the number of samples, got 4"):
        assign(IID(), np.zeros(3, dtype=np.int64), 4, 1)


def test_dirichlet_gives_every_client_min_samples():
    for seed in range(20):
        assert min(map(len, assign(Dirichlet(0.1, min_samples=30), clients=10, seed=seed))) >= 30


def test_dirichlet_with_small_beta_concentrates_classes_and_with_large_beta_spreads_them():
    few = (counts(assign(Dirichlet(0.05, 5))) > 0).sum(1).mean()
    many = (counts(assign(Dirichlet(100.0, 5))) > 0).sum(1).mean()
    assert few < 6
    assert many == 10


def test_dirichlet_balance_stops_a_client_at_its_fair_share():
    """A client above N/K got there with its last class, so without that class it is below."""
    for seed in range(10):
        held = counts(assign(Dirichlet(0.1, 1), seed=seed))
        for row in held:
            last = np.flatnonzero(row)[-1]
            assert row[:last].sum() < len(LABELS) / 5


def test_dirichlet_shares_follow_the_proportions():
    """One class over two clients: floor(p * N) for the first, the rest for the second."""
    labels = np.zeros(100, dtype=np.int64)
    first, second = assign(Dirichlet(1.0, 0), labels, 2, 1)
    p = np.random.default_rng(0).dirichlet([1.0, 1.0])
    assert (len(first), len(second)) == (int(p[0] * 100), 100 - int(p[0] * 100))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_dirichlet_takes_even_draws_where_later_classes_have_no_samples(classes):
    """Two samples and two clients: once each has one, nobody takes more."""
    parts = assign(Dirichlet(1.0, min_samples=1), np.zeros(2, dtype=np.int64), 2, classes)
    assert sorted(part.tolist() for part in parts) == [[0], [1]]


@pytest.mark.parametrize("beta", [1e-3, 1e-6, 1e6])
def test_dirichlet_survives_extreme_beta(beta):
    assert sum(map(len, assign(Dirichlet(beta, 0)))) == len(LABELS)


def test_dirichlet_refuses_impossible_min_samples_at_once():
    with pytest.raises(
        ConfigError, match=r"data.partition.min_samples: 5 clients cannot .* of 550 .* at most 110, got 111"
    ):
        assign(Dirichlet(0.1, min_samples=111))


def test_dirichlet_gives_up_with_a_remedy():
    with pytest.raises(ConfigError, match=r"beta=0.001.* 10 clients at least 50 samples in none of 10000 draws.*lower"):
        assign(Dirichlet(0.001, min_samples=50), clients=10)


@pytest.mark.parametrize("balanced", [True, False])
def test_classes_per_client_gives_exactly_that_many_classes(balanced):
    held = counts(assign(ClassesPerClient(3, balanced), clients=7)) > 0
    assert (held.sum(1) == 3).all()
    holders = held.sum(0)
    assert holders.max() - holders.min() <= 1
    assert holders.min() >= 1


def test_classes_in_turn_leave_the_others_to_chance():
    held = counts(assign(ClassesPerClient(2, even=False), clients=20)) > 0
    assert (held.sum(1) == 2).all()
    assert all(held[client, client % 10] for client in range(20))
    assert held.sum(0).max() - held.sum(0).min() > 1


def test_classes_per_client_shares_equally_where_balanced():
    held = counts(assign(ClassesPerClient(2), clients=20))
    for column, size in zip(held.T, np.bincount(LABELS), strict=True):
        shares = column[column > 0]
        assert shares.sum() == size
        assert shares.max() - shares.min() <= 1


def test_classes_per_client_shares_unequally_where_not_balanced():
    column = np.array([len(part) for part in assign(ClassesPerClient(1, False), np.zeros(1000, dtype=np.int64), 3, 1)])
    assert column.sum() == 1000
    assert column.min() >= 1
    assert column.max() - column.min() > 1


def test_classes_per_client_passes_over_classes_without_samples():
    labels = np.repeat([0, 2], 10)
    assert (counts(assign(ClassesPerClient(2), labels, 3, 4), labels, 4)[:, [1, 3]] == 0).all()


@pytest.mark.parametrize("partition", [ClassesPerClient(11), Shards(11)], ids=name)
def test_more_classes_than_exist_are_refused(partition):
    with pytest.raises(ConfigError, match=r"must be at most 10, the number of classes with samples, got 11"):
        assign(partition)


@pytest.mark.parametrize("partition", [ClassesPerClient(1), Shards(1)], ids=name)
def test_a_class_with_fewer_samples_than_holders_is_refused(partition):
    with pytest.raises(ConfigError, match=r"class 0 is too small: 3 clients hold it and it has 2 samples"):
        assign(partition, np.zeros(2, dtype=np.int64), 3, 1)


def test_distinct_shards_give_equally_many_samples_of_every_held_class():
    """20 clients, 4 classes each, 10 classes: 8 holders of each; the smallest has 35, so a shard is 35 // 8 = 4."""
    held = counts(assign(Shards(4), clients=20))
    assert ((held > 0).sum(1) == 4).all()
    assert set(held[held > 0]) == {4}


def test_plain_shards_are_pieces_of_the_sorted_labels():
    labels = np.repeat([0, 1, 2], 4)
    parts = assign(Shards(1, distinct=False), labels, 3, 3)
    assert sorted(part.tolist() for part in parts) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [len(part) for part in assign(Shards(2, distinct=False), labels, 3, 3)] == [4, 4, 4]


def test_more_shards_than_samples_are_refused():
    with pytest.raises(ConfigError, match=r"data.partition.shards: 3 clients need 12 shards but there are 10 samples"):
        assign(Shards(4, distinct=False), np.zeros(10, dtype=np.int64), 3, 1)


def test_a_dirichlet_draw_with_empty_clients_is_kept_and_filled():
    labels = np.repeat([0, 1], 500)
    plain = assign(Dirichlet(0.05, min_samples=0, balance=False), labels, 10, 2)
    filled = assign(Dirichlet(0.05, min_samples=0, balance=False, fill_empty=True), labels, 10, 2)
    empty = [client for client, part in enumerate(plain) if len(part) == 0]
    assert len(empty) >= 2
    assert [len(filled[client]) for client in empty] == [1] * len(empty)
    assert sorted(np.concatenate(filled)) == list(range(1000))
    others = {client: part for client, part in enumerate(plain) if client not in empty}
    lost = {client: len(part) - len(filled[client]) for client, part in others.items()}
    assert sum(lost.values()) == len(empty)
    assert max(lost, key=lambda client: lost[client]) == max(others, key=lambda client: len(others[client]))


def test_n_way_k_shot_ranges():
    def k_range(**kwargs):
        return NWayKShot(3, 100, **kwargs).k_range()

    assert NWayKShot(3, 100).n_range(10) == (3, 3)
    assert NWayKShot(3, 100, std_n=2).n_range(10) == (2, 5)
    assert NWayKShot(5, 100, std_n=2).n_range(6) == (3, 5)
    assert NWayKShot(1, 100).n_range(2) == (1, 1)
    assert k_range() == (100, 100)
    assert k_range(std_k=2) == (99, 102)
    assert k_range(std_k=2, tight=True) == (99, 100)
    assert k_range(std_k=1, tight=True) == (100, 100)


def test_n_way_k_shot_takes_the_slices_of_the_class_sorted_training_part():
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), 40))
    partition = NWayKShot(2, 5, std_n=1, std_k=2, stride=8, test_shots=3)
    parts = assign(partition, labels, 5, 4)
    held = counts(parts, labels, 4)
    assert set((held > 0).sum(1)) == {2, 3}
    for client, part in enumerate(parts):
        shots = set(held[client][held[client] > 0])
        assert len(shots) == 1
        k = shots.pop()
        assert 4 <= k <= 7
        for c in np.flatnonzero(held[client]):
            expected = np.flatnonzero(labels == c)[client * 8 : client * 8 + k]
            assert np.array_equal(part[labels[part] == c], expected)


def test_n_way_k_shot_takes_the_slices_of_the_class_sorted_test_part():
    test_labels = np.tile(np.arange(3), 10)
    train_counts = np.array([[5, 0, 5], [0, 5, 5]])
    parts = NWayKShot(2, 5, test_shots=4).match(test_labels, train_counts, np.random.default_rng(0))
    assert parts[0].tolist() == [0, 2, 3, 5, 6, 8, 9, 11]  # classes 0 and 2, numbers 0 to 3
    assert parts[1].tolist() == [13, 14, 16, 17, 19, 20, 22, 23]  # classes 1 and 2, numbers 4 to 7


def test_n_way_k_shot_by_rank_among_the_holders_needs_no_more_than_they_take():
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 72))
    by_client = NWayKShot(2, 10, std_n=1, std_k=2, stride=12)
    by_holder = NWayKShot(2, 10, std_n=1, std_k=2, stride=12, slots="holder", test_shots=2)
    with pytest.raises(ConfigError, match="is too small"):
        assign(by_client, labels, 8, 5)
    parts = assign(by_holder, labels, 8, 5)
    held = counts(parts, labels, 5)
    assert ((held == 0) | ((held >= 9) & (held <= 12))).all()
    for c in range(5):
        for rank, client in enumerate(np.flatnonzero(held[:, c])):
            expected = np.flatnonzero(labels == c)[12 * rank : 12 * rank + held[client, c]]
            assert np.array_equal(parts[client][labels[parts[client]] == c], expected)
    tests = by_holder.match(np.tile(np.arange(5), 16), held, np.random.default_rng(0))
    assert [len(part) for part in tests] == (2 * (held > 0).sum(1)).tolist()
    assert len(np.unique(np.concatenate(tests))) == sum(map(len, tests))
    same = assign(NWayKShot(2, 5, stride=7), labels, 8, 5)
    ranked = assign(NWayKShot(2, 5, stride=7, slots="holder"), labels, 8, 5)
    assert np.array_equal(counts(same, labels, 5), counts(ranked, labels, 5))  # who holds what is drawn alike


def test_n_way_k_shot_names_the_class_that_is_too_small():
    with pytest.raises(ConfigError, match=r"stride: class 0 is too small: client 2 .* 25 of it and it has 24; lower"):
        assign(NWayKShot(1, 5, stride=10), np.zeros(24, dtype=np.int64), 3, 1)
    with pytest.raises(ConfigError, match=r"test_shots: class 0 .* client 1 needs test samples up to number 8"):
        NWayKShot(1, 5, test_shots=4).match(np.zeros(7, dtype=np.int64), np.ones((2, 1)), np.random.default_rng(0))


def test_n_way_k_shot_refuses_more_classes_than_exist():
    rule = r"data.partition.n: must be at most 10, the number of classes with samples, got 11"
    with pytest.raises(ConfigError, match=rule):
        assign(NWayKShot(11, 2, stride=2))


def test_match_deals_each_class_in_proportion_to_the_training_samples():
    """Class 0: 8 test samples for 30 : 10 are 6 : 2; class 1: 5 for 10 : 20 are 1.67 : 3.33, so 2 : 3."""
    test_labels = np.random.default_rng(2).permutation(np.repeat([0, 1, 2], [8, 5, 4]))
    train_counts = np.array([[30, 10, 0], [10, 20, 0], [0, 0, 0]])
    parts = IID().match(test_labels, train_counts, np.random.default_rng(0))
    assert counts(parts, test_labels, 3).tolist() == [[6, 2, 0], [2, 3, 0], [0, 0, 0]]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.flatnonzero(test_labels < 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(0.0), r"data.partition.beta: must be above 0, .*got 0.0"),
        (lambda: Dirichlet(-1.0), r"data.partition.beta: must be above 0, .*got -1.0"),
        (lambda: Dirichlet(float("nan")), r"data.partition.beta"),
        (lambda: Dirichlet(float("inf")), r"data.partition.beta"),
        (lambda: Dirichlet(0.1, min_samples=-1), r"data.partition.min_samples: must be at least 0, got -1"),
        (lambda: ClassesPerClient(0), r"data.partition.classes: must be at least 1, got 0"),
        (lambda: Shards(0), r"data.partition.shards: must be at least 1, got 0"),
        (lambda: NWayKShot(0, 5), r"data.partition.n: must be at least 1"),
        (lambda: NWayKShot(3, 0), r"data.partition.k: must be at least 1"),
        (lambda: NWayKShot(3, 5, std_n=-1), r"data.partition.std_n"),
        (lambda: NWayKShot(3, 5, std_k=6), r"data.partition.std_k: must be from 0 to k = 5, got 6"),
        (lambda: NWayKShot(3, 5, test_shots=0), r"data.partition.test_shots"),
        (lambda: NWayKShot(3, 100, std_k=20), r"data.partition.stride: must be at least 120, .* got 110"),
    ],
)
def test_constructors_refuse_bad_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "arguments", "wanted"),
    [
        (Pathological, {}, "classes"),
        (PowerLaw, {"min_samples": 1}, "classes"),
        (NWayKShot, {"k": 2, "std_n": 1, "stride": 3}, "n"),
    ],
)
def test_a_class_that_nobody_has_is_dealt_to_nobody(kind, arguments, wanted):
    """Labels from 1 to C were refused, with advice that could not help."""
    labels = np.repeat([1, 2, 4], 40)
    whole = kind(**{wanted: 2, **arguments})
    found = whole.assign(labels, 6, 5, np.random.default_rng(0))
    alike = whole.assign(np.repeat([0, 1, 2], 40), 6, 3, np.random.default_rng(0))
    assert [own.tolist() for own in found] == [own.tolist() for own in alike]
    with pytest.raises(ConfigError, match="must be at most 3, the number of classes with samples, got 4"):
        kind(**{wanted: 4, **arguments}).assign(labels, 6, 5, np.random.default_rng(0))
