import gzip
import struct

import numpy as np
import pytest
import torch

from fl_lightning.data.arrays import Arrays


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """No test sees the user's own data sets or cache."""
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(tmp_path / "default-data"))
    monkeypatch.setenv("FL_LIGHTNING_CACHE", str(tmp_path / "default-cache"))


@pytest.fixture
def make_arrays():
    """Random 1x4x4 images with given class sizes in the training and the test part, shuffled."""

    def make(train_sizes, test_sizes=(), seed=0):
        rng = np.random.default_rng(seed)
        parts = [rng.permutation(np.repeat(np.arange(len(sizes)), sizes)) for sizes in (train_sizes, test_sizes)]
        y = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        x = torch.from_numpy(rng.integers(0, 256, size=(len(y), 1, 4, 4), dtype=np.uint8))
        classes = tuple(str(c) for c in range(len(train_sizes)))
        return Arrays(x, y, len(parts[0]), classes, (0.25,), (0.5,))

    return make


@pytest.fixture
def write_idx():
    """Write an array of bytes as an idx file."""

    def write(path, values, magic=None, cut=0):
        values = np.asarray(values, dtype=np.uint8)
        header = struct.pack(">I", 0x800 + values.ndim if magic is None else magic)
        content = header + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
        content = content[: len(content) - cut]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    return write
