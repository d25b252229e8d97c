"""Files that would unpack to far more than they hold, forged with a seal that fits, are refused before they are."""

import io
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch

from fl_lightning.archives import check_room, free_memory
from fl_lightning.data import idx
from fl_lightning.data.own_files import read_arrays
from fl_lightning.data.pickles import read_pickle, read_pickled_npz
from fl_lightning.errors import ConfigError
from fl_lightning.report.page.classifier import _load
from fl_lightning.sealed import FORMAT, MARK, SEAL, load_tensors, save_tensors

LARGE = 2**28


def packed(members):
    """A compressed archive of members that are texts, or numbers of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                if isinstance(content, int):
                    for _ in range(content >> 24):
                        member.write(bytes(1 << 24))
                else:
                    member.write(content)
    return file.getvalue()


@pytest.fixture(scope="module")
def large():
    """A megabyte that stands for 256."""
    return packed({"archive/data/0": LARGE})


def sealed(path, content):
    path.write_bytes(content + SEAL.pack(MARK, FORMAT, zlib.crc32(content), len(content)))
    return path


def directory(content, change):
    """An archive with another directory: each entry as `change` makes it of the fields of its 46 first bytes."""
    end = content.rfind(b"PK\x05\x06")
    start = struct.unpack("<L", content[end + 16 : end + 20])[0]
    fields = list(struct.unpack("<4s4B4HL2L5H2L", content[start : start + 46]))
    return content[:start] + struct.pack("<4s4B4HL2L5H2L", *change(fields)) + content[start + 46 :]


def test_checkpoint_that_is_packed_is_refused_unread(tmp_path, large):
    path = sealed(tmp_path / "round-0001.ckpt", large)
    with pytest.raises(ConfigError, match=r"^--resume: .*round-0001\.ckpt is packed, or unpacks to more than it holds"):
        load_tensors(path, "--resume")
    assert _load(path) is None


def test_directory_that_says_another_size_is_refused(tmp_path):
    save_tensors(tmp_path / "a.pt", {"a": torch.zeros(9)})
    content = (tmp_path / "a.pt").read_bytes()[: -SEAL.size]

    def claims(place, value):
        return lambda fields: [*fields[:place], value, *fields[place + 1 :]]

    for place, value in ((11, 2**31), (10, 2**31), (11, 1)):  # unpacked, packed
        with pytest.raises(ConfigError, match="unpacks to more than it holds"):
            load_tensors(sealed(tmp_path / "b.pt", directory(content, claims(place, value))), "--resume")
    assert load_tensors(tmp_path / "a.pt", "--resume")["a"].shape == (9,)


def test_one_member_that_is_named_a_thousand_times_counts_a_thousand_times(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", bytes(1 << 20))
        archive.filelist *= 1000
    with pytest.raises(ConfigError, match="unpacks to more than it holds"):
        load_tensors(sealed(tmp_path / "a.pt", file.getvalue()), "--resume")


def nested(make):
    """A container that unfolds to 10^12 entries."""
    found = make([0] * 10)
    for _ in range(11):
        found = make([found] * 10)
    return found


def test_containers_that_unfold_to_more_than_their_file_are_refused(tmp_path):
    for make in (list, lambda entries: dict(enumerate(entries))):
        save_tensors(tmp_path / "a.pt", {"exchange": nested(make)})
        with pytest.raises(ConfigError, match="unfolds to more entries than it has bytes"):
            load_tensors(tmp_path / "a.pt", "--resume")
    (tmp_path / "p.pkl").write_bytes(pickle.dumps(nested(list)))
    with pytest.raises(ConfigError, match="unfolds to more entries"):
        read_pickle(tmp_path / "p.pkl", "data.partition.path")


@pytest.mark.parametrize("name", ["a.npz", "a.pt"])
def test_data_set_that_unpacks_to_more_than_the_memory_that_is_left_is_refused(tmp_path, monkeypatch, large, name):
    (tmp_path / name).write_bytes(large)
    monkeypatch.setattr("fl_lightning.archives.free_memory", lambda: LARGE - 1)
    rule = r"^data\.dataset\.path: .* unpacks to 0\.2 GiB, and this machine has 0\.2 GiB of memory left$"
    with pytest.raises(ConfigError, match=rule):
        read_arrays(tmp_path / name, "data.dataset.path")
    with pytest.raises(ConfigError, match=r"unpacks to 0\.2 GiB"):
        read_pickled_npz(tmp_path / name, "data", "data.dataset.path")


def test_packed_arrays_that_fit_are_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((100, 100)))
    assert read_arrays(tmp_path / "a.npz", "data.dataset.path")["x"].shape == (100, 100)
    check_room(tmp_path / "nothing.npz", tmp_path, "data.dataset.path")
    assert 0 < free_memory() < 2**62


@pytest.mark.parametrize("shape", [(2**30,), (2**20, 2**20)])
def test_pickle_makes_no_array_without_content(tmp_path, shape):
    """It could name a size of its own, which takes memory once somebody looks at it."""

    class Large:
        def __init__(self, *call):
            self.call = call

        def __reduce__(self):
            return self.call

    _reconstruct = np.zeros(1).__reduce__()[0]
    for call in ((np.ndarray, (shape, "u1")), (_reconstruct, (np.ndarray, shape, b"b"))):
        (tmp_path / "p.pkl").write_bytes(pickle.dumps(Large(*call)))
        with pytest.raises(ConfigError, match=r"cannot be read: it (has|makes) an array"):
            read_pickle(tmp_path / "p.pkl", "data.partition.path")
    whole = {"0": {"train": np.arange(5), "test": np.array([1.5, 2.5], dtype="f4")}}
    (tmp_path / "p.pkl").write_bytes(pickle.dumps(whole))
    assert read_pickle(tmp_path / "p.pkl", "")["0"]["train"].tolist() == [0, 1, 2, 3, 4]


def test_idx_file_is_unpacked_no_further_than_its_header_says(tmp_path):
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    content = packer.compress(struct.pack(">4I", 2051, 2, 3, 3))
    content += b"".join(packer.compress(bytes(1 << 24)) for _ in range(2)) + packer.flush()
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is too long: 35 bytes or more where its header says 34"):
        idx._read_idx(path)
