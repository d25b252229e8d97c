import numpy as np
import pytest
import torch

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.listed import FromFile
from fl_lightning.data.module import FederatedData
from fl_lightning.data.partitions import IID, Partition
from fl_lightning.data.skews import ByGroup, Pathological, PowerLaw, QuantitySkew
from fl_lightning.data.splits import from_file, holdout, matched
from fl_lightning.errors import ConfigError
from fl_lightning.sealed import write_json


class Brought(Dataset):
    """Arrays as a data set."""

    def __init__(self, content):
        self.content = content

    def arrays(self):
        return self.content


class Made(Partition):
    """Whatever it is told."""

    def __init__(self, parts):
        self.parts = parts

    def assign(self, labels, num_clients, num_classes, rng):
        return self.parts


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1, 2], [2, 3]], "gives sample 2 to client 0 and to client 1"),
        ([[0, 1, 1], [2]], "gives client 0 sample 1 twice"),
        ([[0, 1, 2]], "one list of indices for each of the 2 clients, got 1"),
        ([[0, 1], [2], [3]], "each of the 2 clients, got 3"),
        ([[0, 1], [2, 20]], "client 1: indices must be from 0 to 19, got 20"),
        ([[0, -1], [2, 3]], "client 0: indices must be from 0 to 19, got -1"),
        ([[0.0, 1.0], [2, 3]], "client 0: indices must be whole numbers"),
        ([[True, False], [2, 3]], "client 0: indices must be whole numbers"),
        ([[[0, 1]], [[2, 3]]], "client 0: indices must be whole numbers in a flat list"),
        (np.array([["a", "b"], ["c", "d"]]).tolist(), "client 0: indices must be whole numbers"),
        ("ab", "must give a list of indices for each client"),
        (None, "must give a list of indices for each client"),
    ],
)
def test_what_a_partition_makes_is_checked(make_arrays, parts, said):
    with pytest.raises(ConfigError, match=said) as caught:
        holdout(Made(parts), make_arrays([10, 10]), 2, seed=0)
    assert caught.value.key == "data.partition"


def test_lists_of_any_whole_type_are_taken(make_arrays):
    parts = [np.array([3, 1, 2], dtype=np.uint8), torch.tensor([5, 4]).tolist()]
    clients = holdout(Made(parts), make_arrays([10, 10]), 2, seed=0, test_fraction=0.0)
    assert [client.train.tolist() for client in clients] == [[1, 2, 3], [4, 5]]
    assert clients[0].train.dtype == np.int64


# --- PFLlib's pathological partition --------------------------------------------------------------------------------


def test_pathological_neighbours_share_classes_and_the_last_holder_takes_the_rest():
    labels = np.repeat(np.arange(10), 100)
    parts = Pathological(2).assign(labels, 20, 10, np.random.default_rng(0))
    held = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert [sorted(np.flatnonzero(row)) for row in held] == [[2 * (c // 4), 2 * (c // 4) + 1] for c in range(20)]
    assert (held.sum(0) == 100).all()
    for label in range(10):
        sizes = held[:, label][held[:, label] > 0]
        assert len(sizes) == 4  # ceil(20 / 10 * 2)
        assert (sizes[:3] >= 2).all()  # a tenth of 25, cut
        assert (sizes[:3] < 25).all()
        assert sizes[3] >= 25
    together = np.sort(np.concatenate(parts))
    assert np.array_equal(together, np.arange(1000))


def test_pathological_balanced_and_refusals():
    labels = np.repeat(np.arange(4), 10)
    parts = Pathological(2, balanced=True).assign(labels, 4, 4, np.random.default_rng(0))
    assert [len(part) for part in parts] == [10] * 4
    with pytest.raises(ConfigError, match="at most 4"):
        Pathological(5).assign(labels, 4, 4, np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"without a class|samples for"):
        Pathological(1).assign(labels, 50, 4, np.random.default_rng(0))


def test_quantity_skew_uses_every_sample_and_keeps_the_mix():
    labels = np.tile(np.arange(5), 400)
    parts = QuantitySkew(0.3, min_samples=20).assign(labels, 8, 5, np.random.default_rng(3))
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 2000
    assert sizes.min() >= 20
    assert sizes.max() > 4 * np.median(sizes)
    largest = np.bincount(labels[parts[int(sizes.argmax())]], minlength=5) / sizes.max()
    assert np.abs(largest - 0.2).max() < 0.05
    with pytest.raises(ConfigError, match="at most 100 clients"):
        QuantitySkew(1.0, 20).assign(labels, 101, 5, np.random.default_rng(0))


def test_power_law_gives_neighbouring_classes_in_very_different_numbers():
    labels = np.tile(np.arange(10), 400)
    parts = PowerLaw(2, min_samples=3).assign(labels, 100, 10, np.random.default_rng(0))
    held = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert [np.flatnonzero(row).tolist() for row in held] == [sorted({c % 10, (c + 1) % 10}) for c in range(100)]
    assert (held.sum(0) == 400).all()
    assert held[held > 0].min() >= 3
    sizes = np.sort(held.sum(1))
    assert sizes[-10:].sum() > 10 * sizes[:50].sum() / 5
    even = PowerLaw(2, sigma=0.0).assign(labels, 100, 10, np.random.default_rng(0))
    assert {len(part) for part in even} == {40}
    with pytest.raises(ConfigError, match=r"min_samples: class 0 has 400 samples for 20 clients.*21"):
        PowerLaw(2, min_samples=21).assign(labels, 100, 10, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="at most 10"):
        PowerLaw(11).assign(labels, 100, 10, np.random.default_rng(0))


# --- groups ---------------------------------------------------------------------------------------------------------


def grouped(make_arrays, groups):
    arrays = make_arrays([10, 10], [4, 4])
    arrays.groups = torch.tensor(groups)
    arrays.validate("Test")
    return arrays


def test_groups_are_never_torn_apart_and_test_samples_follow_them(make_arrays):
    arrays = grouped(make_arrays, [i % 5 for i in range(28)])
    clients = matched(ByGroup(), arrays, 3, seed=0)
    owners = {}
    for client, own in enumerate(clients):
        for part in (own.train, own.test):
            for group in set(arrays.groups[torch.from_numpy(part)].tolist()):
                assert owners.setdefault(group, client) == client
    assert set(owners) == set(range(5))
    assert sum(len(own.train) for own in clients) == 20
    assert sum(len(own.test) for own in clients) == 8


def test_groups_may_have_any_numbers(make_arrays):
    """Ids of users: a place for each number up to the largest was 7 TiB."""
    small = [i % 5 for i in range(28)]
    ids = grouped(make_arrays, [10**12 + 7 * group for group in small])
    for data, seed in ((small, 0), (small, 1)):
        known, own = (matched(ByGroup(), arrays, 3, seed=seed) for arrays in (grouped(make_arrays, data), ids))
        assert [part.train.tolist() for part in own] == [part.train.tolist() for part in known]


def test_so_many_groups_a_client_and_small_ones_left_out(make_arrays):
    arrays = grouped(make_arrays, [0] * 9 + [1] * 9 + [2, 3] + [0, 1] * 4)
    clients = holdout(ByGroup(per_client=1, min_samples=5), arrays, 2, seed=0)
    found = [set(arrays.groups[torch.from_numpy(np.concatenate([c.train, c.test]))].tolist()) for c in clients]
    assert sorted(map(tuple, found)) == [(0,), (1,)]
    with pytest.raises(ConfigError, match="has 2 groups of at least 5 samples, and 3 are needed"):
        holdout(ByGroup(min_samples=5), arrays, 3, seed=0)
    with pytest.raises(ConfigError, match="needs a data set with groups"):
        holdout(ByGroup(), make_arrays([10, 10]), 2, seed=0)
    arrays.groups = arrays.groups[:5]
    with pytest.raises(ConfigError, match=r"groups must be int64 \[28\]"):
        arrays.validate("Test")


# --- a file of indices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[[0, 2], [3, 1]]", '{"0": [0, 2], "1": [3, 1]}', '{"clients": [{"train": [0, 2]}, {"train": [3, 1]}]}'],
)
def test_indices_from_json(tmp_path, make_arrays, text):
    (tmp_path / "p.json").write_text(text)
    clients = holdout(FromFile(str(tmp_path / "p.json")), make_arrays([4, 4]), 2, seed=0, test_fraction=0.0)
    assert [client.train.tolist() for client in clients] == [[0, 2], [1, 3]]


def test_indices_beside_parts_that_hold_nothing(tmp_path, make_arrays):
    """As a run under `split: global` writes them: its own file was refused, with advice that left nobody a test."""
    (tmp_path / "p.json").write_text('{"0": {"train": [0, 2], "validation": [], "test": []}, "1": {"train": [3, 1]}}')
    clients = holdout(FromFile(str(tmp_path / "p.json")), make_arrays([4, 4]), 2, seed=0, test_fraction=0.0)
    assert [client.train.tolist() for client in clients] == [[0, 2], [1, 3]]


def test_validation_parts_under_global_are_the_files(tmp_path, make_arrays):
    """A run's own file was refused; as `split: file`, which was advised, nobody had a test."""
    path, arrays = tmp_path / "p.json", make_arrays([4, 4], [2, 2])

    def again(text, **options):
        path.write_text(text)
        made = FederatedData(Brought(arrays), FromFile(str(path)), 2, split="global", **options)
        made.setup(0)
        return made

    listed = '[{"train": [0, 2], "validation": [4], "test": []}, {"train": [3], "validation": [1, 5], "test": []}]'
    made = again(listed)
    assert [(own.train.tolist(), own.validation.tolist(), own.num_test) for own in made.clients] == [
        ([0, 2], [4], 0),
        ([3], [1, 5], 0),
    ]
    assert (made.server_test.tolist(), made.left_out) == ([8, 9, 10, 11], 2)
    assert again(listed, evaluate_on="validation").server_test.tolist() == [1, 4, 5]
    with pytest.raises(ConfigError, match=r"^data\.validation_fraction: must be 0 where the partition's file says"):
        again(listed, validation_fraction=0.2)
    with pytest.raises(ConfigError, match=r"indices must be from 0 to 7 under 'global', got 8"):
        again(listed.replace("[4]", "[8]"))
    with pytest.raises(ConfigError, match=r"several parts of client 0; say data\.split: file$"):
        again(listed.replace('"test": []', '"test": [7]', 1))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{}", r"partition\.path: .*p\.json, client 0: must list train"),
        ('{"test": []}', r"partition\.path: .*p\.json, client 0: must list train, got 'test'"),
        ('{"train": [1], "test": [[5], [6, 7]]}', r"split: .*p\.json lists several parts of client 0; say"),
        ('{"train": [1], "x": []}', r"partition\.path: .*p\.json, client 0: parts are train, .*, got 'x'"),
    ],
)
def test_parts_that_are_none_are_said_under_another_split(tmp_path, make_arrays, entry, said):
    """They were a traceback, of a KeyError or of NumPy's."""
    (tmp_path / "p.json").write_text(f'[{entry}, {{"train": [2]}}]')
    with pytest.raises(ConfigError, match=f"^data\\.{said}"):
        holdout(FromFile(str(tmp_path / "p.json")), make_arrays([4, 4]), 2, seed=0)


def test_each_part_from_npz(tmp_path, make_arrays):
    np.savez(tmp_path / "p.npz", **{"0/train": [0, 2], "0/test": [5], "1/train": [3], "1/validation": [1]})
    clients = from_file(FromFile(str(tmp_path / "p.npz")), make_arrays([4, 4]), 2, seed=0)
    assert [[p.tolist() for p in (c.train, c.validation, c.test)] for c in clients] == [
        [[0, 2], [], [5]],
        [[3], [1], []],
    ]
    with pytest.raises(ConfigError, match=r"lists several parts of client 0; say data.split: file"):
        holdout(FromFile(str(tmp_path / "p.npz")), make_arrays([4, 4]), 2, seed=0)
    with pytest.raises(ConfigError, match=r"data.split: 'file' needs a partition that lists"):
        from_file(IID(), make_arrays([4, 4]), 2, seed=0)
    np.savez(tmp_path / "p.npz", **{"0/train": [0, 2], "0": [5], "1": [3]})  # the later one was taken
    with pytest.raises(ConfigError, match=r"is no JSON or npz file of indices \(it says '0' beside '0/train'\)"):
        from_file(FromFile(str(tmp_path / "p.npz")), make_arrays([4, 4]), 2, seed=0)


def test_a_runs_own_partition_is_made_again_from_its_file(tmp_path, make_arrays):
    import json

    arrays = make_arrays([60, 60], [20, 20])
    whole = holdout(IID(), arrays, 3, seed=5, validation_fraction=0.2)
    record = [{n: getattr(c, n).tolist() for n in ("train", "validation", "test")} for c in whole]
    (tmp_path / "partition.json").write_text(json.dumps({"hash": "x", "clients": record}))
    again = from_file(FromFile(str(tmp_path / "partition.json")), arrays, 3, seed=9)
    for one, other in zip(whole, again, strict=True):
        assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("train", "validation", "test"))


@pytest.mark.parametrize("split", ["file", "holdout"])
def test_a_runs_own_partition_for_other_data_is_refused(tmp_path, split, make_arrays):
    made = FederatedData(Brought(make_arrays([6, 6])), IID(), 2, test_fraction=0.0)
    made.setup(0)
    record = made.partition_record()
    if split == "holdout":
        record["clients"] = [own["train"] for own in record["clients"]]
    write_json(tmp_path / "partition.json", record)

    def again(counts):
        listed = FromFile(str(tmp_path / "partition.json"))
        FederatedData(Brought(make_arrays(counts)), listed, 2, split=split, test_fraction=0.0).setup(3)

    again([6, 6])
    for other in ([5, 7], [4, 4, 4]):
        with pytest.raises(ConfigError, match=r"partition\.path: .*is of a run on other data \(Brought\): its classes"):
            again(other)


def test_a_runs_own_partition_with_another_index_is_refused(tmp_path, make_arrays):
    path = tmp_path / "partition.json"
    write_json(path, {"clients": [[0, 1], [2, 3]]})
    assert [list(own) for own in FromFile(str(path)).listed(2)[1][:1]] == [[2, 3]]
    path.write_text(path.read_text().replace("[2, 3]", "[2, 4]"))
    with pytest.raises(ConfigError, match=r"partition\.json is damaged: its checksum does not fit its content"):
        from_file(FromFile(str(path)), make_arrays([4, 4]), 2, seed=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[[0], [0]]", "sample 0 to client 0 and to client 1"),
        (b"[[0]]", "data.num_clients: must be 1"),
        (b'{"a": [0], "b": [1]}', "numbered from 0 to 1"),
        (b'[{"train": [0], "tests": [1]}, [2]]', "parts are train, validation, test"),
        (b"{", "is no JSON or npz file"),
        (b"\xff\xfe", "is no JSON or npz file"),
        (b"3", "must list clients"),
    ],
)
def test_files_that_are_none(tmp_path, make_arrays, content, said):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        from_file(FromFile(str(tmp_path / "p.json")), make_arrays([4, 4]), 2, seed=0)
    with pytest.raises(ConfigError, match="there is no such file"):
        FromFile(str(tmp_path / "q.json")).assign(np.zeros(3), 2, 1, np.random.default_rng(0))


def test_validation_fraction_and_the_file_do_not_go_together(tmp_path, make_arrays):
    (tmp_path / "p.json").write_text("[[0], [1]]")
    with pytest.raises(ConfigError, match=r"data.validation_fraction: must be 0"):
        from_file(FromFile(str(tmp_path / "p.json")), make_arrays([4, 4]), 2, seed=0, validation_fraction=0.1)
    assert FederatedData.__doc__.count("``file``") == 1
