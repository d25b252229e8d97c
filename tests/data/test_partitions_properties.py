"""Every partition, which are found by themselves, on any labels, and files of partitions whatever happened to them."""

import inspect
import json
import pickle
import random
import time
import typing
from dataclasses import replace

import numpy as np
import pytest
import torch
from damage import damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning.catalog import entries
from fl_lightning.data.arrays import Arrays
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.listed import FromFile
from fl_lightning.data.module import FederatedData
from fl_lightning.data.own_files import LEAF, PFLlibFolder
from fl_lightning.errors import ConfigError
from fl_lightning.trust import import_name

QUICK = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PARTITIONS = {entry.name: import_name(entry.class_path) for entry in entries("partitions")}
RULES = sorted(set(PARTITIONS) - {"FromFile", "Population"})  # these share no samples out
OF_ALL = {"IID", "Dirichlet", "QuantitySkew"}
"""Rules that leave no sample out."""
SECONDS = 10


class Labels(Dataset):
    """A data set of labels alone."""

    def __init__(self, content):
        self.content = content

    def arrays(self):
        return self.content


@st.composite
def arrays(draw):
    """Labels of 1 to 6 classes, evenly many or not, some classes without a sample, with and without test part."""
    num_classes = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1, 2, 7, 40, 300]))
    weights = rng.dirichlet(np.full(num_classes, draw(st.sampled_from([0.1, 1.0, 100.0]))))
    y = torch.from_numpy(rng.choice(num_classes, size=size, p=weights))
    num_train = draw(st.sampled_from([size, max(1, size * 3 // 4)]))
    groups = torch.from_numpy(rng.integers(0, 9, size=size)) if draw(st.booleans()) else None
    x = torch.zeros(size, 2)
    return Arrays(x, y, num_train, tuple(map(str, range(num_classes))), groups=groups, digest="-")


def argument(kind, name):
    """Values of a constructor's argument, by its type: mostly sensible ones."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(options)
    if options:
        return st.one_of(*(argument(own, name) for own in options))
    kinds = {
        int: st.integers(0, 12) | st.sampled_from([-1, 10**6, 2**62]),
        float: st.sampled_from([0.001, 0.1, 0.5, 1.0, 100.0, 1e9]) | st.sampled_from([0.0, -1.0, 1e300]),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return kinds[kind]


@st.composite
def rules(draw, name):
    """A rule with any arguments that it takes."""
    cls = PARTITIONS[name]
    hints = typing.get_type_hints(cls.__init__)
    given = {}
    for own in inspect.signature(cls).parameters.values():
        if own.default is inspect.Parameter.empty or draw(st.booleans()):
            given[own.name] = draw(argument(hints[own.name], own.name))
    try:
        return cls(**given)
    except ConfigError as error:
        assert_one_line(error, "data.partition")
        return None


def assert_one_line(error, key="data"):
    line = f"fl-lightning: error: {error}"
    assert "\n" not in line
    assert len(line) <= 300
    assert error.key.startswith(key), line


def shared(partition, content, clients, seed=0, **options):
    """The data set shared out, or None where that was refused in one line."""
    start = time.process_time()
    try:
        data = FederatedData(Labels(content), partition, clients, **options)
        data.setup(seed)
    except ConfigError as error:
        assert_one_line(error)
        data = None
    assert time.process_time() - start < SECONDS
    return data


def outcome(make):
    """The data shared out, or None; and what was said, in one line."""
    try:
        data = make()
        data.setup(0)
    except ConfigError as error:
        assert_one_line(error)
        return None, str(error)
    return data, ""


def assert_is_a_partition(data, content):
    """Whole numbers in range, every sample at most once, a training sample for everybody, and nothing uncounted."""
    size = len(content.y)
    for client in data.clients:
        for part in (client.train, client.validation, client.test):
            assert part.dtype == torch.int64
            assert (part.diff() > 0).all()
        assert len(client.train) >= 1
    parts = torch.cat([torch.cat([c.train, c.validation, c.test]) for c in data.clients])
    assert len(parts.unique()) == len(parts)
    assert not len(parts) or 0 <= int(parts.min()) <= int(parts.max()) < size
    everything = torch.cat([parts, data.server_test]).unique()
    assert data.left_out == size - len(everything)
    assert data.class_counts().sum() == sum(len(client.train) for client in data.clients)
    if data.split != "holdout" and data.split != "file":  # official parts stay apart
        for client in data.clients:
            assert int(client.train.max()) < content.num_train
            assert not len(client.test) or int(client.test.min()) >= content.num_train


@pytest.mark.parametrize("name", RULES)
@QUICK
@given(data=st.data())
def test_any_rule_gives_a_partition_or_one_line(name, data):
    content = data.draw(arrays())
    partition = data.draw(rules(name))
    if partition is None:
        return
    clients = data.draw(st.sampled_from([1, 2, 3, 5, 20]))
    options = {
        "split": data.draw(st.sampled_from(["holdout", "matched", "global"])),
        "validation_fraction": data.draw(st.sampled_from([0.0, 0.2, 0.9])),
        "test_fraction": data.draw(st.sampled_from([0.25, 0.5])),
    }
    seed = data.draw(st.integers(0, 3))
    made = shared(partition, content, clients, seed, **options)
    if made is None:
        return
    assert_is_a_partition(made, content)
    again = shared(partition, content, clients, seed, **options)
    assert again.partition_hash == made.partition_hash
    if options["split"] == "holdout" and name in OF_ALL:
        assert made.left_out == 0


@QUICK
@given(content=arrays(), clients=st.integers(1, 6), split=st.sampled_from(["holdout", "matched", "global"]))
def test_own_record_gives_the_same_partition_again(content, clients, split, tmp_path_factory):
    made = shared(PARTITIONS["IID"](), content, clients, split=split, validation_fraction=0.2)
    if made is None:
        return
    path = tmp_path_factory.mktemp("record") / "partition.json"
    path.write_text(json.dumps(made.partition_record()))
    again = shared(FromFile(str(path)), content, clients, split="file")
    for first, second in zip(made.clients, again.clients, strict=True):
        for part in ("train", "validation", "test"):
            assert torch.equal(getattr(first, part), getattr(second, part))
    if split == "global":  # the server has the official test part again
        assert shared(FromFile(str(path)), content, clients, split=split).partition_hash == made.partition_hash


# --- files of partitions --------------------------------------------------------------------------------------------

LISTS = [
    {"train": [0, 2, 4], "validation": [6], "test": [8, 10]},
    {"train": [1, 3], "validation": [], "test": [5, 7, 9]},
    {"train": [11, 12, 13], "validation": [14], "test": [15]},
]


def as_json(path):
    path.write_text(json.dumps({"hash": "x", "clients": LISTS}))


def as_lists(path):
    path.write_text(json.dumps([own["train"] for own in LISTS]))


def as_numbered(path):
    path.write_text(json.dumps({str(n): own for n, own in enumerate(LISTS)}))


def as_npz(path):
    named = {f"{n}/{part}": np.array(own[part], dtype=np.int64) for n, own in enumerate(LISTS) for part in own}
    np.savez(path, **named)


def as_fl_bench(path):
    entries = [{"train": np.array(o["train"]), "val": np.array([], int), "test": np.array(o["test"])} for o in LISTS]
    path.write_bytes(pickle.dumps({"separation": {"total": 3}, "data_indices": entries}))


def as_numbered_fl_bench(path):
    path.write_bytes(pickle.dumps({"data_indices": dict(enumerate(LISTS))}))


FILES = {
    "own": ("partition.json", as_json),
    "lists": ("lists.json", as_lists),
    "numbered": ("numbered.json", as_numbered),
    "npz": ("partition.npz", as_npz),
    "FL-bench": ("partition.pkl", as_fl_bench),
    "FL-bench, numbered": ("partition.pkl", as_numbered_fl_bench),
}
CONTENT = Arrays(torch.zeros(16, 2), torch.arange(16) % 4, 16, ("a", "b", "c", "d"), digest="-")


@pytest.mark.parametrize("kind", FILES)
def test_file_that_nobody_damaged_is_taken(kind, tmp_path):
    name, write = FILES[kind]
    write(tmp_path / name)
    split = "holdout" if kind == "lists" else "file"
    assert_is_a_partition(shared(FromFile(str(tmp_path / name)), CONTENT, 3, split=split), CONTENT)


@pytest.mark.parametrize("kind", FILES)
@settings(QUICK, max_examples=25)
@given(seed=st.integers(0, 2**32), split=st.sampled_from(["file", "file", "holdout"]))
def test_damaged_file_is_a_partition_or_one_line_that_names_it(kind, seed, split, tmp_path_factory):
    name, write = FILES[kind]
    path = tmp_path_factory.mktemp("damaged") / name
    write(path)
    what = damaged(path, random.Random(seed))
    made, said = outcome(lambda: FederatedData(Labels(CONTENT), FromFile(str(path)), 3, split=split))
    if made is not None:
        assert_is_a_partition(made, CONTENT)
    else:
        assert name in said or "FromFile" in said or "data.partition" in said, (what, said)


@pytest.mark.parametrize(
    "entry",
    [
        None, 5, "abc", [[1]], [1.5], ["a"], [10**30], [-1], [True], {"train": None}, {"train": "abc"}, {"train": {}},
        {"train": [[0], [1]]}, {"train": [0, None]}, {"train": [0, 0]}, {"validation": [0]}, {"train": [0], "x": []},
        {"train": [1e400]}, {"train": [[0], 1]}, {}, {"test": []}, {"train": [0], "test": [[5], [6, 7]]},
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("split", ["file", "holdout", "global"])
def test_odd_entry_is_one_line(entry, split, tmp_path):
    path, content = tmp_path / "partition.json", replace(CONTENT, num_train=12)
    path.write_text(json.dumps([[3, 4], entry, [1, 2]]))
    with pytest.raises(ConfigError) as caught:
        FederatedData(Labels(content), FromFile(str(path)), 3, split=split).setup(0)
    assert_one_line(caught.value)


# --- folders of others ----------------------------------------------------------------------------------------------


def leaf(root):
    for part, shift in (("train", 0), ("test", 3)):
        users = ["ann", "bob"]
        data = {user: {"x": [[0.1 * n + shift, 1.0] for n in range(4)], "y": [0, 1, 1, 2]} for user in users}
        (root / part).mkdir(parents=True)
        content = {"users": users, "num_samples": [4, 4], "user_data": data}
        (root / part / "all.json").write_text(json.dumps(content))


def pfllib(root):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        (root / part).mkdir(parents=True)
        for client in range(2):
            data = {"x": rng.random((5, 1, 4, 4), dtype=np.float32), "y": np.arange(5) % 3}
            np.savez_compressed(root / part / f"{client}.npz", data=data)


FOLDERS = {"LEAF": (leaf, LEAF), "PFLlib": (pfllib, PFLlibFolder)}


@pytest.mark.parametrize("kind", FOLDERS)
@settings(QUICK, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_damaged_folder_of_others_is_a_data_set_or_one_line_that_names_it(kind, seed, tmp_path_factory):
    write, cls = FOLDERS[kind]
    root = tmp_path_factory.mktemp("theirs")
    write(root)
    draw = random.Random(seed)
    path = draw.choice(sorted(root.rglob("*")))
    damaged(path, draw)
    made, said = outcome(lambda: FederatedData(cls(str(root)), PARTITIONS["ByGroup"](), 2, split="matched"))
    if made is not None:
        assert_is_a_partition(made, made.arrays)
    else:
        assert path.name in said or str(root) in said or said.startswith("data."), said
