"""Splits of public code: the numbers that NIID-Bench's, Flower's baseline and PFLlib's drew when they were run."""

import numpy as np
import pytest

from fl_lightning.data.replayed import NIIDBenchClasses, NIIDBenchDirichlet, PFLlibDirichlet
from fl_lightning.errors import ConfigError

LABELS = np.arange(1000) % 10
UNUSED = np.random.default_rng(0)
DIRICHLET = {  # counts by class of five clients, as the public code printed them
    ("flower", None): [
        [10, 13, 0, 2, 46, 6, 32, 21, 0, 23],
        [10, 13, 33, 45, 9, 15, 8, 33, 91, 0],
        [4, 21, 10, 2, 4, 35, 59, 29, 0, 57],
        [28, 52, 50, 29, 37, 14, 0, 0, 0, 0],
        [48, 1, 7, 22, 4, 30, 1, 17, 9, 20],
    ],
    ("niid_bench", None): [
        [1, 18, 25, 28, 7, 0, 6, 5, 49, 51],
        [35, 69, 52, 0, 0, 1, 69, 0, 0, 0],
        [61, 1, 10, 18, 10, 3, 3, 2, 48, 21],
        [0, 11, 12, 7, 0, 93, 5, 85, 0, 0],
        [3, 1, 1, 47, 83, 3, 17, 8, 3, 28],
    ],
    ("niid_bench", 1): [
        [0, 2, 46, 0, 31, 11, 22, 73, 20, 0],
        [32, 1, 8, 13, 19, 0, 2, 9, 42, 89],
        [55, 93, 36, 2, 8, 11, 0, 0, 0, 0],
        [7, 0, 9, 64, 25, 54, 64, 0, 0, 0],
        [6, 4, 1, 21, 17, 24, 12, 18, 38, 11],
    ],
}
FIRST = {  # each client's first three samples
    ("flower", None): [[17, 24, 27], [2, 3, 7], [6, 12, 16], [0, 1, 4], [5, 9, 53]],
    ("niid_bench", None): [[3, 8, 9], [1, 11, 12], [0, 2, 10], [5, 6, 7], [4, 14, 19]],
    ("niid_bench", 1): [[7, 12, 14], [4, 8, 9], [0, 1, 2], [3, 6, 10], [5, 15, 17]],
}
CLASSES = {  # the classes of ten clients
    "flower": [(0, 7), (1, 6), (2, 4), (3, 4), (4, 8), (0, 5), (2, 6), (0, 7), (5, 8), (7, 9)],
    "niid_bench": [(0, 6), (1, 6), (0, 2), (3, 4), (4, 8), (5, 7), (4, 6), (5, 7), (8, 9), (3, 9)],
}
FIRST_OF_CLASSES = {
    "flower": [[0, 20, 37], [1, 11, 21], [2, 4, 22], [3, 13, 23], [14, 24, 44]],
    "niid_bench": [[10, 20, 26], [1, 6, 11], [0, 2, 12], [13, 23, 24], [14, 18, 28]],
}


def counts(parts, num_classes=10):
    return [np.bincount(LABELS[part], minlength=num_classes).tolist() for part in parts]


@pytest.mark.parametrize(("code", "seed"), DIRICHLET)
def test_dirichlet_draws_what_the_public_code_draws(code, seed):
    parts = NIIDBenchDirichlet(0.5, code, seed).assign(LABELS, 5, 10, UNUSED)
    assert counts(parts) == DIRICHLET[code, seed]
    assert [part[:3].tolist() for part in parts] == FIRST[code, seed]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


@pytest.mark.parametrize("code", CLASSES)
def test_classes_are_those_that_the_public_code_draws(code):
    parts = NIIDBenchClasses(2, code).assign(LABELS, 10, 10, UNUSED)
    assert [tuple(np.flatnonzero(row)) for row in counts(parts)] == CLASSES[code]
    assert [part[:3].tolist() for part in parts[:5]] == FIRST_OF_CLASSES[code]
    held = np.array(counts(parts))
    assert all(column[column > 0].max() - column[column > 0].min() <= 1 for column in held.T)  # even shares


def test_pfllibs_clients_are_those_that_its_script_makes():
    parts = PFLlibDirichlet(0.1).assign(LABELS, 5, 10, UNUSED)
    assert counts(parts) == [
        [0, 0, 63, 0, 18, 0, 10, 97, 2, 97],
        [95, 0, 0, 0, 6, 4, 0, 0, 71, 0],
        [0, 99, 36, 0, 0, 0, 24, 0, 12, 2],
        [0, 0, 1, 96, 4, 95, 63, 0, 0, 0],
        [5, 1, 0, 4, 72, 1, 3, 3, 15, 1],
    ]
    assert [part[:3].tolist() for part in parts] == [[7, 9, 12], [0, 8, 10], [1, 2, 11], [3, 5, 6], [4, 24, 34]]


@pytest.mark.parametrize("clients", [20, 100])
def test_pfllibs_clients_have_forty_samples_or_half_a_fair_share(clients):
    sizes = [len(part) for part in PFLlibDirichlet(1.0).assign(LABELS, clients, 10, UNUSED)]
    assert min(sizes) >= min(40, 1000 // clients // 2)
    assert sum(sizes) == 1000


def test_flowers_split_of_cifar10_is_more_skewed_than_the_papers():
    labels = np.repeat(np.arange(10), 5000)  # who holds how many of which class depends on the classes' sizes alone
    sizes = [len(p) for p in NIIDBenchDirichlet(0.5, "flower").assign(labels, 10, 10, UNUSED)]
    assert sizes == [1785, 5453, 5426, 5263, 7013, 5062, 5051, 6092, 5142, 3713]


def test_more_clients_than_their_ten_samples_each_are_refused():
    with pytest.raises(ConfigError, match=r"^data\.num_clients: must be at most 2, 10 each of 29 samples, got 3"):
        NIIDBenchDirichlet().assign(np.arange(29) % 10, 3, 10, UNUSED)


def test_the_runs_own_seed_changes_nothing():
    for rule in (NIIDBenchDirichlet(), NIIDBenchClasses(), PFLlibDirichlet()):
        once, again = (rule.assign(LABELS, 10, 10, np.random.default_rng(seed)) for seed in (1, 2))
        assert all(np.array_equal(*pair) for pair in zip(once, again, strict=True))


def test_every_client_has_ten_samples():
    parts = NIIDBenchDirichlet(0.1, "flower").assign(LABELS, 20, 10, UNUSED)
    assert min(map(len, parts)) >= 10


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NIIDBenchDirichlet(0.0), "partition.beta"),
        (lambda: NIIDBenchDirichlet(seed=-1), "partition.seed"),
        (lambda: PFLlibDirichlet(-1.0), "partition.beta"),
        (lambda: PFLlibDirichlet().assign(LABELS, 1001, 10, UNUSED), "data.num_clients"),
        (lambda: NIIDBenchClasses(0), "partition.classes"),
        (lambda: NIIDBenchClasses(11).assign(LABELS, 10, 10, UNUSED), "at most 10"),
        (lambda: NIIDBenchDirichlet().assign(LABELS, 101, 10, UNUSED), "data.num_clients"),
        (lambda: NIIDBenchDirichlet(0.001, "flower").assign(LABELS, 90, 10, UNUSED), "no draw of 1000"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(make, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)
